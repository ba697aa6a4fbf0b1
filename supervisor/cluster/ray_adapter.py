"""All of Ray: two kinds of actor, how they call each other, and how they are made.

Imported only by processes that are Ray's or make them; no command does. An actor is a loop
of Trio in a thread (`LoopThread`): its methods, which Ray calls in a loop of asyncio, ask
it, so that a request that lasts holds no thread. Rules of this file.

1. Actors are detached, need no CPU and are started again for ever: a node actor on its
   node, and the directory on the head, and nowhere else (FL1, FL2). A directory whose
   store is in a PostgreSQL moves where the head's raylet is gone, to a node whose
   configuration names the same one.
2. No exception travels: an outcome is a `Reply`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import ray
import trio
from ray._private import services, utils
from ray._raylet import GcsClient
from ray.exceptions import GetTimeoutError
from ray.exceptions import RayError as RayFault
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hostlib.log import Log, place_of
from hostlib.threads import in_abandonable_thread
from supervisor.cluster import ray_processes
from supervisor.cluster.client import door_of
from supervisor.cluster.directory_start import READY, DirectoryStart
from supervisor.cluster.door import NodeDoor
from supervisor.cluster.loop_thread import LoopThread
from supervisor.cluster.node_service import JoinState, NodeService
from supervisor.cluster.requests import FleetUnavailableError, result_of
from supervisor.fleet.messages import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.cluster.orders import DirectoryOrder, NodeOrder
    from supervisor.cluster.requests import Reply

NAMESPACE = "sandhost-fleet"
DIRECTORY = "directory"
"""Name of the directory actor in the namespace."""

ALIVE_S = 4.0
"""Time from a request to the question for a sign of life; longest wait for the sign."""

LOOK_UP_S = 3.0
"""Longest time in which Ray finds an actor by its name."""

UP_S = 90.0
"""Longest start of Ray's processes, and then of the node."""

SEEN_S = 25.0
"""Longest time in which Ray notices a killed raylet: 17 s were measured."""

IDLE_S = 60.0
"""Time without a message after which a node's mailbox is given up."""

PAUSE_S = 0.25
"""Time between two looks."""

MOST_MESSAGES = 10_000
"""Most messages for an actor that is not found yet; the oldest are dropped, and sent
again."""

MOST_CALLS = 1000
"""Most calls under way to one actor: a stopped one answers none."""

MOST_ACTORS = 2000
"""Most other actors that an actor knows at once; names of nodes come and go."""

_NODE_PREFIX = "sandhost"
_OTHER_TOKEN = "InvalidAuthToken"  # noqa: S105 - a word of Ray's refusal
_CONCURRENCY = 4096  # requests to one actor at once; further ones wait


class AdapterError(Exception):
    """Something cannot be done with Ray; the text says why and what to do."""


# Between actors


class Mailbox:
    """Messages on their way to an actor; they may be lost.

    No call waits for the one before: one to an actor that was just killed is answered
    late, and a node bears no four seconds without a beat.

    Args:
        find: returns the actor; it blocks, and raises where there is none.
        idle_s: `run` ends when no message has come for so long.
    """

    def __init__(self, find: Callable[[], Any], idle_s: float = math.inf) -> None:
        self._find = find
        self._idle_s = idle_s
        self._waiting: deque[bytes] = deque(maxlen=MOST_MESSAGES)  # drops the oldest
        self._come = trio.Event()
        self._actor: Any = None
        self._under_way: set[Any] = set()

    def put(self, messages: list[bytes]) -> None:
        """Put messages behind the others."""
        self._waiting += messages
        self._come.set()

    async def run(self) -> None:
        """Send messages until cancelled, or no more come."""
        limiter = trio.CapacityLimiter(1)
        self._token = trio.lowlevel.current_trio_token()
        while True:
            with trio.move_on_after(self._idle_s):
                await self._come.wait()
            if not self._come.is_set():
                return
            self._come = trio.Event()
            if not self._waiting or len(self._under_way) >= MOST_CALLS:
                continue
            messages = list(self._waiting)
            self._waiting.clear()
            try:
                actor = self._actor
                if actor is None:
                    actor = await in_abandonable_thread(self._find, limiter=limiter)
                    self._actor = actor
                method = actor.receive.options(concurrency_group="messages")
                future = method.remote(messages).future()
                self._under_way.add(future)  # else Ray forgets it, and tells nothing
                future.add_done_callback(self._note)
            except (RayFault, ValueError, OSError):
                self._actor = None  # no such actor for now

    def _note(self, future: Any) -> None:
        """Look the actor up anew where one was not reached; from a thread of Ray's."""
        is_full = len(self._under_way) >= MOST_CALLS
        self._under_way.discard(future)
        if is_full:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.put, [])
        if future.exception() is not None:
            self._actor = None


class _Outcome:
    """The outcome of a call of an actor, for a task that waits for it."""

    def __init__(self, ref: Any) -> None:
        token = trio.lowlevel.current_trio_token()
        self._over = trio.Event()
        self._future = ref.future()

        def tell(_future: object) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._over.set)

        self._future.add_done_callback(tell)

    async def result(self) -> Any:
        """Return what the call returned.

        Raises:
            RayFault: the actor was not reached, or has ended meanwhile.
        """
        await self._over.wait()
        return self._future.result()


def _find_actor(name: str) -> Any:
    return ray.get_actor(name, NAMESPACE)


def _node_actor(node: str) -> str:
    return f"node/{node}"


class Actors:
    """The other actors, as one of them reaches them.

    Args:
        find: returns the actor of a name; it blocks, and raises where there is none.
        most: are kept once they were found; the oldest go, and are looked up anew.
    """

    def __init__(self, find: Callable[[str], Any], most: int = MOST_ACTORS) -> None:
        self._look_up = find
        self._most = most
        self._found: dict[str, Any] = {}
        self._limiter = trio.CapacityLimiter(8)

    async def ask(self, name: str, what: str, *words: object) -> bytes:
        """Return the answer of an actor.

        Raises:
            RequestError: it refuses, or is unavailable.
        """
        try:
            actor = self._found.get(name)
            if actor is None:
                actor = await self._find(name, what)
                self._found[name] = actor
                if len(self._found) > self._most:
                    del self._found[next(iter(self._found))]
            reply = await answered(actor, what, *words)
        except (RayFault, ValueError, OSError) as why:
            self._found.pop(name, None)
            text = f"cannot reach {what}: {_first_line(why)}; try again"
            raise FleetUnavailableError(text) from None
        return result_of(reply)

    async def _find(self, name: str, what: str) -> Any:
        with trio.move_on_after(LOOK_UP_S):
            return await in_abandonable_thread(
                self._look_up, name, limiter=self._limiter
            )
        raise FleetUnavailableError(
            f"cannot reach {what}: Ray's head does not answer within {LOOK_UP_S:g} s;"
            " try again, or look at the head's machine"
        )


async def answered(actor: Any, what: str, *words: object) -> Reply:
    """Return the outcome of a request, which may last while the actor is alive.

    Raises:
        RayFault: it was not reached, or has ended meanwhile.
        FleetUnavailableError: it is silent.
    """
    outcome = _Outcome(actor.ask.remote(*words))
    while True:
        with trio.move_on_after(ALIVE_S):
            found: Reply = await outcome.result()
            return found
        receive = actor.receive.options(concurrency_group="messages")
        with trio.move_on_after(ALIVE_S) as scope:
            await _Outcome(receive.remote([])).result()
        if scope.cancelled_caught:
            raise FleetUnavailableError(
                f"cannot reach {what}: its actor does not answer within"
                f" {2 * ALIVE_S:g} s: its machine may be cut off, or stopped; try again"
            )


class _RayPeers:
    """`node_service.FleetPeers` on Ray."""

    def __init__(self) -> None:
        self._actors = Actors(_find_actor)
        self.mailbox = Mailbox(lambda: _find_actor(DIRECTORY))

    def send(self, messages: list[bytes]) -> None:
        """Send messages of the node to the directory."""
        self.mailbox.put(messages)

    async def ask_directory(self, do: str, args: bytes) -> bytes:
        """Return the directory's answer as JSON."""
        what = "the fleet's directory"
        return await self._actors.ask(DIRECTORY, what, VERSION, do, args)

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Return the answer of another node's actor as JSON."""
        return await self._actors.ask(
            _node_actor(node), f"node {node!r}", VERSION, do, args
        )


# Actors


class DirectoryActor:
    """The directory of the fleet.

    Args:
        order: for it.
    """

    def __init__(self, order: DirectoryOrder) -> None:
        # It may have moved to another node than the one that has made it.
        self._log = _open_log(os.environ[ray_processes.MARK])
        self._mailboxes: dict[str, Mailbox] = {}
        self._directory = DirectoryStart(order, self._deliver, self._log)
        self._loop = LoopThread(self._run, _teller(self._log))

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(_end_with, os.getppid())
            task_status.started()
            await self._directory.run()

    def _deliver(self, node: str, message: bytes) -> None:
        mailbox = self._mailboxes.get(node)
        if mailbox is None:
            mailbox = Mailbox(lambda: _find_actor(_node_actor(node)), IDLE_S)
            self._mailboxes[node] = mailbox
            self._nursery.start_soon(self._run_mailbox, node, mailbox)
        mailbox.put([message])

    async def _run_mailbox(self, node: str, mailbox: Mailbox) -> None:
        await mailbox.run()
        del self._mailboxes[node]

    def receive(self, messages: list[bytes]) -> None:
        """Take messages of nodes."""
        self._loop.call_soon(self._directory.receive, messages)

    async def ask(self, version: str, do: str, args: bytes) -> Reply:
        """Return the outcome of a question or an order."""
        return await self._loop.call(self._directory.answer, version, do, args)


async def _end_with(raylet: int) -> None:
    """Wait for the end of this process's raylet; Ray delivers it nothing from then on.

    It may live on, and send: a directory would leave the store to no other one, and a
    node would be up and take no order.

    Raises:
        AdapterError: the raylet has ended.
    """
    pidfd = os.pidfd_open(raylet)
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    raise AdapterError("the raylet has ended")


class NodeActor:
    """The actor of one node."""

    def __init__(self, order: NodeOrder) -> None:
        self._order = order
        self._log = _open_log(order.directory)
        self._others = _RayPeers()
        self._service = NodeService(order, self._others, self._log, self._end)
        self._loop = LoopThread(self._run, _teller(self._log))

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        door = door_of(self._order.control)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_with, os.getppid())
            nursery.start_soon(self._others.mailbox.run)
            await nursery.start(self._service.run)
            nursery.start_soon(NodeDoor(self._service).serve, door, self._log)
            task_status.started()

    def _end(self) -> None:
        """End Ray here if it was started for this node, and this actor in any case."""
        ray_processes.end_later(self._order.directory)
        ray.kill(ray.get_runtime_context().current_actor)

    def receive(self, messages: list[bytes]) -> None:
        """Take messages of the directory."""
        self._loop.call_soon(self._service.deliver, messages)

    async def ask(self, version: str, do: str, args: bytes) -> Reply:
        """Return the outcome of a request."""
        return await self._loop.call(self._service.answer, version, do, args)


def _open_log(directory: str) -> Log:
    """Return a log in a file of a node's directory: Ray's own goes with its session."""
    fd = os.open(
        f"{directory}/{ray_processes.ACTORS_LOG}",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o600,
    )
    os.dup2(fd, 2)
    os.close(fd)
    return Log("INFO", as_json=True)


def _teller(log: Log) -> Callable[[BaseException], None]:
    return lambda why: log.write("ERROR", f"The actor ends: {place_of(why)}: {why}")


def _first_line(why: BaseException) -> str:
    lines = str(why).splitlines()
    return lines[0] if lines else type(why).__name__


def _actor(kind: type, name: str, node_id: str, resource: str | None = None) -> Any:
    """Return what makes an actor of a name on a node of Ray (rule 1).

    Args:
        kind: the actor.
        name: of the actor.
        node_id: of the node.
        resource: of the nodes to which it may move; None: it stays on its own.
    """
    return ray.remote(concurrency_groups={"messages": 1})(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=_CONCURRENCY,
        resources={} if resource is None else {resource: 0.001},
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            node_id, soft=resource is not None
        ),
    )


# Making them


class Versions(NamedTuple):
    """Versions that are the same on all nodes; of Python the first two numbers."""

    ray: str
    python: str

    @property
    def _compared(self) -> tuple[str, list[str]]:
        return self.ray, self.python.split(".")[:2]

    def check(self, cluster: Versions, address: str) -> None:
        """Refuse a cluster of other versions.

        Raises:
            AdapterError: it is one; both versions are named.
        """
        if self._compared != cluster._compared:
            raise AdapterError(
                f"cannot join {address}: it runs Ray {cluster.ray} on Python"
                f" {cluster.python}, this node has Ray {self.ray} on Python"
                f" {self.python}; install the fleet's versions here"
            )


def own_versions() -> Versions:
    """Return those of this process."""
    return Versions(ray.__version__, ".".join(map(str, sys.version_info[:3])))


def keep_loopback() -> None:
    """Let Ray take 127.0.0.1 where it is told so, and not this machine's own address."""
    services.resolve_ip_for_localhost = lambda host: host


def run_ray(words: list[str]) -> int:
    """Run Ray's own command line in this process; return its status."""
    from ray.scripts import scripts  # noqa: PLC0415 - of this program alone

    keep_loopback()
    # Where grpc is installed a head would start the client server, which runs code too.
    scripts.get_ray_client_dependency_error = lambda: "it is not started"
    # Without it a head would run the dashboard's process all the same, for figures.
    services.start_api_server = lambda *_, **__: (None, None)
    return int(scripts.cli(words, standalone_mode=False) or 0)


class Cluster:
    """A running cluster as its head tells of it, before anything of it is joined.

    Args:
        address: of the head, IP:PORT.

    Raises:
        AdapterError: no head answers there, or the token is another one.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            self._client = GcsClient(address=address)
            data = self._client.internal_kv_get(b"CLUSTER_METADATA", b"cluster")
        except Exception as why:  # noqa: BLE001 - Ray raises many kinds
            reason = _first_line(why)
            if _OTHER_TOKEN in reason:
                reason = "its token is another one"
            raise AdapterError(no_reach(address, reason)) from None
        found = json.loads(data or b"{}")
        self.versions = Versions(
            str(found.get("ray_version")), str(found.get("python_version"))
        )

    def raylets(self) -> dict[str, tuple[str, str]]:
        """Return (id, address) of the raylets that are alive, by their names."""
        rows = self._client.get_all_node_info().values()
        return {
            row.node_name: (row.node_id.hex(), row.node_manager_address)
            for row in rows
            if row.state == 0
        }

    def is_fleet(self) -> bool:
        """Return whether a node of a fleet is there."""
        return any(name.startswith(f"{_NODE_PREFIX}:") for name in self.raylets())

    def has_resource(self, raylet: str, resource: str) -> bool:
        """Return whether a raylet that is alive was started with a resource."""
        return any(
            resource in row.resources_total
            for row in self._client.get_all_node_info().values()
            if row.node_name == raylet and row.state == 0
        )

    def ports_of(self, raylet: str) -> tuple[int, ...]:
        """Return the ports of a raylet that is alive, without those of its workers."""
        found = set()
        for row in self._client.get_all_node_info().values():
            if row.node_name == raylet and row.state == 0:
                fields = (field.name for field in row.DESCRIPTOR.fields)
                found |= {
                    getattr(row, name) for name in fields if name.endswith("_port")
                }
        return tuple(sorted(port for port in found if port > 0))

    def check_name(self, node: str, before: str) -> None:
        """Refuse a name that a node of the fleet has.

        Args:
            node: the name.
            before: raylet that this node had before; it has ended, though Ray may not
                have seen it yet.

        Raises:
            AdapterError: one has it.
        """
        others = self.raylets().keys() - {before}
        if any(_is_of_node(name, node) for name in others):
            raise _name_error(node)


def no_reach(address: str, reason: str) -> str:
    """Return the text for a head that does not answer, or not to this token."""
    return (
        f"cannot reach {address}: {reason:.80}; give the address and the token file that"
        " `fleet up` has printed"
    )


def _name_error(node: str) -> AdapterError:
    return AdapterError(
        f"cannot join as {node!r}: a node of that name is in the fleet; choose another"
        " by --node"
    )


def raylet_name(node: str) -> str:
    """Return a name for the raylet of a node, which no other raylet has."""
    return f"{_NODE_PREFIX}:{node}:{secrets.token_hex(4)}"


def _is_of_node(raylet: str, node: str) -> bool:
    prefix, _, rest = raylet.partition(":")
    return prefix == _NODE_PREFIX and rest.rpartition(":")[0] == node


def foreign_raylet(
    cluster: Cluster, addresses: frozenset[str]
) -> tuple[str, str] | None:
    """Return (name, id) of a raylet here that is no node's yet; None: there is none."""
    for name, (node_id, address) in cluster.raylets().items():
        if address in addresses and not name.startswith(f"{_NODE_PREFIX}:"):
            return name, node_id
    return None


class Driver:
    """This process as a driver of a cluster, for the length of a `with` block.

    Args:
        address: of the head, IP:PORT.
        bind: address of the raylet here.
    """

    def __init__(self, address: str, bind: str) -> None:
        self._address = address
        self._bind = bind

    def __enter__(self) -> Self:
        keep_loopback()
        # Ray's own handler would let a second SIGTERM cut the clean-up of a start.
        utils.set_sigterm_handler = lambda _: None
        ray.init(
            address=self._address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=self._bind,
        )
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def node_id(self, raylet: str) -> str:
        """Return the id of a raylet that is alive.

        Raises:
            AdapterError: there is none of that name.
        """
        for row in ray.nodes():
            if row["NodeName"] == raylet and row["Alive"]:
                return str(row["NodeID"])
        raise AdapterError(
            f"cannot find the raylet {raylet!r}: it has ended; try again"
        )

    def make_directory(self, order: DirectoryOrder, node_id: str) -> None:
        """Make the directory actor, and wait until it has its store.

        Raises:
            AdapterError: it cannot have it.
        """
        made = _actor(DirectoryActor, DIRECTORY, node_id, order.resource)
        ref = made.remote(order).ask.remote(VERSION, READY, b"{}")
        try:
            is_done, data = ray.get(ref, timeout=UP_S)
        except RayFault as why:
            raise AdapterError(
                f"cannot begin a fleet: its directory does not start: {_first_line(why)}"
            ) from None
        if not is_done:
            raise AdapterError(data.decode())

    def make_node(self, order: NodeOrder, node_id: str, *, is_again: bool) -> None:
        """Make a node actor, and wait until the node is up.

        Args:
            order: for it.
            node_id: of its raylet.
            is_again: the node had a raylet before; Ray may not have seen its end yet.

        Raises:
            AdapterError: it does not come up; its actor has ended again.
        """
        until_s = time.monotonic() + (SEEN_S if is_again else 0.0)
        actor: Any = None
        while actor is None:
            try:
                made = _actor(NodeActor, _node_actor(order.node), node_id)
                actor = made.remote(order)
            except ValueError:
                if time.monotonic() >= until_s:
                    raise _name_error(order.node) from None
                ray_processes.pause(PAUSE_S)
        try:
            _wait_up(actor, order.node)
        except BaseException:
            ray.kill(actor)
            raise


def _wait_up(actor: Any, node: str) -> None:
    """Return when the directory shows a node as up.

    Raises:
        AdapterError: it was refused, or is not up in time.
    """
    state = JoinState(is_up=False, reason="its actor does not answer")
    until_s = time.monotonic() + UP_S
    while time.monotonic() < until_s:
        ref = actor.ask.remote(VERSION, "join-state", b"{}")
        try:
            is_done, data = ray.get(ref, timeout=max(0.1, until_s - time.monotonic()))
        except GetTimeoutError:
            break
        except RayFault as why:
            state = JoinState(is_up=False, reason=_first_line(why))
            continue
        if not is_done:
            state = JoinState(is_up=False, reason=data.decode())
            break
        state = msgspec.json.decode(data, type=JoinState)
        if state.is_up:
            return
        if state.is_final:
            break
    raise AdapterError(state.refusal(node))
