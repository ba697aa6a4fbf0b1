"""A start of Ray that dies, and a node that another node's `down` has ended."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from supervisor.cluster import ray_processes
from supervisor.cluster.admission import FleetFigures, Options, Place, enter, leave
from supervisor.cluster.client import FleetClient
from supervisor.cluster.names import DOOR, LOOPBACK
from supervisor.cluster.ray_processes import RayError
from supervisor.control.client import ControlError

# A start that leaves a program which was started for the node, and says nothing.
DYING = """#!/bin/sh
export {mark}={directory}
setsid sh -c 'echo > ready; exec sleep 600' > /dev/null 2>&1 < /dev/null &
while [ ! -e ready ]; do :; done
exit 1
"""


def place(where: Path, address: str | None = None) -> Place:
    figures = FleetFigures(address, "n1", ["gpu"], 5.0, None, None, "never")
    return Place(f"{where}/control", f"{where}/state", 8, figures)


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
    try:
        with pytest.raises(RayError, match=r"its start failed: .*; see .*/ray\.log"):
            enter(one, Options("n1", (), LOOPBACK, 1, None))
        assert not ray_processes.is_running(one.directory)
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
    join = Options(None, (), LOOPBACK, 1, None, token_file="token")
    enter(place(tmp_path, "10.0.0.1:6379"), join)
    order = json.loads((tmp_path / "order").read_bytes())
    assert (order["address"], order["head"]) == ("10.0.0.1:6379", None)
    assert (order["node"]["node"], order["node"]["labels"]) == ("n1", ["gpu"])
    address = "10.0.0.2:6379"
    named = Options("n2", ("big",), LOOPBACK, 1, None, address, token_file="token")
    enter(place(tmp_path, "10.0.0.1:6379"), named)
    order = json.loads((tmp_path / "order").read_bytes())
    assert order["address"] == address
    assert (order["node"]["node"], order["node"]["labels"]) == ("n2", ["big"])
    with pytest.raises(RayError, match="name it by --address, or as `address` in"):
        enter(place(tmp_path), join)


# spec FL1
def test_a_node_that_was_ended_from_elsewhere_is_in_no_fleet(tmp_path: Path) -> None:
    one = place(tmp_path)
    door = f"{tmp_path}/{DOOR}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(door)
    with pytest.raises(ControlError, match="else `sandhost fleet leave`"):
        FleetClient(one.control).ask("ps")
    with pytest.raises(RayError, match="this node is in none"):
        leave(one, one.control, lambda client: client.ask("leave"))
    assert not os.path.lexists(door)
    with pytest.raises(ControlError, match="this node is in none"):
        FleetClient(one.control)
