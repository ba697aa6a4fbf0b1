"""The one facade of the VFS: what the host's dispatcher and its owner may call.

Rules of this file.

1. Each operation is a straight line: look up, check, do, account.
2. A view decides what a name means.  Top level: what it means to the host, relative
   names from the child's working directory (spec A2).  Restricted: beneath the root or
   a grant, else "access denied" (spec A3).
3. What is opened is charged before it exists and released when it is gone, on every
   way out (spec S3, S7).
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Protocol

from vfs.backends import MODES
from vfs.clients import Client, Tables, file_row, timestamp
from vfs.errors import AccessDeniedError
from vfs.hostio import in_thread
from vfs.openfile import OpenFile
from vfs.paths import DENIED
from vfs.policy import (
    CLIENTS,
    FILES,
    OPEN_FILES,
    PUBLISH_ON_CLOSE,
    SIZE_BYTES,
    Ledger,
    Policy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collections.abc import Callable

    from vfs.backends import Backend, FileStatus, Handle, Mode
    from vfs.policy import Place
__all__ = ["Client", "Filesystem", "Observer", "OpenFile", "file_row", "timestamp"]


class Observer(Protocol):
    """Who wants to know; a host without one pays nothing for it."""

    def file_opened(self, file: OpenFile) -> None:
        """Called after an OPEN."""

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Called after a CLOSE; ``why`` names what closed it for the client (S3)."""


class Filesystem:
    """Clients, files and what they may do.

    ``observer`` is told of every file; ``on_denied`` of every client that reached for
    what it may not (spec A1), with the command and the name.

    Args:
        max_host_files: most files open at once over all clients: what the process's
            descriptor limit leaves beside a reserve (attack 18).
    """

    def __init__(self, *, max_host_files: int = 1_000_000) -> None:
        self.tables = Tables()
        self.observer: Observer | None = None
        self.on_denied: Callable[[Client, str, bytes], None] | None = None
        self._max_host_files = max_host_files
        self._closing: dict[OpenFile, tuple[int, ...]] = {}

    # Clients

    def connect(
        self, policy: Policy, ledger: Ledger, pipe_id: str, parent: Client | None = None
    ) -> Client:
        """Enter a client.

        Raises:
            OSError: ``EUSERS``: the child has as many connections as it may (S7).
        """
        if not ledger.charge(CLIENTS, 1):
            raise OSError(errno.EUSERS, os.strerror(errno.EUSERS))
        client = Client(self.tables.new_client_id(), pipe_id, policy, ledger, parent)
        self.tables.clients[client.id] = client
        if parent is not None:
            parent.nested.append(client)
        return client

    def disconnect(self, client: Client, why: str) -> list[int]:
        """Strike a client out with everything it holds, nested clients first.

        Args:
            client: still in the table or not; a second call finds nothing to do.
            why: ``pipe EOF`` or ``process exit``, for the record (spec S3).

        Returns:
            The filenos that were closed for it.
        """
        if self.tables.clients.get(client.id) is not client:
            return []
        closed: list[int] = []
        for nested in tuple(client.nested):
            closed += self.disconnect(nested, why)
        for file in tuple(client.files.values()):
            self._forget(file)
            closed.append(file.fileno)
            try:
                file.abandon()
            except OSError as failure:
                why = f"{why}; close failed: {failure.strerror}"
            if self.observer is not None:
                self.observer.file_closed(file, why=why)
        del self.tables.clients[client.id]
        client.ledger.charge(CLIENTS, -1)
        if client.parent is not None:
            client.parent.nested.remove(client)
        return closed

    # Files

    def open(
        self, client: Client, name: bytes, word: bytes, claim: bool | None
    ) -> OpenFile:
        """Open a file for a client (spec O1-O9, A1-A4).

        Args:
            client: who asks.
            name: as on the wire.
            word: one of the wire's modes.
            claim: ``is_top_level``; None leaves it to the client's own right (O5).

        Raises:
            UnavailableError: the client's root is gone (spec O4).
            AccessDeniedError: the name is outside what the client may reach.
            OSError: the open failed.
        """
        mode = MODES[word]
        tables = self.tables
        policy = client.policy
        ledger = client.ledger
        top_level = policy.top_level if claim is None else claim
        if top_level:
            if not policy.top_level:
                raise AccessDeniedError
        else:
            policy.check_available()
        full = len(tables.files) >= self._max_host_files
        if full or not ledger.charge(OPEN_FILES, 1):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        place: Place | None = None
        staged = False
        try:
            if top_level and not ledger.bounds_files:
                handle = policy.host.open(
                    name, mode, create=mode.creates, exclusive=False, staged=False
                )
            elif top_level:
                handle = self._open_in(policy.host, name, mode, ledger, staged)
            else:
                place, handle, staged = self._open_restricted(
                    policy, name, mode, ledger
                )
            if mode.empties and not staged:
                self._empty(handle, ledger)
        except BaseException:
            ledger.charge(OPEN_FILES, -1)
            raise
        file = OpenFile(
            next(tables.filenos),
            name,
            mode,
            client,
            handle,
            top_level,
            place,
            ledger if ledger.bounds_size else None,
            staged,
        )
        tables.files[file.fileno] = client.files[file.fileno] = file
        if self.observer is not None:
            self.observer.file_opened(file)
        return file

    def _open_restricted(
        self, policy: Policy, name: bytes, mode: Mode, ledger: Ledger
    ) -> tuple[Place, Handle, bool]:
        failure: OSError | None = None
        for place, rest in policy.candidates(name, read=mode.reads, write=mode.writes):
            staged = mode.empties and place.publish == PUBLISH_ON_CLOSE
            try:
                handle = self._open_in(place.backend, rest, mode, ledger, staged)
            except OSError as why:
                if why.errno not in DENIED:
                    raise
                failure = why
            else:
                return place, handle, staged
        raise AccessDeniedError from failure

    def _open_in(
        self, backend: Backend, name: bytes, mode: Mode, ledger: Ledger, staged: bool
    ) -> Handle:
        if mode.creates and ledger.bounds_files:
            return self._open_counted(backend, name, mode, ledger, staged=staged)
        return backend.open(
            name, mode, create=mode.creates, exclusive=False, staged=staged
        )

    def _open_counted(
        self, backend: Backend, name: bytes, mode: Mode, ledger: Ledger, *, staged: bool
    ) -> Handle:
        """Open where the number of files is bounded: know whether one is made."""
        while True:
            try:
                there = backend.open(
                    name, mode, create=False, exclusive=False, staged=False
                )
            except FileNotFoundError:
                pass
            else:
                if not staged:
                    return there
                there.close()
                return backend.open(
                    name, mode, create=True, exclusive=False, staged=True
                )
            if not ledger.charge(FILES, 1):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            try:
                return backend.open(
                    name, mode, create=True, exclusive=not staged, staged=staged
                )
            except FileExistsError:
                ledger.charge(FILES, -1)  # somebody made it meanwhile: look again
            except BaseException:
                ledger.charge(FILES, -1)
                raise

    @staticmethod
    def _empty(handle: Handle, ledger: Ledger) -> None:
        """Truncate a file that was opened with ``w`` and found to be one (O7)."""
        try:
            freed = handle.size() if ledger.bounds_size else 0
            handle.truncate(0)
        except BaseException:
            handle.close()
            raise
        ledger.charge(SIZE_BYTES, -freed)

    def write(self, file: OpenFile, data: bytes | memoryview) -> None:
        """Write a whole payload (spec W1, W5, P1).

        Raises:
            OSError: nothing of it counts; the offset is as it was.
        """
        if file.ledger is None:
            file.write(data)
        else:
            growth = self._charge_growth(file, len(data))
            try:
                file.write(data)
            except BaseException:
                file.ledger.charge(SIZE_BYTES, -growth)
                raise

    async def write_waiting(self, file: OpenFile, data: bytes | memoryview) -> None:
        """Write like ``write``, in a worker thread."""
        growth = self._charge_growth(file, len(data)) if file.ledger else 0
        try:
            await in_thread(file.write, data)
            file.handle.mount.try_again()
        except BaseException:
            if file.ledger is not None:
                file.ledger.charge(SIZE_BYTES, -growth)
            raise

    @staticmethod
    def _charge_growth(file: OpenFile, size: int) -> int:
        """Charge what a write of ``size`` bytes will add to the file; return it."""
        before = file.handle.size()
        start = before if file.mode.appends else file.offset
        growth = max(0, start + size - before) if size else 0
        if file.ledger is not None and not file.ledger.charge(SIZE_BYTES, growth):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return growth

    def truncate(self, file: OpenFile, size: int) -> None:
        """Set a file's size (spec X1).

        Raises:
            OSError: ``EBADF`` without write mode, ``EDQUOT``, ``EFBIG``, ...
        """
        ledger = file.ledger
        if ledger is None:
            file.handle.truncate(size)
            return
        growth = size - file.handle.size()
        if not ledger.charge(SIZE_BYTES, growth):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        try:
            file.handle.truncate(size)
        except BaseException:
            ledger.charge(SIZE_BYTES, -growth)
            raise

    def close(self, file: OpenFile) -> None:
        """Close a file (spec C1); it is gone from the tables whatever happens.

        Raises:
            OSError: publication, fsync or close(2) failed.
        """
        self._forget(file)
        try:
            file.close()
        finally:
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    async def close_waiting(self, file: OpenFile) -> None:
        """Close like ``close``, in a worker thread."""
        self._forget(file)
        self._closing[file] = file.handle.descriptors()
        try:
            await in_thread(file.close)
        finally:
            del self._closing[file]
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    def _forget(self, file: OpenFile) -> None:
        client = file.client
        del self.tables.files[file.fileno]
        del client.files[file.fileno]
        client.ledger.charge(OPEN_FILES, -1)

    def descriptors(self) -> Iterator[int]:
        """Yield what open files hold, and those that a thread is closing."""
        for file in self.tables.files.values():
            yield from file.handle.descriptors()
        for numbers in self._closing.values():
            yield from numbers

    # Names

    def stat(self, client: Client, name: bytes, *, claim: bool) -> FileStatus:
        """Tell size, time and kind of a name (spec X1)."""
        backend, rest = self._locate(client, name, claim=claim, read=True)
        return _mapped(backend.stat, rest)

    def list(
        self, client: Client, name: bytes, *, claim: bool
    ) -> list[tuple[bytes, str]]:
        """List a directory (spec X1)."""
        backend, rest = self._locate(client, name, claim=claim, read=True)
        return _mapped(backend.list, rest)

    def make_directory(self, client: Client, name: bytes, *, claim: bool) -> None:
        """Make a directory; it counts as a file that was made (spec X1)."""
        backend, rest = self._locate(client, name, claim=claim, write=True)
        if not client.ledger.charge(FILES, 1):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        try:
            _mapped(backend.make_directory, rest)
        except BaseException:
            client.ledger.charge(FILES, -1)
            raise

    def remove(self, client: Client, name: bytes, *, claim: bool) -> None:
        """Remove a file or an empty directory (spec X1).

        What it frees is credited only where nobody has a file open: an open file keeps
        its bytes until it is closed.
        """
        backend, rest = self._locate(client, name, claim=claim, write=True)
        freed = _mapped(backend.remove, rest)
        if client.ledger.bounds_size and not self.tables.files:
            client.ledger.charge(SIZE_BYTES, -freed)
        if client.ledger.used[FILES] > 0:
            client.ledger.charge(FILES, -1)

    def rename(self, client: Client, old: bytes, new: bytes, *, claim: bool) -> None:
        """Rename within what the client may write (spec X1)."""
        source, old_rest = self._locate(client, old, claim=claim, read=True, write=True)
        target, new_rest = self._locate(client, new, claim=claim, write=True)
        _mapped(source.rename, old_rest, target, new_rest)

    def _locate(
        self,
        client: Client,
        name: bytes,
        *,
        claim: bool,
        read: bool = False,
        write: bool = False,
    ) -> tuple[Backend, bytes]:
        policy = client.policy
        if claim:
            if not policy.top_level:
                raise AccessDeniedError
            return policy.host, name
        policy.check_available()
        place, rest = policy.candidates(name, read=read, write=write)[0]
        return place.backend, rest


def _mapped(call, *args):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN202
    """Call a backend; a name that leads out becomes ``AccessDeniedError``."""
    try:
        return call(*args)
    except OSError as why:
        if why.errno in DENIED:
            raise AccessDeniedError from why
        raise
