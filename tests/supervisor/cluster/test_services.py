"""Directory and nodes in one loop, joined without Ray; daemons are stand-ins."""

import errno
import json
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hostlib.log import Log
from hostlib.threads import in_thread
from supervisor.cluster import client, commands, door
from supervisor.cluster.client import TIMEOUT_S
from supervisor.cluster.directory_service import DirectoryService
from supervisor.cluster.door import NodeDoor
from supervisor.cluster.fleet_child import Holder
from supervisor.cluster.names import DOOR
from supervisor.cluster.node_service import JoinState, NodeService
from supervisor.cluster.orders import NodeOrder
from supervisor.cluster.requests import FleetUnavailableError, RequestError, result_of
from supervisor.control.client import ControlError, RefusedError, call, stream
from supervisor.control.client import UnavailableError as StillUnavailableError
from supervisor.control.server import MAX_WAITING
from supervisor.fleet import directory, store
from supervisor.fleet.messages import VERSION, Refused, Session, encode
from supervisor.fleet.store import FleetStore
from tests.helpers.command import sandhost
from tests.helpers.fleetnode import StandIn

LOG = Log("ERROR")


@dataclass
class Scene:
    """A fleet: a directory, node services, their daemons and doors.

    Attributes:
        scopes: each ends a node's service, as a kill of its actor would.
        is_cut: the directory is not reached.
        is_hung: the directory is reached, and answers nobody.
        hung: nodes whose actors answer nobody.
        may_end: other nodes take no request to end their Ray before; None: at once.
        ending: set with the first such request.
        given_up: set when a request to a node that is hung was cancelled.
        losing: by request, whether each of the directory's next answers is lost.
    """

    where: Path
    nursery: trio.Nursery
    nodes: dict[str, NodeService] = field(default_factory=dict)
    daemons: dict[str, StandIn] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    is_cut: bool = False
    is_hung: bool = False
    hung: set[str] = field(default_factory=set)
    may_end: trio.Event | None = None
    ending: trio.Event = field(default_factory=trio.Event)
    given_up: trio.Event = field(default_factory=trio.Event)
    losing: dict[str, Iterator[bool]] = field(default_factory=dict)
    directory: DirectoryService | None = None

    def deliver(self, node: str, message: bytes) -> None:
        """Pass what the directory sends to a node."""
        if node in self.nodes and not self.is_cut:
            self.nodes[node].deliver([message])

    def send(self, messages: list[bytes]) -> None:
        """Pass what a node sends, as `Others` says."""
        if self.directory is not None and not self.is_cut:
            self.directory.receive(messages)

    async def ask_directory(self, do: str, args: bytes) -> bytes:
        """Ask the directory, as `Others` says."""
        if self.directory is None or self.is_cut:
            raise RequestError("cannot reach the fleet's directory")
        if self.is_hung:
            await trio.sleep_forever()
        answer = await self.directory.answer(VERSION, do, args)
        if next(self.losing.get(do, iter(())), False):
            raise FleetUnavailableError(
                f"the directory has ended before it answered {do!r}"
            )
        return result_of(answer)

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Ask another node, as `Others` says."""
        if node in self.hung:
            try:
                await trio.sleep_forever()
            finally:
                self.given_up.set()
        if do == "end-ray":
            self.ending.set()
            if self.may_end is not None:
                await self.may_end.wait()
        return result_of(await self.nodes[node].answer(VERSION, do, args))

    async def add(
        self, name: str, labels: tuple[str, ...] = (), capacity: int = 8
    ) -> NodeService:
        """Start a node with its daemon and its door, and wait until it is up."""
        place = self.where / name
        place.mkdir()
        daemon = StandIn(f"ledger-{name}", capacity)
        await self.nursery.start(daemon.serve, f"{place}/control")
        order = NodeOrder(name, labels, f"{place}/control", f"{place}/fleet")
        node = NodeService(order, self, LOG, lambda: self.ended.append(name))
        self.nodes[name], self.daemons[name] = node, daemon
        self.scopes[name] = trio.CancelScope()
        self.nursery.start_soon(run_within, self.scopes[name], node)
        state = json.loads(result_of(await node.answer(VERSION, "join-state", b"{}")))
        assert state == {"is_up": True, "reason": "", "is_final": False}
        await self.nursery.start(NodeDoor(node).serve, f"{place}/{DOOR}", LOG)
        return node

    async def ask(self, node: str, what: str, /, **args: Any) -> Any:
        """Return what the door of a node answers."""
        return await in_thread(call, f"{self.where}/{node}/{DOOR}", what, args)

    async def end(self, node: str, do: str) -> dict[str, str]:
        """Leave or end the fleet at a node; return other nodes that did not leave."""
        items = await in_thread(
            lambda: list(client.FleetClient(f"{self.where}/{node}/control").leave(do))
        )
        return dict(items[-1]["failed"])


async def end_actor(scene: Scene, name: str) -> None:
    """End a node actor; return when its daemon has no link any more."""
    scene.scopes[name].cancel()
    while scene.daemons[name].link is not None:
        await trio.lowlevel.checkpoint()


def start_actor(scene: Scene, before: NodeService) -> NodeService:
    """Start another actor for the node of one that has ended, in a fleet."""
    again = NodeService(before.order, scene, LOG, lambda: None)
    scene.nodes[before.name] = again
    scene.nursery.start_soon(again.run)
    return again


async def run_within(scope: trio.CancelScope, node: NodeService) -> None:
    with scope:
        await node.run()


@asynccontextmanager
async def fleet(where: Path) -> AsyncIterator[Scene]:
    rows = FleetStore(f"{where}/store")
    try:
        async with trio.open_nursery() as nursery:
            scene = Scene(where, nursery)
            scene.directory = DirectoryService(rows, rows.load(), scene.deliver, LOG)
            nursery.start_soon(scene.directory.run)
            yield scene
            nursery.cancel_scope.cancel()
    finally:
        rows.close()


# spec FL4
async def test_children_are_placed_shown_and_ended_from_any_node(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        program = {"command": ["serve"]}
        rows = await scene.ask("a", "spawn", name="w", count=4, program=program)
        assert [row["name"] for row in rows] == ["w-0", "w-1", "w-2", "w-3"]
        assert {row["state"] for row in rows} == {"running"}
        assert sorted(row["node"] for row in rows) == ["a", "a", "b", "b"]
        shown = await scene.ask("b", "ps")
        assert [node["state"] for node in shown["nodes"]] == ["up", "up"]
        assert [row["name"] for row in shown["children"]] == [r["name"] for r in rows]
        await scene.ask("b", "kill", name="w-0")
        over = await scene.ask("a", "wait", name="w-0")
        assert (over["state"], over["status"]) == ("ended", 143)


# spec FL4
async def test_what_finds_no_place_is_refused_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a", capacity=2)
        program = {"command": ["serve"]}
        with pytest.raises(ControlError, match="no node has these labels"):
            await scene.ask(
                "a", "spawn", name="w", program=program, needs={"labels": ["gpu"]}
            )
        with pytest.raises(ControlError, match="room for 2"):
            await scene.ask("a", "spawn", name="w", count=3, program=program)
        assert (await scene.ask("a", "ps"))["children"] == []
        rows = await scene.ask(
            "a", "spawn", name="w", count=3, program=program, wait=True
        )
        assert len(rows) == 3
        states: list[str] = []
        while states != ["running", "running", "waiting"]:
            children = (await scene.ask("a", "ps"))["children"]
            states = sorted(row["state"] for row in children)


# spec FL4: what can be nowhere is refused at once, and waits for nothing.
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"name": "a b"}, "cannot spawn 'a b': a child's name has at most 64"),
        ({"name": ""}, "cannot spawn '': a child's name has at most 64"),
        ({"name": "x" * 63, "count": 2}, "-1': a child's name has at most 64"),
        ({"needs": {"labels": [""]}}, "that needs '': no label is like that; write"),
        ({"needs": {"labels": ["gpu", "a b"]}}, "needs 'a b': no label is like that"),
        ({"needs": {"node": "a\n"}}, r"on 'a\\n': no node is called so; write"),
    ],
)
async def test_a_word_that_nothing_can_have_is_refused(
    tmp_path: Path, words: dict[str, Any], said: str
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a", ("gpu",))
        args = {"name": "w", "program": {"command": ["serve"]}, "wait": True, **words}
        with pytest.raises(ControlError) as why:
            await scene.ask("a", "spawn", **args)
        assert re.search(said, str(why.value)), why.value
        assert (await scene.ask("a", "ps"))["children"] == []


# spec FL4
@pytest.mark.parametrize("count", [0, -1, 100_001])
async def test_a_number_of_children_that_cannot_be_is_refused(
    tmp_path: Path, count: int
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        with pytest.raises(ControlError, match=r"\$\.count"):
            await scene.ask(
                "a", "spawn", name="w", count=count, program={"command": ["serve"]}
            )


# spec FL4
async def test_of_a_batch_that_cannot_start_none_is_left(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        scene.daemons["b"].missing = ("gpu",)
        program = {"command": ["serve"], "policy": "gpu"}
        error = r"cannot spawn 'w-\d': no such policy; the others of the 4 were ended"
        with pytest.raises(ControlError, match=error):
            await scene.ask("a", "spawn", name="w", count=4, program=program)
        children = (await scene.ask("a", "ps"))["children"]
        assert [row["state"] for row in children] == ["ended"] * 4
        assert sorted(row["status"] or 0 for row in children) == [0, 0, 143, 143]
        assert scene.daemons["a"].children == {}


# spec FL4: the directory is started again meanwhile.
@pytest.mark.parametrize("do", ["kill", "wait"])
async def test_a_batch_is_ended_also_where_an_answer_is_lost(
    tmp_path: Path, do: str
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        scene.daemons["b"].missing = ("gpu",)
        scene.losing[do] = iter((do == "kill", True))
        program = {"command": ["serve"], "policy": "gpu"}
        error = r"cannot spawn 'w-\d': no such policy; the others of the 4 were ended"
        with pytest.raises(ControlError, match=error):
            await scene.ask("a", "spawn", name="w", count=4, program=program)
        assert scene.daemons["a"].children == {}


# spec FL4, FL11
async def test_a_batch_that_cannot_be_ended_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "ANSWER_S", 0.5)
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        scene.daemons["b"].missing = ("gpu",)
        scene.losing["kill"] = repeat(True)
        program = {"command": ["serve"], "policy": "gpu"}
        error = (
            r"cannot spawn 'w-\d': no such policy; cannot end the others of the 2: the"
            r" directory has ended"
        )
        with pytest.raises(StillUnavailableError, match=error):
            await scene.ask("a", "spawn", name="w", count=2, program=program)


# spec FL3, FL4: they are listed no more when the last one has started.
async def test_children_that_end_at_once_are_all_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MOST_OVER", 3)
    async with fleet(tmp_path) as scene:
        await scene.add("a", capacity=20)
        program = {"command": ["exit", "0"], "restart": "on-failure"}
        rows = await scene.ask("a", "spawn", name="w", count=20, program=program)
        assert [row["name"] for row in rows] == [f"w-{number}" for number in range(20)]
        assert {row["restart"] for row in rows} == {"on-failure"}


# spec FL4
async def test_a_child_is_waited_for_and_no_other_of_its_name(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        program = {"command": ["serve"]}
        (first,) = await scene.ask("a", "spawn", name="w", program=program)
        await scene.daemons["a"].end(first["id"], 7)
        over = await scene.ask("a", "wait", name="w", child=first["id"])
        assert (over["id"], over["status"]) == (first["id"], 7)
        (second,) = await scene.ask("a", "spawn", name="w", program=program)
        with pytest.raises(ControlError, match="cannot wait for 'w': it is over"):
            await scene.ask("a", "wait", name="w", child=first["id"])
        await scene.daemons["a"].end(second["id"], 8)
        assert (await scene.ask("a", "wait", name="w"))["status"] == 8


# spec FL4: an order without an answer stays `placing` until its node is lost.
@pytest.mark.slow
async def test_a_child_whose_node_is_lost_before_it_began_is_not_spawned(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        scene.scopes["b"].cancel()
        program = {"command": ["serve"]}
        with pytest.raises(ControlError, match="cannot spawn 'w': node 'b' lost"):
            await scene.ask(
                "a", "spawn", name="w", program=program, needs={"node": "b"}
            )


# spec FL11
async def test_the_daemon_of_another_node_is_asked(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        program = {"command": ["serve"]}
        await scene.ask("a", "spawn", name="w", program=program, needs={"node": "b"})
        assert await scene.ask("a", "on", node="b", do="ps") == ["w"]
        assert await scene.ask("a", "on", child="w", do="ps") == ["w"]
        with pytest.raises(ControlError, match="it does not know 'kill'"):
            await scene.ask("a", "on", child="w", do="kill")
        with pytest.raises(ControlError, match="no such child"):
            await scene.ask("a", "on", child="x", do="ps")
        path, words = f"{tmp_path}/a/{DOOR}", {"node": "b", "do": "count"}
        assert await in_thread(lambda: list(stream(path, "items", words))) == [0, 1, 2]
        words = {"node": "b", "do": "logs"}
        with pytest.raises(ControlError, match="it does not know 'logs'"):
            await in_thread(lambda: list(stream(path, "items", words)))


# spec FL11
@pytest.mark.slow
async def test_commands_that_wait_keep_no_short_one_out(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene, trio.open_nursery() as nursery:
        await scene.add("a")
        await scene.ask("a", "spawn", name="w", program={"command": ["serve"]})
        send, refusals = trio.open_memory_channel[str](1)

        async def read(stream: trio.SocketStream) -> None:
            async with stream:
                said = b""
                while b"\n" not in said:  # spaces before it are signs of life
                    said += await stream.receive_some()
                await send.send(json.loads(said)["error"])

        for _ in range(MAX_WAITING + 1):
            stream = await trio.open_unix_socket(f"{tmp_path}/a/{DOOR}")
            await stream.send_all(b'{"v":1,"do":"wait","args":{"name":"w"}}\n')
            nursery.start_soon(read, stream)
        error = await refusals.receive()
        assert error.startswith(f"it has {MAX_WAITING} streams and waiting orders")
        (row,) = (await scene.ask("a", "ps"))["children"]
        assert row["state"] == "running"
        nursery.cancel_scope.cancel()


# spec FL11
@pytest.mark.slow
async def test_a_directory_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert door.ANSWER_S < TIMEOUT_S == 10.0
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        scene.is_cut = True
        with pytest.raises(ControlError, match="cannot reach the fleet's directory"):
            await scene.ask("a", "ps")
        scene.is_cut, scene.is_hung = False, True
        monkeypatch.setattr(door, "ANSWER_S", 0.1)
        orders: dict[str, dict[str, object]] = {
            "ps": {},
            "quota": {},
            "find": {"name": "w"},
            "workspace": {"name": "w"},
            "spawn": {"name": "w", "program": {"command": ["true"]}},
            "kill": {"name": "w"},
            "wait": {"name": "w"},
            "forget": {"node": "a"},
        }
        for order, args in orders.items():
            with pytest.raises(ControlError, match=r"does not answer within 0\.1 s"):
                await scene.ask("a", order, **args)


# spec FL2, FL4: an order that is told to have failed would be done later.
@pytest.mark.slow
async def test_an_order_waits_while_the_directory_gets_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        failed = trio.Event()
        attempts = 0
        has_threads = False

        async def no_thread(*words: Any) -> Any:
            nonlocal attempts
            if has_threads:
                return await in_thread(*words)
            attempts += 1
            if attempts > 2 * len(("run", "spawn")):  # each has tried it again
                failed.set()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        monkeypatch.setattr(store, "in_thread", no_thread)
        replies = []

        async def spawn() -> None:
            words = b'{"name": "w", "program": {"command": ["serve"]}}'
            assert scene.directory is not None
            replies.append(await scene.directory.answer(VERSION, "spawn", words))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(spawn)
            await failed.wait()
            assert replies == []
            has_threads = True
        assert replies == [(True, b'{"w":"c1"}')]
        states: list[str] = []
        while states != ["running"]:
            children = (await scene.ask("a", "ps"))["children"]
            states = [row["state"] for row in children]


# spec FL11
def test_a_node_actor_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/{DOOR}")
        listener.listen()
        with pytest.raises(ControlError, match="here does not answer within"):
            client.FleetClient(f"{tmp_path}/control").ask("ps")


# spec FL11: an upgrade in place leaves an older node actor; that can be left.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "told"),
    [("fleet-0", "version 'fleet-0'"), (None, "an older version")],
)
async def test_a_node_actor_of_another_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, told: str
) -> None:
    monkeypatch.setattr(door, "VERSION", version)
    async with fleet(tmp_path) as scene:
        for name in ("a", "b"):
            await scene.add(name)
        at = f"{tmp_path}/b/control"
        said = f"the node actor here has {told}, this sandhost {VERSION!r}"
        for use in (
            lambda: client.FleetClient(at).ask("wait", {"name": "w", "child": "c"}),
            lambda: list(client.FleetClient(at).logs("w", {})),
            lambda: list(client.FleetClient(at).hold("w")),
        ):
            with pytest.raises(RefusedError, match=re.escape(said)):
                await in_thread(use)
        for words in (("run", "--", "true"), ("ps",)):
            command = partial(sandhost, "fleet", words[0], "--control", at, *words[1:])
            done = await in_thread(command)
            assert (done.status, done.out) == (125 if words[0] == "run" else 1, b"")
            assert done.said(said)
        assert await scene.end("b", "leave") == {}


# spec FL11: it was killed, and left its socket.
def test_a_node_actor_that_holds_nothing_any_more_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PATIENCE_S", 0.0)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/{DOOR}")
        holder = Holder(client.FleetClient(f"{tmp_path}/control"))
        with pytest.raises(ControlError, match="the node actor here has ended; Ray"):
            holder.hold("w", "c1")


# spec FL11: a daemon that is not there is no node without a fleet.
def test_no_daemon_and_no_door_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"cannot ask .*: there is no such socket"):
        client.FleetClient(f"{tmp_path}/control")
    (tmp_path / DOOR).touch()
    with pytest.raises(ControlError, match="it is not a socket"):
        client.FleetClient(f"{tmp_path}/control").ask("ps")


# spec FL1: of one that was killed the next tells what has ended meanwhile.
async def test_an_end_without_a_node_actor_is_told_by_the_next(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        node = await scene.add("a")
        (row,) = await scene.ask("a", "spawn", name="w", program={"command": ["serve"]})
        await end_actor(scene, "a")
        await scene.daemons["a"].end(row["id"], 7)
        scene.scopes["a"] = trio.CancelScope()
        scene.nursery.start_soon(run_within, scene.scopes["a"], node)
        over = await scene.ask("a", "wait", name="w")
        assert (over["state"], over["status"]) == ("ended", 7)


# spec FL1: a daemon that is a member still gets renewals alone.
async def test_a_node_that_joins_again_within_its_lease_is_up(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        node = await scene.add("a")
        await end_actor(scene, "a")
        again = start_actor(scene, node)
        state = json.loads(result_of(await again.answer(VERSION, "join-state", b"{}")))
        assert state == {"is_up": True, "reason": "", "is_final": False}


# spec FL2, FL11
async def test_a_daemon_that_is_in_another_fleet_says_how_to_leave_it(
    tmp_path: Path,
) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir()
    async with fleet(places[0]) as scene, fleet(places[1]) as other:
        node = await scene.add("b")
        await end_actor(scene, "b")
        again = start_actor(other, node)
        data = result_of(await again.answer(VERSION, "join-state", b"{}"))
        state = msgspec.json.decode(data, type=JoinState)
        assert state.is_final
        assert state.refusal("b") == (
            "cannot join as 'b': its daemon is still in another fleet; run `sandhost"
            " fleet leave` there first"
        )
        assert (await scene.ask("b", "ps"))["nodes"][0]["state"] != "left"
        other.nursery.cancel_scope.cancel()


# spec FL2: a beat on its way is refused, too, and comes later.
async def test_a_final_refusal_is_told_whatever_comes_behind_it(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as scene:
        node = await scene.add("b")
        session = Session("ledger-b", 1)
        refusals = [
            Refused(1, session, "no", is_final=True, fleet="two"),
            Refused(1, session, "its session is over", is_final=False, fleet="two"),
        ]
        node.deliver([encode(one) for one in refusals])
        state = json.loads(result_of(await node.answer(VERSION, "join-state", b"{}")))
        assert (state["reason"], state["is_final"]) == ("no", True)


# spec FL1
async def test_a_door_is_its_users_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        mode = await in_thread(os.stat, f"{tmp_path}/a/{DOOR}")
        assert stat.S_IMODE(mode.st_mode) == 0o600


# spec FL5, FL11
@pytest.mark.slow
async def test_a_node_that_is_not_heard_is_unknown_then_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        for name, restart in (("once", "no"), ("again", "always")):
            program = {"command": ["serve"], "restart": restart}
            await scene.ask(
                "a", "spawn", name=name, program=program, needs={"node": "b"}
            )
        scene.scopes["b"].cancel()
        states: list[str] = []
        while not states or states[-1] != "lost":
            nodes = (await scene.ask("a", "ps"))["nodes"]
            states.append(nodes[1]["state"])
            await trio.sleep(0.2)
        assert states.index("up") < states.index("unknown")
        once, again = (await scene.ask("a", "ps"))["children"]
        assert once["state"] == "lost"
        assert "node 'b' lost" in once["reason"]
        # It may go nowhere but to b.
        assert (again["state"], again["incarnation"]) == ("waiting", 1)
        scene.hung.add("b")
        monkeypatch.setattr(door, "ALIVE_S", 1.0)
        failed = await scene.end("a", "down")
        assert list(failed) == ["b"]
        assert "it has not left within 1 s; see its daemon" in failed["b"]
        await scene.ask("a", "forget", node="b")


# spec FL5
async def test_a_node_that_leaves_is_shown_as_left(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        await scene.add("a")
        await scene.add("b")
        assert await scene.end("b", "leave") == {}
        states: dict[str, str] = {}
        while states.get("b") != "left":
            nodes = (await scene.ask("a", "ps"))["nodes"]
            states = {node["name"]: node["state"] for node in nodes}
        assert states == {"a": "up", "b": "left"}
        assert scene.daemons["b"].children == {}


# spec FL5
@pytest.mark.slow
async def test_down_has_all_nodes_leave_and_end_their_ray(tmp_path: Path) -> None:
    async with fleet(tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.add(name)
        assert await scene.end("b", "down") == {}
        while sorted(scene.ended) != ["a", "b", "c"]:
            await trio.lowlevel.checkpoint()


# spec FL8: a `down` before it was interrupted.
@pytest.mark.slow
async def test_down_ends_the_ray_of_nodes_that_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.add(name)
        for name in ("b", "c"):
            result_of(await scene.nodes[name].answer(VERSION, "leave", b"{}"))
        states: list[str] = []
        while states != ["up", "left", "left"]:
            nodes = (await scene.ask("a", "ps"))["nodes"]
            states = [node["state"] for node in nodes]
        scene.hung.add("c")  # as one whose node actor has ended, too
        monkeypatch.setattr(door, "ALIVE_S", 1.0)
        assert await scene.end("a", "down") == {}
        while sorted(scene.ended) != ["a", "b"]:
            await trio.lowlevel.checkpoint()


# spec FL8
@pytest.mark.slow
async def test_a_down_that_is_interrupted_ends_the_ray_of_nodes_that_have_left(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.add(name)
        scene.hung.add("c")
        scene.may_end = trio.Event()
        stream = await trio.open_unix_socket(f"{tmp_path}/a/{DOOR}")
        await stream.send_all(b'{"v":1,"do":"down","args":{}}\n')
        await scene.ending.wait()  # b has left
        await stream.aclose()
        await scene.given_up.wait()
        scene.may_end.set()
        while scene.ended != ["b"]:
            await trio.lowlevel.checkpoint()
        scene.hung.clear()
        assert await scene.end("a", "down") == {}
        while set(scene.ended) != {"a", "b", "c"}:
            await trio.lowlevel.checkpoint()


# spec FL8
@pytest.mark.slow
async def test_a_leave_that_is_interrupted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "ALIVE_S", 0.1)
    async with fleet(tmp_path) as scene:
        for name in ("a", "b"):
            await scene.add(name)
        scene.daemons["b"].may_leave = may_leave = trio.Event()
        items = client.FleetClient(f"{tmp_path}/b/control").leave("leave")
        assert await in_thread(next, items) == {"waiting": ["b"]}
        await in_thread(items.close)  # type: ignore[attr-defined]
        may_leave.set()
        assert await scene.end("b", "leave") == {}
        while scene.ended != ["b"]:
            await trio.lowlevel.checkpoint()
        states: list[str] = []
        while states != ["up", "left"]:
            nodes = (await scene.ask("a", "ps"))["nodes"]
            states = [node["state"] for node in nodes]


# spec FL5, FL11
@pytest.mark.slow
async def test_down_waits_for_no_node_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "LONGEST_LEAVE_S", 1.0)
    async with fleet(tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.add(name)
        scene.hung.add("b")
        failed = await scene.end("a", "down")
        assert list(failed) == ["b"]
        assert "it has not left within 1 s; see its daemon" in failed["b"]
        while sorted(scene.ended) != ["a", "c"]:
            await trio.lowlevel.checkpoint()


# spec FL11
@pytest.mark.parametrize(("do", "at"), [("down", "a"), ("leave", "b")])
async def test_a_node_that_leaves_slowly_is_told_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str, at: str
) -> None:
    # It tells before a client would give up.
    assert door.ALIVE_S < TIMEOUT_S
    monkeypatch.setattr(door, "ALIVE_S", 0.1)
    async with fleet(tmp_path) as scene:
        for name in ("a", "b"):
            await scene.add(name)
        scene.daemons["b"].may_leave = trio.Event()
        fleet_client = client.FleetClient(f"{tmp_path}/{at}/control")
        items = fleet_client.leave(do)
        first = await in_thread(next, items)
        assert "b" in first["waiting"]
        assert scene.ended == []
        scene.daemons["b"].may_leave.set()
        last = await in_thread(lambda: list(items)[-1])
        assert last == {"failed": {}}


# spec FL11
async def test_a_door_that_ends_before_all_have_left_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/{DOOR}")
        listener.listen()
        items = client.FleetClient(f"{tmp_path}/control").leave("down")

        async def end() -> None:
            accepted, _ = await in_thread(listener.accept)
            with accepted:
                accepted.recv(4096)
                accepted.sendall(b'{"v":1,"item":{"waiting":["b"]}}\n')

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            assert await in_thread(next, items) == {"waiting": ["b"]}
        with pytest.raises(ControlError, match="cannot ask the fleet"):
            await in_thread(next, items)


# spec FL11
async def test_parts_of_other_versions_are_refused_by_both_names(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as scene:
        node = await scene.add("a")
        assert scene.directory is not None
        for part in (node, scene.directory):
            is_done, data = await part.answer("fleet-0", "ps", b"{}")
            assert not is_done
            assert "'fleet-0'" in data.decode()
            assert f"'{VERSION}'" in data.decode()
        scene.daemons["a"].version = "fleet-9"
        place = tmp_path / "a"
        order = NodeOrder("z", (), f"{place}/control", f"{place}/fleet")
        again = NodeService(order, scene, LOG, lambda: scene.ended.append("z"))
        scene.nursery.start_soon(again.run)
        state = json.loads(result_of(await again.answer(VERSION, "join-state", b"{}")))
        assert state["is_final"]
        assert "'fleet-9'" in state["reason"]
