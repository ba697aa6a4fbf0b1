"""One child: its process, its conversations, its end; one task owns it (I2).

Rules of this file.

1. What is acquired is released in reverse order by one stack, whether the child ran for
   a month or was never started.
2. The exit of the process ends the child (spec S2); what it had sent is done first,
   nested clients are closed before the client they hang on (spec S3).
3. Nothing here decides: ``lifecycle`` says what an event means, this file does it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, assert_never

import trio

from supervisor import walled
from supervisor.launcher import LaunchpadLost
from supervisor.lifecycle import Action, Event, State, step
from supervisor.sandbox import Walls, Wanted
from supervisor.session_base import PROCESS_EXIT
from supervisor.spawn_request import SpawnError, SpawnRequest, find_executable
from supervisor.traffic import Traffic
from vfs.filesystem import timestamp
from vfs.policy import Ledger, Policy, close_places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.host import Host
    from supervisor.launcher import ExitStatus, SpawnedProcess
    from supervisor.session import Session
    from supervisor.spec import ChildSpec
    from vfs.policy import Place

SWEEP_TIMEOUT_S = 5.0
"""Longest wait for the rest of a dead child's processes; they are killed at once, and
only one that is stuck in the kernel takes longer."""

STANDARD = (0, 1, 2)

ATTACHING = "attaching"
"""What a descriptor is held for on its way to a client."""


class Child:
    """One child of a host.

    Args:
        host: whose child it is.
        child_id: unique in the host.
        spec: what it is to be.

    Attributes:
        state: where in its life it is.
        exit: how its process ended; None before.
        failure: why it could not be started; None if it was.
        timed_out: its time limit ended it.
        gone: set when nothing of it is left.
        places: its root and grants.
        wanted: what it, and whatever is run for it, is to run in.
        walls: what it runs in, once it does.
    """

    def __init__(self, host: Host, child_id: str, spec: ChildSpec) -> None:
        self.id = child_id
        self.spec = spec
        self.state = State.STARTING
        self.exit: ExitStatus | None = None
        self.failure: SpawnError | None = None
        self.timed_out = False
        self.gone = trio.Event()
        self.started = trio.Event()
        self.process: SpawnedProcess | None = None
        self.session: Session | None = None
        self._host = host
        self._stopped = trio.Event()
        self._side: socket.socket | None = None
        self._ends: Ends | None = None
        self.places: tuple[Place, ...] = ()
        self.walls = Walls(spec.sandbox.name)
        self.wanted: Wanted | None = None
        self._held: dict[int, str] = {}
        self._past = Traffic()  # of nested clients that are gone
        self._nursery: trio.Nursery | None = None
        self._grace_s = host.settings.grace_s
        self._killed_at = math.inf
        self._timeout_at = math.inf

    # Orders from outside

    def stop(self, grace_s: float | None = None) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after the grace period (spec S6).

        Args:
            grace_s: seconds between the two; None for the host's setting.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self._stopped.set()
        self._happened(Event.STOP)

    def session_closed(self, session: Session) -> None:
        """Take note that a conversation is over; the process may go on (spec S3)."""
        if session is not self.session:
            self._past += Traffic.of(session)
        if session is self.session and session.why_closed != PROCESS_EXIT:
            self._happened(Event.EOF)

    async def wait_gone(self) -> int:
        """Wait until nothing of it is left; return its exit status, 128+n by signal."""
        await self.gone.wait()
        return self.status

    @property
    def status(self) -> int:
        """The exit status as a shell would see it (face: exit statuses of ``run``)."""
        if self.failure is not None:
            return self.failure.exit_status
        if self.exit is None or (self.exit.code is None and self.exit.signal is None):
            return 125
        if self.exit.signal is not None:
            return 128 + self.exit.signal
        return self.exit.code or 0

    # Its life

    async def run(self) -> None:
        """Own the child from its start until it is gone."""
        try:
            async with AsyncExitStack() as stack:
                try:
                    await self._start(stack)
                except SpawnError as why:
                    self.failure = why
                    self._happened(Event.SPAWN_FAILED)
                    return
                except OSError as why:
                    self.failure = _not_prepared(why)
                    self._happened(Event.SPAWN_FAILED)
                    return
                await self._live()
        finally:
            if self.state is not State.REAPING:
                # Cancelled: the host is being torn down with everything in it.
                self.state = State.REAPING
            self._happened(Event.CLEANED)
            self.started.set()

    async def _start(self, stack: AsyncExitStack) -> None:
        host = self._host
        spec = self.spec
        policy = self._make_policy(stack)
        ledger = Ledger(
            open_files=spec.max_open_files,
            clients=host.settings.clients_per_child,
            size_bytes=spec.max_bytes,
            files=spec.max_files,
            file_bytes=spec.max_file_bytes,
        )
        pairs = self._ends = Ends(spec.transport, spec.dialect)
        stack.callback(pairs.close)
        client = host.fs.connect(policy, ledger, f"{self.id}:{spec.transport}")
        self._nursery = await self._open_nursery(stack)
        read_fd, write_fd = pairs.host_fds()
        self.session = host.open_session(client, read_fd, write_fd, spec.dialect)
        self.session.on_attach = self._attach
        self._side = pairs.side
        self._nursery.start_soon(self.session.run)
        cwd_fd = self._hold_directory(stack, spec.cwd)
        wanted = self.wanted = self._wanted(stack)
        stack.push_async_callback(self._wait_swept)
        env = {**spec.env, **pairs.env, "FSPROXY_TOP_LEVEL": spec.top_level_word}
        env.update(spec.walls_env)
        for service in host.services:
            env.update(await service.child_starting(self, stack))
        self.process = await self._spawn(cwd_fd, pairs, env, wanted)
        stack.callback(self.process.close)
        pairs.close_child_ends()

    async def _open_nursery(self, stack: AsyncExitStack) -> trio.Nursery:
        """Open where its conversations run; they are closed before it is left."""
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        stack.push_async_callback(self._close_sessions)
        return nursery

    def _make_policy(self, stack: AsyncExitStack) -> Policy:
        spec = self.spec
        cwd_fd = self._hold_directory(stack, spec.cwd)
        places = self.places = spec.open_places()
        stack.callback(close_places, places)
        return Policy(
            places,
            top_level=spec.top_level,
            cwd_fd=cwd_fd,
            tools=spec.tools,
            model=spec.model,
        )

    def _hold_directory(self, stack: AsyncExitStack, path: str) -> int:
        """Open a directory that is held until the child is gone."""
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held[fd] = "working directory"
        stack.callback(self._give_back, fd)
        return fd

    def _give_back(self, fd: int) -> None:
        del self._held[fd]
        os.close(fd)

    def _wanted(self, stack: AsyncExitStack) -> Wanted:
        """Say what it is to run in; what is taken for that is given back at its end."""
        spec = self.spec
        wanted = Wanted(spec.sandbox, spec.network, spec.cwd, spec.own_dirs)
        machine = self._host.machine
        keeps_cpus = False
        if "uid" in spec.sandbox.layers and "uid" not in machine.lacking:
            wanted.user = user = machine.take_user()
            stack.callback(machine.give_user_back, user)
        if "cgroup" in spec.sandbox.layers:
            groups = self._host.groups.take(self.id, spec.group_limits)
            stack.callback(groups.remove)
            wanted.groups, wanted.no_groups = groups.procs(), groups.why_not
            keeps_cpus = groups.keeps_cpus
        if spec.group_limits.cpus is not None and not keeps_cpus:
            raise _cpus_not_kept(wanted.no_groups)
        return wanted

    async def _spawn(
        self, cwd_fd: int, pairs: Ends, env: dict[str, str], wanted: Wanted
    ) -> SpawnedProcess:
        spec = self.spec
        stdio = zip(spec.stdio, STANDARD, strict=True)
        executable = find_executable(spec.command[0], spec.env.get("PATH"), spec.cwd)
        request = SpawnRequest(
            executable=executable,
            argv=spec.command,
            env=env,
            cwd_fd=cwd_fd,
            fds=(*stdio, *pairs.child_fds()),
            rlimits=spec.rlimits,
            umask=spec.umask,
        )
        host = self._host
        process, self.walls = await walled.spawn(
            host.launcher, host.machine, request, wanted
        )
        return process

    async def _live(self) -> None:
        self._happened(Event.SPAWNED)
        await self._live_on(self.spec.timeout_s)

    async def _live_on(self, timeout_s: float | None) -> None:
        """Wait for its process's end; ``timeout_s`` is left of its time limit."""
        process = self.process
        session = self.session
        if process is None or session is None:
            raise RuntimeError("a child that was not started cannot live")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._enforce_end)
                if timeout_s is not None:
                    nursery.start_soon(self._enforce_timeout, timeout_s)
                self.exit = await process.wait_exit()
                nursery.cancel_scope.cancel()
        except LaunchpadLost:
            self._host.log.write(
                "ERROR", "The launchpad is lost, and with it the child"
            )
            raise
        self._host.log.write(
            "INFO",
            f"Process {process.pid} terminated, cleaning up client {session.client.id}",
        )
        self._happened(Event.EXITED)
        await self._close_sessions()

    async def _wait_swept(self) -> None:
        """Wait until nothing that the dead process left behind is alive."""
        if self.process is not None and self.exit is not None:
            with trio.move_on_after(SWEEP_TIMEOUT_S):
                await self.process.wait_swept()

    async def _enforce_end(self) -> None:
        """After a stop, kill what does not end within the grace period (spec S6)."""
        await self._stopped.wait()
        self._killed_at = trio.current_time() + self._grace_s
        await trio.sleep_until(self._killed_at)
        self._host.on_overdue(self)
        self._happened(Event.GRACE_OVER)

    async def _enforce_timeout(self, timeout_s: float) -> None:
        self._timeout_at = trio.current_time() + timeout_s
        await trio.sleep_until(self._timeout_at)
        self.timed_out = True
        self.stop()

    async def _close_sessions(self) -> None:
        """Close every conversation, nested ones first (spec S3)."""
        if self.session is not None:
            # Bounded: what a job may still do is a call into the kernel (I1).
            with trio.CancelScope(shield=True):
                await self.session.finish(PROCESS_EXIT)

    def _happened(self, event: Event) -> None:
        """Take an event in, and do what the table says."""
        self.state, action = step(self.state, event)
        match action:
            case Action.SERVE:
                self._serve()
            case Action.SERVE_AND_TERMINATE:
                self._serve()
                self._signal(self.spec.stop_signal)
            case Action.TERMINATE:
                self._signal(self.spec.stop_signal)
            case Action.KILL:
                self._signal(signal.SIGKILL)
            case Action.REPORT:
                self._report()
            case Action.CLEAN_UP | Action.NOTHING:
                pass  # `run` unwinds its stack as soon as there is nothing to wait for
            case Action.FAULT:
                raise AssertionError("`step` has raised")
            case _:
                assert_never(action)

    def _serve(self) -> None:
        """Begin its conversation: its process is there."""
        process, session, journal = self.process, self.session, self._host.journal
        if process is None or session is None:
            raise RuntimeError("a child that was not started cannot be served")
        client = session.client
        client.pid = process.pid
        self._host.pump.add(session)
        journal.write(
            "client.connected", child_id=self.id, client_id=client.id, pid=client.pid
        )
        self.started.set()
        journal.write(
            "child.spawned",
            child_id=self.id,
            name=self.spec.name,
            client_id=client.id,
            pid=client.pid,
            command=[
                os.fsencode(a).decode(errors="replace") for a in self.spec.command
            ],
            isolation=self.walls.row(),
        )

    def _signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self._host.journal.write(
                "child.signalled",
                child_id=self.id,
                pid=self.process.pid,
                signal=int(number),
            )

    def _report(self) -> None:
        journal = self._host.journal
        if self.exit is not None:
            journal.write(
                "child.exited",
                child_id=self.id,
                code=self.exit.code,
                signal=self.exit.signal,
                utime_s=self.exit.utime_s,
                stime_s=self.exit.stime_s,
                maxrss_kib=self.exit.maxrss_kib,
                timed_out=self.timed_out,
            )
        reason = None if self.failure is None else self.failure.text
        journal.write(
            "child.gone", child_id=self.id, status=self.status, failure=reason
        )

    # More conversations

    async def _attach(self, session: Session) -> bytes | None:
        """Make one more conversation for whoever asks on ``session`` (spec N4)."""
        try:
            nested, theirs = self.open_nested(
                session.client.policy, "attached", session
            )
        except OSError as why:
            reason = os.strerror(why.errno or 0).encode()
            return b"ERROR failed to attach: " + reason + b"\n"
        with self.carrying(theirs):
            await self._send_descriptor(
                session, b"OK %b\n" % nested.client.id.encode(), theirs
            )
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
        host = self._host
        session = session or self.session
        if session is None or self._nursery is None:
            raise RuntimeError("a child without a nursery has no clients")
        parent = session.client
        ours, theirs = socket.socketpair()
        try:
            ledger = Ledger(parent.ledger)
            client = host.fs.connect(policy, ledger, f"{self.id}:{label}", parent)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if host.services.fds is not None:
            host.services.fds.client_attached(client)
        ours.setblocking(False)
        fd = ours.detach()
        nested = host.open_session(client, fd, fd, session.dialect)
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
        return nested, theirs

    async def _send_descriptor(
        self, session: Session, reply: bytes, carried: socket.socket
    ) -> None:
        """Send a reply with a descriptor on its first byte (over pipes: beside it)."""
        fds = [carried.fileno()]
        session.carried = (carried.fileno(), reply)
        try:
            if session is self.session and self._side is not None:
                with session.patience():
                    await _send_fds(self._side, b"+", fds)
                sent = 0
            else:
                line = socket.socket(fileno=os.dup(session.write_fd))
                with self.carrying(line), session.patience():
                    sent = await _send_fds(line, reply, fds)
        finally:
            session.carried = None
        if sent < len(reply):
            await session.send(reply[sent:])

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

    # Looking at it

    def sessions(self) -> Iterator[Session]:
        """Yield its conversations, each before those nested in it."""
        ahead = [] if self.session is None else [self.session]
        for session in ahead:  # grows while it is walked
            yield session
            ahead.extend(session.nested)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, with a word for each."""
        yield from self._held.items()
        for place in self.places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"
        if self.process is not None:
            for fd in self.process.descriptors():
                yield fd, "pidfd"
        if self._ends is not None:
            for fd in self._ends.descriptors():
                yield fd, "connection"
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
            "isolation": self.walls.row(),
            "traffic": self.traffic().row(),
        }


def _cpus_not_kept(why: str) -> SpawnError:
    """Word that nothing here keeps a limit that only a group of processes can keep."""
    why = why or "no group of processes with the controller 'cpu' can be made for it"
    how = "leave the limit out, or delegate that controller (systemd: Delegate=cpu)"
    text = f"cannot start a child: nothing keeps the limit 'cpus': {why}; {how}"
    return SpawnError(errno.EOPNOTSUPP, "cgroup", text)


def _not_prepared(why: OSError) -> SpawnError:
    """Word what could not be had for a child: its root, a grant, a descriptor."""
    known = why.filename is not None
    name = f" {os.fsdecode(why.filename)!r}" if known else ""
    text = f"cannot start a child: cannot use{name}: {why.strerror}"
    if why.errno in (errno.ENOENT, errno.ENOTDIR):
        text += "; name what is there, or make it first"
    return SpawnError(why.errno or 0, "request", text)


async def _send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> int:
    while True:
        try:
            return socket.send_fds(sock, [data], fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


class Ends:
    """Both ends of a child's door (spec T1): a socketpair, or two pipes.

    With pipes a socketpair on FD 5 carries the descriptors of ATTACH (spec N4).

    Attributes:
        env: what tells the child its descriptors.
        side: the host's end of that socketpair.
    """

    def __init__(
        self,
        transport: str | None,
        dialect: int = 2,
        side: socket.socket | None = None,
    ) -> None:
        self._child: list[int] = []
        self._host: tuple[int, ...] = ()
        self.side = side
        self.env: dict[str, str] = {}
        if transport is None:
            return
        numbers = "3,4,5" if transport == "pipes" else "3"
        self.env = {"FSPROXY_FD": numbers, "FSPROXY_VERSION": str(dialect)}
        if transport == "pipes":
            replies_out, replies_in = os.pipe2(os.O_CLOEXEC)
            self._child.append(replies_out)
            requests_out, requests_in = os.pipe2(os.O_CLOEXEC)
            self._child.append(requests_in)
            side, theirs = socket.socketpair()
            self._child.append(theirs.detach())
            self.side = side
            self._host = (requests_out, replies_in)
        else:
            ours, theirs = socket.socketpair()
            self._child.append(theirs.detach())
            self._host = (ours.detach(),)
        for fd in self._host:
            os.set_blocking(fd, False)

    @classmethod
    def handed_over(cls, side: socket.socket | None) -> Ends:
        """Return what is left of them when the child runs and its session has its own.

        Args:
            side: the host's end of the socketpair beside two pipes.
        """
        return cls(None, side=side)

    def close(self) -> None:
        """Close what nobody took over."""
        self.close_child_ends()
        for fd in self._host:
            os.close(fd)
        if self.side is not None:
            self.side.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return those of either end that nobody else owns yet, and the side socket."""
        side = -1 if self.side is None else self.side.fileno()
        return (*self._child, *self._host, *((side,) if side >= 0 else ()))

    def host_fds(self) -> tuple[int, int]:
        """Hand the host's (read, write) descriptors to a session, which owns them."""
        fds, self._host = self._host, ()
        return fds[0], fds[-1]

    def child_fds(self) -> tuple[tuple[int, int], ...]:
        """Return (descriptor, number in the child) pairs."""
        return tuple((fd, 3 + index) for index, fd in enumerate(self._child))

    def close_child_ends(self) -> None:
        """Close the host's copies of the child's end, or EOF never comes (spec T2)."""
        while self._child:
            os.close(self._child.pop())
