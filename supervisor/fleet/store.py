"""The rows of a directory, or of a node's ledger: SQLite in one directory (FL2).

Rules of this file.

1. One directory at a time: a lock (flock) is held for as long as the store is open, and
   the kernel drops it with its process.
2. The epoch is counted up under the lock; each transaction compares it first.
3. One thread call at a time writes, and takes all steps that wait; nothing of a step is
   sent before its rows are on the disk. After a failure nothing is written any more: a
   caller may have been told that its step is not stored.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import trio

from hostlib.database import open_database
from hostlib.linux.holdings import descriptors_of
from hostlib.private_files import open_private
from hostlib.threads import in_thread
from supervisor.fleet.step import StaleEpochError, Step, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hostlib.log import Log
    from supervisor.fleet.step import Change, Store

AGAIN_S = 0.1
"""Time between two attempts to start a thread."""

FILE = "fleet.sqlite3"
LOCK = "fleet.lock"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS epoch (
    only INTEGER PRIMARY KEY CHECK (only = 1), number INTEGER NOT NULL
);
INSERT OR IGNORE INTO epoch VALUES (1, 0);
CREATE TABLE IF NOT EXISTS rows (
    name TEXT, key TEXT, row BLOB NOT NULL, PRIMARY KEY (name, key)
) WITHOUT ROWID;
"""


class FleetStore:
    """The rows of one directory; its methods block.

    Args:
        directory: made if it is missing; other users may not read it.

    Attributes:
        epoch: counted up when it was opened; no process before had it.
        is_remote: False: no other machine's directory can have the lock meanwhile.

    Raises:
        StoreError: another process has it, or the files cannot be used.
    """

    is_remote = False

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, FILE)  # noqa: PTH118 - a str is wanted
        try:
            with ExitStack() as stack:
                os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
                self._lock = open_private(f"{directory}/{LOCK}")
                stack.callback(os.close, self._lock)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(open_private(self._path))
                # A machine that loses its power has lost no slice that it has granted.
                self._base = open_database(self._path, _SCHEMA, synchronous="FULL")
                stack.callback(self._base.close)
                self.epoch = self._count_epoch()
                stack.pop_all()
        except BlockingIOError:
            raise StoreError(
                f"cannot open the fleet's store in {directory!r}: another directory has"
                " it; end that one first"
            ) from None
        except (OSError, sqlite3.Error) as why:
            text = getattr(why, "strerror", None) or why
            raise StoreError(
                f"cannot open the fleet's store in {directory!r}: {text}; make"
                " room and make it writable, or move a damaged file away"
            ) from None

    def _count_epoch(self) -> int:
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            query = "UPDATE epoch SET number = number + 1 RETURNING number"
            ((number,),) = self._base.execute(query).fetchall()
        return int(number)

    def load(self) -> list[tuple[str, str, bytes]]:
        """Return (table, key, row) of all that is stored, rows as msgpack."""
        return self._base.execute("SELECT name, key, row FROM rows").fetchall()

    def put(self, changes: Sequence[Change]) -> None:
        """Store all changes, or none.

        Raises:
            StaleEpochError: another process has counted the epoch up since.
            sqlite3.Error: they cannot be written.
        """
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:  # commits, or rolls back
            ((number,),) = self._base.execute("SELECT number FROM epoch").fetchall()
            if number != self.epoch:
                raise StaleEpochError(number, self.epoch)
            for name, key, row in changes:
                if row is None:
                    query = "DELETE FROM rows WHERE name = ? AND key = ?"
                    self._base.execute(query, (name, key))
                else:
                    query = "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)"
                    data = msgspec.msgpack.encode(row)
                    self._base.execute(query, (name, key, data))

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return what it holds of the process's descriptors, with a word."""
        files = ((fd, "fleet ledger") for fd in descriptors_of(self._path))
        return (self._lock, "fleet ledger"), *files

    def close(self) -> None:
        """Close the file, and let another process have it."""
        self._base.close()
        os.close(self._lock)


S = TypeVar("S", bound=Step)


class StepWriter(Generic[S]):
    """Stores steps in the order in which they were decided, then carries them out.

    Args:
        store: where their changes go.
        carry_out: sends what a step says; called in the Trio thread, in order.
        log: where it is told that steps wait for a thread.
    """

    def __init__(self, store: Store, carry_out: Callable[[S], None], log: Log) -> None:
        self._store = store
        self._carry_out = carry_out
        self._log = log
        self._is_late = False
        self._waiting: list[S] = []
        self._turn = trio.Lock()
        self._fault: Exception | None = None

    def add(self, step: S) -> None:
        """Put a step behind those that wait; ``flush`` is to follow."""
        self._waiting.append(step)

    async def flush(self) -> None:
        """Return when every step so far is stored and carried out.

        Where no thread is to be had the steps wait for one.

        Raises:
            StaleEpochError: another process has the store: this one has to end.
            StoreError, sqlite3.Error: the steps cannot be stored, or could not before:
                none of them is carried out, now or later.
        """
        while True:
            try:
                await self.try_flush()
            except OSError as why:
                if not self._is_late:
                    text = f"Rows of the fleet are written later: {why.strerror}"
                    self._log.write("WARNING", text)
                self._is_late = True
                await trio.sleep(AGAIN_S)
            else:
                self._is_late = False
                return

    async def try_flush(self) -> None:
        """Do as `flush` if a thread is to be had now.

        Raises:
            OSError: none is; the next call tries it again.
            Exception: as of `flush`.

        Cancellation: a transaction that has begun is waited for, and carried out.
        """
        async with self._turn:  # a task that waited finds the work done
            if self._fault is not None:
                raise self._fault.with_traceback(None)
            while self._waiting:
                steps, self._waiting = self._waiting, []
                changes = [change for step in steps for change in step.changes]
                try:
                    if changes or self._store.is_remote:
                        await in_thread(self._store.put, changes)
                except (OSError, trio.Cancelled):  # it was not begun
                    self._waiting = steps + self._waiting
                    raise
                except Exception as why:
                    self._fault = why
                    raise
                for step in steps:
                    self._carry_out(step)
