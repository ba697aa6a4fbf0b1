"""The hierarchical proxy: nested children behind one child's FD 3 (spec section 7).

    async with open_relay() as relay:
        nested = await relay.new_client(rights)
        ...                  # spawn a process with nested.child_end as its FD 3
        nested.child_end.close()
        ...                  # its process has ended
        await relay.client_done(nested)

Rules of this file.

1. A nested client has at most the rights of this process: the relay forces every flag
   to false and asks the host to narrow a connection before anybody has it.  What cannot
   be narrowed is not started (spec A5).
2. Every nested client has a lane.  With a host that knows ATTACH it is a connection of
   its own (``vfs.relay.attached``), with another one a turn on the one connection there
   is (``vfs.relay.serial``).
3. A lane's failure is that lane's end: its siblings go on.
4. The end of a nested client's process ends its lane; EOF does so as well (spec S2).
   Should the relay itself die, the host's clean-up of the relay covers everything.

It spawns nothing, and knows no processes: who does gives each nested child a directory and a
token for tools of its own, and no ``FSPROXY_SOCKET``, which has this process's rights
(``supervisor/relay.py``).
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

# The commands with a payload of hosts that have no CAPS to ask, by dialect.
_FIRST_COMMANDS = {1: frozenset({b"WRITE"}), 2: frozenset({b"WRITE", b"LLM_CHAT"})}


class RelayError(Exception):
    """A nested client cannot be had as it was asked for; the text says why."""


class NestedClient:
    """A nested client, as its spawner knows it.

    Attributes:
        child_end: what becomes FD 3 of its process; the spawner closes it after that,
            or EOF never comes (spec T2).
    """

    def __init__(self, child_end: socket.socket, lane: Lane) -> None:
        self.child_end = child_end
        self._lane = lane

    @property
    def filenos(self) -> tuple[int, ...]:
        """What it has open, ascending."""
        return tuple(sorted(self._lane.filenos))

    async def finished(self) -> None:
        """Return when the lane is over and what it held is released."""
        await self._lane.finished.wait()


class Relay:
    """Made by ``open_relay``.

    Attributes:
        dialect: what nested clients speak.
        is_serial: the host has no ATTACH; None while that is not known.
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
        self._lanes: set[Lane] = set()
        self._count = 0

    async def new_client(
        self,
        rights: Mapping[str, object] | None = None,
        fds: Iterable[FdPart] | None = None,
    ) -> NestedClient:
        """Return a connection for a nested child.

        Args:
            rights: what it may do of what this process may: ``read``, ``write`` (lists
                of names), ``model``, ``quota``.  None: all of it, in the restricted
                view.
            fds: the only LLM fds that it has of this process's: ids, or lines of one,
                which get a new id; None: all that are there now.

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
        """Record that a nested child's process has ended; return when all is clean.

        What it had sent is led upstream first, then each fileno it left open is closed.
        A stalled host does not hold this up longer than ``SETTLE_S``, but for a request
        on the one connection of all, which is waited for.
        """
        lane = client._lane  # noqa: SLF001 - the other half of one thing
        await self._end(lane, force=not self.is_serial)

    async def close(self) -> None:
        """End every nested client, as if their processes had ended."""
        async with trio.open_nursery() as nursery:
            for lane in tuple(self._lanes):
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
            # Bounded: what a cancelled lane does is.
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
        """Start a lane for a connection that a nested client attached."""
        near, far = socket.socketpair()
        lane = self._attached_lane(near, attached)
        self._start(lane, parent.nested)
        return far

    def _start(self, lane: Lane, siblings: set[Lane] | None = None) -> None:
        holders = (self._lanes,) if siblings is None else (self._lanes, siblings)
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
    """Open a relay; at its end every nested client is ended.

    Args:
        upstream: this process's connection to its host; None: its FD 3.
        dialect: what nested clients speak; None: what this process does.

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
        # The nursery is this function's own business: the caller's error goes through
        # as it came.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


async def _commands_of(upstream: AsyncClient) -> frozenset[bytes]:
    """Return the command words that the host knows."""
    told = await upstream.commands()
    if not told:
        return _FIRST_COMMANDS[upstream.dialect]
    return frozenset(word.encode() for word in told)
