"""A start of Ray that dies, and a node that another node's `down` has ended."""

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


def place(where: Path) -> Place:
    figures = FleetFigures("n1", [], 5.0, None, None, "never")
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
