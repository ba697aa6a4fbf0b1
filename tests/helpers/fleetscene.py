"""A fleet without Ray: the product's `Directory` in a test, linked to daemons.

    async with fleet(tmp_path / "head") as scene:
        await scene.link(control, "a")
        await scene.until(lambda: scene.node("a") == "up")

`Scene.link` speaks as a node actor does: the control socket, one request, frames.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from hostlib.log import Log
from supervisor.control.client import VERSION as CONTROL_VERSION
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.directory import Directory, PlacementRequest
from supervisor.fleet.lease import LEASE_S
from supervisor.fleet.link import ActorReader, LinkArgs, encode_frame, request_line
from supervisor.fleet.listings import ShownChild
from supervisor.fleet.messages import FromNode, Message, Program, RayPlace
from supervisor.fleet.placement import Needs
from supervisor.fleet.step import Step
from supervisor.fleet.store import FleetStore, StepWriter

PATIENCE_S = 60.0
"""Longest wait for anything, on a machine where much else runs."""

CALM_S = 30.0
"""A lease that a busy machine does not lose, for tests of something else."""

TICK_S = 0.05


class Scene:
    """A directory and its links.

    Attributes:
        directory: decides.
        heard: all messages that nodes have sent.
        sent: all messages of the directory for nodes.
        cut: nodes whose messages go nowhere, either way.
        deaf_to: the name of messages that the directory does not get.
    """

    def __init__(
        self, store: FleetStore, lease_s: float, nursery: trio.Nursery
    ) -> None:
        self.directory = Directory(store.epoch, store.load(), read_clocks(), lease_s)
        self.heard: list[FromNode] = []
        self.sent: list[Message] = []
        self.cut: set[str] = set()
        self.deaf_to = ""
        self.nursery = nursery
        self._streams: dict[str, trio.SocketStream] = {}
        self._ended: dict[str, trio.Event] = {}
        self._writer = StepWriter(store, self._carry_out, Log("WARNING"))
        self._wake = trio.Event()
        self._changed = trio.Event()
        self._outgoing: dict[str, list[bytes]] = {}
        self.do(self.directory.name_fleet(os.urandom(8).hex()))

    # The directory

    def do(self, step: Step) -> None:
        """Have a step of the directory stored and carried out."""
        self._writer.add(step)
        self._wake.set()

    def _carry_out(self, step: Step) -> None:
        for send in step.sends:
            self.sent.append(send.message)
            if send.node not in self.cut and send.node in self._streams:
                frame = encode_frame(send.message)
                self._outgoing.setdefault(send.node, []).append(frame)

    async def run(self) -> None:
        """Let the directory live."""
        while True:
            self.do(self.directory.tick(read_clocks()))
            with trio.move_on_after(TICK_S):
                await self._wake.wait()
            self._wake = trio.Event()
            await self._writer.flush()
            self._changed.set()
            self._changed = trio.Event()
            for node, frames in list(self._outgoing.items()):
                del self._outgoing[node]
                stream = self._streams.get(node)
                if stream is not None:
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await stream.send_all(b"".join(frames))

    def spawn(
        self,
        name: str,
        *command: str,
        node: str | None = None,
        wait: bool = False,
        **program: object,
    ) -> None:
        """Order a child."""
        asked = Program(command, **program)  # type: ignore[arg-type]
        needs = Needs(node=node)
        request = PlacementRequest(name=name, program=asked, needs=needs, wait=wait)
        _, step = self.directory.spawn(request, read_clocks())
        self.do(step)

    def kill(self, name: str, signal: str = "TERM") -> None:
        """Order a child's end."""
        self.do(self.directory.kill(name, signal, read_clocks()))

    def node(self, name: str) -> str | None:
        """Return a node's state; None if there is no such node."""
        found = [one.state for one in self.directory.ps().nodes if one.name == name]
        return found[0] if found else None

    def child(self, name: str) -> ShownChild:
        """Return a child."""
        (found,) = (one for one in self.directory.ps().children if one.name == name)
        return found

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        with trio.fail_after(PATIENCE_S):
            while not is_so():
                changed = self._changed
                with trio.move_on_after(TICK_S):
                    await changed.wait()

    async def until_running(self, name: str) -> ShownChild:
        """Wait until a child runs."""
        await self.until(lambda: self.child(name).state == "running")
        return self.child(name)

    # Node actors

    async def link(
        self, control: str, node: str, *labels: str, ray: RayPlace | None = None
    ) -> ActorReader:
        """Link a node's daemon; return its answer, with what reads the link.

        Raises:
            LinkError: it is refused.
        """
        stream = await trio.open_unix_socket(control)
        args = LinkArgs(node, labels, ray=ray)
        reader, messages = ActorReader(), list[FromNode]()
        try:
            await stream.send_all(request_line(args, CONTROL_VERSION))
            while reader.answer is None:
                data = await stream.receive_some(4096)
                assert data, "no answer"
                messages += reader.feed(data)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        self._streams[node], self._ended[node] = stream, trio.Event()
        self._hear(node, messages)
        self.nursery.start_soon(self._read, node, stream, reader)
        return reader

    def _hear(self, node: str, messages: list[FromNode]) -> None:
        for message in messages:
            self.heard.append(message)
            is_heard = type(message).__name__ != self.deaf_to
            if node not in self.cut and is_heard:
                self.do(self.directory.receive(message, read_clocks()))

    async def _read(
        self, node: str, stream: trio.SocketStream, reader: ActorReader
    ) -> None:
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with stream:
                    while data := await stream.receive_some(65_536):
                        self._hear(node, reader.feed(data))
        finally:
            self._ended[node].set()

    async def unlink(self, node: str) -> None:
        """Close a link, as the end of an actor does; the daemon has seen it then."""
        with suppress(OSError):  # the daemon has closed it already
            self._streams.pop(node).socket.shutdown(socket.SHUT_WR)
        await self._ended[node].wait()


@asynccontextmanager
async def fleet(where: Path, lease_s: float = LEASE_S) -> AsyncIterator[Scene]:
    """Open a fleet's directory while the block runs.

    Args:
        where: its store.
        lease_s: L.
    """
    store = FleetStore(str(where))
    try:
        async with trio.open_nursery() as nursery:
            scene = Scene(store, lease_s, nursery)
            nursery.start_soon(scene.run)
            yield scene
            nursery.cancel_scope.cancel()
    finally:
        store.close()
