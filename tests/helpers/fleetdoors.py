"""A fleet of real daemons, with the product's directory, nodes and doors; no Ray.

    async with fleet_of(tmp_path, a=one, b=other) as scene:
        child = await scene.call(create, "/srv/repo", control=scene.control("a"))

Directory and node actors live in the test's loop, and call each other there.
"""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from hostlib.log import Log
from hostlib.threads import in_thread
from supervisor.cluster.client import FleetClient
from supervisor.cluster.directory_service import DirectoryService
from supervisor.cluster.door import NodeDoor
from supervisor.cluster.names import DOOR
from supervisor.cluster.node_service import JoinState, NodeService
from supervisor.cluster.orders import NodeOrder
from supervisor.cluster.ray_processes import DIRECTORY
from supervisor.cluster.requests import FleetUnavailableError, Reply, result_of
from supervisor.fleet.messages import VERSION, RayPlace
from supervisor.fleet.store import FleetStore
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetscene import CALM_S

LOG = Log("ERROR")

T = TypeVar("T")

RUN = (str(Path(sys.executable).with_name("sandhost")), "fleet", "run")

FLEET = """
[fleet]
[workspace.repo]
base = "{where}/repo"
"""


@dataclass
class FleetPeers:
    """The other parts of the fleet, as one node's actor reaches them.

    Attributes:
        is_killed: the actor is gone; nothing that it says on its way arrives.
        meanwhile: done once, before the next answer of the directory to what it names.
        failing: requests of which the next answer is lost.
        may_arrive: requests reach the directory once it is set; None: at once.
    """

    scene: "Doors"
    is_killed: bool = False
    meanwhile: tuple[str, Callable[[], Awaitable[object]]] | None = None
    failing: set[str] = field(default_factory=set)
    may_arrive: trio.Event | None = None

    def send(self, messages: list[bytes]) -> None:
        """Pass what the node sends to the directory."""
        if not (self.is_killed or self.scene.is_away):
            self.scene.directory.receive(messages)

    async def ask_directory(self, do: str, args: bytes) -> bytes:
        """Ask the directory."""
        self._check()
        if self.scene.is_away:
            self.scene.missed.set()
            raise FleetUnavailableError(
                "cannot reach the fleet's directory: it has ended"
            )
        answer = await self._directory_answers(do, args)
        self.scene.asked["directory", do] += 1
        self._lose(do)
        if self.meanwhile is not None and self.meanwhile[0] == do:
            (_, happen), self.meanwhile = self.meanwhile, None
            await happen()
        return result_of(answer)

    async def _directory_answers(self, do: str, args: bytes) -> Reply:
        """Return its answer; the request arrives also where nobody waits any more."""
        send, answers = trio.open_memory_channel[Reply](1)

        async def arrive() -> None:
            if self.may_arrive is not None:
                await self.may_arrive.wait()
            send.send_nowait(await self.scene.directory.answer(VERSION, do, args))

        self.scene.nursery.start_soon(arrive)
        return await answers.receive()

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Ask another node."""
        self._check()
        reply = None
        actor = self.scene.nodes.get(node)
        if actor is not None:
            reply = await actor.answer(VERSION, do, args)
        if reply is None or self.scene.nodes.get(node) is not actor:
            self.scene.missed.set()
            raise FleetUnavailableError(f"cannot reach node {node!r}")
        self.scene.asked[node, do] += 1
        self._lose(do)
        return result_of(reply)

    def _lose(self, do: str) -> None:
        if do in self.failing:
            self.failing.remove(do)
            raise FleetUnavailableError(
                f"the fleet's directory does not answer to {do!r}"
            )

    def _check(self) -> None:
        if self.is_killed:
            raise FleetUnavailableError("this actor was killed")


@dataclass
class Doors:
    """The fleet.

    Attributes:
        daemons: by the names of their nodes.
        nodes: the actors that run.
        ray: where Ray of a node is said to listen, before it begins.
        is_away: the directory has ended.
        missed: set when a part that has ended was asked for.
        asked: how many requests a part has answered to another: `directory` or a node.
    """

    nursery: trio.Nursery
    where: Path
    lease_s: float
    daemons: dict[str, Daemon]
    is_away: bool = True
    missed: trio.Event = field(default_factory=trio.Event)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    nodes: dict[str, NodeService] = field(default_factory=dict)
    ray: dict[str, RayPlace] = field(default_factory=dict)
    _scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    _ended: dict[str, trio.Event] = field(default_factory=dict)
    _others: dict[str, FleetPeers] = field(default_factory=dict)

    def control(self, node: str) -> str:
        """Return the control socket of a node's daemon."""
        return f"{self.daemons[node].where}/run/control"

    def client(self, node: str) -> FleetClient:
        """Return what asks a node's door."""
        return FleetClient(self.control(node))

    async def call(self, do: Callable[..., T], *args: Any, **words: Any) -> T:
        """Call a blocking function in a thread."""
        return await in_thread(partial(do, *args, **words))

    def meanwhile(
        self, node: str, do: str, happen: Callable[[], Awaitable[object]]
    ) -> None:
        """Have something happen before a node has the next answer of the directory."""
        self._others[node].meanwhile = do, happen

    def lose_answer(self, node: str, do: str) -> None:
        """Have a node not get the next answer of another part to a request."""
        self._others[node].failing.add(do)

    def hold_requests(self, node: str) -> trio.Event:
        """Have a node's requests reach the directory only when the event is set."""
        self._others[node].may_arrive = may_arrive = trio.Event()
        return may_arrive

    # The directory

    async def begin_directory(self) -> None:
        """Start the directory, on the store of the one before."""
        self.directory: DirectoryService = await self.nursery.start(self._serve)
        self.is_away = False

    async def kill_directory(self) -> None:
        """End the directory, as a kill of its process does."""
        self.is_away = True
        self._directory_scope.cancel()
        await self._directory_ended.wait()

    async def _serve(
        self, task_status: trio.TaskStatus[DirectoryService] = trio.TASK_STATUS_IGNORED
    ) -> None:
        def deliver(node: str, message: bytes) -> None:
            if node in self.nodes:
                self.nodes[node].deliver([message])

        self._directory_ended = trio.Event()
        store = FleetStore(str(self.where / "store"))
        try:
            with trio.CancelScope() as self._directory_scope:
                service = DirectoryService(
                    store, store.load(), deliver, LOG, self.lease_s
                )
                task_status.started(service)
                await service.run()
        finally:
            store.close()
            self._directory_ended.set()

    async def away(self, part: str) -> None:
        """End a part until it was asked for: the directory, or a node's actor."""
        self.missed = trio.Event()
        if part == "directory":
            await self.kill_directory()
            await self.missed.wait()
            await self.begin_directory()
        else:
            await self.kill(part)
            await self.missed.wait()
            await self.begin(part)

    async def gone(self, part: str) -> None:
        """Wait until the directory, or a node's actor, has ended."""
        is_directory = part == "directory"
        await (self._directory_ended if is_directory else self._ended[part]).wait()

    # Node actors

    async def begin(self, node: str) -> None:
        """Start the actor of a node; the first time, wait until the node is up."""
        control = self.control(node)
        self._others[node] = others = FleetPeers(self)
        is_head = node == next(iter(self.daemons))
        directory = f"{self.daemons[node].where}/state/{DIRECTORY}"
        labels, ray = (node, "gpu"), self.ray.get(node)
        order = NodeOrder(node, labels, control, directory, is_head, ray)
        service = NodeService(order, others, LOG, lambda: None)
        state = JoinState(is_up=node in self._ended)
        self._ended[node] = trio.Event()
        await self.nursery.start(self._live, node, service)
        while not state.is_up:
            answer = result_of(await service.answer(VERSION, "join-state", b"{}"))
            state = msgspec.json.decode(answer, type=JoinState)
            await trio.sleep(0.01)

    async def started(self, node: str) -> None:
        """Wait until a child runs on a node."""
        child = None
        while child is None:
            answer = await self.directory.answer(VERSION, "ps", b"{}")
            rows = msgspec.json.decode(result_of(answer))["children"]
            on = [
                row for row in rows if (row["node"], row["state"]) == (node, "running")
            ]
            child = next(iter(on), None)
            await trio.sleep(0.05)

    async def kill(self, node: str) -> None:
        """End the actor of a node and its door, as a kill of its process does."""
        self._others[node].is_killed = True
        self._scopes[node].cancel()
        await self._ended[node].wait()

    async def _live(
        self, node: str, service: NodeService, task_status: trio.TaskStatus[None]
    ) -> None:
        door = str(Path(self.control(node)).with_name(DOOR))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                self._scopes[node], self.nodes[node] = scope, service
                await nursery.start(service.run)
                await nursery.start(NodeDoor(service).serve, door, LOG)
                task_status.started()
        del self.nodes[node]
        self._ended[node].set()


@asynccontextmanager
async def fleet_of(
    where: Path, lease_s: float = CALM_S, **daemons: Daemon
) -> AsyncIterator[Doors]:
    """Join daemons to a fleet while the block runs.

    Args:
        where: a directory for the store.
        lease_s: L.
        daemons: by the names of their nodes.
    """
    async with trio.open_nursery() as nursery:
        scene = Doors(nursery, where, lease_s, daemons)
        await scene.begin_directory()
        for node in daemons:
            await scene.begin(node)
        yield scene
        nursery.cancel_scope.cancel()


@contextmanager
def node_at(where: Path) -> Iterator[Daemon]:
    """Start a daemon that may be a node, with a directory `repo` for a workspace."""
    (where / "repo").mkdir(parents=True)
    (where / "repo" / "a.txt").write_text("hello\n")
    with daemon(where, FLEET.format(where=where), grace="1s") as one:
        yield one


async def run_in(scene: Doors, *words: str, data: bytes = b"") -> Outcome:
    """Run `sandhost fleet run` on node a, with an input."""
    words = ("fleet", "run", "--control", scene.control("a"), *words)
    return await scene.call(partial(sandhost, *words, data=data))
