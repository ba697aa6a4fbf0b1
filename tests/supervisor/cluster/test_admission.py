"""A start that dies, a node that others have ended, no daemon, or an older one."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from hostlib.threads import in_thread
from supervisor.cluster import ray_processes
from supervisor.cluster.admission import (
    DaemonPlace,
    FleetFigures,
    Options,
    enter,
    find_place,
    leave,
)
from supervisor.cluster.client import FleetClient, door_of, is_there
from supervisor.cluster.names import DOOR, LOOPBACK
from supervisor.cluster.ray_processes import RayError
from supervisor.control.client import ControlError
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.held_slices import HeldSlices, LedgerRow
from supervisor.fleet.node import Node
from tests.helpers.fleetnode import StandIn

# A start that leaves a program which was started for the node, and says nothing.
DYING = """#!/bin/sh
export {mark}={directory}
setsid sh -c 'echo > ready; exec sleep 600' > /dev/null 2>&1 < /dev/null &
while [ ! -e ready ]; do :; done
exit 1
"""


def place(where: Path, address: str | None = None) -> DaemonPlace:
    figures = FleetFigures(address, "n1", ["gpu"], 5.0, None, None, "never")
    return DaemonPlace(f"{where}/control", f"{where}/state", 8, figures)


# spec FL1
def test_a_start_that_dies_leaves_nothing_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    one = place(tmp_path)
    program = tmp_path / "python"
    program.write_text(DYING.format(mark=ray_processes.MARK, directory=one.directory))
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program))
    door = door_of(one.control)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(door)  # of its node actor, which the start has killed again
    try:
        with pytest.raises(RayError, match=r"its start failed: .*; see .*/ray\.log"):
            enter(one, Options("n1", (), LOOPBACK, 1, None))
        assert not ray_processes.is_running(one.directory)
        assert not is_there(door)
    finally:
        ray_processes.end(one.directory)


# A start that keeps its order, and says that the node is up.
KEEPING = """#!/bin/sh
cat > order
echo '{"address": "10.0.0.1:6379"}'
"""


# spec FL1
def test_a_join_goes_by_the_configuration_where_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    program = tmp_path / "python"
    program.write_text(KEEPING)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "token").write_text("secret")
    join = Options(None, (), LOOPBACK, 1, None, token_file="token")
    enter(place(tmp_path, "10.0.0.1:6379"), join)
    order = json.loads((tmp_path / "order").read_bytes())
    assert (order["address"], order["head"]) == ("10.0.0.1:6379", None)
    assert (order["node"]["node"], order["node"]["labels"]) == ("n1", ["gpu"])
    # spec FL9: the operator's own copy may go.
    kept = Path(order["token_file"])
    (tmp_path / "token").rename(tmp_path / "other")
    assert kept == tmp_path / "state" / ray_processes.TOKEN
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == ("secret", 0o600)
    with pytest.raises(RayError, match="cannot read the token in 'token': No such"):
        enter(place(tmp_path, "10.0.0.1:6379"), join)
    (tmp_path / "other").rename(tmp_path / "token")
    address = "10.0.0.2:6379"
    named = Options("n2", ("big",), LOOPBACK, 1, None, address, token_file="token")
    enter(place(tmp_path, "10.0.0.1:6379"), named)
    order = json.loads((tmp_path / "order").read_bytes())
    assert order["address"] == address
    assert (order["node"]["node"], order["node"]["labels"]) == ("n2", ["big"])
    with pytest.raises(RayError, match="name it by --address, or as `address` in"):
        enter(place(tmp_path), join)
    for odd in ("", "10.0.0.1", "http://10.0.0.1:6379", "a\nb:1", "10.0.0.1:99999"):
        with pytest.raises(RayError, match=r"--address .* has another form; write"):
            enter(place(tmp_path), named._replace(address=odd))
    for token in ("", " \n", "two words", "é"):
        (tmp_path / "token").write_text(token)
        with pytest.raises(RayError, match="use 'token': it has no token; copy the"):
            enter(place(tmp_path, "10.0.0.1:6379"), join)
    ray_processes.end(f"{tmp_path}/state")  # as `leave` does
    assert not kept.exists()


# spec FL1
@pytest.mark.parametrize(
    ("node", "labels", "said"),
    [
        ("a b", (), "--node: 'a b'"),
        ("a\n", (), r"--node: 'a\\n'"),
        ("x" * 65, (), "--node: 'xxx"),
        ("", (), "--node: ''"),
        ("a", ("gpu", "-big"), "--labels: '-big'"),
        ("a", ("l",) * 65, "--labels: 65 are too many"),
    ],
)
def test_a_word_that_names_no_node_and_no_label_is_refused(
    tmp_path: Path, node: str, labels: tuple[str, ...], said: str
) -> None:
    pytest.importorskip("ray")
    one = place(tmp_path)
    with pytest.raises(RayError, match=said):
        enter(one, Options(node, labels, LOOPBACK, 1, None))
    assert not os.path.exists(one.directory)


# spec FL1
async def test_a_node_that_was_ended_from_elsewhere_is_in_no_fleet(
    tmp_path: Path,
) -> None:
    one = place(tmp_path)
    door = f"{tmp_path}/{DOOR}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(door)
    with pytest.raises(ControlError, match="else `sandhost fleet leave`"):
        FleetClient(one.control).ask("ps")
    async with trio.open_nursery() as nursery:
        await nursery.start(StandIn("L1").serve, one.control)
        ask = partial(leave, one, lambda client: list(client.leave("leave")))
        with pytest.raises(RayError, match="this node is in none"):
            await in_thread(ask)
        nursery.cancel_scope.cancel()
    assert not is_there(door)
    with pytest.raises(ControlError, match="there is no such socket"):
        FleetClient(one.control)


# spec FL5, FL8
async def test_a_daemon_leaves_though_its_node_actor_was_killed(
    tmp_path: Path,
) -> None:
    one, standin = place(tmp_path), StandIn("L1")
    os.makedirs(f"{one.directory}/{ray_processes.SESSIONS}")
    door = f"{tmp_path}/{DOOR}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(door)
    async with trio.open_nursery() as nursery:
        await nursery.start(standin.serve, one.control)
        ask = partial(leave, one, lambda client: list(client.leave("leave")))
        assert "the node actor here has ended" in (await in_thread(ask) or "")
        nursery.cancel_scope.cancel()
    assert standin.leaves == 1
    assert not is_there(door)
    assert not ray_processes.is_there(one.directory)


# spec FL8: its Ray was killed, and nobody has had the daemon leave.
async def test_a_daemon_leaves_of_which_no_ray_is_left(tmp_path: Path) -> None:
    one, standin = place(tmp_path), StandIn("L1")
    standin.node = Node("b", (), 8, HeldSlices("b", LedgerRow("L1")))
    standin.node.join(read_clocks())
    async with trio.open_nursery() as nursery:
        await nursery.start(standin.serve, one.control)
        ask = partial(leave, one, lambda client: list(client.leave("leave")))
        assert await in_thread(ask) == (
            "nothing of Ray is left here; node 'b' has left, and its children have"
            " ended"
        )
        assert standin.node.is_out
        with pytest.raises(RayError, match="this node is in none"):
            await in_thread(ask)
        nursery.cancel_scope.cancel()


# A program that was started for a node.
MARKED = "import signal; print(flush=True); signal.pause()"


@contextmanager
def left_behind(one: DaemonPlace, word: str = "raylet") -> Iterator[None]:
    """Have a node as the kill of its actor leaves it: Ray, its files, a deaf door."""
    os.makedirs(f"{one.directory}/{ray_processes.SESSIONS}")
    ray_processes.make_token(one.directory)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(door_of(one.control))
    env = {**os.environ, ray_processes.MARK: one.directory}
    words = [sys.executable, "-c", MARKED, word]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


INTERRUPTED = (
    "admission.FleetClient",
    "ray_processes.end_processes",
    "ray_processes.shutil.rmtree",
    "ray_processes.Path.unlink",
    "admission.call",
    "ray_processes.remove_deaf",
)
"""The steps of a `leave`, in their order, where no node actor answers."""


# spec FL8
@pytest.mark.parametrize("moment", INTERRUPTED)
async def test_a_leave_that_was_interrupted_is_finished_by_the_next(
    tmp_path: Path, moment: str
) -> None:
    one, standin = place(tmp_path), StandIn("L1")
    standin.node = Node("b", (), 8, HeldSlices("b", LedgerRow("L1")))
    standin.node.join(read_clocks())

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ask = partial(leave, one, lambda client: list(client.leave("leave")))
    async with trio.open_nursery() as nursery:
        await nursery.start(standin.serve, one.control)
        with left_behind(one):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"supervisor.cluster.{moment}", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    await in_thread(ask)
            with suppress(RayError):  # where all was done but the last file
                await in_thread(ask)
            assert not ray_processes.is_running(one.directory)
        nursery.cancel_scope.cancel()
    assert standin.node.is_out
    assert os.listdir(one.directory) == [ray_processes.LOCK]
    assert not is_there(door_of(one.control))


# spec FL1, FL2: Ray starts the node actor again within 2 s.
def test_a_head_whose_node_actor_was_killed_is_not_left(tmp_path: Path) -> None:
    one = place(tmp_path)
    ask = partial(leave, one, lambda client: list(client.leave("leave")))
    with left_behind(one, "gcs_server"):
        with pytest.raises(RayError, match="the fleet's directory is on this node"):
            ask()
        assert ray_processes.is_running(one.directory)
        assert "Ray here is ended" in (ask(may_end_fleet=True) or "")
    assert not ray_processes.is_there(one.directory)


# spec FL1
def test_a_machine_without_a_daemon_joins_nothing(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="there is no such socket; name"):
        find_place(f"{tmp_path}/control")


# spec FL11
async def test_a_daemon_that_knows_no_fleet_is_told_to_be_started_again(
    tmp_path: Path,
) -> None:
    control = f"{tmp_path}/control"
    async with trio.open_nursery() as nursery:
        await nursery.start(StandIn("L1").serve, control)
        with pytest.raises(ControlError, match="is of another version; start it again"):
            await in_thread(find_place, control)
        nursery.cancel_scope.cancel()


# spec FL1
def test_a_daemon_without_the_section_joins_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    one = place(tmp_path)._replace(fleet=None)
    with pytest.raises(RayError, match=r"has no \[fleet\]; add it"):
        enter(one, Options("n1", (), LOOPBACK, 1, None))
    assert not os.path.exists(one.directory)
