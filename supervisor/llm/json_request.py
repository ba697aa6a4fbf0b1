"""A JSON request of a child: strictly read, and passed on with few changes.

Host and provider must read the same in a request (spec MD2).  So repeated keys are refused,
and values that JSON does not have or that a reader may round: NaN, Infinity, numbers that
overflow, halves of surrogate pairs.  Unchanged members are sent byte for byte.

A JSON decoder holds the interpreter lock to the end of a text, in any thread: 0.1 s for
12 MiB of escapes.  So texts above ``LONG_TEXT_BYTES`` are checked by a regex engine that
releases the lock, and are not decoded.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined] # not in its stub
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import re2

from hostlib.documents import MOST_DEPTH, is_deep, texts_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hostlib.documents import Object

LONG_TEXT_BYTES = 256
"""Longest text that is decoded with the object that holds it, in a long request."""

MOST_OUTLINE_BYTES = 2 << 20
"""Longest request without its long texts: decoding it holds the lock for at most 20 ms."""

MOST_DIGITS = 400
"""Longest number: a reader needs 17 digits, and 300 zeros at most."""

INLINE_BYTES = 96 * 1024
"""Longest request whose long texts are decoded with it."""

INLINE_VALUES = 800
VALUE_BYTES = 100
"""Most values (quotes, commas, lists, objects) of a request that is read in the Trio thread, and
the bytes that count as one more.  Reading, checking and translating takes 1 us for each in the
worst case (members of the outermost object), 0.4 us in the requests of agents."""

LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1
"""The range of readers with 64-bit integers."""

# Without the surrogates named the engine takes any bytes that look like UTF-8.
_LONG_TEXT = re2.compile(
    rb'"(?:[^"\\\x00-\x1f\x{d800}-\x{dfff}]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
)
_BLANKS = re.compile(r"[ \t\n\r]*")
_COLON = re2.compile(rb"[ \t\n\r]*:")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class BadJsonError(ValueError):
    """A request is no JSON object that all readers read alike; the text says why."""


class JsonMember(NamedTuple):
    """The place of a member of the outermost object, in bytes.

    Attributes:
        start: start of its key.
        value: start of its value.
        end: end of its value.
    """

    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A received request.

    Attributes:
        data: its bytes.
        value: its decoded value; texts above ``LONG_TEXT_BYTES`` are empty in a long one.
        members: places of the members of the outermost object, by key, in order.
        has_long_texts: whether a text was left out of ``value``.
    """

    data: bytes
    value: Object
    members: dict[str, JsonMember]
    has_long_texts: bool = False

    def whole_value(self) -> Object:
        """Return the decoded value with all its texts."""
        if not self.has_long_texts:
            return self.value
        found: Object = msgspec.json.decode(self.data)
        return found

    def text_of(self, name: str) -> bytes:
        """Return the received JSON of a member's value."""
        member = self.members[name]
        return self.data[member.value : member.end]

    def with_changes(
        self, changes: Mapping[str, bytes], without: Collection[str] = ()
    ) -> bytes:
        """Return the request with changed members, otherwise byte for byte.

        Args:
            changes: key -> JSON of its value; a missing key is added.
            without: keys to leave out.
        """
        data = self.data
        pieces: list[bytes] = []
        first = next(iter(self.members.values()), None)
        head = data.index(b"{") + 1 if first is None else first.start
        end = head
        for name, member in self.members.items():
            if name not in without:
                pieces.append(data[end : member.start] if pieces else data[:head])
                pieces.append(data[member.start : member.value])
                pieces.append(changes.get(name, data[member.value : member.end]))
            end = member.end
        is_empty = not pieces
        for name, text in changes.items():
            if name not in self.members:
                pieces.append(data[:head] if is_empty else b",")
                pieces += (json.dumps(name).encode(), b":", text)
                is_empty = False
        return b"".join((*(pieces or [data[:head]]), data[end:]))


def is_short(data: bytes | bytearray) -> bool:
    """Tell whether a request is read in less than a millisecond (spec MD8)."""
    size = len(data) // VALUE_BYTES
    if size > INLINE_VALUES:
        return False
    # A list of one value has no comma, and so have lists within lists.
    return size + sum(map(data.count, (b'"', b",", b"[", b"{"))) <= INLINE_VALUES


def read_request(data: bytes | bytearray, most_values: int) -> JsonRequest:
    """Return the request in some bytes.

    Args:
        data: the bytes.
        most_values: most values of the request; a text is one.

    Raises:
        BadJsonError: they are no request that all readers read alike.
    """
    data = bytes(data)
    outline, cuts = _outline(data, most_values)
    try:
        text = outline.decode()
        members, value = _members(text)
    except RecursionError:
        raise BadJsonError(_too_deep()) from None
    except BadJsonError:
        raise
    except ValueError as why:
        raise BadJsonError(f"it is no JSON: {why}") from None
    if is_deep(value):
        raise BadJsonError(_too_deep())
    if _HALF_PAIR.search(data):
        _check_pairs(data, value, has_cuts=bool(cuts))
    places = _Places(text, cuts)
    spans = {
        name: JsonMember(*map(places.in_bytes, member))
        for name, member in members.items()
    }
    return JsonRequest(data, value, spans, bool(cuts))


def _outline(data: bytes, most_values: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a document without its long texts, and (start, end) of each of those."""
    if len(data) <= INLINE_BYTES:
        return data, []
    cuts, pieces, at = [], [], 0
    try:
        for start, end in texts_in(data, most_values, "what is long is a text"):
            if end - start > LONG_TEXT_BYTES and not _COLON.match(data, end):
                _check_long_text(data, start, end)
                cuts.append((start + 1, end - 1))
                pieces.append(data[at : start + 1])
                at = end - 1
    except BadJsonError:
        raise
    except ValueError as why:
        raise BadJsonError(str(why)) from None
    pieces.append(data[at:])
    outline = b"".join(pieces)
    if len(outline) > MOST_OUTLINE_BYTES:
        text = f"more than {MOST_OUTLINE_BYTES} bytes beside its long texts"
        raise BadJsonError(text)
    return outline, cuts


def _check_long_text(data: bytes, start: int, end: int) -> None:
    # The engine matches valid UTF-8 only.
    if _LONG_TEXT.fullmatch(data[start:end]) is None:
        raise BadJsonError(f"it is no JSON: a text at byte {start} is not well formed")


class _Places:
    """Converts places in a decoded outline to places in the document's bytes.

    Calls must be in rising order: each continues from the one before.
    """

    def __init__(self, text: str, cuts: list[tuple[int, int]]) -> None:
        self._text = text
        self._is_ascii = text.isascii()
        self._char = self._byte = 0
        # The place of each cut in the outline, and the bytes left out up to there.
        self._cut_places: list[int] = []
        self._left_out: list[int] = []
        total = 0
        for start, end in cuts:
            self._cut_places.append(start - total)
            total += end - start
            self._left_out.append(total)

    def in_bytes(self, char: int) -> int:
        """Return the place in the document's bytes of a character of the outline."""
        if self._is_ascii:
            place = char
        else:
            self._byte += len(self._text[self._char : char].encode())
            self._char, place = char, self._byte
        cuts_before = bisect_left(self._cut_places, place)
        return place + (self._left_out[cuts_before - 1] if cuts_before else 0)


def _members(text: str) -> tuple[dict[str, JsonMember], Object]:
    """Return the places of the members of the outermost object, and their values."""
    members: dict[str, JsonMember] = {}
    value: Object = {}
    at = _after_blanks(text, 0)
    if text[at : at + 1] != "{":
        raise BadJsonError("the body is no JSON object")
    at = _after_blanks(text, at + 1)
    is_first = True
    while text[at : at + 1] != "}":
        if not is_first:
            at = _after_blanks(text, _after(text, at, ","))
        start = at
        name, at = scanstring(text, _after(text, at, '"'), True)
        at = _after_blanks(text, _after(text, _after_blanks(text, at), ":"))
        found, end = _DECODER.raw_decode(text, at)
        if name in value:
            raise _twice(name)
        value[name] = found
        members[name] = JsonMember(start, at, end)
        at = _after_blanks(text, end)
        is_first = False
    if _after_blanks(text, at + 1) != len(text):
        raise BadJsonError("it is no JSON: something stands behind the object")
    return members, value


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise BadJsonError(f"it is no JSON: {mark} is missing at character {at}")
    return at + 1


def _object(pairs: list[tuple[str, object]]) -> Object:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _twice(name)
            seen.add(name)
    return found


def _twice(name: str) -> BadJsonError:
    return BadJsonError(f"the key {name[:100]!r} stands twice in one object")


def _float(text: str) -> float:
    if len(text) <= MOST_DIGITS and not math.isinf(found := float(text)):
        return found
    raise BadJsonError(f"the number {text[:20]} overflows")


def _integer(text: str) -> int:
    # Check before converting, whose time grows with the square of the length.
    if len(text) <= len(str(LEAST_INTEGER)):
        found = int(text)
        if LEAST_INTEGER <= found <= MOST_INTEGER:
            return found
    raise BadJsonError(f"the number {text[:20]} overflows")


def _constant(text: str) -> float:
    raise BadJsonError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=_float,
    parse_int=_integer,
    parse_constant=_constant,
)


def _too_deep() -> str:
    return f"more than {MOST_DEPTH} lists and objects within one another"


def _check_pairs(data: bytes, value: Object, *, has_cuts: bool) -> None:
    """Raise if a text has half of a surrogate pair, which UTF-8 does not have."""
    try:
        if has_cuts:
            msgspec.json.decode(data)
        else:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        raise BadJsonError("a text has half of a surrogate pair") from None
