"""Contents that are on their way in, piece by piece, each under a token (``FD_PUT``).

A token belongs to one process and is used up by the call that names it.  What is begun
counts against the allowance by its bytes; once it is a content, that counts instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import INVALID_PARAMETER, FdError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.store import Store, Writer

MOST_TOKENS = 64
"""Contents that one client may be putting in at once."""


class Begun:
    """What one process has begun.

    Args:
        store: keeps the contents.
        allowance: what they are charged to; None: nothing bounds them.

    Attributes:
        made: how many tokens there were.
    """

    def __init__(self, store: Store, allowance: Allowance | None) -> None:
        self.made = 0
        self._store = store
        self._allowance = allowance
        self._writers: dict[str, Writer] = {}
        self._lock = ThreadLock()

    def __contains__(self, token: str) -> bool:
        return token in self._writers

    def __iter__(self) -> Iterator[tuple[str, Writer]]:
        """Go through tokens and what is under them."""
        return iter(self._writers.items())

    def size(self, token: str) -> int:
        """Return how much was put in under a token, bytes; 0 if it is not known."""
        writer = self._writers.get(token)
        return 0 if writer is None else writer.size

    def put(self, token: str | None, piece: bytes) -> str:
        """Take in a piece; return the token it is under, a new one for None.

        Raises:
            KeyError: the token is not known.
            FdError: there is no room.
        """
        if token is None:
            if len(self._writers) >= MOST_TOKENS:
                text = (  # a reply repeats 200 bytes of it (spec F6)
                    f"{MOST_TOKENS} contents were put in and no call has used them, the"
                    " most there may be; use one (wrap_output takes its token), or start"
                    " the child anew"
                )
                raise FdError(INVALID_PARAMETER, text)
            token = self.enter(self._store.writer())
        writer = self._writers[token]
        try:
            self._take(len(piece))
            try:
                writer.add(piece)
            except FdError:
                self._give_back(len(piece))
                raise
        except FdError:
            self.drop(token)
            raise
        return token

    def enter(self, writer: Writer, token: str = "") -> str:
        """Own what was begun elsewhere, and charged already; return its token.

        Args:
            writer: what was begun.
            token: the one it had; empty for a new one.
        """
        with self._lock:  # a piece comes in a thread, what a tool has put out in Trio's
            if not token:
                self.made += 1
                token = f"t{self.made}"
            self._writers[token] = writer
        return token

    def take(self, token: str) -> Content:
        """Return what was put in under a token, which is used up; the caller holds it.

        Raises:
            FdError: ``invalid_parameter``: the token is not known.
        """
        # Taken out first: who ends meanwhile must not end what is being finished.
        writer = self._writers.pop(token, None)
        if writer is None:
            raise FdError(INVALID_PARAMETER, f"Unknown token: {token}")
        try:
            return writer.finish()
        finally:
            self._give_back(writer.size)
            writer.close()

    def drop(self, token: str) -> None:
        """Forget a token, if it is there; what it was charged is given back."""
        writer = self._writers.pop(token, None)
        if writer is not None:
            self._give_back(writer.size)
            writer.close()

    def close(self) -> None:
        """Forget all."""
        for token in tuple(self._writers):
            self.drop(token)

    def _take(self, size: int) -> None:
        if self._allowance is not None:
            self._allowance.take(size)

    def _give_back(self, size: int) -> None:
        if self._allowance is not None:
            self._allowance.give_back(size)
