"""Tokens: 128 random bits for each child, valid until the child has ended.

Rules of this file.

1. A token is looked up by a keyed hash and compared in constant time: the time for a
   wrong one says nothing about a right one, and a thousand children cost no more than
   one.
2. A revoked token is as unknown as one that never was, and so are tokens narrowed from
   it (``protocol/toolexec/token.py``).
3. A narrowed token names its origin; for an unknown origin nothing is computed. The
   name is no secret, so the time of its look-up does not matter.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Generic, TypeVar

from protocol.toolexec import token as toolexec_token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.toolexec.token import TokenRights

TOKEN_BYTES = 16
"""128 bits, which the child sees as 32 hexadecimal digits."""

Owner = TypeVar("Owner")


class Tokens(Generic[Owner]):
    """The tokens of one host."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, Owner]] = {}
        self._names: dict[str, str] = {}  # those in narrowed tokens

    def issue(self, owner: Owner) -> str:
        """Return a new token that stands for an owner."""
        token = secrets.token_hex(TOKEN_BYTES)
        self.adopt(token, owner)
        return token

    def adopt(self, token: str, owner: Owner) -> None:
        """Let a token of the program before stand for an owner."""
        self._owners[self._digest(token.encode())] = (token.encode(), owner)
        self._names[toolexec_token.identity(token)] = token

    def revoke(self, token: str) -> None:
        """Forget a token; nothing if it is unknown."""
        self._owners.pop(self._digest(token.encode()), None)
        self._names.pop(toolexec_token.identity(token), None)

    def find(self, pieces: Iterable[bytes]) -> tuple[Owner, TokenRights] | None:
        """Return the owner and rights of the token in one of the pieces, or None."""
        found = None
        for piece in pieces:
            if len(piece) > toolexec_token.MAX_TOKEN_BYTES:
                continue
            token, owner = self._owners.get(self._digest(piece), (b"", None))
            if hmac.compare_digest(token, piece) and owner is not None:
                found = owner, toolexec_token.ALL
            elif b"~" in piece:
                found = self._find_narrowed(piece) or found
        return found

    def _find_narrowed(self, piece: bytes) -> tuple[Owner, TokenRights] | None:
        taken = toolexec_token.parse_narrowed(piece)
        if taken is None:
            return None
        name, caveats, given = taken
        token = self._names.get(name)
        if token is None:
            return None
        if not hmac.compare_digest(toolexec_token.mac(token, caveats), given):
            return None
        rights = toolexec_token.TokenRights.of(caveats)
        if rights is None or not rights.is_narrowed:
            return None
        return self._owners[self._digest(token.encode())][1], rights

    def _digest(self, piece: bytes) -> bytes:
        return hashlib.blake2b(piece, key=self._key, digest_size=32).digest()
