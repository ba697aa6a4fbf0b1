"""Contents that arrive in pieces, those of ``FD_PUT`` each under a token.

Rules of this file.

1. A token belongs to one process and is used up by the call that names it.
2. Pieces count against the allowance by their bytes; then the content counts instead.
3. One thread at a time uses an upload: while a piece is added, or the content is made, its
   token is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import FILE_OPERATION, INVALID_PARAMETER, FdError
from supervisor.llmfd.store import WriterState  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.memory_file import MemoryFile
    from supervisor.llmfd.store import Store

MOST_TOKENS = 64
"""Most contents that one client may be putting in at the same time."""


class BegunState(msgspec.Struct):
    """See ``Uploads``."""

    made: int
    writers: list[WriterState]


class PartialContent:
    """A content that comes in pieces.

    Args:
        store: keeps it.
        allowance: charged for its pieces; None if there is no bound.
    """

    def __init__(self, store: Store, allowance: Allowance | None) -> None:
        self._writer = store.writer()
        self._allowance = allowance
        self._taken = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: there is no room; the caller closes this.
        """
        if self._allowance is not None:
            self._allowance.take(len(piece))
            self._taken += len(piece)
        self._writer.add(piece)

    def finish(self) -> Content:
        """Return the content, which the caller holds; this is closed.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        try:
            return self._writer.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Give its room back; safe to call twice."""
        taken, self._taken = self._taken, 0
        if self._allowance is not None:
            self._allowance.give_back(taken)
        self._writer.close()

    def snapshot(self, token: str, memory: MemoryFile) -> WriterState:
        """Return it as ``restore`` takes it."""
        return self._writer.snapshot(token, memory)

    def restore(self, state: WriterState, memory: MemoryFile) -> None:
        """Continue an upload of the program before; see ``Writer.restore``."""
        self._writer.restore(state, memory)
        if self._allowance is not None:
            self._taken = self._writer.size
            self._allowance.used += self._taken  # it was taken piece by piece


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
        self._uploads: dict[str, PartialContent] = {}
        self._lock = ThreadLock()
        self._is_closed = False

    def __contains__(self, token: str) -> bool:
        return token in self._uploads

    def put(self, token: str | None, piece: bytes) -> str:
        """Add a piece; return its token, a new one for None.

        Raises:
            FdError: the token is not known, or there is no room; then it is used up.
        """
        if token is None:
            token, upload = self._begin()
        else:
            upload = self._remove(token)
        try:
            upload.add(piece)
            self._enter(token, upload)
        except BaseException:
            upload.close()
            raise
        return token

    def _begin(self) -> tuple[str, PartialContent]:
        """Return a new upload with its token, not in the table yet."""
        with self._lock:
            if len(self._uploads) >= MOST_TOKENS:
                text = (  # a reply repeats 200 bytes of it (spec F6)
                    f"{MOST_TOKENS} contents were put in and no call has used them, the"
                    " most there may be; use one (wrap_output takes its token), or start"
                    " the child anew"
                )
                raise FdError(INVALID_PARAMETER, text)
            self.made += 1
            return f"t{self.made}", PartialContent(self._store, self._allowance)

    def _remove(self, token: str) -> PartialContent:
        """Take an upload from the table: no other thread finds it then (rule 3)."""
        upload = self._uploads.pop(token, None)
        if upload is None:
            raise FdError(INVALID_PARAMETER, f"Unknown token: {token}")
        return upload

    def _enter(self, token: str, upload: PartialContent) -> None:
        with self._lock:
            if self._is_closed:
                text = "Cannot store content: the process has ended"
                raise FdError(FILE_OPERATION, text)
            self._uploads[token] = upload

    def take(self, token: str) -> Content:
        """Return the content under a token, which is used up; the caller holds it.

        Raises:
            FdError: ``invalid_parameter``: the token is not known.
        """
        return self._remove(token).finish()

    def close(self) -> None:
        """Forget all tokens; refuse further pieces."""
        with self._lock:
            self._is_closed = True
            uploads = tuple(self._uploads.values())
            self._uploads.clear()
        for upload in uploads:
            upload.close()

    def snapshot(self, memory: MemoryFile) -> BegunState:
        """Return them as ``restore`` takes them."""
        writers = [one.snapshot(token, memory) for token, one in self._uploads.items()]
        return BegunState(self.made, writers)

    def restore(self, state: BegunState, memory: MemoryFile) -> None:
        """Restore the contents that the program before has begun.

        One that cannot be continued is dropped: its token is not known then.
        """
        self.made = state.made
        for one in state.writers:
            upload = PartialContent(self._store, self._allowance)
            try:
                upload.restore(one, memory)
            except FdError:
                upload.close()
                continue
            self._uploads[one.token] = upload
