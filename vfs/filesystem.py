"""The facade of the VFS for the host's dispatcher: clients and their files.

Rules of this file.

1. Each operation is a straight line: look up, check, do, charge.
2. A view gives a name its meaning.  Top level: that of the host, with relative names from
   the child's working directory (spec A2).  Restricted: beneath the root or a grant, else
   "access denied" (spec A3).
3. An open file is charged before it is opened, and released on every path after its end
   (spec S3, S7).
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from hostlib.accounts import Account
from hostlib.threads import in_thread
from vfs.backends import KEPT, MODES, UnflushedError
from vfs.clients import Client, FileState, OpenFile, Tables
from vfs.errors import AccessDeniedError
from vfs.ledger import turn_of
from vfs.names import credit
from vfs.opening import open_in, open_restricted, truncate_inline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.backends import Handle, RemovedEntry
    from vfs.ledger import Ledger
    from vfs.places import Place
    from vfs.policy import Policy

T = TypeVar("T")

KEPT_WORD = b"kept"
"""The host's own mode: opens an existing file for writing, without truncating it."""

OWN_DESCRIPTORS = 10
"""Descriptors of the host for a child: its connection, process, root, working directory,
private directory, two pipes, its log and the marks of that."""

ATTACHED_DESCRIPTORS = 3
"""Descriptors of the host for an attached connection: its own, and two for its requests (a
spooled payload with its mapping, or a call of the model)."""

_MODES = {**MODES, KEPT_WORD: KEPT}


class Observer(Protocol):
    """An observer of opened and closed files."""

    def file_opened(self, file: OpenFile) -> None:
        """Called after an OPEN."""

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Called after a CLOSE; ``why`` names what closed it for the client (S3)."""


class Filesystem:
    """The clients of a host and their open files.

    Args:
        max_descriptors: most descriptors of all clients together, for files, connections
            and other things: the process's limit without a reserve (attack 18).

    Attributes:
        tables: the clients and open files.
        observer: called for every opened and closed file.
        on_denied: called with client, command and name of each denial (spec A1).
        is_secret: returns whether an opened file is one that no client may have.
        shows_host: returns the same for files of file systems that show processes.
        descriptor_account: the host's descriptors that clients use, and services for
            them; the accounts of children's open files are beneath it.
    """

    def __init__(self, *, max_descriptors: int | None = None) -> None:
        self.tables = Tables()
        self.observer: Observer | None = None
        self._closing: dict[OpenFile, tuple[int, ...]] = {}
        self.on_denied: Callable[[Client, str, bytes], None] | None = None
        self.is_secret: Callable[[Handle], bool] | None = None
        self.shows_host: Callable[[Handle], bool] | None = None
        self.descriptor_account: Account[int] = Account(None, max_descriptors)

    # Clients

    def connect(
        self, policy: Policy, ledger: Ledger, pipe_id: str, parent: Client | None = None
    ) -> Client:
        """Make a client, put it into the table and return it.

        Raises:
            OSError: ``EUSERS``: the child has its limit of connections (S7);
                ``EMFILE``: another one would take from the host's reserve.
        """
        if parent is not None and self.descriptor_account.left < ATTACHED_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not ledger.clients.charge(1):
            raise OSError(errno.EUSERS, os.strerror(errno.EUSERS))
        client = Client(self.tables.new_client_id(), pipe_id, policy, ledger, parent)
        self.enter(client)
        return client

    def enter(self, client: Client) -> None:
        """Put a client into the table, and charge its descriptors."""
        self.tables.clients[client.id] = client
        if client.ledger.open_files.parent is None:
            client.ledger.open_files.join(self.descriptor_account)
        if client.parent is None:
            self.hold(client, OWN_DESCRIPTORS + len(client.policy.places[1:]))
        else:
            self.hold(client, ATTACHED_DESCRIPTORS)
            client.parent.nested.append(client)

    def restore_file(
        self, client: Client, state: FileState, place: Place | None
    ) -> None:
        """Put a file of the program before into the tables; it is charged already."""
        file = OpenFile.restore(state, client, place)
        self.tables.files[file.fileno] = client.files[file.fileno] = file
        if file.staged:
            self.hold(client, 1)
        if file.ledger is not None:
            file.ledger.open.add(file, is_removed=state.is_removed)

    def hold(self, client: Client, count: int) -> None:
        """Charge descriptors that a client holds beside its files."""
        client.held += count
        self.descriptor_account.record(count)

    def disconnect(self, client: Client, why: str) -> list[int]:
        """Remove a client and close its files, nested clients first.

        Args:
            client: a client that is in the table or not; a second call does nothing.
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
            self._give_up(file)
            closed.append(file.fileno)
            with self._tell_end(file, why):
                file.abandon()
        del self.tables.clients[client.id]
        self.hold(client, -client.held)
        client.ledger.clients.charge(-1)
        if client.parent is not None:
            client.parent.nested.remove(client)
        return closed

    async def end_distant(self, client: Client, why: str) -> list[int]:
        """Close the files of an ended client that are in distant places.

        Each is closed in a worker thread, before ``disconnect`` closes the others.

        Returns:
            The filenos that were closed for it.

        Cancellation: not while it closes (I1).
        """
        distant = [f for f in client.files.values() if f.handle.mount.is_distant]
        for file in distant:
            self._give_up(file)
            with self._tell_end(file, why), trio.CancelScope(shield=True):
                await self._end(file, file.abandon)
        return [file.fileno for file in distant]

    # Files

    def open(
        self, client: Client, name: bytes, word: bytes, claim: bool | None
    ) -> OpenFile:
        """Open a file for a client (spec O1-O9, A1-A4).

        If ``must_empty`` is set on the result, the caller must call ``empty_waiting``.

        Precondition: no task has the turn (``ledger.must_wait``), or the mode neither
        makes nor empties a file.

        Args:
            client: the client.
            name: as on the wire.
            word: one of the wire's modes, or ``KEPT_WORD``.
            claim: ``is_top_level``; None leaves it to the client's own right (O5).

        Raises:
            UnavailableError: the client's root is gone (spec O4).
            AccessDeniedError: the client has no right to the name.
            OSError: the open failed.
        """
        mode = _MODES[word]
        tables = self.tables
        policy = client.policy
        ledger = client.ledger
        top_level = policy.is_claimed(policy.top_level if claim is None else claim)
        self._charge_open(ledger)
        handle: Handle
        place: Place | None = None
        staged, entry = False, None
        try:
            if top_level and not ledger.bounds_files:
                handle = policy.host.open(
                    name, mode, create=mode.creates, exclusive=False, staged=False
                )
            elif top_level:
                handle, _ = open_in(policy.host, name, mode, ledger, staged=False)
            else:
                handle, place, staged, entry = open_restricted(
                    policy, name, mode, ledger
                )
            if handle.mount.is_proc or self.is_secret is not None:
                self._refuse_secret(handle)
            must_empty = (
                mode.empties and not staged and not truncate_inline(handle, ledger)
            )
        except BaseException:
            ledger.open_files.charge(-1)
            if entry is not None:
                entry.release()
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
        file.must_empty = must_empty
        file.entry = entry
        self._enter(file)
        return file

    async def open_waiting(
        self, client: Client, name: bytes, word: bytes, claim: bool | None
    ) -> OpenFile:
        """Open like ``open``, in its turn, and empty the file if needed."""
        mode = _MODES[word]
        changes = mode.creates or mode.empties
        async with turn_of(client.ledger if changes else None):
            file = self.open(client, name, word, claim)
            if file.must_empty:
                await self._empty(file)
            return file

    def open_replacing(self, client: Client, name: bytes, *, claim: bool) -> OpenFile:
        """Open a file that replaces a name at its close, complete and synced (A3b).

        Args:
            client: the client.
            name: as on the wire; its present file stays until then.
            claim: use the top-level view; the client must have the right.

        Raises:
            UnavailableError: the client's root is gone (spec O4).
            AccessDeniedError: the client has no right to write the name.
            OSError: the open failed.
        """
        mode, policy, ledger = MODES[b"w"], client.policy, client.ledger
        if not claim:
            policy.check_available()
        self._charge_open(ledger)
        place: Place | None = None
        try:
            if claim:
                handle, entry = open_in(policy.host, name, mode, ledger, staged=True)
            else:
                handle, place, _, entry = open_restricted(
                    policy, name, mode, ledger, replaces=True
                )
        except BaseException:
            ledger.open_files.charge(-1)
            raise
        file = OpenFile(
            next(self.tables.filenos),
            name,
            mode,
            client,
            handle,
            claim,
            place,
            ledger if ledger.bounds_size else None,
            staged=True,
        )
        file.durability = "close"
        file.entry = entry
        self._enter(file)
        return file

    @staticmethod
    def _charge_open(ledger: Ledger) -> None:
        """Charge an open file.

        Raises:
            OSError: ``EMFILE``: the host or the child has its limit of them.
        """
        if not ledger.open_files.charge(1):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _enter(self, file: OpenFile) -> None:
        client = file.client
        self.tables.files[file.fileno] = client.files[file.fileno] = file
        if file.staged:
            self.hold(client, 1)  # the directory of its name
        if file.ledger is not None:
            file.ledger.open.add(file)
        if self.observer is not None:
            self.observer.file_opened(file)

    def _refuse_secret(self, handle: Handle) -> None:
        """Raise for a file that no client may have, after closing it."""
        ask = (self.shows_host if handle.mount.is_proc else None, self.is_secret)
        try:
            is_secret = any(one is not None and one(handle) for one in ask)
        except BaseException:
            handle.close()
            raise
        if is_secret:
            handle.close()
            raise AccessDeniedError

    # Open files

    @staticmethod
    def write(file: OpenFile, data: bytes | memoryview) -> None:
        """Write a whole payload (spec W1, W5, P1).

        Precondition: no task has the turn (``ledger.must_wait``).

        Raises:
            OSError: nothing was written or charged; the offset is unchanged.
        """
        growth = file.charge_growth(len(data))
        try:
            file.write(data)
        except BaseException:
            file.give_back(growth)
            raise

    @staticmethod
    async def write_waiting(
        file: OpenFile,
        data: bytes | memoryview,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Write like ``write``, in a worker thread.

        Args:
            file: the file.
            data: the payload.
            on_turn: called just before it is charged.
        """
        async with turn_of(file.ledger):
            old_size = await _wait_size(file)
            on_turn()
            growth = file.charge_growth(len(data), old_size)
            try:
                await in_thread(file.write, data, share=file.client.ledger.threads)
            except BaseException:
                file.give_back(growth)
                raise
            finally:
                file.handle.mount.try_again()

    @classmethod
    async def truncate_waiting(cls, file: OpenFile, size: int) -> None:
        """Set a file's size, in a worker thread: freeing pages takes long (spec X1).

        With ``durability = "write"`` the size is synced to the disk, as after a WRITE.

        Raises:
            OSError: ``EDQUOT``, ``EFBIG``, ...; or only the fsync failed.
        """
        async with turn_of(file.ledger):
            await cls._truncate(file, size)
            if file.durability == "write":
                await in_thread(file.flush, share=file.client.ledger.threads)

    @staticmethod
    async def _truncate(file: OpenFile, size: int) -> None:
        """Set a file's size; the caller has the turn."""
        growth = file.charge_size(size, await _wait_size(file))
        try:
            threads = file.client.ledger.threads
            await in_thread(file.handle.truncate, size, share=threads)
        except BaseException:
            file.give_back(growth)
            raise

    async def empty_waiting(self, file: OpenFile) -> None:
        """Truncate the long file of an OPEN, in a worker thread.

        Raises:
            OSError: the file could not be truncated, and was closed.
        """
        async with turn_of(file.ledger):
            await self._empty(file)

    async def _empty(self, file: OpenFile) -> None:
        """Truncate the file; the caller has the turn."""
        try:
            await self._truncate(file, 0)
        except BaseException:
            self._forget(file)
            with trio.CancelScope(shield=True), suppress(OSError):
                await self._end(file, file.abandon)
            raise
        file.must_empty = False

    def close(self, file: OpenFile) -> None:
        """Close a file and remove it from the tables, in any case (spec C1).

        Raises:
            OSError: publication, fsync or close(2) failed.
        """
        if file.is_plain and self.observer is None:
            # As _forget below, for a plain file only.
            client, fileno = file.client, file.fileno
            del self.tables.files[fileno]
            del client.files[fileno]
            client.ledger.open_files.record(-1)
            file.handle.close()
            return
        with self._end_charges(file):
            self._charge_close(file, file.close())

    async def close_waiting(self, file: OpenFile) -> None:
        """Close like ``close``, in a worker thread.

        Cancellation: not while it closes, which is bounded: it waits for the disk, and
        for other tasks that do.
        """
        # If it were cancelled before it has a thread, the file would stay open (I1, I5).
        with trio.CancelScope(shield=True):
            async with turn_of(file.client.ledger if file.staged else None):
                with self._end_charges(file):
                    replaced = await self._end(file, file.close)
                    self._charge_close(file, replaced)

    async def _end(self, file: OpenFile, call: Callable[[], T]) -> T:
        """Close a file that is in no table any more, in a worker thread.

        If no thread can be started, the file is abandoned here (I1).
        """
        freed_bytes = 0

        def end() -> T:
            nonlocal freed_bytes
            if file.frees_in_thread:
                with suppress(OSError):  # its server has gone: it stays charged
                    freed_bytes = file.freed_bytes()
            return call()

        self._closing[file] = file.handle.descriptors()
        try:
            return await in_thread(end, share=file.client.ledger.threads)
        except OSError:
            if file.handle.descriptors():  # the call has not begun
                file.abandon()
            raise
        finally:
            del self._closing[file]
            file.give_back(freed_bytes)

    @contextmanager
    def _end_charges(self, file: OpenFile) -> Iterator[None]:
        """Remove a file from the tables, and settle its charges after the block."""
        self._forget(file)
        file.reserve_entry()
        try:
            yield
        except UnflushedError as why:
            self._charge_close(file, why.replaced)  # it has its name already
            raise
        except BaseException:
            file.give_back_staged()
            raise
        finally:
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    def _charge_close(self, file: OpenFile, replaced: RemovedEntry | None) -> None:
        """Charge a published file, and give back the file that it replaced."""
        credit(file.ledger, replaced)
        file.charge_published(replaced)

    def abandon(self, file: OpenFile) -> None:
        """Close a file without publishing it (spec A3b).

        Many pages are freed in a thread (``close_file``).
        """
        self._give_up(file)
        file.abandon()
        if self.observer is not None:
            self.observer.file_closed(file, why=None)

    async def abandon_waiting(self, file: OpenFile) -> None:
        """Close a file like ``abandon``, in a worker thread.

        Cancellation: not while it closes (I1).
        """
        self._give_up(file)
        try:
            with trio.CancelScope(shield=True):
                await self._end(file, file.abandon)
        finally:
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    def _give_up(self, file: OpenFile) -> None:
        """Remove a file that will not be published from the tables."""
        self._forget(file)
        file.give_back_staged()

    @contextmanager
    def _tell_end(self, file: OpenFile, why: str) -> Iterator[None]:
        """Report a file that the block closes for its client, closed or not."""
        try:
            yield
        except OSError as failure:
            why = f"{why}; close failed: {failure.strerror}"
        if self.observer is not None:
            self.observer.file_closed(file, why=why)

    def _forget(self, file: OpenFile) -> None:
        client = file.client
        del self.tables.files[file.fileno]
        del client.files[file.fileno]
        client.ledger.open_files.charge(-1)
        if file.staged:
            self.hold(client, -1)
        # The close itself gives back the charges of a staged file.
        ledger = file.ledger
        if ledger is not None and ledger.open.remove(file) and not file.staged:
            if file.handle.mount.is_distant:
                file.frees_in_thread = True
            else:
                file.give_back(file.freed_bytes())

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors of open files, and of files that a thread closes."""
        for file in self.tables.files.values():
            yield from file.handle.descriptors()
        for numbers in self._closing.values():
            yield from numbers


async def _wait_size(file: OpenFile) -> int:
    """Return the size of a file whose growth is charged; 0 for another one.

    A thread asks for it if the file is distant.
    """
    if file.ledger is None:
        return 0
    if not file.handle.mount.is_distant:
        return file.handle.size()
    return await in_thread(file.handle.size, share=file.client.ledger.threads)
