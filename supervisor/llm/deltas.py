"""Redacting a streamed answer across its events (spec L13, I10).

Rules of this file.

1. A text in pieces is searched as one: the content, the arguments of each tool call, and any
   other streamed text.  Its end is held back as long as it may begin a secret.
2. Names and ids come in one piece: holding a part back would change them.
3. Log-probabilities spell the text, token by token.  They wait with it, and are dropped if
   it has a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostlib.redact import StreamRedactor
from supervisor.llm.answer import extend
from supervisor.llm.answer_reader import MAX_TEXTS, check_count

if TYPE_CHECKING:
    from hostlib.documents import Object
    from hostlib.redact import Redactor

_WHOLE = frozenset({"role", "id", "type", "name"})
"""Texts of a delta that no provider cuts into pieces (rule 2)."""

_TEXTS = "texts beside each other"

Path = tuple[str | int, ...]
"""The place of a text in a delta: keys, and the ``index`` of items of a list."""


class ChoiceRedactor:
    """One choice of a streamed answer.

    Args:
        redactor: knows every secret.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._texts: dict[Path, StreamRedactor] = {}
        self._waiting: list[Object] = []

    def feed(self, choice: Object) -> None:
        """Redact an event's choice in place; the last one gets the held-back rest."""
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._walk(delta, ())
        if choice.get("finish_reason"):
            if not isinstance(delta, dict):
                delta = choice["delta"] = {}
            self._put_rest(delta)
        self._hold_logprobs(choice)

    def rest(self) -> Object:
        """Return a delta with all held-back text; empty if there is none."""
        delta: Object = {}
        self._put_rest(delta)
        return delta

    def take_ended(self, choice: Object) -> Object:
        """Return a delta with held-back text of texts that an event's choice ends.

        In Responses and Messages a text ends where another begins, so its end would be too
        late with the last event.  Calls continue in parallel until then.

        Args:
            choice: the event's choice, before it is fed.
        """
        delta = choice.get("delta")
        keys = delta.items() if isinstance(delta, dict) else ()
        begun = {key for key, value in keys if value and key != "role"}
        rest: Object = {}
        for path, text in self._texts.items():
            goes_on = path[0] in begun or path[0] == "tool_calls"
            if begun and not goes_on and (end := text.rest()):
                _append(rest, path, end)
        return rest

    def _walk(self, value: Object, path: Path) -> None:
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
            check_count(self._texts, MAX_TEXTS, _TEXTS)
        return text

    def _put_rest(self, delta: Object) -> None:
        for path, text in self._texts.items():
            if rest := text.rest():
                _append(delta, path, rest)

    def _hold_logprobs(self, choice: Object) -> None:
        found = choice.get("logprobs")
        if isinstance(found, dict):
            self._waiting.append(found)
        if not self._waiting:
            return
        if any(text.has_found for text in self._texts.values()):
            self._waiting.clear()
        choice["logprobs"] = None
        if self._waiting and not any(text.is_holding for text in self._texts.values()):
            choice["logprobs"] = _join_logprobs(self._waiting)
            self._waiting = []


def _join_logprobs(pieces: list[Object]) -> Object:
    """Return log-probabilities of several events as those of one."""
    whole: Object = {}
    for piece in pieces:
        extend(whole, piece)
    return whole


def _place(item: Object, number: int) -> int:
    """Return the number that an item of a list has in all events."""
    index = item.get("index")
    return index if isinstance(index, int) else number


def _append(delta: Object, path: Path, text: str) -> None:
    """Append a text at a place of a delta; make the place if needed."""
    at: Any = delta
    for number, step in enumerate(path[:-1]):
        if isinstance(step, int):
            tables = ((n, item) for n, item in enumerate(at) if isinstance(item, dict))
            places = {_place(item, n): item for n, item in tables}
            if step not in places:
                at.append({"index": step})
            at = places.get(step, at[-1])
        else:
            kind: type = list if isinstance(path[number + 1], int) else dict
            if not isinstance(at.get(step), kind):
                at[step] = kind()
            at = at[step]
    before = at.get(path[-1])
    at[path[-1]] = (before if isinstance(before, str) else "") + text


class EventRedactor:
    """Redacts the events of Messages and Responses.

    A text is identified by the numbers of its block, item and part.  Before the event that
    ends it, its held-back rest is sent in another piece.

    Args:
        redactor: knows every secret.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._texts: dict[Path, tuple[StreamRedactor, Object]] = {}
        self._has_found = False

    def feed(self, event: Object) -> list[Object]:
        """Return the events to pass on now, in place of an event."""
        kind = event["type"]
        if kind == "content_block_delta" or kind.endswith(".delta"):
            return self._feed_delta(event)
        held = self._rest_before(event)
        if self._has_found:
            drop_logprobs(event)
        return [*held, event]

    def _feed_delta(self, event: Object) -> list[Object]:
        holder, names = _pieces_in(event)
        texts = []
        for name in names:
            path = (*_numbers(event), event["type"], name)
            known = self._texts.get(path)
            text = StreamRedactor(self._redactor) if known is None else known[0]
            # Log-probabilities would spell the held-back text.
            last = {key: value for key, value in event.items() if key != "logprobs"}
            self._texts[path] = text, last
            check_count(self._texts, MAX_TEXTS, _TEXTS)
            holder[name] = text.feed(holder[name])
            self._has_found = self._has_found or text.has_found
            texts.append(text)
        if self._has_found or any(text.is_holding for text in texts):
            drop_logprobs(event)
        return [] if names and not any(holder[name] for name in names) else [event]

    def _rest_before(self, event: Object) -> list[Object]:
        """Return an event with the held-back rest of texts that an event ends."""
        kind = event["type"]
        if kind in _NO_ENDS:
            return []
        place, piece = _numbers(event), kind.removesuffix("done") + "delta"
        rest = []
        for path, (text, last) in list(self._texts.items()):
            if path[: len(place)] != place or (piece in _PIECES and piece != path[-2]):
                continue
            if kind in _LAST:
                del self._texts[path]
            if held := text.rest():
                if isinstance(last["delta"], dict):
                    last["delta"] = {**last["delta"], path[-1]: held}
                else:
                    last["delta"] = held
                rest.append(last)
        return rest


_PIECES = frozenset(
    f"response.{name}.delta"
    for name in (
        "output_text", "refusal", "reasoning_text", "reasoning_summary_text",
        "function_call_arguments", "custom_tool_call_input", "mcp_call_arguments",
        "code_interpreter_call_code",
    )
)  # fmt: skip
"""Kinds of texts in pieces, each of which has an event of its own at its end."""

_NO_ENDS = frozenset(
    {"ping", "keepalive", "content_block_start", "response.output_item.added"}
    | {"response.created", "response.queued", "response.in_progress"}
    | {"response.content_part.added", "response.reasoning_summary_part.added"}
)
"""Events that end no text; with another one that has no number all of them end."""

_LAST = frozenset({"content_block_stop", "response.output_item.done"})
"""Events after which the texts that they end have no more pieces, as the reader checks.
After other events a text may continue, and is searched on."""

_NUMBERS = ("index", "output_index", "content_index", "summary_index")


def _numbers(event: Object) -> Path:
    """Return the numbers of the block, item and part of an event, the outermost first."""
    return tuple(event[name] for name in _NUMBERS if isinstance(event.get(name), int))


def _pieces_in(event: Object) -> tuple[Object, list[str]]:
    """Return the object with pieces of texts in an event, and their names in it."""
    delta = event.get("delta")
    if not isinstance(delta, dict):
        return event, ["delta"] if isinstance(delta, str) else []
    names = [key for key in delta if key != "type" and isinstance(delta[key], str)]
    return delta, names


def drop_logprobs(event: Object) -> None:
    """Empty all log-probabilities in an event: they would spell a secret."""
    level: list[object] = [event]
    while level:
        value = level.pop()
        if isinstance(value, dict):
            if found := value.get("logprobs"):
                value["logprobs"] = None if isinstance(found, dict) else []
            level += value.values()
        elif isinstance(value, list):
            level += value
