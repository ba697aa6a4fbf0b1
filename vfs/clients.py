"""Clients, their open files, and the tables of both (spec S1).

An open file is a handle with its offset (spec P1).

Rules of this file.

1. A fileno comes from one counter of the host and is never used again (I4, spec O9).
2. A number is looked up in its client's own dictionary: a number of another client is as
   unknown as one that never existed (spec R2).
3. The fields of both tables are part of the contract.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from itertools import count
from typing import TYPE_CHECKING, Self

import msgspec

from hostlib.accounts import Reservation
from hostlib.clock import timestamp
from hostlib.handover import HandoverError
from hostlib.large_files import frees_much
from protocol.limits import FIRST_FILENO
from vfs.backends import MODES
from vfs.backends.host_file import HostHandle, StagedHandle, StagedState
from vfs.errors import AccessDeniedError
from vfs.ledger import Ledger, LedgerState

if TYPE_CHECKING:
    from vfs.backends import Handle, Mode, RemovedEntry
    from vfs.places import Place
    from vfs.policy import Policy


_now = time.time


class ClientState(LedgerState, kw_only=True):
    """A client with its ledger; see ``Client``.

    Attributes:
        policy: the number of its policy, as in ``handover.Numbering``.
    """

    id: str
    pipe_id: str
    pid: int | None
    connected_at: float
    policy: int


class Client:
    """One connection of a child.

    Attributes:
        id: unique in the host, for ever.
        pipe_id: name of the connection's transport, for people.
        policy: its rights.
        ledger: the account of it and of all clients nested in it.
        parent: the client that attached it; None for a child's own connection.
        pid: the process of a child's own connection; None for an attached one.
        files: its open files by number.
        held: the host's descriptors that it takes beside those files.
    """

    __slots__ = (
        "connected_at",
        "files",
        "held",
        "id",
        "ledger",
        "nested",
        "parent",
        "pid",
        "pipe_id",
        "policy",
    )

    def __init__(
        self,
        client_id: str,
        pipe_id: str,
        policy: Policy,
        ledger: Ledger,
        parent: Client | None,
    ) -> None:
        self.id = client_id
        self.pipe_id = pipe_id
        self.policy = policy
        self.ledger = ledger
        self.parent = parent
        self.pid: int | None = None
        self.nested: list[Client] = []
        self.held = 0
        self.files: dict[int, OpenFile] = {}
        self.connected_at = time.time()

    def snapshot(self, policy: int) -> ClientState:
        """Return the client for the next program, without its files.

        Args:
            policy: the number of its policy.
        """
        return ClientState(
            id=self.id,
            pipe_id=self.pipe_id,
            pid=self.pid,
            connected_at=self.connected_at,
            policy=policy,
            **msgspec.structs.asdict(self.ledger.snapshot()),
        )

    @classmethod
    def restore(cls, state: ClientState, policy: Policy, parent: Client | None) -> Self:
        """Return the client of the program before; it is in no table yet."""
        ledger = Ledger.restore(state, None if parent is None else parent.ledger)
        client = cls(state.id, state.pipe_id, policy, ledger, parent)
        client.pid = state.pid
        client.connected_at = state.connected_at
        return client

    def row(self) -> dict[str, object]:
        """Return the client as the contract's JSON object."""
        return {
            "id": self.id,
            "pipe_id": self.pipe_id,
            "open_files": sorted(self.files),
            "connected_at": timestamp(self.connected_at),
            "parent_id": self.parent.id if self.parent is not None else None,
            "pid": self.pid,
        }


class FileState(msgspec.Struct):
    """An open file; see ``OpenFile``.

    Attributes:
        fd: its descriptor, whose number and locks stay across exec(2).
        place: the number of its place, as in ``handover.Numbering``.
        is_counted: a ledger is charged for its growth.
        staged: the rest of a staged file.
        has_reserved: a directory entry is reserved for it.
        is_removed: its client removed its last name.
    """

    fileno: int
    name: bytes
    mode: str
    opened_at: float
    is_top_level: bool
    fd: int
    offset: int
    place: int | None
    is_counted: bool
    staged: StagedState | None = None
    has_reserved: bool = False
    is_removed: bool = False

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the file owns."""
        return (self.fd,) if self.staged is None else (self.fd, self.staged.dir_fd)


class OpenFile:
    """A row of the file table.

    Attributes:
        fileno: the number that the client sees (spec O9).
        name: the name from the client.
        mode: the wire's open mode.
        client: its owner; no other client may use the number.
        opened_at: seconds since the epoch.
        is_top_level: the effective view in which it was opened (spec S1).
        handle: the file itself.
        offset: start of the next READ or WRITE, in bytes.
        durability: when fsync is called: ``none``, ``close`` or ``write``.
        ledger: charged for growth; None if growth is not bounded.
        must_empty: it must still be truncated (``w`` of a long file).
        entry: the reserved directory entry of a staged file; None if none is reserved.
        must_replace: no entry could be reserved at the close, so it may only replace.
        entry_is_due: its name may be new, and must be synced with the file.
        unpublished_bytes: the charge for a staged file's content.
        frees_in_thread: it was removed; the thread that closes it measures its content.
        is_plain: a write is only one pwrite at the offset, and a close one close.
    """

    __slots__ = (
        "client",
        "durability",
        "entry",
        "entry_is_due",
        "fileno",
        "frees_in_thread",
        "handle",
        "is_plain",
        "is_top_level",
        "ledger",
        "mode",
        "must_empty",
        "must_replace",
        "name",
        "offset",
        "opened_at",
        "place",
        "staged",
        "unpublished_bytes",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - the columns of the table
        self,
        fileno: int,
        name: bytes,
        mode: Mode,
        client: Client,
        handle: Handle,
        is_top_level: bool,
        place: Place | None,
        ledger: Ledger | None,
        staged: bool,
    ) -> None:
        self.fileno = fileno
        self.name = name
        self.mode = mode
        self.client = client
        self.opened_at = _now()
        self.is_top_level = is_top_level
        self.handle = handle
        self.offset = 0
        self.must_empty = False
        self.entry: Reservation[int] | None = None
        self.must_replace = False
        self.place = place
        self.ledger = ledger
        self.staged = staged
        self.unpublished_bytes = 0
        self.frees_in_thread = False
        durability = "none" if place is None else place.durability
        self.durability = durability
        self.entry_is_due = durability != "none" and mode.creates and not staged
        self.is_plain = not (
            staged
            or mode.appends
            or ledger
            or durability != "none"
            or handle.mount.is_distant
        )

    def snapshot(self, place: int | None) -> FileState:
        """Return the file for the next program.

        Args:
            place: the number of its place.

        Raises:
            HandoverError: the file has no descriptor, or must still be truncated.
        """
        handle = self.handle
        if not isinstance(handle, HostHandle) or handle.fd < 0 or self.must_empty:
            raise HandoverError(
                f"cannot hand over file {self.fileno}: it has no descriptor, or must"
                " still be truncated"
            )
        return FileState(
            fileno=self.fileno,
            name=self.name,
            mode=self.mode.text,
            opened_at=self.opened_at,
            is_top_level=self.is_top_level,
            fd=handle.fd,
            offset=self.offset,
            place=place,
            is_counted=self.ledger is not None,
            staged=handle.snapshot() if isinstance(handle, StagedHandle) else None,
            has_reserved=self.entry is not None,
            is_removed=self.ledger is not None and self.ledger.open.has_removed(self),
        )

    @classmethod
    def restore(cls, state: FileState, client: Client, place: Place | None) -> Self:
        """Return the file of the program before; it is charged, and in no table yet."""
        ledger = client.ledger
        handle = (
            HostHandle(state.fd, os.fstat(state.fd))
            if state.staged is None
            else StagedHandle(
                state.fd, state.staged, None if place is None else place.user
            )
        )
        file = cls(
            state.fileno,
            state.name,
            MODES[state.mode.encode()],
            client,
            handle,
            state.is_top_level,
            place,
            ledger if state.is_counted else None,
            state.staged is not None,
        )
        file.opened_at = state.opened_at
        file.offset = state.offset
        if file.staged and file.ledger is not None:
            file.unpublished_bytes = handle.size()
        if state.has_reserved:
            file.entry = Reservation([(account, 1) for account in ledger.files.path()])
        return file

    def read(self, size: int) -> bytes | bytearray:
        """Read at the offset and move it; fewer bytes only at the end (spec R1).

        Raises:
            BlockingIOError: the data is not in memory; the offset is unchanged.
            OSError: the disk failed.
        """
        data = self.handle.pread(size, self.offset)
        self.offset += len(data)
        return data

    def read_wait(self, size: int) -> bytes:
        """Read like ``read``, waiting for the disk (for a worker thread)."""
        data = self.handle.pread_wait(size, self.offset)
        self.offset += len(data)
        return data

    def write(self, data: bytes | memoryview) -> None:
        """Write all of ``data`` at the offset, or at the end in an append mode.

        Raises:
            OSError: nothing was added beyond the old end, the offset is unchanged (W5).
        """
        handle = self.handle
        is_durable = self.durability == "write"
        if self.mode.appends:
            end = handle.append(data)
            old_end = end - len(data)
        else:
            old_end = handle.size() if is_durable else 0
            handle.pwrite(data, self.offset)
            end = self.offset + len(data)
        if is_durable:
            try:
                self.flush()
            except OSError:
                handle.cut_off(end, old_end)
                raise
        self.offset = end

    def flush(self) -> None:
        """Sync the file's content to the disk, and its name if that may be new.

        Raises:
            OSError: the disk failed.
        """
        self.handle.sync()
        self._sync_entry()

    def _sync_entry(self) -> None:
        """Sync the directory entry that OPEN may have made, once (fsync(2))."""
        place = self.place
        if not self.entry_is_due or place is None:
            return
        rest = place.beneath(self.name)
        # The entry may have been renamed or removed since.
        with contextlib.suppress(
            FileNotFoundError, NotADirectoryError, AccessDeniedError
        ):
            if rest is not None:
                place.backend.sync_entry(rest)
        self.entry_is_due = False

    # Charges, if growth is bounded

    def charge_growth(self, size: int, old_size: int | None = None) -> int:
        """Charge the growth by a write of ``size`` bytes, and return it.

        Args:
            size: bytes of the write.
            old_size: of the file; None: it is asked for here, so the file is not distant.

        Raises:
            OSError: ``EDQUOT``: the growth passes a limit; ``EFBIG``: the size does.
        """
        if self.ledger is None or not size:
            return 0
        if old_size is None:
            old_size = self.handle.size()
        start = old_size if self.mode.appends else self.offset
        _check_file_size(self.ledger, start + size)
        return self._charge(self.ledger, max(0, start + size - old_size))

    def charge_size(self, size: int, old_size: int) -> int:
        """Charge the growth by a new size, negative for a smaller one, and return it.

        Raises:
            OSError: ``EDQUOT``, ``EFBIG``: as for ``charge_growth``.
        """
        if self.ledger is None:
            return 0
        _check_file_size(self.ledger, size)
        return self._charge(self.ledger, size - old_size)

    def _charge(self, ledger: Ledger, growth: int) -> int:
        if not ledger.size_bytes.charge(growth):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        if self.staged:
            self.unpublished_bytes += growth
        return growth

    def give_back(self, growth: int) -> None:
        """Give back a charge for growth that did not happen."""
        if self.ledger is not None:
            self.ledger.size_bytes.charge(-growth)
            if self.staged:
                self.unpublished_bytes -= growth

    def give_back_staged(self) -> None:
        """Give back the charges of a staged file that is not published."""
        self.give_back(self.unpublished_bytes)
        self._release_entry()

    def reserve_entry(self) -> None:
        """Reserve the entry of a staged file that is about to be published.

        The file that it was to replace may be gone since the open.  If there is no room,
        ``close`` publishes only over an existing file.
        """
        ledger = self.client.ledger
        if self.staged and ledger.bounds_files and self.entry is None:
            self.entry = ledger.files.reserve(1)
            self.must_replace = self.entry is None

    def charge_published(self, replaced: RemovedEntry | None) -> None:
        """Charge the entry that a staged file has made, if it replaced none.

        The entry exists, so it is charged even beyond the limit: a count that is too low
        would never be right again.
        """
        if not self.staged or not self.client.ledger.bounds_files:
            return
        self._release_entry()
        if replaced is None:
            self.client.ledger.files.record(1)

    def _release_entry(self) -> None:
        entry, self.entry = self.entry, None
        if entry is not None:
            entry.release()

    def freed_bytes(self) -> int:
        """Return the bytes that the last close of a removed file frees.

        Precondition: a client of its ledger removed its last name (``OpenSet.removed``).
        """
        # It may have got another name since.
        return 0 if self.handle.links() else self.handle.size()

    # The end

    def close(self) -> RemovedEntry | None:
        """Close as CLOSE does: publish a staged file, sync as durability says.

        The file is closed in any case (spec C1).

        Returns:
            The file that a staged one replaced.

        Raises:
            OSError: the publication, the fsync or close(2) failed.
        """
        if self.is_plain:
            self.handle.close()
            return None
        durable = self.durability != "none" and self.mode.writes
        try:
            if self.staged and not self.client.policy.places:
                # Its client has given up every right, so it may not publish.
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            if self.must_replace and not self.handle.will_replace():
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            if self.staged or durable:
                replaced = self.handle.publish(durable=durable)
                self._sync_entry()
                return replaced
        finally:
            self.handle.close()
        return None

    def abandon(self) -> None:
        """Close without publishing, as at the end of a client (spec A3b)."""
        self.handle.drop()

    @property
    def closes_inline(self) -> bool:
        """Whether ``close`` does not wait, and frees few pages."""
        if self.staged or self.handle.mount.is_distant:
            return False
        if self.durability != "none" and self.mode.writes:
            return False
        return self.handle.fd < 0 or not frees_much(self.handle.fd)


class CounterState(msgspec.Struct):
    """The next client id and fileno, which are never given twice (I4)."""

    client: int
    fileno: int


class Tables:
    """All clients and all open files of one host.

    Attributes:
        filenos: numbers that no file has had (I4).
    """

    __slots__ = ("client_ids", "clients", "filenos", "files")

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.files: dict[int, OpenFile] = {}
        self.client_ids = count(1)
        self.filenos = count(FIRST_FILENO)

    def snapshot(self) -> CounterState:
        """Return the counters for the next program; each skips a number."""
        return CounterState(next(self.client_ids), next(self.filenos))

    def restore(self, state: CounterState) -> None:
        """Continue the counters of the program before (I4)."""
        self.client_ids = count(state.client)
        self.filenos = count(state.fileno)

    def sort_files(self) -> None:
        """Put restored files in the order in which they were opened."""
        self.files = dict(sorted(self.files.items()))

    def new_client_id(self) -> str:
        """Return an id that no client has had."""
        return f"c{next(self.client_ids)}"


def file_row(file: OpenFile) -> dict[str, object]:
    """Return an open file as the contract's JSON object.

    Bytes of the name that are not UTF-8 are escaped, so different names stay different.
    """
    return {
        "fileno": file.fileno,
        "filename": file.name.decode(errors="backslashreplace"),
        "mode": file.mode.text,
        "client_id": file.client.id,
        "opened_at": timestamp(file.opened_at),
        "is_top_level": file.is_top_level,
        "offset": file.offset,
    }


def _check_file_size(ledger: Ledger, size: int) -> None:
    if not ledger.allows_file_of(size):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
