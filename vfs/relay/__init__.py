"""The proxy of nested children behind one child's FD 3 (spec section 7).

1. A nested client has at most the rights of this process: the relay sets every flag to
   false, and lets the host narrow a connection before a client gets it.  A client that
   cannot be narrowed is not started (spec A5).
2. Every nested client has a lane: a connection of its own if the host knows ATTACH
   (``vfs.relay.attached``), else turns on the shared one (``vfs.relay.serial``).
3. A failure of a lane ends that lane only.
4. The end of a nested client's process, or EOF, ends its lane (spec S2).  If the relay
   dies, the host cleans up.

``supervisor/relay.py`` spawns the nested processes (``new_client``, ``client_done``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from loguru import logger

from protocol.door import DOOR_NAME
from vfs.client.aio import AsyncClient
from vfs.client.errors import FsProxyError, UnknownCommandError
from vfs.relay.attached import AttachedLane
from vfs.relay.lane import SETTLE_S, Lane
from vfs.relay.serial import SerialLane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    FdPart = str | Mapping[str, str | int]  # "fd:1", or fd, start_line, end_line

# Dialect -> commands with a payload of hosts without CAPS.
_FIRST_COMMANDS = {1: frozenset({b"WRITE"}), 2: frozenset({b"WRITE", b"LLM_CHAT"})}


class RelayError(Exception):
    """A nested client cannot be made as requested; the text says why."""


class NestedClient:
    """A nested client, for its spawner.

    Attributes:
        child_end: the socket for FD 3 of its process; the spawner closes it after the
            start, or EOF never comes (spec T2).
    """

    def __init__(self, child_end: socket.socket, lane: Lane) -> None:
        self.child_end = child_end
        self._lane = lane

    @property
    def filenos(self) -> tuple[int, ...]:
        """The numbers of its open files, ascending."""
        return tuple(sorted(self._lane.filenos))

    async def wait_finished(self) -> None:
        """Wait until the lane has ended and its files are released."""
        await self._lane.finished.wait()


class Relay:
    """The lanes of nested clients; made by ``open_relay``.

    Attributes:
        dialect: the dialect of nested clients.
        is_serial: the host has no ATTACH; None while that is unknown.
    """

    def __init__(
        self,
        upstream: AsyncClient,
        nursery: trio.Nursery,
        commands: frozenset[bytes],
        dialect: int,
    ) -> None:
        self.is_serial: bool | None = None
        self._upstream = upstream
        self._nursery = nursery
        self._commands = commands
        self.dialect = dialect
        self.lanes: set[Lane] = set()
        self._count = 0

    async def new_client(
        self,
        rights: Mapping[str, object] | None = None,
        fds: Iterable[FdPart] | None = None,
    ) -> NestedClient:
        """Return a connection for a nested child.

        Args:
            rights: its part of this process's rights: ``read``, ``write`` (lists of
                names), ``model``, ``quota``.  None: all, in the restricted view.
            fds: the only LLM fds of this process that it gets: ids, or lines of one,
                which get a new id; None: all present ones.

        Raises:
            RelayError: rights or descriptors were given and the host cannot narrow.
            FsProxyError: the host refused, or it is gone.
            OSError: this process has no descriptor left for it.
        """
        attached = None if self.is_serial else await self._attach()
        if rights is not None:
            await self._narrow(attached, rights)
        if fds is not None:
            await self._keep_fds(attached, fds)
        try:
            near, far = socket.socketpair()
            with contextlib.suppress(OSError):
                near.bind(DOOR_NAME + os.urandom(8).hex().encode())
        except BaseException:
            if attached is not None:
                attached.disconnect()
            raise
        lane: Lane
        if attached is None:
            self._count += 1
            lane = SerialLane(
                self._count, near, self._upstream, self.dialect, self._knows
            )
        else:
            upstream = socket.socket(fileno=attached.release())
            lane = self._attached_lane(near, upstream)
        self._start(lane)
        return NestedClient(far, lane)

    async def client_done(self, client: NestedClient) -> None:
        """Record that a nested child's process has ended; wait until its files are closed.

        Its sent requests are passed upstream first, then its open filenos are closed.
        This waits for a stalled host at most ``SETTLE_S``, except for a request on the
        shared connection.
        """
        lane = client._lane  # noqa: SLF001 - two halves of one object
        await self._end(lane, force=not self.is_serial)

    async def close(self) -> None:
        """End every nested client, as if their processes had ended."""
        async with trio.open_nursery() as nursery:
            for lane in tuple(self.lanes):
                nursery.start_soon(self._end, lane)

    async def _attach(self) -> AsyncClient | None:
        try:
            attached = await self._upstream.attach()
        except UnknownCommandError:
            self.is_serial = True
            logger.bind(event="relay.serial").warning(
                "The host has no ATTACH: nested clients take turns on one connection"
            )
            return None
        self.is_serial = False
        return attached

    async def _narrow(
        self, attached: AsyncClient | None, rights: Mapping[str, object]
    ) -> None:
        if attached is None:
            raise RelayError(
                "cannot narrow the rights of a nested client: the host has no ATTACH,"
                " so it would be everybody's; start it without narrowing options"
            )
        try:
            await attached.narrow(rights)
        except UnknownCommandError:
            attached.disconnect()
            raise RelayError(
                "cannot narrow the rights of a nested client: the host does not know"
                " NARROW; start it without narrowing options, or use a newer host"
            ) from None
        except BaseException:
            attached.disconnect()
            raise

    async def _keep_fds(
        self, attached: AsyncClient | None, fds: Iterable[FdPart]
    ) -> None:
        if attached is None:
            raise RelayError(
                "cannot choose the LLM fds of a nested client: the host has no ATTACH,"
                " so it would be everybody's; start it without --fd"
            )
        try:
            answer = await attached.fd_call("keep_fds", fds=list(fds))
        except FsProxyError as why:
            attached.disconnect()
            raise RelayError(f"cannot choose the LLM fds: {why}") from None
        except BaseException:
            attached.disconnect()
            raise
        if answer.startswith("<fd_error"):
            attached.disconnect()
            message = answer.partition("<message>")[2].partition("</message>")[0]
            raise RelayError(f"cannot choose the LLM fds: {message}")

    async def _end(self, lane: Lane, *, force: bool = True) -> None:
        lane.end()
        with trio.move_on_after(SETTLE_S if force else float("inf")):
            await lane.finished.wait()
            return
        lane.scope.cancel()
        with trio.CancelScope(shield=True):
            # Bounded, since the work of a cancelled lane is.
            await lane.finished.wait()

    def _knows(self, word: bytes) -> bool:
        return word in self._commands

    def _attached_lane(
        self, near: socket.socket, upstream: socket.socket
    ) -> AttachedLane:
        self._count += 1
        dialects = (self.dialect, self._upstream.dialect)
        return AttachedLane(
            self._count, near, upstream, dialects, self._knows, self._adopt
        )

    def _adopt(self, attached: socket.socket, parent: AttachedLane) -> socket.socket:
        """Start a lane for a connection that a nested client attached; return its end."""
        near, far = socket.socketpair()
        lane = self._attached_lane(near, attached)
        self._start(lane, parent.nested)
        return far

    def _start(self, lane: Lane, siblings: set[Lane] | None = None) -> None:
        holders = (self.lanes,) if siblings is None else (self.lanes, siblings)
        for holder in holders:
            holder.add(lane)
        self._nursery.start_soon(self._run, lane, holders)

    @staticmethod
    async def _run(lane: Lane, holders: tuple[set[Lane], ...]) -> None:
        try:
            await lane.run()
        finally:
            for holder in holders:
                holder.discard(lane)


@asynccontextmanager
async def open_relay(
    upstream: AsyncClient | None = None, *, dialect: int | None = None
) -> AsyncIterator[Relay]:
    """Open a relay for a block; end every nested client at its end.

    Args:
        upstream: this process's connection to its host; None: its FD 3.
        dialect: the dialect of nested clients; None for that of this process.

    Raises:
        NotAChildError: this process has no host.
        FsProxyError: the host is gone.
    """
    upstream = AsyncClient() if upstream is None else upstream
    commands = await _commands_of(upstream)
    dialect = upstream.dialect if dialect is None else dialect
    try:
        async with trio.open_nursery() as nursery:
            relay = Relay(upstream, nursery, commands, dialect)
            try:
                yield relay
            finally:
                with trio.CancelScope(shield=True):
                    await relay.close()  # bounded by SETTLE_S, as each lane's end is
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The caller's error leaves without the nursery's exception group.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


async def _commands_of(upstream: AsyncClient) -> frozenset[bytes]:
    """Return the command words that the host knows."""
    told = await upstream.commands()
    if not told:
        return _FIRST_COMMANDS[upstream.dialect]
    return frozenset(word.encode() for word in told)
