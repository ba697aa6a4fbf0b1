"""Blotting out secrets in whatever leaves the gateway (spec L11, L13; I10).

A provider can echo a key in an error or an answer, as it is or encoded.  So every text
from outside passes here once, whole, before anybody else sees it.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MIN_SECRET_CHARS = 4
"""A shorter one is refused: to blot it out would spoil ordinary text."""

BLOT = "[redacted]"


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


def forms_of(secret: str) -> tuple[str, ...]:
    """Return every form of a secret that is looked for, longest first."""
    in_json = json.dumps(secret)[1:-1]
    found = {
        secret,
        quote(secret, safe=""),
        quote_plus(secret),
        in_json,
        json.dumps(secret, ensure_ascii=False)[1:-1],
        json.dumps(in_json)[1:-1],  # a tool's arguments are JSON within JSON
        *_encoded(secret.encode()),
    }
    return tuple(sorted(found, key=len, reverse=True))


class Redactor:
    """Replaces secrets.

    Args:
        secrets: texts of at least ``MIN_SECRET_CHARS`` characters.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets for form in forms_of(secret)}
        self._forms = tuple(sorted(forms, key=len, reverse=True))
        self._encoded = tuple(form.encode() for form in self._forms)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for form in self._forms:
            if form in text:
                text = text.replace(form, BLOT)
        return text

    def data(self, data: bytes) -> bytes:
        """Return UTF-8 bytes without secrets."""
        for form in self._encoded:
            if form in data:
                data = data.replace(form, BLOT.encode())
        return data

    def held_back(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a secret."""
        longest = 0
        for form in self._forms:
            for size in range(min(len(form) - 1, len(text)), longest, -1):
                if text.endswith(form[:size]):
                    longest = size
                    break
        return longest


class StreamRedactor:
    """Blots out secrets in a text that comes in pieces, also across them.

    Attributes:
        has_found: there was a secret in it.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""
        self.has_found = False

    @property
    def is_holding(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def feed(self, piece: str) -> str:
        """Take a piece; return what can be passed on by now."""
        whole = self._held + piece
        text = self._redactor.text(whole)
        self.has_found = self.has_found or text != whole
        back = self._redactor.held_back(text)
        self._held = text[len(text) - back :]
        return text[: len(text) - back]

    def rest(self) -> str:
        """Return what was held back, at the end."""
        text, self._held = self._held, ""
        return text
