"""Who may ask: one token a child, 128 random bits, until the child has ended.

Rules of this file.

1. A token is looked up by a keyed hash of it, and compared in constant time: how long a
   wrong one takes says nothing about a right one, and a thousand children cost no more
   than one.
2. A token that was revoked is as unknown as one that never was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

TOKEN_BYTES = 16
"""128 bits, which the child sees as 32 hexadecimal digits."""

Owner = TypeVar("Owner")


class Tokens(Generic[Owner]):
    """The tokens of one host."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, Owner]] = {}

    def issue(self, owner: Owner) -> str:
        """Make a token that stands for an owner."""
        token = secrets.token_hex(TOKEN_BYTES)
        self.adopt(token, owner)
        return token

    def adopt(self, token: str, owner: Owner) -> None:
        """Let a token stand for an owner, which the program before has issued."""
        self._owners[self._digest(token.encode())] = (token.encode(), owner)

    def revoke(self, token: str) -> None:
        """Forget a token; nothing if it is not known."""
        self._owners.pop(self._digest(token.encode()), None)

    def find(self, pieces: Iterable[bytes]) -> Owner | None:
        """Return whose token one of the pieces is, None if none is one."""
        found = None
        for piece in pieces:
            token, owner = self._owners.get(self._digest(piece), (b"", None))
            if hmac.compare_digest(token, piece) and owner is not None:
                found = owner
        return found

    def _digest(self, piece: bytes) -> bytes:
        return hashlib.blake2b(piece, key=self._key, digest_size=32).digest()
