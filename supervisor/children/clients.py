"""What a child has, and with whom it talks: the part of it that has no life of its own.

The attributes of a child, the conversations that it and what it nests ask for, and what
is to be seen of it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import traceback
from typing import TYPE_CHECKING

import trio

from hostlib.clock import timestamp
from hostlib.linux.cgroup_files import memory_taken, refusals
from hostlib.messages import remedy
from supervisor.children.lifecycle import State
from supervisor.fsproxy.door_socket import peer_pid
from supervisor.fsproxy.replies import FAULT, SLOW
from supervisor.fsproxy.traffic import Traffic
from supervisor.sandbox.forecast import is_held
from supervisor.sandbox.groups import Groups
from supervisor.sandbox.plan import Walls
from supervisor.sandbox.start import LISTENER, instead_of_listener
from supervisor.spawn.ends import send_fds
from supervisor.spawn.inner_pair import InnerListener
from supervisor.usage.limits import refused_by, uses_of
from vfs.policy import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    from supervisor.fsproxy.door_socket import DoorSocket
    from supervisor.fsproxy.session import Session
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import Wanted
    from supervisor.spawn.ends import Ends
    from supervisor.spawn.inner_pair import InnerMounts
    from supervisor.spawn.process import ExitStatus, SpawnedProcess
    from supervisor.spawn.request import SpawnError
    from supervisor.spec import ChildSpec
    from supervisor.usage.limits import Use
    from supervisor.usage.samples import Sample
    from supervisor.workspace.audit import WorkspaceAudit
    from supervisor.workspace.bounds import LayerBounds
    from vfs.policy import Place, Policy

ATTACHING = "attaching"
"""What a descriptor is held for on its way to a client."""

_DOOR_CLOSED = b"ERROR failed to attach: nothing has descriptor 3 open any more"


class ChildClients:
    """A child of a host, and its conversations.

    Args:
        host: what the parts of the host share whose child it is.
        child_id: unique in the host.
        spec: what it is to be.

    Attributes:
        state: where in its life it is.
        exit: how its process ended; None before.
        failure: why it could not be started; None if it was.
        timed_out: its time limit ended it.
        ended_for: what else ended it, in words; "" for nothing.
        is_counted: what its limits have refused is among ``Parts.refused``.
        gone: set when nothing of it is left.
        begun: set when its process is there and its conversation begins, or never will.
        scope: of all its life; cancelled where nobody waits for its start any more.
        places: its root and grants.
        wanted: what it, and whatever is run for it, is to run in.
        walls: what it runs in, once it does.
        memory_in_groups: bytes that its processes take, at the last ``look_at_groups``;
            None where no group bounds them.
    """

    def __init__(self, host: Parts, child_id: str, spec: ChildSpec) -> None:
        self.id = child_id
        self.spec = spec
        self.state = State.STARTING
        self.exit: ExitStatus | None = None
        self.failure: SpawnError | None = None
        self.memory_in_groups: int | None = None
        self.timed_out = False
        self.ended_for = ""
        self.is_counted = False
        self.gone = trio.Event()
        self.begun = trio.Event()
        self.scope = trio.CancelScope()
        self.process: SpawnedProcess | None = None
        self.session: Session | None = None
        self._host = host
        self._is_stopped = False
        self._side: socket.socket | None = None
        self._ends: Ends | None = None
        self.places: tuple[Place, ...] = ()
        self.walls = Walls(spec.sandbox.name)
        self.wanted: Wanted | None = None
        self._groups = Groups()
        self._refused_before: dict[str, int] = {}
        self._refused_by_groups: dict[str, int] = {}
        self._held: dict[int, str] = {}
        self._bounds: dict[str, LayerBounds] = {}
        self._audits: dict[str, WorkspaceAudit] = {}
        self._inner: InnerListener | None = None
        self._sent: InnerMounts | None = None
        self._door_socket: DoorSocket | None = None
        self._listens = False
        self._past = Traffic()  # of nested clients that are gone
        self._nursery: trio.Nursery | None = None
        self._grace_s = host.settings.grace_s
        self._killed_at = math.inf
        self._timeout_at = math.inf

    # More conversations

    async def _attach(self, session: Session) -> bytes | None:
        """Make one more conversation for the client of ``session`` (spec N4)."""
        if session.is_closing:
            return None  # nobody is sent its descriptor
        try:
            nested, theirs = self.open_nested(
                session.client.policy, "attached", session
            )
        except OSError as why:
            return _not_attached(why)
        with self.carrying(theirs):
            reply = b"OK %b\n" % nested.client.id.encode()
            try:
                await self._send_descriptor(session, reply, theirs)
            except OSError as why:
                if why.errno != errno.ETOOMANYREFS:
                    raise
                return _not_attached(why)  # too many are on their way: unix(7)
        return None

    def open_nested(
        self, policy: Policy, label: str, session: Session | None = None
    ) -> tuple[Session, socket.socket]:
        """Make one more conversation beneath another one.

        Args:
            policy: what it may do; at most what that one may.
            label: says what it is for, in the table of clients.
            session: the one above it; None for the child's own.

        Returns:
            The conversation, and its other end, which is the caller's to close.

        Raises:
            OSError: no descriptor, or no more clients, for this child (spec S7).
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            nested = self._open_on(ours, policy, label, session or self.session)
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
        """Make one more conversation on a non-blocking socket, which it owns then."""
        host = self._host
        if session is None or self._nursery is None:
            raise RuntimeError("a child without a nursery has no clients")
        parent = session.client
        ledger = Ledger(parent.ledger)
        client = host.fs.connect(policy, ledger, f"{self.id}:{label}", parent)
        client.pid = pid
        if host.services.fds is not None:
            host.services.fds.client_attached(client)
        fd = sock.detach()
        nested = host.open_session(
            client, (fd, fd), session.dialect, self.session_closed
        )
        nested.on_attach = self._attach
        session.nested.append(nested)
        nested.parent = session
        self._nursery.start_soon(nested.run)
        host.pump.add(nested)
        host.journal.write(
            "client.connected",
            child_id=self.id,
            client_id=client.id,
            parent_id=parent.id,
        )
        return nested

    def session_closed(self, session: Session) -> None:
        """Count what went through a conversation that is over, and tell of its end."""
        host, client = self._host, session.client
        host.pump.counts.gone_in += session.bytes_in
        host.pump.counts.gone_out += session.bytes_out
        if session is not self.session:
            self._past += Traffic.of(session)
        for service in host.services:
            service.client_gone(client)
        self._tell_failure(session)
        if client.parent is None and client.pid is None:
            return  # of a child that could not be started: nobody heard of it
        host.journal.write(
            "client.gone",
            child_id=self.id,
            client_id=client.id,
            reason=session.why_closed,
            closed_files=session.closed_files,
        )

    def _tell_failure(self, session: Session) -> None:
        """Log what went wrong with a conversation, if anything did."""
        failure, log = session.failure, self._host.log
        name = session.client.id
        who = {"child_id": self.id, "client_id": name}
        if session.why_closed == FAULT and failure is not None:
            where = "".join(traceback.format_tb(failure.__traceback__)[-1:]).split()
            text = f"Fault serving client {name}: {failure!r} at {' '.join(where)}"
            log.write("ERROR", text, **who, reason=session.why_closed)
        elif isinstance(failure, OSError):
            # The usual ends of a connection are no news.
            usual = isinstance(failure, BrokenPipeError | ConnectionResetError)
            text = f"Connection of client {name} failed: {failure.strerror}"
            level = "DEBUG" if usual else "WARNING"
            log.write(level, text, **who, reason=failure.strerror)
        elif session.why_closed == SLOW:
            text = f"Client {name} missed its deadline: closed"
            log.write("WARNING", text, **who, reason=session.why_closed)

    def _let_in(self, sock: socket.socket) -> None:
        """Make a conversation for a program that has connected to the door's socket."""
        session = self.session
        refusal = _DOOR_CLOSED
        if session is not None and not (session.is_closing or session.is_over):
            policy = session.client.policy
            try:
                self._open_on(sock, policy, "socket", session, peer_pid(sock))
            except OSError as why:
                refusal = _not_attached(why).rstrip()
            else:
                return
        with sock, contextlib.suppress(OSError):  # it is gone
            sock.send(refusal + b"\n")

    def _tell_of_door_socket(self, why: OSError) -> None:
        text = f"The door's socket lets nobody in: {why.strerror}{remedy(why)}"
        self._host.log.write("WARNING", text, child_id=self.id, reason=why.strerror)

    async def _send_descriptor(
        self, session: Session, reply: bytes, carried: socket.socket
    ) -> None:
        """Send a reply with a descriptor on its first byte (over pipes: beside it)."""
        fds = [carried.fileno()]
        session.outbound.carried = (carried.fileno(), reply)
        try:
            if session is self.session and self._side is not None:
                with session.outbound.patience():
                    await send_fds(self._side, b"+", fds)
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

    @contextlib.contextmanager
    def carrying(self, carried: socket.socket) -> Iterator[None]:
        """Hold a socket while it, or something through it, is handed on; close it."""
        fd = carried.fileno()
        self._held[fd] = ATTACHING
        try:
            yield
        finally:
            del self._held[fd]
            carried.close()

    def listen_within(
        self,
        port: int,
        serve: Callable[[socket.socket], None],
        stack: AsyncExitStack,
    ) -> int:
        """Have it listen on loopback of its own net namespace, if it will have one.

        To be said before it is spawned.

        Args:
            port: there, if no other service has it.
            serve: is given the listener, non-blocking, once the child runs; it is never
                called where nobody else's loopback is kept from the child.
            stack: closes what nobody took over.

        Returns:
            The port that it will be.

        Raises:
            OSError: there is no descriptor for its way to the host.
        """
        self._listens = True
        if self.spec.network == "none" and "netns" in self.spec.sandbox.layers:
            if self._inner is None:
                self._inner = InnerListener()
                stack.callback(self._inner.close)
            return self._inner.want(port, serve)
        return port

    def _unheard(self) -> dict[str, str]:
        """Say of a service's port on loopback that it is out of reach, if it is."""
        layers = dict(self.walls.applied)
        if not self._listens or self.walls.network == "host" or "netns" in layers:
            return {}
        how = instead_of_listener(self.spec.sandbox)
        return {LISTENER: f"it has no net namespace; {how}"}

    # Looking at it

    @property
    def held(self) -> Mapping[int, str]:
        """What it holds open for its start and its end, with a word for each."""
        return self._held

    @property
    def threads(self) -> trio.CapacityLimiter | None:
        """What bounds the threads that look at what is its own; None: nothing does."""
        session = self.session
        return None if session is None else session.client.ledger.threads

    def sessions(self) -> Iterator[Session]:
        """Yield its conversations, each before those nested in it."""
        ahead = [] if self.session is None else [self.session]
        for session in ahead:  # grows while it is walked
            yield session
            ahead.extend(session.nested)

    def look_at_groups(self) -> bool:
        """See what the bounds of its groups have refused; False: there are none."""
        limits = self.spec.group_limits
        if not self._groups.made or (limits.memory, limits.processes) == (None, None):
            return False
        self._refused_by_groups = refusals(self._groups.made)
        layers = dict(self.walls.applied).keys()
        is_bounded = "cgroup" in layers and is_held(layers)
        if is_bounded and self._groups.keep_memory(limits):
            self.memory_in_groups = memory_taken(self._groups.made)
        return True

    def refused(self) -> dict[str, int]:
        """Return how often its limits refused something, by limit.

        Those of its groups as they were at the last ``look_at_groups``.
        """
        session = self.session
        found = {} if session is None else refused_by(session.client.ledger)
        for limit, count in self._refused_by_groups.items():
            found[limit] = count - self._refused_before.get(limit, 0)
        return found

    def tell_limits(self, sample: Sample | None = None) -> None:
        """Write down which limits it has come near to, or is refused by."""
        self._write_limits(uses_of(self, sample))

    def count_refusals(self) -> None:
        """Count what was refused to it among the host's: its process has ended."""
        self._write_limits([use for use in uses_of(self, None) if use.refused])
        self._host.limits.forget(self.id)
        self._host.refused.update(self.refused())
        self.is_counted = True

    def _write_limits(self, found: Sequence[Use]) -> None:
        for use in self._host.limits.of(self.id, found):
            self._host.journal.write(
                "child.limit",
                child_id=self.id,
                name=self.spec.name,
                limit=use.limit,
                level=use.level.name.lower(),
                used=use.used,
                allowed=use.allowed,
                refused=use.refused,
            )

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, with a word for each."""
        yield from self._held.items()
        for place in self.places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"
        for part, word in (
            (self.process, "pidfd"),
            (self._ends, "connection"),
            (self._inner, "inner listener"),
            (self._sent, "inner mounts"),
        ):
            for fd in () if part is None else part.descriptors():
                yield fd, word
        if self._door_socket is not None and self._door_socket.fd >= 0:
            yield self._door_socket.fd, "door socket"
        for session in self.sessions():
            yield from session.descriptors()

    def traffic(self) -> Traffic:
        """Return what it and its nested clients asked for, from its start to now."""
        return sum(map(Traffic.of, self.sessions()), self._past)

    def row(self) -> dict[str, object]:
        """Return the child as one row of ``ps``."""
        process = self.process
        session = self.session
        return {
            "id": self.id,
            "name": self.spec.name,
            "pid": process.pid if process is not None else None,
            "create_time": process.create_time if process is not None else None,
            "state": self.state.value,
            "command": [
                os.fsencode(a).decode(errors="replace") for a in self.spec.command
            ],
            "client_id": session.client.id if session is not None else None,
            "started_at": timestamp(session.client.connected_at) if session else None,
            # Of who has not begun nothing was tried yet.
            "isolation": None if process is None else self.walls.row(),
            "traffic": self.traffic().row(),
            "workspaces": self._host.sizes.rows(self.spec.workspaces),
        }


def _not_attached(why: OSError) -> bytes:
    return b"ERROR failed to attach: %b\n" % os.strerror(why.errno or 0).encode()
