"""Redacting the events of a streamed answer, across them (spec L13, I10).

What it is: one choice of a stream, event by event, for whoever passes events on.  What it
is not: whole answers (``gateway``), or what a secret looks like (``redact``).

Rules of this file.

1. A text that comes in pieces is looked at as one: the content, the arguments of each
   tool call, whatever else a provider streams.  Its end is held back for as long as it
   may be the beginning of a secret.
2. What names a thing comes whole: holding a part of it back would give it another name.
3. Log-probabilities spell the text out, token by token.  They wait with it, and where a
   secret was in it they are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from supervisor.llm.pieces import extend
from supervisor.llm.redact import StreamRedactor

if TYPE_CHECKING:
    from supervisor.llm.redact import Redactor

_WHOLE = frozenset({"role", "id", "type", "name"})
"""Texts of a delta that no provider cuts into pieces (rule 2)."""

Path = tuple[str | int, ...]
"""Where in a delta a text stands: keys, and the ``index`` of what stands in a list."""


class ChoiceRedactor:
    """One choice of a streamed answer.

    Args:
        redactor: knows every secret.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._texts: dict[Path, StreamRedactor] = {}
        self._waiting: list[object] = []

    def feed(self, choice: dict[str, Any]) -> None:
        """Redact an event's choice in place; its last one gets all that is left."""
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._walk(delta, ())
        if choice.get("finish_reason"):
            if not isinstance(delta, dict):
                delta = choice["delta"] = {}
            self._put_rest(delta)
        self._hold_logprobs(choice)

    def rest(self) -> dict[str, Any]:
        """Return a delta of what is held back still; empty if nothing is."""
        delta: dict[str, Any] = {}
        self._put_rest(delta)
        return delta

    def ended_by(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a delta of what is held back of texts that end with an event's choice.

        In Responses and Messages a text ends where another begins, so that its end comes
        too late with the last event.  Calls go on beside each other until then.  A secret
        that begins before another text and goes on behind it is not seen.

        Args:
            choice: the event's, before it is fed.
        """
        delta = choice.get("delta")
        keys = delta.items() if isinstance(delta, dict) else ()
        begun = {key for key, value in keys if value and key != "role"}
        rest: dict[str, Any] = {}
        for path, text in self._texts.items():
            goes_on = path[0] in begun or path[0] == "tool_calls"
            if begun and not goes_on and (end := text.rest()):
                _append(rest, path, end)
        return rest

    def _walk(self, value: dict[str, Any], path: Path) -> None:
        for key, inner in value.items():
            if isinstance(inner, str):
                if key not in _WHOLE:
                    value[key] = self._text((*path, key)).feed(inner)
            elif isinstance(inner, dict):
                self._walk(inner, (*path, key))
            elif isinstance(inner, list):
                for number, item in enumerate(inner):
                    if isinstance(item, dict):
                        self._walk(item, (*path, key, _place(item, number)))

    def _text(self, path: Path) -> StreamRedactor:
        text = self._texts.get(path)
        if text is None:
            text = self._texts[path] = StreamRedactor(self._redactor)
        return text

    def _put_rest(self, delta: dict[str, Any]) -> None:
        for path, text in self._texts.items():
            if rest := text.rest():
                _append(delta, path, rest)

    def _hold_logprobs(self, choice: dict[str, Any]) -> None:
        found = choice.get("logprobs")
        if isinstance(found, dict):
            self._waiting.append(found)
        if not self._waiting:
            return
        if any(text.has_found for text in self._texts.values()):
            self._waiting.clear()
        choice["logprobs"] = None
        if self._waiting and not any(text.is_holding for text in self._texts.values()):
            choice["logprobs"] = _joined(self._waiting)
            self._waiting = []


def _joined(pieces: list[Any]) -> dict[str, Any]:
    """Return log-probabilities of several events as those of one."""
    whole: dict[str, Any] = {}
    for piece in pieces:
        extend(whole, piece)
    return whole


def _place(item: dict[str, Any], number: int) -> int:
    """Return what tells an item of a list from the others, over all events."""
    index = item.get("index")
    return index if isinstance(index, int) else number


def _append(delta: dict[str, Any], path: Path, text: str) -> None:
    """Add a text to what stands at a place of a delta, and make the place."""
    at: Any = delta
    for number, step in enumerate(path[:-1]):
        if isinstance(step, int):
            places = {_place(item, n): item for n, item in enumerate(at)}
            if step not in places:
                at.append({"index": step})
            at = places.get(step, at[-1])
        else:
            kind: type = list if isinstance(path[number + 1], int) else dict
            if not isinstance(at.get(step), kind):
                at[step] = kind()
            at = at[step]
    at[path[-1]] = (at.get(path[-1]) or "") + text
