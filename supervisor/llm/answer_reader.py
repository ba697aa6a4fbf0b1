"""The base of readers of a provider's answer: bytes in, events or one object out.

Sans-IO.  An answer is a stream of server-sent events, or a body of one JSON object.

1. The two are told apart by their first byte (JSON begins with ``{``), not by headers.
2. Memory is bounded by ``MAX_ANSWER_BYTES`` (I9), and time grows with the length.
3. ``TURN_LINES`` and ``MAX_VALUES`` bound the work of one call, during which no other task
   of the host runs; ``MAX_CHOICES``, ``MAX_ITEMS`` and ``MAX_TEXTS`` bound the parts of an
   answer.  A provider that sends more has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar

import msgspec

from hostlib.documents import MOST_DEPTH, is_deep
from supervisor.llm.quota import Usage, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from hostlib.documents import Object

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Longest answer of a provider: models write at most 500 KiB, and the events around each
token take ten times that."""

MAX_VALUES = 250_000
"""Most bytes ``[``, ``{`` and ``,`` in one piece of JSON, also in its texts: an upper bound
for its values that is counted in a fiftieth of the time of decoding.  Decoding this many
takes 0.1 s, 16 MiB of empty lists 1.6 s, in which no other task runs.  It is enough for an
answer in one piece with 128,000 tokens as numbers, or with 6,000 tokens that have
log-probabilities of 5 alternatives."""

TURN_LINES = 128
"""Lines that one call parses.  An event has two or three and takes 5 us; 64 KiB of events
at once, from a fast provider, took 6 ms."""

MAX_CHOICES = 16
"""Most choices of one answer: the endpoint lets a request ask for one (spec MD2)."""

MAX_ITEMS = 4096
"""Most items of one answer (calls of tools, output items, blocks): a model calls some dozens
of tools at once, and a long report with searches has some hundreds of items."""

MAX_TEXTS = 512
"""Most unfinished texts of one answer: an event may end each of them, so each event looks at
all."""

VALUE_BYTES = 150
"""Memory of a kept value of a stream, with its place in a table or list."""

PIECE_BYTES = 100
"""Memory of a piece of text beside its characters."""

FORMS = 6
"""Copies of a model's text at the end: pieces, joined, JSON, searched for secrets.  An answer
in one piece of JSON has as many."""

DONE = b"[DONE]"

_OUTLINE = b"[{,"


class AnswerError(Exception):
    """The received bytes are no answer; the text says why, in one line."""


class BrokenOffError(AnswerError):
    """The connection ended before the reply did."""


class ProviderError(Exception):
    """The provider reports a failure in the middle of its answer.

    Attributes:
        code: the provider's code of the error; empty for none.
    """

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class AnswerReader(ABC):
    """Reads one answer.

    Attributes:
        events: number of events.
        output_bytes: bytes of text that the model has written so far.
        output_pieces: number of pieces of that text; a piece is at least a token.
        kept_bytes: memory of the kept events, beside that text.
        has_early_usage: the reported use covers only the beginning of the output.
        ends_with_done: a stream of the API may end with ``[DONE]``.
    """

    ends_with_done: ClassVar[bool] = False

    def __init__(self) -> None:
        self.events = 0
        self.output_bytes = 0
        self.output_pieces = 0
        self.kept_bytes = 0
        self.has_early_usage = False
        self._size = 0
        self._pending = bytearray()
        self._searched = 0  # pending bytes without LF
        self._lines: deque[bytes] = deque()  # complete lines
        self._data = bytearray()  # the lines of an event, each with its LF
        self._is_plain: bool | None = None
        self._is_done = False

    @property
    def pending_bytes(self) -> int:
        """Length of the incomplete event, or of an answer in one piece."""
        return len(self._pending) + len(self._data)

    @property
    def has_lines(self) -> bool:
        """Whether there are lines for another turn."""
        return bool(self._lines)

    @property
    def has_ended(self) -> bool:
        """Whether the last event of a stream has come; a reply may continue after it."""
        return self._is_done

    @property
    def held_bytes(self) -> int:
        """The memory of the answer, with its copies at the end."""
        texts = self.pending_bytes + self.output_bytes
        return FORMS * texts + PIECE_BYTES * self.output_pieces + self.kept_bytes

    def feed(self, data: bytes) -> list[Object]:
        """Add bytes; return all events that they complete.

        Raises:
            AnswerError: the answer is too long, or no answer.
            ProviderError: an event says that the provider failed.
        """
        return [event for events in self.batches(data) for event in events]

    def batches(self, data: bytes) -> Iterator[list[Object]]:
        """Add bytes; yield the events of each ``TURN_LINES`` lines, at least once.

        Raises:
            AnswerError: the answer is too long, or no answer.
            ProviderError: an event says that the provider failed.
        """
        self.receive(data)
        yield self.next_events()
        while self._lines:
            yield self.next_events()

    def receive(self, data: bytes) -> None:
        """Add bytes; ``next_events`` returns the events that they complete.

        Raises:
            AnswerError: the answer is too long.
        """
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            raise AnswerError(f"longer than {MAX_ANSWER_BYTES} bytes")
        pending = self._pending
        pending += data
        if self._is_plain is None:
            start = bytes(pending[:64]).lstrip()
            if not start:
                return
            self._is_plain = start.startswith(b"{")
        if self._is_plain:
            return
        end = pending.rfind(b"\n", self._searched)
        self._searched = len(pending)
        if end >= 0:
            self._searched -= end + 1
            self._lines += bytes(pending[:end]).split(b"\n")
            del pending[: end + 1]

    def next_events(self) -> list[Object]:
        """Return the events of the next ``TURN_LINES`` lines.

        Raises:
            AnswerError: the lines are no answer.
            ProviderError: an event reports a failure of the provider.
        """
        lines = self._lines
        events: list[Object] = []
        for _ in range(min(TURN_LINES, len(lines))):
            line = lines.popleft().removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data += line[5:].removeprefix(b" ") + b"\n"
            elif not line and self._data:
                text = bytes(self._data[:-1])
                self._data.clear()
                if text == DONE:
                    self._is_done = self._is_done or self.ends_with_done
                elif not self._is_done:
                    self.events += 1
                    events += self._take_event(parse_object(text), len(text))
        return events

    @abstractmethod
    def _take_event(self, event: Object, size_bytes: int) -> Iterable[Object]:
        """Add an event; return the events to pass on.

        Raises:
            AnswerError: it is no event of this API.
            ProviderError: it reports a failure of the provider.
        """

    @abstractmethod
    def _take_plain(self, found: Object) -> None:
        """Add an answer in one piece; raise as ``_take_event``."""

    def _finish_stream(self) -> Object:
        """Return the answer of all events; an empty one if they were passed on.

        Raises:
            AnswerError: the end is missing.
        """
        if not self._is_done:
            raise AnswerError("the stream ended before its end")
        return {}

    @abstractmethod
    def usage(self) -> Usage | None:
        """Return the use that the provider reported; None without a report.

        Raises:
            AnswerError: the report does not have numbers.
        """

    def finish(self) -> Object:
        """Return the checked answer; an empty one if a stream was passed on.

        Raises:
            AnswerError: the answer is incomplete, or lacks a member.
            ProviderError: the answer is an error.
        """
        if self._is_plain:
            found = parse_object(bytes(self._pending))
            self._take_plain(found)
            self.usage()
            return found
        if self._is_plain is None:
            raise AnswerError("nothing came")
        whole = self._finish_stream()
        self.usage()
        return whole

    def estimate(self, prompt_tokens: int, most: int | None) -> Usage:
        """Return the use to charge without a usable report (spec L10).

        Args:
            prompt_tokens: the estimate for the messages.
            most: the bound on the output; None for no bound.
        """
        output = max(self.output_pieces, tokens_of(self.output_bytes))
        return Usage(prompt_tokens, output if most is None else min(output, most))

    def count_output(self, *texts: object) -> None:
        """Count texts of the model as one piece; without any text it is none."""
        size = sum(len(text.encode()) for text in texts if isinstance(text, str))
        self.output_bytes += size
        self.output_pieces += size > 0


def check_count(found: Sized, most: int, what: str) -> None:
    """Raise ``AnswerError`` if an answer has more than ``most`` parts of a kind."""
    if len(found) > most:
        raise AnswerError(f"more than {most} {what}")


def kind_of(event: Object) -> str:
    """Return the type of an event, which is also its name in a stream.

    Raises:
        AnswerError: it has no type, or one that does not fit into a line.
    """
    kind = event.get("type")
    if not isinstance(kind, str) or not kind.isprintable():
        raise AnswerError("an event of another API: its type is no name")
    return kind


def read_usage(reported: object, prompt: str, output: str) -> Usage | None:
    """Return a provider's ``usage`` as numbers; None if there is none.

    Args:
        reported: the ``usage``.
        prompt: the member with the tokens of the prompt.
        output: the member with the tokens of the answer.

    Raises:
        AnswerError: a member is no number of tokens.
    """
    if reported is None:
        return None
    if not isinstance(reported, dict):
        raise AnswerError("usage is not an object")
    if reported.get(prompt) is None:
        raise AnswerError(f"usage: {prompt} is no number of tokens")
    told = table_in(reported, f"{prompt}_details")
    return Usage(
        tokens_in(reported, prompt),
        tokens_in(reported, output),
        tokens_in(told, "cached_tokens"),
        tokens_in(told, "cache_write_tokens"),
        tokens_in(table_in(reported, f"{output}_details"), "reasoning_tokens"),
    )


def tokens_in(table: Object, name: str) -> int:
    """Return a member that is a number of tokens; 0 without it.

    Raises:
        AnswerError: the member is no number of tokens.
    """
    value = table.get(name)
    if value is None:
        return 0
    # Not isinstance: a bool is an int to Python.
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise AnswerError(f"usage: {name} is no number of tokens")
    return value


def table_in(table: Object, name: str) -> Object:
    """Return a member that is an object; an empty one if it is not."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def parse_object(text: bytes) -> Object:
    """Return the JSON object in a text.

    Raises:
        AnswerError: the text is no object, or has too many values.
    """
    outline = len(text) - len(text.translate(None, _OUTLINE))
    if outline > MAX_VALUES:
        raise AnswerError(f"more than {MAX_VALUES} values in one piece")
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError) as why:
        raise AnswerError(f"not JSON: {why}") from None
    if not isinstance(found, dict):
        raise AnswerError("not a JSON object")
    if outline > MOST_DEPTH and is_deep(found):
        raise AnswerError(f"more than {MOST_DEPTH} values within one another")
    return found
