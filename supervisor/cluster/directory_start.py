"""The start of a directory: it opens its store, and tells why not until it has it.

Ray never starts an actor again whose constructor fails, and a store may only be away for
a time: a server that is started again, a disk that is full, a lock that the directory of
a lost machine still has. So the actor begins without it, and tries again and again.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, TypeAlias

import trio

from hostlib.threads import in_thread
from supervisor.cluster.directory_service import DirectoryService, open_store
from supervisor.fleet.slices import ACCOUNT
from supervisor.fleet.step import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.log import Log
    from supervisor.cluster.orders import DirectoryOrder
    from supervisor.cluster.requests import Reply
    from supervisor.fleet.step import Store

Row: TypeAlias = tuple[str, str, bytes]
"""A table, a key, and the stored row as msgpack."""

READY = "ready"
"""Name of the request that waits for the outcome of the first attempt."""

AGAIN_S = 0.5
"""Time from an attempt that failed to the next one."""


class DirectoryStart:
    """One directory, from the start of its process on.

    Args:
        order: for it.
        deliver: takes a message for a node; it may be lost.
        log: for what cannot be told to anybody.
    """

    def __init__(
        self, order: DirectoryOrder, deliver: Callable[[str, bytes], None], log: Log
    ) -> None:
        self._order = order
        self._deliver = deliver
        self._log = log
        self._service: DirectoryService | None = None
        self._reason = "cannot ask the fleet's directory: it opens its store; try again"
        self._tried = trio.Event()

    async def run(self) -> None:
        """Open the store, however long that takes, and be the directory until cancelled.

        Raises:
            StaleEpochError: another directory has the store.
            StoreError: the store cannot be read or written any more.
        """
        store, service = await self._open()
        try:
            order = self._order
            service.set_account(ACCOUNT, order.max_tokens, order.window)
            self._service = service
            self._tried.set()
            await service.run()
        finally:
            store.close()

    async def _open(self) -> tuple[Store, DirectoryService]:
        while True:
            try:
                return await self._load()
            except StoreError as why:
                if str(why) != self._reason:
                    self._log.write("WARNING", f"The directory waits: {why}")
                self._reason = str(why)
            self._tried.set()
            await trio.sleep(AGAIN_S)

    async def _load(self) -> tuple[Store, DirectoryService]:
        """Open the store and read it.

        Raises:
            StoreError: it cannot be opened or read.
        """
        try:
            store, rows = await in_thread(_load_store, self._order.store)
        except sqlite3.Error as why:
            raise StoreError(
                f"cannot read the fleet's store: {why}; move a damaged file away"
            ) from None
        except OSError as why:  # no thread
            raise StoreError(
                f"cannot open the fleet's store: {why.strerror}; end other programs of"
                " this user"
            ) from None
        try:
            lease_s = self._order.lease_s
            return store, DirectoryService(
                store, rows, self._deliver, self._log, lease_s
            )
        except BaseException:
            store.close()
            raise

    def receive(self, messages: list[bytes]) -> None:
        """Take messages of nodes; they are lost before it has its store."""
        if self._service is not None:
            self._service.receive(messages)

    async def answer(self, version: str, do: str, args: bytes) -> Reply:
        """Return the outcome of a question or an order."""
        if do == READY:
            await self._tried.wait()
        if self._service is None:
            return None, self._reason.encode()
        return (
            (True, b"null")
            if do == READY
            else await self._service.answer(version, do, args)
        )


def _load_store(where: str) -> tuple[Store, list[Row]]:
    """Return a store, opened, with all that is in it; blocks.

    Raises:
        StoreError, sqlite3.Error: it cannot be opened or read.
    """
    store = open_store(where)
    try:
        return store, list(store.load())
    except BaseException:
        store.close()
        raise
