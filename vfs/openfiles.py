"""What is done to files that are open: WRITE, TRUNCATE, CLOSE, and their end.

A part of the facade (``filesystem``), which has the rules and opens them; it holds what
all parts share: the tables, who is told, and what a thread is closing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from hostlib.threads import in_thread
from vfs.backends import UnflushedError
from vfs.clients import Tables
from vfs.ledger import turn_of
from vfs.names import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.backends import Removed
    from vfs.clients import Client, OpenFile


T = TypeVar("T")


class Observer(Protocol):
    """Who wants to know; a host without one pays nothing for it."""

    def file_opened(self, file: OpenFile) -> None:
        """Called after an OPEN."""

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Called after a CLOSE; ``why`` names what closed it for the client (S3)."""


class OpenFiles(Names):
    """Files that are open, and what becomes of them."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.observer: Observer | None = None
        self._closing: dict[OpenFile, tuple[int, ...]] = {}

    @staticmethod
    def write(file: OpenFile, data: bytes | memoryview) -> None:
        """Write a whole payload (spec W1, W5, P1).

        Precondition: nobody else has the turn (``ledger.must_wait``).

        Raises:
            OSError: nothing of it counts; the offset is as it was.
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
            file: which.
            data: the payload.
            on_turn: called just before it is charged.
        """
        async with turn_of(file.ledger):
            on_turn()
            growth = file.charge_growth(len(data))
            try:
                await in_thread(file.write, data, share=file.client.ledger.threads)
            except BaseException:
                file.give_back(growth)
                raise
            finally:
                file.handle.mount.try_again()

    @classmethod
    async def truncate_waiting(cls, file: OpenFile, size: int) -> None:
        """Set a file's size, in a worker thread: to free much takes long (spec X1).

        Under ``durability = "write"`` it is on the disk then, as what a WRITE writes is.

        Raises:
            OSError: ``EDQUOT``, ``EFBIG``, ...; or the fsync failed: the size is set.
        """
        async with turn_of(file.ledger):
            await cls._truncate(file, size)
            if file.durability == "write":
                await in_thread(file.flush, share=file.client.ledger.threads)

    @staticmethod
    async def _truncate(file: OpenFile, size: int) -> None:
        """Set it; its caller has the turn."""
        growth = file.charge_size(size)
        try:
            threads = file.client.ledger.threads
            await in_thread(file.handle.truncate, size, share=threads)
        except BaseException:
            file.give_back(growth)
            raise

    async def empty_waiting(self, file: OpenFile) -> None:
        """Finish an OPEN that has found a long file to truncate, in a worker thread.

        Raises:
            OSError: the file could not be truncated; it is not open any more.
        """
        async with turn_of(file.ledger):
            await self._empty(file)

    async def _empty(self, file: OpenFile) -> None:
        """Finish it; its caller has the turn."""
        try:
            await self._truncate(file, 0)
        except BaseException:
            self._forget(file)
            file.abandon()
            raise
        file.must_empty = False

    def close(self, file: OpenFile) -> None:
        """Close a file (spec C1); it is gone from the tables whatever happens.

        Raises:
            OSError: publication, fsync or close(2) failed.
        """
        if file.is_plain and self.observer is None:
            # As _forget below, without what only other files need.
            client, fileno = file.client, file.fileno
            del self.tables.files[fileno]
            del client.files[fileno]
            client.ledger.open_files.record(-1)
            file.handle.close()
            return
        with self._closes(file):
            self._account(file, file.close())

    async def close_waiting(self, file: OpenFile) -> None:
        """Close like ``close``, in a worker thread.

        Cancellation: not while it closes, which is bounded: it waits for the disk, and
        for others who do.
        """
        # Cancelled before it had a thread, nobody would ever close it (I1, I5).
        with trio.CancelScope(shield=True):
            async with turn_of(file.client.ledger if file.staged else None):
                with self._closes(file):
                    replaced = await self._end(file, file.close)
                    self._account(file, replaced)

    async def _end(self, file: OpenFile, call: Callable[[], T]) -> T:
        """End a file that is in no table any more in a worker thread.

        Where no thread can be had it is dropped here: nobody else would (I1).
        """
        self._closing[file] = file.handle.descriptors()
        try:
            return await in_thread(call, share=file.client.ledger.threads)
        except OSError:
            if file.handle.descriptors():  # the call has not begun
                file.abandon()
            raise
        finally:
            del self._closing[file]

    @contextmanager
    def _closes(self, file: OpenFile) -> Iterator[None]:
        """Forget a file that is closed inside, and account for what came of it."""
        self._forget(file)
        growth = file.staged_growth
        file.reserve_entry()
        try:
            yield
        except UnflushedError as why:
            self._account(file, why.replaced)  # it has the name all the same
            raise
        except BaseException:
            file.give_back_staged(growth)
            raise
        finally:
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    def _account(self, file: OpenFile, replaced: Removed | None) -> None:
        """Account for what took its name at its close, and for what had it before."""
        self._credit(file.ledger, replaced)
        file.charge_published(replaced)

    def abandon(self, file: OpenFile) -> None:
        """Close a file without publishing what is staged (spec A3b).

        What that gives back, if it is much, it gives back in a thread (``close_file``).
        """
        self._forget(file)
        file.give_back_staged(file.staged_growth)
        file.abandon()
        if self.observer is not None:
            self.observer.file_closed(file, why=None)

    async def abandon_waiting(self, file: OpenFile) -> None:
        """Close it like ``abandon``, in a worker thread.

        Cancellation: not while it closes (I1).
        """
        self._forget(file)
        file.give_back_staged(file.staged_growth)
        try:
            with trio.CancelScope(shield=True):
                await self._end(file, file.abandon)
        finally:
            if self.observer is not None:
                self.observer.file_closed(file, why=None)

    def _forget(self, file: OpenFile) -> None:
        client = file.client
        del self.tables.files[file.fileno]
        del client.files[file.fileno]
        client.ledger.open_files.charge(-1)
        if file.staged:
            self.hold(client, -1)
        # What is staged is given back whole, published or not, by the close.
        ledger = file.ledger
        if ledger is not None and ledger.open.remove(file) and not file.staged:
            file.give_back_removed(ledger)

    def hold(self, client: Client, count: int) -> None:
        """See ``Filesystem``, which knows the bound."""
        raise NotImplementedError

    def descriptors(self) -> Iterator[int]:
        """Yield what open files hold, and those that a thread is closing."""
        for file in self.tables.files.values():
            yield from file.handle.descriptors()
        for numbers in self._closing.values():
            yield from numbers
