"""The sessions of one child: its own on FD 3, and those nested in it.

Rules of this file.

1. A nested session has at most the rights and limits of the one above it.
2. Each is closed before the one above it (spec S3).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import traceback
from typing import TYPE_CHECKING

import trio

from supervisor.fsproxy.door_socket import (
    VARIABLE,
    DoorSocket,
    has_door_socket,
    open_door_socket,
    peer_pid,
)
from supervisor.fsproxy.replies import FAULT, PROCESS_EXIT, SLOW
from supervisor.fsproxy.traffic import Traffic
from supervisor.spawn.ends import send_fds
from vfs.clients import Client
from vfs.ledger import Ledger
from vfs.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AsyncExitStack

    from supervisor.children.held_descriptors import HeldDescriptors
    from supervisor.fsproxy.session import Session
    from supervisor.fsproxy.session_state import SessionState
    from supervisor.parts import Parts
    from supervisor.spawn.ends import Ends
    from supervisor.spec import ChildSpec
    from vfs.handover import NumberedObjects

_DOOR_CLOSED = b"ERROR failed to attach: nothing has descriptor 3 open any more"


class Clients:
    """The sessions of one child.

    Args:
        host: the parts that all children of the host share.
        child_id: unique in the host.
        held: gets descriptors that are sent to a client.

    Attributes:
        own: on FD 3; None before the start.
        door: a socket for its programs without FD 3; None if it has none.
        side: carries descriptors beside two pipes; None with a socket.
        past: the traffic of nested sessions that are gone.
    """

    def __init__(self, host: Parts, child_id: str, held: HeldDescriptors) -> None:
        self._host = host
        self._id = child_id
        self._held = held
        self._nursery: trio.Nursery | None = None
        self.past = Traffic()
        self._restored: list[tuple[Session, SessionState]] = []
        self.own: Session | None = None
        self.door: DoorSocket | None = None
        self.side: socket.socket | None = None

    # The child's own

    def open(
        self, nursery: trio.Nursery, policy: Policy, spec: ChildSpec, ends: Ends
    ) -> None:
        """Open its own session; it is served once the process is there.

        Args:
            nursery: where sessions run; `finish` is called before it is left.
            policy: the rights of the child.
            spec: its limits.
            ends: the host's end goes to the session.
        """
        host = self._host
        ledger = Ledger(
            open_files=spec.max_open_files,
            clients=host.settings.clients_per_child,
            size_bytes=spec.max_bytes,
            files=spec.max_files,
            file_bytes=spec.max_file_bytes,
        )
        self._nursery = nursery
        self.side = ends.side
        client = host.fs.connect(policy, ledger, f"{self._id}:{spec.transport}")
        self.own = host.open_session(
            client, ends.host_fds(), spec.dialect, self._session_closed
        )
        self.own.on_attach = self._attach
        nursery.start_soon(self.own.run)

    def restore(
        self,
        nursery: trio.Nursery,
        state: SessionState,
        side: socket.socket | None,
        numbered: NumberedObjects,
    ) -> None:
        """Restore the sessions of a running child; `resume` serves them.

        Args:
            nursery: as for `open`.
            state: the child's own, and those nested in it.
            side: as the attribute.
            numbered: all places and policies.
        """
        self._nursery = nursery
        self.side = side
        self.own = self._restore_one(state, None, numbered)

    def _restore_one(
        self, state: SessionState, parent: Session | None, numbered: NumberedObjects
    ) -> Session:
        is_over = state.closed is not None
        policy = Policy(()) if is_over else numbered.policies[state.client.policy]
        above = None if parent is None else parent.client
        session = self._host.open_session(
            Client.restore(state.client, policy, above),
            (state.read_fd, state.write_fd),
            state.dialect,
            self._session_closed,
        )
        session.parent = parent
        session.restore(state, numbered)
        session.on_attach = self._attach
        if session.is_over or self._nursery is None:
            return session
        self._nursery.start_soon(session.run)
        self._restored.append((session, state))
        session.nested = [
            self._restore_one(nested, session, numbered) for nested in state.nested
        ]
        return session

    def resume(self) -> None:
        """Continue each session where the program before has stopped."""
        for session, state in self._restored:
            session.resume(state)
            if state.carried is not None:
                self._resume_sending(session, *state.carried)
        self._restored.clear()

    def _resume_sending(self, session: Session, fd: int, reply: bytes) -> None:
        """Continue sending a client the descriptor that its ATTACH has made."""

        async def carry() -> None:
            carried = socket.socket(fileno=fd)
            with self._held.carrying(carried):
                await self._send_descriptor(session, reply, carried)

        session.start(carry)

    def serve(self, pid: int) -> None:
        """Serve its own session: the child's process runs."""
        session = self.own
        if session is None:
            raise RuntimeError("a child that was not started cannot be served")
        session.client.pid = pid
        self._host.pump.add(session)
        self._host.journal.write(
            "client.connected", child_id=self._id, client_id=session.client.id, pid=pid
        )

    async def finish(self) -> None:
        """Close every session, nested ones first (spec S3); refuse new ones.

        Programs that the process leaves behind come too late for its door.
        """
        self._close_door()
        if self.own is not None and not self.own.is_over:
            # Bounded: a job may still be in a call into the kernel (I1).
            with trio.CancelScope(shield=True):
                await self.own.finish(PROCESS_EXIT)

    # Nested ones

    async def _attach(self, session: Session) -> bytes | None:
        """Open one more session for the client of ``session`` (spec N4)."""
        if session.is_closing:
            return None  # the descriptor is not sent
        try:
            nested, theirs = self.open_nested(
                session.client.policy, "attached", session
            )
        except OSError as why:
            return _refuse_attach(why)
        with self._held.carrying(theirs):
            reply = b"OK %b\n" % nested.client.id.encode()
            try:
                await self._send_descriptor(session, reply, theirs)
            except OSError as why:
                if why.errno != errno.ETOOMANYREFS:
                    raise
                return _refuse_attach(why)  # too many are in flight: unix(7)
        return None

    def open_nested(
        self, policy: Policy, label: str, session: Session | None = None
    ) -> tuple[Session, socket.socket]:
        """Return a new session beneath another one, and its other end.

        Args:
            policy: its rights; at most those of the other one.
            label: says what it is for, in the table of clients.
            session: the session above; None for the child's own.

        Returns:
            The session, and its other end, which the caller closes.

        Raises:
            OSError: no descriptor, or no more clients, for this child (spec S7).
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            nested = self._open_on(ours, policy, label, session or self.own)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return nested, theirs

    def _open_on(
        self,
        sock: socket.socket,
        policy: Policy,
        label: str,
        session: Session | None,
        pid: int | None = None,
    ) -> Session:
        """Return a new session on a non-blocking socket, which it owns then."""
        host = self._host
        if session is None or self._nursery is None:
            raise RuntimeError("a child without a nursery has no clients")
        parent = session.client
        ledger = Ledger(parent.ledger)
        client = host.fs.connect(policy, ledger, f"{self._id}:{label}", parent)
        client.pid = pid
        try:
            if host.services.fds is not None:
                host.services.fds.client_attached(client)
            ends = (sock.fileno(), sock.fileno())
            nested = host.open_session(
                client, ends, session.dialect, self._session_closed
            )
        except BaseException:
            host.fs.disconnect(client, FAULT)
            raise
        sock.detach()
        nested.on_attach = self._attach
        session.nested.append(nested)
        nested.parent = session
        self._nursery.start_soon(nested.run)
        host.pump.add(nested)
        host.journal.write(
            "client.connected",
            child_id=self._id,
            client_id=client.id,
            parent_id=parent.id,
        )
        return nested

    async def _send_descriptor(
        self, session: Session, reply: bytes, carried: socket.socket
    ) -> None:
        """Send a reply with a descriptor on its first byte (over pipes: beside it)."""
        fds = [carried.fileno()]
        session.outbound.carried = (carried.fileno(), reply)
        try:
            if session is self.own and self.side is not None:
                with session.outbound.patience():
                    await send_fds(self.side, b"+", fds)
                sent = 0
            else:
                # Not a duplicate of it: there may be no descriptor left.
                line = socket.socket(fileno=session.write_fd)
                try:
                    with session.outbound.patience():
                        sent = await send_fds(line, reply, fds)
                finally:
                    line.detach()
        finally:
            session.outbound.carried = None
        if sent < len(reply):
            await session.outbound.send(reply[sent:])

    # The socket beside FD 3

    def open_door(self, spec: ChildSpec, stack: AsyncExitStack) -> dict[str, str]:
        """Listen for programs without FD 3; return the variables with the address."""
        if not has_door_socket(spec):
            return {}
        door = open_door_socket(spec)
        self.hold_door(door, stack)
        return {VARIABLE: door.path}

    def hold_door(self, door: DoorSocket, stack: AsyncExitStack) -> None:
        """Keep a socket beside FD 3 until the child's end."""
        self.door = door
        stack.callback(self._close_door)
        stack.enter_context(self._host.fs.descriptor_account.holding(1))

    def serve_door(self) -> None:
        """Accept programs on the door's socket; nothing if the child has none."""
        if self.door is not None:
            self._host.door_sockets.add(self.door.listener, self._accept)

    def _close_door(self) -> None:
        if self.door is not None:
            self._host.door_sockets.remove(self.door.listener)
            self.door.close()

    def _accept(self, sock: socket.socket) -> None:
        """Open a session for a program that has connected to the door's socket."""
        session = self.own
        refusal = _DOOR_CLOSED
        if session is not None and not (session.is_closing or session.is_over):
            policy = session.client.policy
            try:
                self._open_on(sock, policy, "socket", session, peer_pid(sock))
            except OSError as why:
                refusal = _refuse_attach(why).rstrip()
            else:
                return
        with sock, contextlib.suppress(OSError):  # it is gone
            sock.send(refusal + b"\n")

    # Their ends

    def _session_closed(self, session: Session) -> None:
        """Count the traffic of a closed session, and record its end."""
        host, client = self._host, session.client
        host.pump.counts.gone_in += session.bytes_in
        host.pump.counts.gone_out += session.bytes_out
        if session is not self.own:
            self.past += Traffic.of(session)
        for service in host.services:
            service.client_gone(client)
        self._tell_failure(session)
        # No event has named a child that was not started.
        if client.parent is not None or client.pid is not None:
            host.journal.write(
                "client.gone",
                child_id=self._id,
                client_id=client.id,
                reason=session.why_closed,
                closed_files=session.closed_files,
            )

    def _tell_failure(self, session: Session) -> None:
        """Log the failure of a session, if it failed."""
        failure, log = session.failure, self._host.log
        name = session.client.id
        who = {"child_id": self._id, "client_id": name}
        if session.why_closed == FAULT and failure is not None:
            where = "".join(traceback.format_tb(failure.__traceback__)[-1:]).split()
            text = f"Fault serving client {name}: {failure!r} at {' '.join(where)}"
            log.write("ERROR", text, **who, reason=session.why_closed)
        elif isinstance(failure, OSError):
            # The usual ends of a connection are not logged.
            usual = isinstance(failure, BrokenPipeError | ConnectionResetError)
            text = f"Connection of client {name} failed: {failure.strerror}"
            level = "DEBUG" if usual else "WARNING"
            log.write(level, text, **who, reason=failure.strerror)
        elif session.why_closed == SLOW:
            text = f"Client {name} missed its deadline: closed"
            log.write("WARNING", text, **who, reason=session.why_closed)

    # Views

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, each before those nested in it."""
        ahead = [] if self.own is None else [self.own]
        for session in ahead:  # grows during the loop
            yield session
            ahead.extend(session.nested)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield their descriptors of the host, with a word for each."""
        if self.door is not None and self.door.fd >= 0:
            yield self.door.fd, "door socket"
        for session in self:
            yield from session.descriptors()

    def traffic(self) -> Traffic:
        """Return their traffic from the child's start to now."""
        return sum(map(Traffic.of, self), self.past)


def _refuse_attach(why: OSError) -> bytes:
    return b"ERROR failed to attach: %b\n" % os.strerror(why.errno or 0).encode()
