"""Ledgers: the limits and use of a client and of all clients nested in it.

A use is charged to the client and to all its ancestors in one step, or to none (spec S7;
``hostlib.accounts``).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import trio

from hostlib.accounts import Account
from hostlib.fairness import Turn
from hostlib.threads import THREADS_PER_CHILD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfs.backends import Handle

    Identity = tuple[int, int]
    Accounts = tuple[Account[int], Account[int], Account[int], Account[int]]

MOST_MEMORY_BYTES = 96 * 1024 * 1024
"""Most memory that the requests of one child reserve at once: six times the longest one;
with memory that is not counted it stays below 128 MiB (spec S5)."""

MOST_SPOOLED_BYTES = 128 * 1024 * 1024
"""Disk for the payloads of one child at once: eight of the longest; a single one may be
longer."""

SHARE = 2
"""Connections of one child that are served in one turn of the loop; with more a child would
get more of the host's time than a child with one connection."""


class BoundedFile(Protocol):
    """The part of an open file that a ledger uses."""

    @property
    def handle(self) -> Handle:
        """The file itself."""

    @property
    def staged(self) -> bool:
        """Whether it gets its name only when it is closed."""


class OpenSet:
    """Open files, by the identity (device and inode) of each.

    Looking up an identity takes constant time: a child that ends may have removed many
    open files, and other clients wait meanwhile (spec S5).

    Attributes:
        removed: files whose last name a client of this ledger removed: their charge is
            given back at their last close.  Files that others removed are not in it:
            their charge was given back already, or never made.
    """

    __slots__ = ("_counts", "_files", "removed")

    def __init__(self) -> None:
        self._files: dict[BoundedFile, Identity] = {}
        self._counts: dict[Identity, int] = {}
        self.removed: set[Identity] = set()

    def __iter__(self) -> Iterator[BoundedFile]:
        return iter(self._files)

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._counts

    def add(self, file: BoundedFile, *, is_removed: bool = False) -> None:
        """Add an open file, and whether it is one of ``removed``."""
        self._files[file] = identity = file.handle.identity()
        self._counts[identity] = self._counts.get(identity, 0) + 1
        if is_removed:
            self.removed.add(identity)

    def has_removed(self, file: BoundedFile) -> bool:
        """Return whether a client of this ledger removed a file's last name."""
        return self._files[file] in self.removed

    def remove(self, file: BoundedFile) -> bool:
        """Remove an open file; return whether it was the last one of a removed file."""
        identity = self._files.pop(file)
        self._counts[identity] -= 1
        if self._counts[identity]:
            return False
        del self._counts[identity]
        was_removed = identity in self.removed
        self.removed.discard(identity)
        return was_removed


class LedgerState(msgspec.Struct, kw_only=True):
    """A ledger; see ``Ledger``.

    Attributes:
        limits: of its accounts, in their order.
        used: the same for their use.
        file_bytes: the largest size of a file.
    """

    limits: tuple[int | None, ...]
    used: list[int]
    file_bytes: int | None = None
    before: tuple[int, int, int] | None = None


class Ledger:
    """The limits and use of one client and of all clients beneath it.

    Args:
        parent: the ledger that is charged as well.
        open_files: most open files at once; None is no bound of its own.
        clients: most clients at once.
        size_bytes: most growth of files.
        files: most new files.
        file_bytes: largest size of a file; None is no bound of its own.

    Attributes:
        open_files: account of open files.
        clients: account of connected clients.
        size_bytes: account of the growth of files.
        files: account of new entries; one is reserved for each staged file.
        bounds_size: here or above, growth is bounded.
        max_file_bytes: the least of the bounds on one file, here and above.
        bounds_files: here or above, the number of files is bounded.
        before: (bytes, files, closed directories) of its places before all charges;
            None before the first look (``vfs.growth``).
        open: open files whose growth is bounded, of the whole tree of ledgers.
        too_large: number of refusals by its own bound on the size of a file.
        memory: account of the memory that requests have reserved, of the whole tree.
        payload_memory: account of the memory of payloads, of the whole tree.
        spooled_bytes: account of payloads that go to files, of the whole tree.
        threads: bounds the worker threads of the whole tree of ledgers.
        sends: bounds the large files that are sent in one turn of the loop, for the
            whole tree; in the topmost ledger only.
        turn: held by a task that changes a bounded amount in a worker thread, for the
            whole tree; None if neither growth nor files are bounded.
    """

    __slots__ = (
        "_sends",
        "_threads",
        "before",
        "bounds_files",
        "bounds_size",
        "clients",
        "files",
        "max_file_bytes",
        "memory",
        "open",
        "open_files",
        "parent",
        "payload_memory",
        "size_bytes",
        "spooled_bytes",
        "too_large",
        "turn",
    )

    def __init__(
        self,
        parent: Ledger | None = None,
        *,
        open_files: int | None = None,
        clients: int | None = None,
        size_bytes: int | None = None,
        files: int | None = None,
        file_bytes: int | None = None,
    ) -> None:
        self.parent = parent
        above = (None,) * 4 if parent is None else parent.accounts
        self.open_files = Account(above[0], open_files)
        self.clients = Account(above[1], clients)
        self.size_bytes = Account(above[2], size_bytes)
        self.files = Account(above[3], files)
        self.too_large = 0
        self.max_file_bytes = file_bytes
        self.bounds_size = size_bytes is not None or file_bytes is not None
        self.bounds_files = files is not None
        self.before: tuple[int, int, int] | None = None
        self.open = OpenSet()
        self.turn: Turn | None = None
        if parent is None:
            self.memory: Account[int] = Account(None, MOST_MEMORY_BYTES)
            self.payload_memory: Account[int] = Account()
            self.spooled_bytes: Account[int] = Account(None, MOST_SPOOLED_BYTES)
            self._threads: trio.CapacityLimiter | None = None
            self._sends: trio.CapacityLimiter | None = None
        else:
            self.bounds_size |= parent.bounds_size
            self.bounds_files |= parent.bounds_files
            self.open = parent.open
            self.memory = parent.memory
            self.payload_memory = parent.payload_memory
            self.spooled_bytes = parent.spooled_bytes
            self.turn = parent.turn
            bounds = (file_bytes, parent.max_file_bytes)
            self.max_file_bytes = min(
                (b for b in bounds if b is not None), default=None
            )
        if self.turn is None and (self.bounds_size or self.bounds_files):
            self.turn = Turn()

    def snapshot(self) -> LedgerState:
        """Return the ledger for the next program, without those above."""
        return LedgerState(
            limits=tuple(account.limit for account in self.accounts),
            used=[account.used for account in self.accounts],
            file_bytes=self.max_file_bytes,
            before=self.before,
        )

    @classmethod
    def restore(cls, state: LedgerState, parent: Ledger | None) -> Self:
        """Return the ledger of the program before, with its use."""
        open_files, clients, size_bytes, files = state.limits
        ledger = cls(
            parent,
            open_files=open_files,
            clients=clients,
            size_bytes=size_bytes,
            files=files,
            file_bytes=state.file_bytes,
        )
        for account, used in zip(ledger.accounts, state.used, strict=True):
            # Not charged: a parent has its own use, and the host's account joins later.
            account.used = used
        ledger.before = state.before
        return ledger

    @property
    def accounts(self) -> Accounts:
        """The accounts of open files, clients, bytes and files."""
        return self.open_files, self.clients, self.size_bytes, self.files

    @property
    def threads(self) -> trio.CapacityLimiter:
        """The limiter of the worker threads of a child and its nested clients."""
        if self.parent is not None:
            return self.parent.threads
        if self._threads is None:  # made late: most children never need it
            self._threads = trio.CapacityLimiter(THREADS_PER_CHILD)
        return self._threads

    @property
    def sends(self) -> trio.CapacityLimiter:
        """The limiter of connections to which one turn of the loop sends large files.

        Precondition: this ledger has no parent.
        """
        if self._sends is None:  # as above
            self._sends = trio.CapacityLimiter(SHARE)
        return self._sends

    def allows_file_of(self, size: int) -> bool:
        """Return whether a file may have a size, here and above; count a refusal."""
        if self.max_file_bytes is None or size <= self.max_file_bytes:
            return True
        node: Ledger | None = self
        while node is not None:
            if node.max_file_bytes is not None and size > node.max_file_bytes:
                node.too_large += 1
            node = node.parent
        return False


_NOBODY_WAITS = nullcontext()


def turn_of(ledger: Ledger | None) -> AbstractAsyncContextManager[None]:
    """Return the turn to hold while a thread changes an amount of a ledger."""
    turn = None if ledger is None else ledger.turn
    return _NOBODY_WAITS if turn is None else turn


def must_wait(ledger: Ledger | None) -> bool:
    """Return whether a change in the Trio thread must wait for a turn."""
    turn = None if ledger is None else ledger.turn
    return turn is not None and turn.is_taken
