"""A provider's answer: bytes in, events or one object out; the form is the API's.

Sans-IO, and what the readers of all APIs have in common. A stream of server-sent events
is taken apart; a body that is one JSON object is taken as it is.

Rules of this file.

1. Told apart by what comes, not by what the headers claim: JSON begins with ``{``.
2. Memory is bounded by ``MAX_ANSWER_BYTES``, whatever comes (I9).
3. The time that an answer takes grows as its length does, whatever it holds.
4. What one call takes apart, with nothing else of the host going on, is bounded by
   ``TURN_LINES`` and ``MAX_VALUES``; what an answer has beside each other, by
   ``MAX_CHOICES``, ``MAX_ITEMS`` and ``MAX_TEXTS``. A provider that sends more has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar

import msgspec

from hostlib.documents import MOST_DEPTH, is_deep
from supervisor.llm.quota import Usage, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized

    from supervisor.llm.pieces import Object

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Longest answer of a provider: a model of today writes some 500 KiB at most, and the
events around each token of it take ten times that."""

MAX_VALUES = 250_000
"""Most of the bytes ``[``, ``{`` and ``,`` in one piece of JSON, those of its texts with
them: no more values than that are in it, and to count these takes a fiftieth of the time.
So many keys take 0.1 s; 16 MiB of empty lists took 1.6 s, in each of which nobody else of the
host has a turn.  An event holds a token.  A server that does not stream has one piece for
all: the 128,000 tokens of a long answer hold half as many as numbers in a list, and
log-probabilities of 5 alternatives are told for 6,000 tokens of it."""

TURN_LINES = 128
"""Lines that one call takes apart. An event is two or three of them, and takes 5 us: 64 KiB
of events, as they come at once from a fast provider, took 6 ms."""

MAX_CHOICES = 16
"""Most choices of one answer: the endpoint lets a request ask for one (spec MD2)."""

MAX_ITEMS = 4096
"""Most items of one answer (calls of tools, output items, blocks): each is told by itself. A
model calls some dozens of tools at once, and a long report with searches has some hundreds."""

MAX_TEXTS = 512
"""Most texts of one answer that go on beside each other: an event may end each of them, so all
are looked at for each event."""

VALUE_BYTES = 150
"""What a value takes that is kept of a stream: its place in a table or list, and itself."""

PIECE_BYTES = 100
"""What a piece of text takes beside its characters."""

FORMS = 6
"""In so many forms a text of the model is there at the end: in pieces, joined, as JSON,
searched for secrets. As many are there of an answer that comes as one piece of JSON."""

DONE = b"[DONE]"

_OUTLINE = b"[{,"


class AnswerError(Exception):
    """What came is no answer; the text says why, in one line."""


class BrokenOffError(AnswerError):
    """The connection ended before the reply did."""


class ProviderError(Exception):
    """The provider says that it failed, in the middle of its answer.

    Attributes:
        code: its word for it; empty for none.
    """

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class AnswerReader(ABC):
    """Takes one answer in.

    Attributes:
        events: how many pieces came.
        output_bytes: text that the model has written so far.
        output_pieces: in how many pieces it came; a piece is a token at least.
        kept_bytes: memory that what is kept of its events takes, beside that text.
        has_early_usage: what was reported of the output is no more than its beginning.
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
        self._searched = 0  # of what is pending: it holds no LF
        self._lines: deque[bytes] = deque()  # that are complete
        self._data = bytearray()  # the lines of an event, each with its end
        self._is_plain: bool | None = None
        self._is_done = False

    @property
    def pending_bytes(self) -> int:
        """How long what has come of an event is, or of an answer in one piece."""
        return len(self._pending) + len(self._data)

    @property
    def has_lines(self) -> bool:
        """Whether there are lines for another turn."""
        return bool(self._lines)

    @property
    def has_ended(self) -> bool:
        """Whether the last event of a stream has come; a reply may go on behind it."""
        return self._is_done

    @property
    def held_bytes(self) -> int:
        """How much memory it takes, its other forms at the end included."""
        texts = self.pending_bytes + self.output_bytes
        return FORMS * texts + PIECE_BYTES * self.output_pieces + self.kept_bytes

    def feed(self, data: bytes) -> list[Object]:
        """Take bytes; return the events that they complete, however many they are.

        Raises:
            AnswerError: it is too long, or no answer.
            ProviderError: an event says that the provider failed.
        """
        self.receive(data)
        events = self.next_events()
        while self.has_lines:
            events += self.next_events()
        return events

    def receive(self, data: bytes) -> None:
        """Take bytes; ``next_events`` returns the events that they complete.

        Raises:
            AnswerError: it is too long.
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
        """Return the events of the next lines, of so many as a turn has.

        Raises:
            AnswerError: it is no answer.
            ProviderError: an event says that the provider failed.
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
        """Take an event in; return what is passed on of it.

        Raises:
            AnswerError: it is none of this API.
            ProviderError: it says that the provider failed.
        """

    @abstractmethod
    def _take_plain(self, found: Object) -> None:
        """Take an answer in that came in one piece; the errors are as above."""

    @abstractmethod
    def _finish_stream(self) -> Object:
        """Return what the events amount to.

        Raises:
            AnswerError: the end is missing.
        """

    @abstractmethod
    def usage(self) -> Usage | None:
        """Return the use that the provider reported; None if it has not.

        Raises:
            AnswerError: it is not numbers.
        """

    def finish(self) -> Object:
        """Return the whole answer, checked; of a stream that is passed on, nothing.

        Raises:
            AnswerError: it is incomplete, or lacks what an answer has.
            ProviderError: it is an error instead.
        """
        if self._is_plain:
            found = parse_object(bytes(self._pending))
            self._take_plain(found)
            self.usage()
            return found
        if not self._size or self._is_plain is None:
            raise AnswerError("nothing came")
        whole = self._finish_stream()
        self.usage()
        return whole

    def estimate(self, prompt_tokens: int, most: int | None) -> Usage:
        """Return what to charge where nothing usable was reported (spec L10).

        Args:
            prompt_tokens: the estimate for the messages.
            most: what the output was held to; None for no bound.
        """
        output = max(self.output_pieces, tokens_of(self.output_bytes))
        return Usage(prompt_tokens, output if most is None else min(output, most))

    def count_output(self, *texts: object) -> None:
        """Add up text that the model has written."""
        self.add_output(
            sum(len(text.encode()) for text in texts if isinstance(text, str))
        )

    def add_output(self, size_bytes: int) -> None:
        """Add a piece of text that the model has written; one of no bytes is none."""
        if size_bytes:
            self.output_bytes += size_bytes
            self.output_pieces += 1


def check_count(found: Sized, most: int, what: str) -> None:
    """Raise ``AnswerError`` if an answer has more of something than that."""
    if len(found) > most:
        raise AnswerError(f"more than {most} {what}")


def kind_of(event: Object) -> str:
    """Return the type of an event, which is its name in a stream too.

    Raises:
        AnswerError: it has none that can stand in one line.
    """
    kind = event.get("type")
    if not isinstance(kind, str) or not kind.isprintable():
        raise AnswerError("an event of another API: its type is no name")
    return kind


def read_usage(reported: object, prompt: str, output: str) -> Usage | None:
    """Return a provider's ``usage`` as numbers; None if there is none.

    Args:
        reported: it.
        prompt: the name of the tokens of the prompt in it.
        output: of those of the answer.

    Raises:
        AnswerError: one of them is no number of tokens.
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
    """Return a number of tokens that a provider reports; 0 if it does not.

    Raises:
        AnswerError: it is none.
    """
    value = table.get(name)
    if value is None:
        return 0
    # A bool is an int to Python, and nothing else here is a count of tokens.
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise AnswerError(f"usage: {name} is no number of tokens")
    return value


def table_in(table: Object, name: str) -> Object:
    """Return a member that is an object; an empty one if it is none."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def parse_object(text: bytes) -> Object:
    """Return an object of JSON.

    Raises:
        AnswerError: it is none, or too much.
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
