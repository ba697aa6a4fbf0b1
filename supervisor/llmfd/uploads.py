"""Contents that arrive in pieces, each under a token (``FD_PUT``).

A token belongs to one process and is used up by the call that names it. Its pieces
count against the allowance by their bytes; then the content counts instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import INVALID_PARAMETER, FdError
from supervisor.llmfd.store import WriterState  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.memory_file import MemoryFile
    from supervisor.llmfd.store import Store, Writer

MOST_TOKENS = 64
"""Most contents that one client may be putting in at the same time."""


class BegunState(msgspec.Struct):
    """See ``Uploads``."""

    made: int
    writers: list[WriterState]


class Uploads:
    """The unfinished contents of one process.

    Args:
        store: keeps the contents.
        allowance: charged for them; None if there is no bound.

    Attributes:
        made: the number of tokens so far.
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
        """Yield tokens with their writers."""
        return iter(self._writers.items())

    def put(self, token: str | None, piece: bytes) -> str:
        """Add a piece; return its token, a new one for None.

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

    def enter(self, writer: Writer) -> str:
        """Own a writer that was charged already; return its new token."""
        with self._lock:  # pieces come in a thread, outputs of tools in Trio's
            self.made += 1
            token = f"t{self.made}"
            self._writers[token] = writer
        return token

    def take(self, token: str) -> Content:
        """Return the content under a token, which is used up; the caller holds it.

        Raises:
            FdError: ``invalid_parameter``: the token is not known.
        """
        # Removed first: `close` must not close a writer that is finishing.
        writer = self._writers.pop(token, None)
        if writer is None:
            raise FdError(INVALID_PARAMETER, f"Unknown token: {token}")
        try:
            return writer.finish()
        finally:
            self._give_back(writer.size)
            writer.close()

    def drop(self, token: str) -> None:
        """Forget a token, if it is there, and give its room back."""
        writer = self._writers.pop(token, None)
        if writer is not None:
            self._give_back(writer.size)
            writer.close()

    def close(self) -> None:
        """Forget all tokens."""
        for token in tuple(self._writers):
            self.drop(token)

    def snapshot(self, memory: MemoryFile) -> BegunState:
        """Return them as ``restore`` takes them."""
        writers = [one.snapshot(token, memory) for token, one in self]
        return BegunState(self.made, writers)

    def restore(self, state: BegunState, memory: MemoryFile) -> None:
        """Restore the contents that the program before has begun.

        One that cannot be continued is dropped: its token is not known then.
        """
        self.made = state.made
        for one in state.writers:
            writer = self._store.writer()
            try:
                writer.restore(one, memory)
            except FdError:
                writer.close()
                continue
            self._writers[one.token] = writer
            if self._allowance is not None:
                self._allowance.used += writer.size  # it was taken piece by piece

    def _take(self, size: int) -> None:
        if self._allowance is not None:
            self._allowance.take(size)

    def _give_back(self, size: int) -> None:
        if self._allowance is not None:
            self._allowance.give_back(size)
