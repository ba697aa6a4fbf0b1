"""A daemon as a node of a fleet, from outside: joins, starts, tells, ends, leaves."""

import json
import os
import signal
import socket
import sqlite3
import tempfile
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.link import LinkError
from supervisor.fleet.messages import Join, Leave, RayPlace, Refused
from supervisor.fleet.store import FleetStore
from tests.helpers.command import sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetscene import CALM_S, Scene, fleet

pytestmark = pytest.mark.slow

FLEET = "[fleet]\n"
UNFENCED = "[fleet]\nunfenced = true\n[policy.bare]\nsandbox = 'none'\n"


async def joined(scene: Scene, one: Daemon, node: str = "a") -> None:
    """Link a daemon, and wait until its node is up."""
    await scene.link(str(one.where / "run" / "control"), node)
    await scene.until(lambda: scene.node(node) == "up")


# spec FL4, FL5
async def test_a_child_of_the_fleet_runs_and_its_end_is_told(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            script = "echo $SANDHOST_FLEET_NODE $SANDHOST_FLEET_INCARNATION; exit 7"
            scene.spawn("web", "sh", "-c", script)
            await scene.until(lambda: scene.child("web").state == "ended")
            assert scene.child("web").status == 7
            assert await trio.to_thread.run_sync(one.log, "web") == b"a 1\n"


# spec FL4
async def test_a_child_of_the_fleet_finds_nothing_of_ray(tmp_path: Path) -> None:
    env = {"RAY_ADDRESS": "10.0.0.1:6379", "LANG": "C.UTF-8"}
    with daemon(tmp_path, FLEET, env=env) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "env")
            await scene.until(lambda: scene.child("web").state == "ended")
            said = await trio.to_thread.run_sync(one.log, "web")
    assert b"SANDHOST_FLEET_NODE=a" in said
    assert b"RAY" not in said


# spec FL11
async def test_ps_of_the_host_shows_the_incarnation(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            row = await trio.to_thread.run_sync(one.row, "web")
            assert (row.pid, row.incarnation) == (child.pid, 1)


# spec FL4
async def test_a_child_is_ended_on_request(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            await scene.until_running("web")
            scene.kill("web")
            await scene.until(lambda: scene.child("web").state == "ended")
            assert scene.child("web").status == 128 + signal.SIGTERM


# spec FL4
async def test_a_program_that_is_not_there_has_failed(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "/no/such/program")
            await scene.until(lambda: scene.child("web").state == "ended")
            assert "/no/such/program" in scene.child("web").reason


# spec FL5
async def test_the_node_outlives_the_link_of_its_actor(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            before = await scene.until_running("web")
            await scene.unlink("a")
            await joined(scene, one)
            scene.kill("web")
            await scene.until(lambda: scene.child("web").state == "ended")
            assert scene.child("web").incarnation == before.incarnation == 1


# spec FL9: Ray was killed here, and nobody has had the node leave.
async def test_a_node_that_asks_to_join_takes_another_place(tmp_path: Path) -> None:
    places = [RayPlace(("10.0.0.1",), ((first, first),)) for first in (7000, 8000)]
    with daemon(tmp_path, FLEET) as one:
        control = str(one.where / "run" / "control")
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            scene.deaf_to = "Join"
            await scene.link(control, "a", "cpu", ray=places[0])
            await scene.until(lambda: scene.heard)
            await scene.unlink("a")
            scene.deaf_to = ""
            await scene.link(control, "b", "gpu", ray=places[1])
            await scene.until(lambda: scene.node("b") == "up")
            (row,) = scene.directory.ps().nodes
            (join,) = (one for one in scene.heard if one.node == "b")
            assert isinstance(join, Join)
            assert (row.labels, join.ray) == (("gpu",), places[1])


# spec FL2, FL6: the epoch of the other fleet is lower, and tells nothing of this one's.
async def test_a_member_of_one_fleet_is_not_taken_by_another(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        control = str(one.where / "run" / "control")
        FleetStore(str(tmp_path / "head")).close()
        async with (
            fleet(tmp_path / "head", lease_s=CALM_S) as scene,
            fleet(tmp_path / "other", lease_s=CALM_S) as other,
        ):
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            await scene.unlink("a")
            await other.link(control, "a")
            await other.until(lambda: other.sent)
            refused = other.sent[0]
            assert isinstance(refused, Refused)
            assert "its daemon is still in another fleet" in refused.reason
            assert other.node("a") is None
            await other.unlink("a")
            await joined(scene, one)
            scene.kill("web")
            await scene.until(lambda: scene.child("web").state == "ended")
            assert scene.child("web").incarnation == child.incarnation == 1
            await scene.unlink("a")
            await trio.to_thread.run_sync(ask, one, "fleet-leave")
            await joined(other, one)


# spec FL11
async def test_a_second_link_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            with pytest.raises(LinkError, match="linked as node 'a' already"):
                await scene.link(str(one.where / "run" / "control"), "b")
            assert scene.node("a") == "up"


# spec FL11
async def test_a_daemon_without_the_section_refuses_a_link(tmp_path: Path) -> None:
    with daemon(tmp_path) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            with pytest.raises(LinkError, match=r"has no \[fleet\]"):
                await scene.link(str(one.where / "run" / "control"), "a")


def ask(one: Daemon, do: str) -> dict[str, object]:
    """Ask the control socket one thing without arguments."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(one.where / "run" / "control"))
        line.sendall(json.dumps({"v": 1, "do": do, "args": {}}).encode() + b"\n")
        with line.makefile("rb") as answer:
            return dict(json.loads(answer.readline()))


# spec FL6
async def test_a_node_that_leaves_has_ended_its_children(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            answer = await trio.to_thread.run_sync(ask, one, "fleet-leave")
            assert answer["result"] == {"node": "a"}
            assert child.pid is not None
            with pytest.raises(ProcessLookupError):
                os.kill(child.pid, 0)
            await scene.until(lambda: scene.node("a") == "left")
            leaks = await trio.to_thread.run_sync(ask, one, "leaks")
            assert dict(leaks["result"])["clean"], leaks  # type: ignore[call-overload]


# spec FL6, FL8: its Ray was ended from elsewhere; before, somebody gave up to ask.
async def test_a_daemon_leaves_of_which_no_ray_is_left(tmp_path: Path) -> None:
    with (
        # Short, for Ray would have its sockets in there.
        tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as where,
        daemon(Path(where), FLEET) as one,
    ):
        control = str(one.where / "run" / "control")
        leave = partial(sandhost, "fleet", "leave", "--control", control)
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            done = await trio.to_thread.run_sync(leave)
            assert (done.status, done.out) == (0, b"")
            assert done.said("node 'a' has left, and its children have ended")
            assert not await trio.Path(f"/proc/{child.pid}").exists()
            await scene.until(lambda: scene.node("a") == "left")
            done = await trio.to_thread.run_sync(leave)
            assert done.status == 1
            assert done.said("this node is in none")


# spec FL8
async def test_a_leave_that_was_given_up_is_finished_by_the_next(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, FLEET) as one:
        control = str(one.where / "run" / "control")
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sh", "-c", "trap '' TERM; exec sleep 600")
            child = await scene.until_running("web")
            async with await trio.open_unix_socket(control) as stream:
                await stream.send_all(b'{"v":1,"do":"fleet-leave","args":{}}\n')
            answer = await trio.to_thread.run_sync(ask, one, "fleet-leave")
            assert answer["result"] in ({"node": "a"}, {"node": None})
            assert not await trio.Path(f"/proc/{child.pid}").exists()
            await scene.until(lambda: scene.node("a") == "left")


# spec FL5: a lease is renewed by a daemon that answers; a hand-over is none for seconds.
async def test_a_member_is_not_replaced_until_it_has_left(tmp_path: Path) -> None:
    with daemon(tmp_path, FLEET) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            answer = await trio.to_thread.run_sync(ask, one, "replace")
            assert "it is node 'a' of a fleet" in str(answer["error"])
            assert "let it leave" in str(answer["error"])
            row = await trio.to_thread.run_sync(one.row, "web")
            assert (row.pid, scene.node("a")) == (child.pid, "up")


# spec FL6, FL9
@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("sandbox = 'none'", "needs a sandbox"),
        ("network = 'host'", "would reach the ports of the fleet"),
        ("sandbox = 'thin'", "has no pid namespace"),
    ],
)
async def test_a_policy_that_no_lease_ends_for_sure_is_refused(
    tmp_path: Path, policy: str, why: str
) -> None:
    thin = "[sandbox.thin]\nlayers = ['landlock']\n"
    with daemon(tmp_path, f"{FLEET}{thin}[policy.p]\n{policy}\n") as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600", policy="p")
            await scene.until(lambda: scene.child("web").state == "ended")
            assert why in scene.child("web").reason


# spec FL6
async def test_such_a_policy_is_taken_where_the_operator_says_so(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, UNFENCED) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600", policy="bare")
            await scene.until_running("web")


# spec FL6
async def test_the_hosts_own_children_outlive_the_end_of_the_lease(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, f"{FLEET}[child.own]\ncommand = ['sleep', '600']\n") as one:
        async with fleet(tmp_path / "head", lease_s=3.0) as scene:
            await joined(scene, one)
            own = await trio.to_thread.run_sync(one.row, "own")
            scene.spawn("web", "sleep", "600", restart="always")
            await scene.until_running("web")
            scene.cut.add("a")
            await scene.until(lambda: scene.child("web").state == "waiting")
            scene.cut.clear()
            again = await scene.until_running("web")
            assert again.incarnation == 2
            row = await trio.to_thread.run_sync(one.row, "own")
            assert (row.pid, row.create_time) == (own.pid, own.create_time)
            assert row.pid is not None
            os.kill(row.pid, 0)


# spec FL2, FL6: without its ledger a daemon is no node: nothing of the fleet is left.
async def test_a_node_whose_ledger_cannot_be_written_is_in_no_fleet(
    tmp_path: Path,
) -> None:
    own = "[child.own]\ncommand = ['sleep', '600']\n"
    with daemon(tmp_path, FLEET + own) as one:
        control = str(one.where / "run" / "control")
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one)
            scene.spawn("web", "sleep", "600")
            child = await scene.until_running("web")
            ledger = one.where / "state" / "fleet-node" / "fleet.sqlite3"
            with closing(sqlite3.connect(ledger)) as base, base:
                base.execute("UPDATE epoch SET number = number + 1")
            (join,) = (one for one in scene.heard if isinstance(one, Join))
            # Its next beat is refused, and the next session is written.
            scene.do(scene.directory.receive(Leave("a", join.session), read_clocks()))
            await scene.until(lambda: "In no fleet any more" in one.said())
            said = "cannot write its ledger"
            answer = await trio.to_thread.run_sync(ask, one, "fleet-leave")
            assert said in str(answer["error"])
            assert child.pid is not None
            await scene.until(lambda: not Path(f"/proc/{child.pid}").exists())
            await scene.unlink("a")
            with pytest.raises(LinkError, match=said):
                await scene.link(control, "a")
            row = await trio.to_thread.run_sync(one.row, "own")
            assert row.pid is not None
            with suppress(json.JSONDecodeError):  # a connection ends with its program
                answer = await trio.to_thread.run_sync(ask, one, "replace")
            assert "let it leave" not in str(answer) + one.said()


# spec FL4: what a node cannot take after all waits, if it may, and is refused else.
@pytest.mark.parametrize(("wait", "others"), [(True, "waiting"), (False, "ended")])
async def test_children_that_have_not_begun_take_room(
    tmp_path: Path, others: str, *, wait: bool
) -> None:
    own = "".join(f"[child.own{n}]\ncommand = ['sleep', '600']\n" for n in range(2))
    with daemon(tmp_path, f"max_children = 3\n{FLEET}{own}") as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            scene.deaf_to = "Beat"  # so the directory does not know of `own`
            await joined(scene, one)
            names = ("x", "y", "z")
            for name in names:
                scene.spawn(name, "sleep", "600", restart="always", wait=wait)
            await scene.until(
                lambda: any(scene.child(name).state == "running" for name in names)
            )
            scene.deaf_to = ""
            await scene.until(
                lambda: (
                    sorted(scene.child(name).state for name in names)
                    == sorted(["running", others, others])
                )
            )
