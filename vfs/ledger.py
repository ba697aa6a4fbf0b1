"""What clients have used of what they may: one count for a client and all beneath it.

What a client and everything nested in it use is charged to the client and to every ancestor
in one step, or to none (spec S7; ``hostlib.accounts``).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

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
"""Memory that the requests of one child reserve at once, in all their forms: six times the
longest one, and less than 128 MiB with what is not counted (spec S5)."""

SHARE = 2
"""Connections of one child that one turn serves: with more it would have more of the
host's time than a child that has one."""


class BoundedFile(Protocol):
    """What a ledger knows of an open file."""

    @property
    def handle(self) -> Handle:
        """The file itself."""

    @property
    def staged(self) -> bool:
        """Whether it has no name before it is closed."""


class OpenSet:
    """Open files, and what tells the file of each from any other.

    Whether a file is open is told at once, however many are: a child that ends may have
    removed all that it has open, and others wait meanwhile (spec S5).

    Attributes:
        removed: those of which who counts here took the last name: what they have grown
            by is given back at their last close. Of what somebody else has removed
            nothing is: that one has it back already, or nobody was charged for it.
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
        """Count an open file, and whether it is one of those that were removed."""
        self._files[file] = identity = file.handle.identity()
        self._counts[identity] = self._counts.get(identity, 0) + 1
        if is_removed:
            self.removed.add(identity)

    def has_removed(self, file: BoundedFile) -> bool:
        """Tell whether who counts here took the last name of an open file."""
        return self._files[file] in self.removed

    def remove(self, file: BoundedFile) -> bool:
        """Forget an open file; tell whether it was the last one of a removed file."""
        identity = self._files.pop(file)
        self._counts[identity] -= 1
        if self._counts[identity]:
            return False
        del self._counts[identity]
        was_removed = identity in self.removed
        self.removed.discard(identity)
        return was_removed


class Ledger:
    """What one client and all beneath it have used of what they may.

    Args:
        parent: whose use this is part of.
        open_files: most open files at once; None is no bound of its own.
        clients: most clients at once.
        size_bytes: most that files may grow by.
        files: most files that may be made.
        file_bytes: the largest that a file may grow to; None is no bound of its own.

    Attributes:
        open_files: files that are open now.
        clients: clients that are connected now.
        size_bytes: what files have grown by.
        files: entries that were made; for each file that is staged, one is reserved.
        bounds_size: here or above, growth is bounded.
        max_file_bytes: the least of the bounds on one file, here and above.
        bounds_files: here or above, the number of files is bounded.
        before: (bytes, files, closed directories) that lay beneath its places before any
            of what is charged; None while nobody has looked (``vfs.growth``).
        open: open files whose growth is bounded, over the whole tree of ledgers.
        too_large: how often its own bound on the size of a file refused something.
        memory_bytes: what its requests have reserved: of the topmost ledger alone.
        threads: bounds the worker threads of the whole tree of ledgers.
        sends: bounds the files of which a piece is sent in one turn of the loop, for the
            whole tree: of the topmost ledger alone.
        turn: who changes what is bounded in a worker thread has it, over the whole tree;
            None where neither growth nor files are.
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
        "memory_bytes",
        "open",
        "open_files",
        "parent",
        "size_bytes",
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
        self.memory_bytes = 0
        self.open = OpenSet()
        self.turn: Turn | None = None
        if parent is None:
            self._threads: trio.CapacityLimiter | None = None
            self._sends: trio.CapacityLimiter | None = None
        else:
            self.bounds_size |= parent.bounds_size
            self.bounds_files |= parent.bounds_files
            self.open = parent.open
            self.turn = parent.turn
            bounds = (file_bytes, parent.max_file_bytes)
            self.max_file_bytes = min(
                (b for b in bounds if b is not None), default=None
            )
        if self.turn is None and (self.bounds_size or self.bounds_files):
            self.turn = Turn()

    @property
    def accounts(self) -> Accounts:
        """Its accounts: open files, clients, bytes, files."""
        return self.open_files, self.clients, self.size_bytes, self.files

    @property
    def threads(self) -> trio.CapacityLimiter:
        """What bounds the worker threads of a child, with all that is nested in it."""
        if self.parent is not None:
            return self.parent.threads
        if self._threads is None:  # most need none, and it is a part of each start
            self._threads = trio.CapacityLimiter(THREADS_PER_CHILD)
        return self._threads

    @property
    def sends(self) -> trio.CapacityLimiter:
        """What bounds how many connections of a child a turn sends large files to.

        Precondition: it is the child's own, which has no parent.
        """
        if self._sends is None:  # as above
            self._sends = trio.CapacityLimiter(SHARE)
        return self._sends

    def reserve_memory(self, size_bytes: int, most_bytes: int) -> bool:
        """Reserve memory for a request of its child, or nothing; tell whether.

        Args:
            size_bytes: a negative size gives back and is always taken.
            most_bytes: what the child may have reserved then.
        """
        if self.parent is not None:
            return self.parent.reserve_memory(size_bytes, most_bytes)
        if size_bytes > 0 and self.memory_bytes + size_bytes > most_bytes:
            return False
        self.memory_bytes += size_bytes
        return True

    def allows_file_of(self, size: int) -> bool:
        """Tell whether a file may be so large, here and above."""
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
    """Return what to hold while a thread changes what a ledger counts."""
    turn = None if ledger is None else ledger.turn
    return _NOBODY_WAITS if turn is None else turn


def must_wait(ledger: Ledger | None) -> bool:
    """Tell whether a change in the Trio thread has to wait for its turn."""
    turn = None if ledger is None else ledger.turn
    return turn is not None and turn.is_taken
