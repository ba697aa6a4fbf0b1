"""A daemon as a node of a fleet: decisions of the sans-IO `Node`, done here.

Rules of this file.

1. A step is in the ledger before anything of it is sent or done (`StepWriter`).
2. Messages go through the link of a node actor, if there is one; without a link they
   are lost, as on a network, and the node sends them again. The node goes on without a link.
3. A renewal counts once the session's launchpad has armed it (FL5). Children of the
   fleet run under that launchpad alone.
4. `all_gone` is said when nothing of the session is left beneath this process (FL6).
"""

from __future__ import annotations

import errno
import math
import sqlite3
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, assert_never

import msgspec
import trio

from hostlib.threads import in_thread
from supervisor.config.child import ChildSection, check_new_child
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.fence import FencedError, FleetLife
from supervisor.fleet.held_slices import HeldSlices
from supervisor.fleet.link import (
    FrameReader,
    LeaveAnswer,
    LinkAnswer,
    LinkArgs,
    LinkError,
    check_link,
    encode_frame,
)
from supervisor.fleet.messages import (
    VERSION,
    Base,
    ChildReport,
    FromDirectory,
    Message,
    Session,
    decode_from_directory,
    workspace_name,
)
from supervisor.fleet.node import (
    Action,
    Arm,
    AskDaemon,
    CallsDecided,
    EndAll,
    EndChild,
    Node,
    NodeStep,
    OperatorNotice,
    StartChild,
)
from supervisor.fleet.states import NodePhase
from supervisor.fleet.step import Moment, StaleEpochError, StoreError
from supervisor.fleet.store import FleetStore, StepWriter
from supervisor.kept_children.fleet_place import FleetPlace
from supervisor.kept_children.kept_child import NOT_STARTED
from supervisor.membership.bases import BaseError, PeerError
from supervisor.membership.ledger import LAUNCHPAD, NodeLedger, read_ledger
from supervisor.membership.session_launchpad import (
    SessionLaunchpad,
    end_former,
    end_left_over,
)
from supervisor.membership.slice_payer import SlicePayer
from supervisor.workspace.use import WorkspaceUse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from supervisor.config.fleet import FleetSection
    from supervisor.host import Host
    from supervisor.kept_children.kept_child import KeptChild
    from supervisor.kept_children.roster import Children
    from supervisor.membership.base_keeper import BaseKeeper

Serve: TypeAlias = "Callable[[trio.SocketStream, bytes], Awaitable[None]]"
"""Serves a link; takes the connection, and the bytes received behind the request."""

TICK_S = 0.1
"""Time between two calls of `Node.tick`."""

MOST_WAITING = 4096
"""Most messages that wait for a link; further ones are dropped, and sent again."""

LOOK_S = 0.1
"""Time between two looks at a child whose failed first start is tried again."""

SENT_S = 1.0
"""Longest time for the last messages of a node that has left to reach its link."""

END_S = 5.0
"""Longest wait for the end of a session when the daemon ends. Killing takes milliseconds;
a process that hangs in the kernel ends when it returns, for its launchpad is dead."""

RECEIVE_BYTES = 65_536


class Member:
    """The membership of one daemon.

    Args:
        host: starts children.
        children: that the daemon keeps.
        section: of the configuration.
        directory: where the ledger is.
        bases: those that its children need, and that it has for others.
        clocks: tells the time.

    Attributes:
        node: the decisions; None before the first link.
        bases: as above.
    """

    def __init__(
        self,
        host: Host,
        children: Children,
        section: FleetSection,
        directory: str,
        bases: BaseKeeper,
        clocks: Callable[[], Moment] = read_clocks,
    ) -> None:
        self.node: Node | None = None
        self._host = host
        self._children = children
        self._section = section
        self._directory = directory
        self.bases = bases
        self._clocks = clocks
        self._kept: dict[str, tuple[KeptChild, FleetLife]] = {}
        self._fetches: dict[str, tuple[trio.CancelScope, FleetLife]] = {}
        self._launchpad: SessionLaunchpad | None = None
        self._link: trio.MemorySendChannel[Message] | None = None
        self._linked: str | None = None
        self._link_scope = trio.CancelScope()
        self._unsent = 0
        self._arm_wanted: Arm | None = None
        self._wake = trio.Event()
        self._arming = trio.Event()
        self._changed = trio.Event()
        self._fault: str | None = None

    async def run(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Be a node for as long as an actor wants, until cancelled.

        Raises:
            OSError: the ledger cannot be used.

        Cancellation: children of the fleet end.
        """
        try:
            store = self._store = await in_thread(FleetStore, self._directory)
        except StoreError as why:
            raise OSError(errno.EINVAL, str(why)) from None
        try:
            await self.bases.open()
            ledger = await _read_ledger(store, self._directory)
            if ledger.launchpad is not None:
                await end_former(ledger.launchpad)
            self._held = HeldSlices("", ledger.row, ledger.held)
            self._writer: StepWriter[NodeStep] = StepWriter(
                store, self._carry_out, self._host.log
            )
            first = NodeStep()
            for change in ledger.changes:
                first.put(*change)
            self._held.recover(first)
            self._writer.add(first)
            try:
                await self._writer.flush()
            except (sqlite3.Error, StaleEpochError) as why:
                raise OSError(errno.EIO, _unwritable(why)) from None
            self._host.holders.add(self.descriptors)
            self._host.fence.judge = self._judge
            self._payer = SlicePayer(
                lambda: self.node, self._clocks, self._do, self._writer.try_flush
            )
            self._host.fence.payer = self._payer
            try:
                await self._live(task_status)
            finally:
                with trio.CancelScope(shield=True):
                    await self._end_session(END_S)
                self._host.fence.payer = None
                self._host.holders.discard(self.descriptors)
        finally:
            with trio.CancelScope(shield=True):
                await in_thread(store.close)

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._write)
            self._nursery.start_soon(self._arm_on)
            self._nursery.start_soon(self._tick)
            task_status.started()
        if self._fault is not None:
            self._host.log.write("ERROR", f"In no fleet any more: {self._fault}")
            await self._end_session(math.inf)
            self._kept.clear()
            self._host.fence.node = None  # nothing of the fleet keeps the host here
            await trio.sleep_forever()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors."""
        yield from self._store.descriptors()
        if self._launchpad is not None:
            yield from self._launchpad.descriptors()

    # Steps

    def _do(self, step: NodeStep) -> None:
        """Have a step stored, and carried out then."""
        self._writer.add(step)
        self._wake.set()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if await self._flush():
                self._tell_changed()

    async def _flush(self) -> bool:
        """Store and carry out all steps so far; return whether that is done.

        Where the ledger cannot be written the membership is over.
        """
        if self._fault is not None:
            return False
        try:
            await self._writer.flush()
        except (sqlite3.Error, StaleEpochError) as why:
            self._end_membership(_unwritable(why))
            return False
        return True

    def _end_membership(self, fault: str) -> None:
        """Be no node any more; `_live` does the slow part."""
        self._fault = fault
        self.node = None  # nothing is carried out, no effect goes out, no call is paid
        self._link_scope.cancel()
        self._nursery.cancel_scope.cancel()
        self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _carry_out(self, step: NodeStep) -> None:
        node = self.node
        if node is None:
            return
        self._host.fence.node = None if node.is_out else node.name
        self._host.fence.ray = node.ray
        for send in step.sends:
            self._send(send.message)
        for action in step.actions:
            self._act(node, action)

    def _act(self, node: Node, action: Action) -> None:
        match action:
            case AskDaemon():
                others = len(self._host.children) - len(self._kept)
                self._do(node.daemon_answered(action.number, max(0, others)))
            case Arm():
                self._arm_wanted = action
                self._arming.set()
            case StartChild():
                self._start(node, action)
            case EndChild():
                self._end(action)
            case EndAll():
                self._nursery.start_soon(self._end_all, node)
            case CallsDecided():
                self._payer.decide(action)
            case OperatorNotice():
                text = f"The fleet does not take node {node.name!r}: {action.reason}"
                self._host.log.write("WARNING", text)
            case _:
                assert_never(action)

    async def _tick(self) -> None:
        while True:
            if self.node is not None:
                self._do(self.node.tick(self._clocks()))
            await trio.sleep(TICK_S)

    # The link

    def link(self, args: LinkArgs) -> tuple[LinkAnswer, Serve]:
        """Return the answer to a node actor, and the function that serves the link.

        Raises:
            LinkError: it is refused.
        """
        self._check(args)
        answer = LinkAnswer(VERSION, self._held.ledger.id, self._capacity)
        return answer, partial(self._serve_link, args)

    def _check(self, args: LinkArgs) -> None:
        check_link(args, linked=self._linked)
        node = self.node
        if self._fault is not None:
            raise LinkError(f"cannot link node {args.node!r}: {self._fault}")
        if node is not None and not _may_begin(node) and node.name != args.node:
            raise LinkError(
                f"cannot link node {args.node!r}: this daemon is node {node.name!r} of"
                " a fleet; let that leave first"
            )

    @property
    def _capacity(self) -> int:
        return self._host.settings.max_children

    def _begin(self, args: LinkArgs) -> Node:
        """Return the node; it asks to join, as the actor says, if it is no member."""
        node = self.node
        labels = args.labels or tuple(self._section.labels)
        if node is None or _may_begin(node):
            self._held.node = args.node
            node = Node(args.node, labels, self._capacity, self._held)
            self.node = node
            node.own_ray = args.ray
            self._do(node.join(self._clocks()))
        else:
            self._do(node.relink(labels, args.ray, self._clocks()))
        return node

    async def _serve_link(
        self, args: LinkArgs, stream: trio.SocketStream, first: bytes
    ) -> None:
        """Carry messages both ways until the actor is gone.

        Args:
            args: of the request.
            stream: of the control socket.
            first: came behind the request.
        """
        try:
            self._check(args)  # again: much can come while the answer is sent
        except LinkError as why:
            self._tell_closed(args, why)
            return
        outgoing, waiting = trio.open_memory_channel[Message](MOST_WAITING)
        self._link, self._linked, self._unsent = outgoing, args.node, 0
        self._link_scope = trio.CancelScope()
        try:
            node = self._begin(args)
            with self._link_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_frames, stream, waiting)
                    try:
                        await self._receive_frames(node, stream, first)
                    except LinkError as why:
                        self._tell_closed(args, why)
                    nursery.cancel_scope.cancel()
        finally:
            self._link = self._linked = None
            outgoing.close()
            waiting.close()

    def _tell_closed(self, args: LinkArgs, why: LinkError) -> None:
        text = f"The link of node {args.node!r} is closed: {why}"
        self._host.log.write("WARNING", text)

    async def _receive_frames(
        self, node: Node, stream: trio.SocketStream, data: bytes
    ) -> None:
        reader: FrameReader[FromDirectory] = FrameReader(decode_from_directory)
        with suppress(trio.BrokenResourceError):
            while True:
                for message in reader.feed(data):
                    self._do(node.receive(message, self._clocks()))
                data = await stream.receive_some(RECEIVE_BYTES)
                if not data:
                    return

    def _send(self, message: Message) -> None:
        if self._link is not None:
            with suppress(trio.WouldBlock, trio.BrokenResourceError):
                self._link.send_nowait(message)
                self._unsent += 1

    async def _send_frames(
        self, stream: trio.SocketStream, waiting: trio.MemoryReceiveChannel[Message]
    ) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for message in waiting:
                await stream.send_all(encode_frame(message))
                self._unsent -= 1
                self._tell_changed()

    async def leave(self) -> LeaveAnswer:
        """End the fleet's children here, and say that the node has left.

        Raises:
            LinkError: the ledger cannot be written, so the membership is over already.
        """
        node = self.node
        if self._fault is None and (node is None or node.is_out):
            return LeaveAnswer(None)
        if node is not None:
            self._do(node.leave(self._clocks()))
            while self._fault is None and not node.is_out:
                await self._changed.wait()
            await self._flush()
        if node is None or self._fault is not None:
            raise LinkError(f"cannot leave the fleet: {self._fault}")
        with trio.move_on_after(SENT_S):
            while self._unsent and self._link is not None:
                await self._changed.wait()
        return LeaveAnswer(node.name)

    # The session's launchpad

    async def _arm_on(self) -> None:
        """Arm deadlines one after the other: the last one counts for the kernel."""
        while True:
            await self._arming.wait()
            self._arming = trio.Event()
            wanted, self._arm_wanted = self._arm_wanted, None
            node = self.node
            if wanted is None or node is None:
                continue
            launchpad = await self._launchpad_of(wanted.session)
            if launchpad is None:
                continue
            try:
                await launchpad.launcher.arm(wanted.deadline_s)
            except Exception as why:  # noqa: BLE001 - its end tells what follows
                self._host.log.write("WARNING", f"The lease was not renewed: {why}")
                launchpad.close()
                continue
            if node.session == wanted.session:
                node.armed(wanted.deadline_s)

    async def _launchpad_of(self, session: Session) -> SessionLaunchpad | None:
        """Return a session's launchpad; None if the session is over, or it has ended."""
        launchpad = self._launchpad
        if launchpad is not None:
            return launchpad if launchpad.session == session else None
        node = self.node
        if (
            node is None
            or node.session != session
            or node.phase is not NodePhase.MEMBER
        ):
            return None
        try:
            launchpad = SessionLaunchpad(self._host, session)
        except OSError as why:
            text = f"cannot start the launchpad of the fleet's children: {why.strerror}"
            self._host.log.write("ERROR", text)
            node.launchpad_failed(text)
            return None
        self._launchpad = launchpad
        self._nursery.start_soon(self._hold, node, launchpad)
        step = NodeStep()
        step.put(LAUNCHPAD, "", launchpad.row)
        self._do(step)
        return launchpad if await self._flush() else None

    async def _hold(self, node: Node, launchpad: SessionLaunchpad) -> None:
        await launchpad.run()
        self._do(node.launchpad_gone(self._clocks()))

    async def _end_all(self, node: Node) -> None:
        await self._end_session(math.inf)
        self._do(node.all_gone(self._clocks()))

    async def _end_session(self, patience_s: float) -> None:
        """End the session's launchpad and children; returns when nothing is left.

        Args:
            patience_s: how long it waits for that.
        """
        for scope, _ in self._fetches.values():
            scope.cancel()
        for kept, _ in tuple(self._kept.values()):
            kept.stop(0.0)
        launchpad = self._launchpad
        if launchpad is None:
            return
        launchpad.close()
        with trio.move_on_after(patience_s):
            await launchpad.ended.wait()
            await end_left_over(self._host)
            for kept, _ in tuple(self._kept.values()):
                await kept.settled.wait()
        self._launchpad = None

    # Children

    def _start(self, node: Node, order: StartChild) -> None:
        life = FleetLife(
            node.name,
            order.child,
            order.incarnation,
            is_fenced=not self._section.unfenced,
        )
        if order.program.base is None:
            self._start_child(node, order, life)
        else:
            base = order.program.base
            self._nursery.start_soon(self._run_in_base, node, order, life, base)

    async def _run_in_base(
        self, node: Node, order: StartChild, life: FleetLife, base: Base
    ) -> None:
        """Start a child once its base is here; hold the base until the child's end."""
        async with self.bases.held(base):
            use = await self._fetch(node, order, life, base)
            if use is None:
                return
            kept = self._start_child(node, order, life, (use,))
            if kept is not None:
                await kept.settled.wait()

    async def _fetch(
        self, node: Node, order: StartChild, life: FleetLife, base: Base
    ) -> WorkspaceUse | None:
        """Return a child's workspace, once its base is here; None: it is not started."""
        name = workspace_name(order.child, order.incarnation, order.session)
        state_dir = self._children.state_dir
        if base.node == node.name:
            return WorkspaceUse(name, base.path, "review", state_dir)
        with trio.CancelScope() as scope:
            own = self._fetches[life.child] = scope, life
            try:
                path = await self.bases.ready(base)
                return WorkspaceUse(name, path, "review", state_dir)
            except (
                PeerError,
                OSError,
            ) as why:  # another node, or this one later, may do
                self._report(node, life, "refused", reason=str(why))
                return None
            except BaseError as why:
                self._report(node, life, "failed", reason=str(why))
                return None
            finally:
                # A later session may have placed the child here again meanwhile.
                if self._fetches.get(life.child) == own:
                    del self._fetches[life.child]
        self._report(node, life, "ended", reason="ended before it began")
        return None

    def _start_child(
        self,
        node: Node,
        order: StartChild,
        life: FleetLife,
        uses: tuple[WorkspaceUse, ...] = (),
    ) -> KeptChild | None:
        """Start a child; return None if it is not started, which is told."""
        launchpad, program = self._launchpad, order.program
        if launchpad is None or launchpad.session != order.session:
            return None  # the session is over, and its end is told
        if len(self._host.children) + self._count_starts() >= self._capacity:
            text = "the node has as many children as host.max_children allows"
            self._report(node, life, "refused", reason=text)
            return None
        section = ChildSection(
            command=list(program.command),
            policy=program.policy,
            restart=program.restart,
            env=dict(program.env),
            cwd=program.cwd,
        )
        try:
            check_new_child(order.name, section, self._children.config.policy)
            placed = FleetPlace(life, launchpad.launcher, program, uses)
            kept = self._children.spawn(order.name, section, placed)
        except ValueError as why:
            text = str(why).removeprefix(": ")
            self._report(node, life, "failed", reason=text)
            return None
        self._kept[life.child] = (kept, life)
        self._nursery.start_soon(self._watch, node, kept, life)
        return kept

    def _count_starts(self) -> int:
        """Return how many children are placed here, and are none of the host's yet."""
        there = {child.spec.fleet for child in self._host.children.values()}
        return sum(
            life not in there and not kept.settled.is_set()
            for kept, life in self._kept.values()
        )

    async def _watch(self, node: Node, kept: KeptChild, life: FleetLife) -> None:
        """Tell of a child's start, and of its end."""
        has_begun = await self._begun(node, kept, life)
        await kept.settled.wait()
        if self._kept.get(life.child) == (kept, life):
            del self._kept[life.child]
        failed = not has_begun and kept.status == NOT_STARTED
        state = "failed" if failed else "ended"
        status = kept.failed_status if failed else kept.status
        self._report(node, life, state, status, kept.reason or "")

    async def _begun(self, node: Node, kept: KeptChild, life: FleetLife) -> bool:
        """Tell of a child's start; return whether it was started."""
        while True:
            await kept.begun.wait()
            process = None if kept.child is None else kept.child.process
            if process is not None:
                step = node.child_started(life.child, life.incarnation, process.pid)
                self._do(step)
                return True
            if kept.settled.is_set():
                if kept.has_lived and kept.pid is not None:
                    pid = kept.pid
                    self._do(node.child_started(life.child, life.incarnation, pid))
                return kept.has_lived
            with trio.move_on_after(LOOK_S):
                await kept.settled.wait()

    def _report(
        self,
        node: Node,
        life: FleetLife,
        state: str,
        status: int | None = None,
        reason: str = "",
    ) -> None:
        report = ChildReport(
            life.child, life.incarnation, state, status=status, reason=reason
        )
        self._do(node.child_over(report, self._clocks()))

    def _end(self, order: EndChild) -> None:
        fetch = self._fetches.get(order.child)
        if fetch is not None and fetch[1].incarnation == order.incarnation:
            fetch[0].cancel()
        found = self._kept.get(order.child)
        if found is None or found[1].incarnation != order.incarnation:
            return
        found[0].stop(0.0 if order.signal == "KILL" else None)

    # The fence

    def _judge(self, life: FleetLife) -> None:
        """Let an effect of a child go out (spec FL6).

        Raises:
            FencedError: the lease is over, or another incarnation runs.
        """
        if self.node is None:
            raise FencedError(f"cannot let {life.child!r} act: its node has left")
        self.node.check_effect(life.child, life.incarnation, self._clocks())


def _may_begin(node: Node) -> bool:
    """Return whether another node may be in its place: nothing runs of this one."""
    return node.phase in (NodePhase.OUT, NodePhase.JOINING)


async def _read_ledger(store: FleetStore, directory: str) -> NodeLedger:
    try:
        return await in_thread(read_ledger, store)
    except (sqlite3.Error, msgspec.DecodeError) as why:
        raise OSError(
            errno.EINVAL,
            f"cannot read the ledger of the fleet's node in {directory!r}: {why}; move"
            " it away, and the node begins with a new one",
        ) from None


def _unwritable(why: Exception) -> str:
    return f"cannot write its ledger: {why}; start the daemon again"
