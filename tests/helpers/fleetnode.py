"""A daemon's half of a fleet's node: the product's `Node` behind a control socket.

For tests of node actors that need no processes: a child is a row, which ends when it is
told to, or at once if its command is `exit N`; one of a policy that is missing is not
started. `ps` answers with those rows, `stats` as an older daemon does, and the stream
`count` sends numbers, three if its argument `most` says no other number.
"""

import json
from dataclasses import dataclass, field

import msgspec
import trio

from hostlib.unix_listener import listen_at
from supervisor.control.client import VERSION as CONTROL_VERSION
from supervisor.fleet import node as on_node
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.held_slices import HeldSlices, LedgerRow
from supervisor.fleet.link import FrameReader, LinkAnswer, LinkArgs, encode_frame
from supervisor.fleet.messages import VERSION, ChildReport, decode_from_directory
from supervisor.fleet.node import Node, NodeStep

TICK_S = 0.05


class Question(msgspec.Struct):
    """A line of the control socket."""

    v: int
    do: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass
class StandIn:
    """One daemon.

    Attributes:
        children: those that run, by the fleet's ids.
        version: that it says it has.
        missing: policies that its configuration has not.
        may_leave: it does not leave before.
        leaves: how often it was asked to leave.
        sending: held by the one task that writes to the link.
    """

    ledger: str
    capacity: int = 8
    version: str = VERSION
    node: Node | None = None
    children: dict[str, on_node.StartChild] = field(default_factory=dict)
    link: trio.SocketStream | None = None
    missing: tuple[str, ...] = ()
    left: trio.Event = field(default_factory=trio.Event)
    may_leave: trio.Event | None = None
    leaves: int = 0
    sending: trio.Lock = field(default_factory=trio.Lock)

    async def serve(
        self,
        path: str,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the control socket until cancelled."""
        async with listen_at(path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tick)
                task_status.started()
                while True:
                    nursery.start_soon(self._converse, await listener.accept())

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            if self.node is not None:
                await self._do(self.node.tick(read_clocks()))

    async def _converse(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                data = b""
                while b"\n" not in data:
                    part = await stream.receive_some()
                    if not part:
                        return
                    data += part
                line, _, rest = data.partition(b"\n")
                await self._answer(
                    msgspec.json.decode(line, type=Question), stream, rest
                )
            except trio.BrokenResourceError:
                return

    async def _answer(
        self, question: Question, stream: trio.SocketStream, rest: bytes
    ) -> None:
        if question.do == "fleet-link":
            args = msgspec.json.decode(question.args, type=LinkArgs)
            await self._serve_link(args, stream, rest)
        elif question.do == "fleet-leave":
            await reply(stream, ok=True, result={"node": await self._leave()})
        elif question.do == "count":
            words = msgspec.json.decode(question.args, type=dict[str, int])
            for number in range(words.get("most", 3)):
                await reply(stream, item=number)
            await reply(stream, end=True)
        elif question.do == "stats":  # as before there were fleets
            await reply(stream, ok=True, result={"state_dir": "/var/lib/sandhost"})
        elif question.do == "ps":
            names = [child.name for child in self.children.values()]
            await reply(stream, ok=True, result=names)
        else:
            await reply(stream, ok=False, error=f"it does not know {question.do!r}")

    async def _serve_link(
        self, args: LinkArgs, stream: trio.SocketStream, rest: bytes
    ) -> None:
        if args.version != self.version:
            error = f"the actor is {args.version!r}, the daemon {self.version!r}"
            await reply(stream, ok=False, error=error)
            return
        result = LinkAnswer(self.version, self.ledger, self.capacity)
        await reply(stream, ok=True, result=msgspec.to_builtins(result))
        self.link = stream
        if self.node is None:
            held = HeldSlices(args.node, LedgerRow(self.ledger))
            self.node = Node(args.node, args.labels, self.capacity, held)
            await self._do(self.node.join(read_clocks()))
        else:
            await self._do(self.node.relink(args.labels, args.ray, read_clocks()))
        reader = FrameReader(decode_from_directory)
        data: bytes | bytearray = rest
        while True:
            for message in reader.feed(bytes(data)):
                await self._do(self.node.receive(message, read_clocks()))
            data = await stream.receive_some()
            if not data:
                break
        if self.link is stream:
            self.link = None

    async def _leave(self) -> str | None:
        self.leaves += 1
        if self.may_leave is not None:
            await self.may_leave.wait()
        if self.node is None or self.node.is_out:
            return None
        await self._do(self.node.leave(read_clocks()))
        if not self.node.is_out:
            await self.left.wait()
        return self.node.name

    async def _do(self, step: NodeStep) -> None:
        assert self.node is not None
        for send in step.sends:
            if self.link is not None:
                try:
                    async with self.sending:
                        await self.link.send_all(encode_frame(send.message))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    self.link = None
        for action in step.actions:
            await self._act(self.node, action)

    async def _act(self, node: Node, action: on_node.Action) -> None:
        match action:
            case on_node.AskDaemon():
                await self._do(node.daemon_answered(action.number, 0))
            case on_node.Arm():
                node.armed(action.deadline_s)
            case on_node.StartChild():
                await self._start(node, action)
            case on_node.EndChild():
                await self.end(action.child, 143)
            case on_node.EndAll():
                self.children.clear()
                await self._do(node.all_gone(read_clocks()))
                self.left.set()
            case on_node.OperatorNotice() | on_node.CallsDecided():
                pass

    async def _start(self, node: Node, action: on_node.StartChild) -> None:
        if action.program.policy in self.missing:
            report = ChildReport(
                action.child, action.incarnation, "failed", reason="no such policy"
            )
            await self._do(node.child_over(report, read_clocks()))
            return
        self.children[action.child] = action
        await self._do(node.child_started(action.child, action.incarnation, 4711))
        words = action.program.command
        if words[0] == "exit":
            await self.end(action.child, int(words[1]))

    async def end(self, child: str, status: int) -> None:
        """Let a child end by itself."""
        assert self.node is not None
        started = self.children.pop(child, None)
        if started is not None:
            report = ChildReport(child, started.incarnation, "ended", status=status)
            await self._do(self.node.child_over(report, read_clocks()))


async def reply(stream: trio.SocketStream, **words: object) -> None:
    """Send a line of the control socket."""
    await stream.send_all(json.dumps({"v": CONTROL_VERSION, **words}).encode() + b"\n")
