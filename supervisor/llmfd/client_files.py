"""Files for ``fd_to_file`` and preloads, under the rights of the calling client.

Rules of this file.

1. Files are opened only through the client's policy and ledger: what OPEN refuses, this
   refuses, and written bytes count as if the client had written them.
2. A file is replaced at one instant: the new one is written without a name, flushed,
   and gets the permission bits and the name of the old one. After a failure the old
   file is unchanged.
3. Calls into the kernel that may block run in worker threads; on a distant file system
   (``mounts``) that is every call on a file, and OPEN waits for a knock first.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from hostlib.threads import in_thread, in_trio_thread
from supervisor.llmfd.store import STEP_BYTES
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.ledger import turn_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.clients import Client, OpenFile
    from vfs.filesystem import Filesystem

T = TypeVar("T")

MOST_READ_BYTES = 1024 * 1024 * 1024
"""Longest file that becomes a content."""


TURN_BYTES = 16 * 1024 * 1024
"""Bytes of an export in one turn, as many as one WRITE has: another client of its child
waits for one turn at most."""


class Files(Protocol):
    """The file system of ``fd_to_file``; all methods raise ``OSError``."""

    async def exists(self, path: str) -> bool:
        """Return whether a file exists."""

    async def make_parents(self, path: str) -> None:
        """Make the missing directories above a file."""

    async def read(self, path: str, take: Callable[[bytes], None]) -> None:
        """Pass a file to ``take`` in pieces."""

    async def replace(self, path: str, pieces: Iterator[bytes]) -> None:
        """Replace the content of a file at one instant (rule 2).

        Args:
            path: the file; it may be missing.
            pieces: the new content; each is asked for in a worker thread.
        """

    async def append(self, path: str, pieces: Iterator[bytes]) -> None:
        """Add to a file; it may be missing.

        A failure removes the bytes that it had added, unless others have added since.
        """


class ClientFiles:
    """The files that a client may reach.

    Args:
        fs: the host's.
        client: has the rights.
        claim: the view of the call; the rights decide (spec A1).
    """

    def __init__(self, fs: Filesystem, client: Client, *, claim: bool = True) -> None:
        self._fs = fs
        self._client = client
        self._claims = claim

    @property
    def _claim(self) -> bool:
        return self._claims and self._client.policy.top_level

    @property
    def _may_wait(self) -> bool:
        """Whether a name may lead to a file system that is down (spec S5)."""
        return self._client.policy.is_distant and not self._claim

    async def _wait_for_file_system(self, name: bytes) -> None:
        """Wait for a distant file system before OPEN."""
        if self._may_wait:
            await names.wait_reachable(self._client, name)

    async def _abandon(self, file: OpenFile) -> None:
        """Close a file as the end of a client does; it is gone in any case."""
        with suppress(OSError):
            if file.handle.mount.is_distant:
                await self._fs.abandon_waiting(file)
            else:
                self._fs.abandon(file)

    async def exists(self, path: str) -> bool:
        """See ``Files``."""
        name = os.fsencode(path)
        try:
            if self._may_wait:
                await names.stat_waiting(self._client, name, claim=self._claim)
            else:
                names.stat(self._client, name, claim=self._claim)
        except FileNotFoundError:
            return False
        except (AccessDeniedError, UnavailableError) as why:
            raise _make_denial(path) from why
        return True

    async def make_parents(self, path: str) -> None:
        """See ``Files``."""
        name = os.fsencode(path)
        missing = []
        parent = os.path.dirname(name)
        while parent.strip(b"/") and not await self._is_there(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for directory in reversed(missing):
            try:
                await names.make_directory_waiting(
                    self._client, directory, claim=self._claim
                )
            except FileExistsError:
                continue  # made by another program meanwhile
            except (AccessDeniedError, UnavailableError) as why:
                raise _make_denial(path) from why

    async def _is_there(self, name: bytes) -> bool:
        try:
            return await self.exists(os.fsdecode(name))
        except PermissionError:
            return True  # not ours to make; OPEN reports the reason

    async def read(self, path: str, take: Callable[[bytes], None]) -> None:
        """See ``Files``."""
        name = os.fsencode(path)
        await self._wait_for_file_system(name)
        try:
            file = self._fs.open(self._client, name, b"r", self._claim)
        except (AccessDeniedError, UnavailableError) as why:
            raise _make_denial(path) from why
        try:
            await self._in_thread(_read_all, file, take)
        finally:
            await self._abandon(file)

    async def replace(self, path: str, pieces: Iterator[bytes]) -> None:
        """See ``Files``."""
        name = os.fsencode(path)
        await self._wait_for_file_system(name)
        try:
            async with turn_of(self._client.ledger):
                file = self._fs.open_replacing(self._client, name, claim=self._claim)
        except (AccessDeniedError, UnavailableError) as why:
            raise _make_denial(path) from why
        try:
            await self._write(file, pieces, partial(_put, file))
        except BaseException:
            await self._abandon(file)
            raise
        await self._fs.close_waiting(file)

    async def append(self, path: str, pieces: Iterator[bytes]) -> None:
        """See ``Files``."""
        name = os.fsencode(path)
        await self._wait_for_file_system(name)
        try:
            file = await self._fs.open_waiting(self._client, name, b"a", self._claim)
        except (AccessDeniedError, UnavailableError) as why:
            raise _make_denial(path) from why
        before = done = 0

        def put(piece: bytes) -> None:
            nonlocal before, done
            if not done:
                before = file.handle.size()
            _put(file, piece)
            done += len(piece)

        try:
            await self._write(file, pieces, put)
        except BaseException:
            try:
                with trio.CancelScope(shield=True):
                    if done and await self._size(file) == before + done:
                        # Unchanged since by others.
                        await self._fs.truncate_waiting(file, before)
            finally:
                await self._abandon(file)
            raise
        if file.closes_inline:
            self._fs.close(file)
        else:
            await self._fs.close_waiting(file)

    async def _size(self, file: OpenFile) -> int:
        if file.handle.mount.is_distant:
            return await self._in_thread(file.handle.size)
        return file.handle.size()

    async def _write(
        self, file: OpenFile, pieces: Iterator[bytes], put: Callable[[bytes], None]
    ) -> None:
        """Write in turns, so that other clients of the child get theirs."""
        has_more = True
        while has_more:
            async with turn_of(file.ledger):
                has_more = await self._in_thread(_put_some, pieces, put)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await in_thread(partial(call, *args), share=self._client.ledger.threads)


def _make_denial(path: str) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _put_some(pieces: Iterator[bytes], put: Callable[[bytes], None]) -> bool:
    """Write one turn's bytes; return whether there may be more."""
    left = TURN_BYTES
    for piece in pieces:
        put(piece)
        left -= len(piece)
        if left <= 0:
            return True
    return False


def _put(file: OpenFile, piece: bytes) -> None:
    """Write a piece in this worker thread; the Trio thread charges for it.

    Precondition: the caller has the turn (``hostlib.fairness``).
    """
    if file.ledger is None:
        file.write(piece)
        return
    # The size is asked for here: its file system may be down (spec S5).
    growth = in_trio_thread(file.charge_growth, len(piece), file.handle.size())
    try:
        file.write(piece)
    except BaseException:
        in_trio_thread(file.give_back, growth)
        raise


def _read_all(file: OpenFile, take: Callable[[bytes], None]) -> None:
    if file.handle.size() > MOST_READ_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    while piece := file.read_wait(STEP_BYTES):
        take(piece)
