"""Replacing secrets in all text that leaves the gateway (spec L11, L13; I10).

A provider can echo a key in an error or an answer, plain or encoded.  So every text from
outside passes here once, whole, before another part sees it.

1. The search finds secrets and their forms in base64.  Each character of a form may be
   written plainly, or as in URLs or JSON (a "writing" of the character).
2. A text is searched for plain forms, and for the few characters that begin another
   writing.  Only a text with one of those is searched further.
3. The search and the hold-back at the end of a piece follow a secret by the same code,
   so exactly the text that may still become a secret is held back.
"""

from __future__ import annotations

import base64
import re
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MIN_SECRET_CHARS = 4
"""Shortest secret: replacing a shorter one would spoil ordinary text."""

BLOT = "[redacted]"

HEAD_CHARS = 16
"""Characters of a secret that the regular expression finds; ``SoughtText`` follows the rest.
It is more than the common prefix of a provider's keys, which a model can be made to repeat
many times."""

MAX_BACKSLASHES = 8
"""Most backslashes for one, after three levels of JSON: an answer is JSON, the arguments of
a tool in it are JSON, and a value in them may be.  An escaped character has seven at most."""

_JSON_LETTERS = {
    '"': '"', "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t",
}  # fmt: skip
"""The letters that JSON writes after a backslash for a character (RFC 8259, 7)."""


def _encoded(secret: bytes) -> Iterator[str]:
    """Yield the parts of a secret in base64 that do not depend on its neighbours.

    A secret in a longer text begins at one of three offsets; its first and last base64
    characters may be shared with neighbours, and those between are always the same.
    """
    for offset in range(3):
        whole = base64.b64encode(bytes(offset) + secret)
        first = (0, 2, 3)[offset]
        last = len(whole) - (0, 2, 3)[-(offset + len(secret)) % 3]
        for text in (whole, whole.translate(bytes.maketrans(b"+/", b"-_"))):
            piece = text[first:last].decode()
            if len(piece) >= MIN_SECRET_CHARS:
                yield piece


@cache
def _writings(char: str) -> tuple[str, ...]:
    """Return every writing of a character, the plain one first.

    URLs write its bytes in UTF-8, JSON its units in UTF-16; a form writes a blank as a
    plus sign.
    """
    units = re.findall("....", char.encode("utf-16-be").hex())
    slashes = ["\\" * count for count in range(1, MAX_BACKSLASHES)]
    found = [char, "+"] if char == " " else [char]
    for upper in (False, True):
        digits = (f"{byte:02x}" for byte in char.encode())
        found.append("".join("%" + (two.upper() if upper else two) for two in digits))
        four = [unit.upper() if upper else unit for unit in units]
        found += ["".join(f"{slash}u{unit}" for unit in four) for slash in slashes]
    if char in _JSON_LETTERS:
        found += [slash + _JSON_LETTERS[char] for slash in slashes]
    if char == "\\":
        found += ["\\" * count for count in range(2, MAX_BACKSLASHES + 1)]
    return tuple(dict.fromkeys(found))


@cache
def _by_beginning(char: str) -> dict[str, tuple[str, ...]]:
    """Return the writings of a character, by their first character."""
    found: dict[str, list[str]] = {}
    for written in _writings(char):
        found.setdefault(written[0], []).append(written)
    return {beginning: tuple(ways) for beginning, ways in found.items()}


def _signs(chars: Iterable[str]) -> Iterator[str]:
    """Yield the writings of characters other than the plain one."""
    for char in chars:
        for written in _writings(char)[1:]:
            # A longer row of backslashes contains the pair.
            if not written.startswith("\\\\") or written == "\\\\":
                yield written


def _first(sign: str) -> str:
    """Return the escape of the first UTF-16 unit of a writing."""
    return sign if sign == "\\\\" else sign[0] + sign[1:].partition("\\")[0]


def _pattern(char: str) -> str:
    """Return the regular expression of a character in any writing."""
    # Each alternative begins with a literal, so that the search skips other text quickly.
    more = rf"\\\\{{0,{MAX_BACKSLASHES - 2}}}"
    ways = (re.escape(way) for way in (char, *_signs(char)))
    return "(?:" + "|".join(way.replace(r"\\", more) for way in ways) + ")"


class SoughtText:
    """A text to find, in any writing of its characters.

    Attributes:
        text: the plain text.
        longest: length of its longest writing.
        beginnings: the first characters of its writings.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.longest = sum(map(_longest, text))
        self.beginnings = _by_beginning(text[0]).keys()

    def end(self, text: str, at: int) -> int | None:
        """Return the end of the text that begins at a place; None if it does not."""
        return self.follow(text, at)[0]

    def may_begin(self, text: str, at: int) -> bool:
        """Return whether the rest from a place on may be the beginning of the text."""
        return text[at] in self.beginnings and self.follow(text, at)[1]

    def follow(self, text: str, at: int) -> tuple[int | None, bool]:
        """Return (the end of the text, whether ``text`` ended within it).

        Several places are followed at once if a character of the secret also begins a
        writing: a percent sign or a backslash.
        """
        size = len(text)
        places, is_cut = {at}, False
        for char in self.text:
            ways, after = _by_beginning(char), set()
            for place in places:
                if place == size:
                    is_cut = True
                    continue
                for way in ways.get(text[place], ()):
                    if text.startswith(way, place):
                        after.add(place + len(way))
                    elif way.startswith(text[place : place + len(way)]):
                        is_cut = True
            places = after
            if not places:
                return None, is_cut
        return max(places), is_cut


def _is_escaped(text: str, begin: int, at: int) -> bool:
    """Return whether a backslash at a place is escaped by the one before it.

    Args:
        text: the text.
        begin: start of the part in which backslashes are counted.
        at: the place.
    """
    if not text.startswith("\\", at):
        return False
    before = text[begin:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _longest(char: str) -> int:
    return max(map(len, _writings(char)))


class Redactor:
    """Replaces secrets.

    Args:
        secrets: texts of at least ``MIN_SECRET_CHARS`` characters.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {form for one in secrets for form in (one, *_encoded(one.encode()))}
        # The longest first: a secret may be a part of another.
        self._plain = tuple(sorted(found, key=len, reverse=True))
        self._wanted = tuple(map(SoughtText, self._plain))
        self._longest = max((one.longest for one in self._wanted), default=0)
        self._heads = {one.text[:HEAD_CHARS] for one in self._wanted}
        self._longest_head = max(
            (sum(map(_longest, h)) for h in self._heads), default=0
        )
        signs: dict[str, list[str]] = {}
        for sign in sorted(set(map(_first, _signs(set("".join(self._plain)))))):
            mark = sign[: 1 + sign.startswith("\\")]
            signs.setdefault(mark, []).append(re.escape(sign.removeprefix(mark)))
        # `re` searches fast for a pattern that begins with one literal.
        self._signs = {
            mark: re.compile(f"{re.escape(mark)}(?:{'|'.join(rests)})")
            for mark, rests in signs.items()
        }

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if any(
            # One character is found by memchr(3), 20 times as fast as two.
            mark[0] in text and mark in text and sign.search(text)
            for mark, sign in self._signs.items()
        ):
            return "".join(self._without(text))
        for form in self._plain:
            if form in text:
                text = text.replace(form, BLOT)
        return text

    def data(self, data: bytes) -> bytes:
        """Return UTF-8 bytes without secrets."""
        text = data.decode(errors="surrogateescape")
        return self.text(text).encode(errors="surrogateescape")

    def count_held_back(self, text: str) -> int:
        """Return the number of last characters that may be the beginning of a secret."""
        size = len(text)
        near = max(0, size - self._longest_head + 1)
        far = max(0, size - self._longest + 1)
        heads = self._places(text, far) if far < near else ()
        for at in chain(heads, range(near, size)):
            if any(one.may_begin(text, at) for one in self._wanted):
                return size - at
        return 0

    def _without(self, text: str) -> Iterator[str]:
        """Yield a text without secrets, in any writing, in pieces."""
        done = 0
        for start in self._places(text, 0):
            if start < done:
                continue
            ends = (one.end(text, start) for one in self._wanted)
            end = next((end for end in ends if end is not None), None)
            if end is not None:
                # A backslash left before the blot would escape its first character in JSON.
                yield text[done : start - _is_escaped(text, done, start)]
                yield BLOT
                done = end
        yield text[done:]

    def _places(self, text: str, at: int) -> Iterator[int]:
        """Yield the places where the head of a secret begins, from a place on."""
        while (head := self._head.search(text, at)) is not None:
            yield head.start()
            at = head.start() + 1

    @cached_property
    def _head(self) -> re.Pattern[str]:
        heads = ("".join(map(_pattern, head)) for head in sorted(self._heads))
        return re.compile("|".join(heads))


class StreamRedactor:
    """Replaces secrets in a text that comes in pieces, also across pieces.

    A text may continue after ``rest``: if the rest was the beginning of a secret, the
    remaining part of that secret is still replaced.

    Attributes:
        has_found: a secret was found.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""
        self._told = 0  # characters of ``_held`` that ``rest`` has already returned
        self.has_found = False

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return len(self._held) > self._told

    def feed(self, piece: str) -> str:
        """Add a piece; return the text that can be passed on now."""
        whole = self._held + piece
        text = self._redactor.text(whole)
        self.has_found = self.has_found or text != whole
        told = self._told
        while not text.startswith(whole[:told]):
            told -= 1
        end = len(text) - self._redactor.count_held_back(text)
        # Pass on a row of backslashes in pairs: see ``Redactor._without``.
        end -= _is_escaped(text, 0, end)
        self._held, self._told = text[end:], max(0, told - end)
        return text[told:end]

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        text, self._told = self._held[self._told :], len(self._held)
        return text
