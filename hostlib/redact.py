"""Blotting out secrets in whatever leaves the gateway (spec L11, L13; I10).

A provider can echo a key in an error or an answer, as it is or encoded.  So every text
from outside passes here once, whole, before anybody else sees it.

Rules of this file.

1. What is looked for is a secret, and what of it shows in base64.  Of either, each
   character may be written in any way of its own: as it is, or as URLs and JSON write it.
2. Ordinary text is searched for what is written as it is, and for the few characters that
   begin any other writing.  Only where one of those is there is anything else done.
3. Who searches and who holds the end of a piece back go through a secret in one way, a
   character at a time: what may still become a secret is held back, and nothing else.
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
"""A shorter one is refused: to blot it out would spoil ordinary text."""

BLOT = "[redacted]"

HEAD_CHARS = 16
"""What a text is searched for before the rest is followed: more than what keys of one
provider have in common, for a model can be asked to say that again and again."""

MAX_BACKSLASHES = 8
"""What three levels of JSON make of one: an answer is JSON, so are a tool's arguments in
it, and what they hold may be.  Of the one before another character they make seven."""

_JSON_LETTERS = {
    '"': '"', "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t",
}  # fmt: skip
"""What may stand after a backslash for a character (RFC 8259, 7)."""


def _encoded(secret: bytes) -> Iterator[str]:
    """Yield what of a secret shows in base64 text, wherever in it the secret begins.

    A secret at another offset shares its first and last characters with its
    neighbours; what lies between is always the same.
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
    """Return every way in which a character is written, itself first.

    In a URL by its bytes in UTF-8, in JSON by its units in UTF-16; a blank in a form is
    a plus sign.
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
    """Return the ways of writing a character, by the character they begin with."""
    found: dict[str, list[str]] = {}
    for written in _writings(char):
        found.setdefault(written[0], []).append(written)
    return {beginning: tuple(ways) for beginning, ways in found.items()}


def _signs(chars: Iterable[str]) -> Iterator[str]:
    """Yield what is in every writing of these characters that is not the plain one."""
    for char in chars:
        for written in _writings(char)[1:]:
            # Where there are more backslashes there is this too.
            if not written.startswith("\\\\") or written == "\\\\":
                yield written


def _first(sign: str) -> str:
    """Return the first unit of a character that UTF-16 has in two."""
    return sign if sign == "\\\\" else sign[0] + sign[1:].partition("\\")[0]


def _pattern(char: str) -> str:
    """Return the regular expression of a character in any writing."""
    # Each way begins with a character, so that what is none is passed over quickly.
    more = rf"\\\\{{0,{MAX_BACKSLASHES - 2}}}"
    ways = (re.escape(way) for way in (char, *_signs(char)))
    return "(?:" + "|".join(way.replace(r"\\", more) for way in ways) + ")"


class _Wanted:
    """A text that is looked for, however each of its characters is written.

    Attributes:
        text: as it is.
        longest: the most characters that it can take.
        beginnings: what it may begin with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.longest = sum(map(_longest, text))
        self.beginnings = _by_beginning(text[0]).keys()

    def end(self, text: str, at: int) -> int | None:
        """Return where it ends if it begins at a place; None if it does not."""
        return self._follow(text, at)[0]

    def may_begin(self, text: str, at: int) -> bool:
        """Whether what stands from a place to the end is a beginning of it."""
        return text[at] in self.beginnings and self._follow(text, at)[1]

    def _follow(self, text: str, at: int) -> tuple[int | None, bool]:
        """Return (where it ends, whether the text ended before it did).

        More than one place is followed at a time where a character begins another's
        writing: a percent sign or a backslash of the secret's own.
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
    """Tell whether a backslash stands at a place that the one before it escapes.

    Args:
        text: from ``begin`` on.
        begin: where a backslash would be the first of its row.
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
        # The longest first: a part of it may be a secret too.
        self._plain = tuple(sorted(found, key=len, reverse=True))
        self._wanted = tuple(map(_Wanted, self._plain))
        self._longest = max((one.longest for one in self._wanted), default=0)
        self._heads = {one.text[:HEAD_CHARS] for one in self._wanted}
        self._longest_head = max(
            (sum(map(_longest, h)) for h in self._heads), default=0
        )
        signs: dict[str, list[str]] = {}
        for sign in sorted(set(map(_first, _signs(set("".join(self._plain)))))):
            mark = sign[: 1 + sign.startswith("\\")]
            signs.setdefault(mark, []).append(re.escape(sign.removeprefix(mark)))
        # A pattern that begins with one text is searched for by that.
        self._signs = {
            mark: re.compile(f"{re.escape(mark)}(?:{'|'.join(rests)})")
            for mark, rests in signs.items()
        }

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if any(
            # Of one character it is memchr(3), 20 times as fast as of two.
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

    def held_back(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a secret."""
        size = len(text)
        near = max(0, size - self._longest_head + 1)
        far = max(0, size - self._longest + 1)
        heads = self._places(text, far) if far < near else ()
        for at in chain(heads, range(near, size)):
            if any(one.may_begin(text, at) for one in self._wanted):
                return size - at
        return 0

    def _without(self, text: str) -> Iterator[str]:
        """Yield a text without secrets, in pieces, however they are written."""
        done = 0
        for start in self._places(text, 0):
            if start < done:
                continue
            ends = (one.end(text, start) for one in self._wanted)
            end = next((end for end in ends if end is not None), None)
            if end is not None:
                # A backslash that was left would take what follows it, in JSON.
                yield text[done : start - _is_escaped(text, done, start)]
                yield BLOT
                done = end
        yield text[done:]

    def _places(self, text: str, at: int) -> Iterator[int]:
        """Yield where the first characters of a secret are, from a place on."""
        while (head := self._head.search(text, at)) is not None:
            yield head.start()
            at = head.start() + 1

    @cached_property
    def _head(self) -> re.Pattern[str]:
        heads = ("".join(map(_pattern, head)) for head in sorted(self._heads))
        return re.compile("|".join(heads))


class StreamRedactor:
    """Blots out secrets in a text that comes in pieces, also across them.

    A text may go on behind its end: if its rest was the beginning of a secret, what
    comes of the secret then is blotted out.

    Attributes:
        has_found: there was a secret in it.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""
        self._told = 0  # characters of what is held that were passed on as a rest
        self.has_found = False

    @property
    def is_holding(self) -> bool:
        """Whether something is held back."""
        return len(self._held) > self._told

    def feed(self, piece: str) -> str:
        """Take a piece; return what can be passed on by now."""
        whole = self._held + piece
        text = self._redactor.text(whole)
        self.has_found = self.has_found or text != whole
        told = self._told
        while not text.startswith(whole[:told]):
            told -= 1
        end = len(text) - self._redactor.held_back(text)
        # So that a row of backslashes is passed on in pairs: see ``Redactor._without``.
        end -= _is_escaped(text, 0, end)
        self._held, self._told = text[end:], max(0, told - end)
        return text[told:end]

    def rest(self) -> str:
        """Return what was held back, at the end."""
        text, self._told = self._held[self._told :], len(self._held)
        return text
