"""Machines of a fleet are killed, stopped and cut off.

No child runs twice, and nothing is left.

Times are printed, and not judged: they are those of a machine where much else runs.
`python -m benchmarks fleet --kills 200` judges them.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from supervisor.cluster import ray_processes
from tests.helpers import fleetkills
from tests.helpers.fleetends import (
    ENDS,
    ENDS_OF_HEAD,
    RAY,
    driver,
    end_head,
    end_part,
)
from tests.helpers.fleetkills import (
    Fleet,
    host,
    is_left,
    is_running,
    kill_in_turn,
    kinds_of,
    pause,
    send,
    until,
)
from tests.helpers.fleetmachines import SANDHOST, Machine, UnavailableError
from tests.helpers.rounds import FLEET_KILLS, LONG_ALONE, SEED

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), *LONG_ALONE]

GIVEN_UP_S = 80.0
"""Ray gives a silent raylet up after 65 s."""

KILLS_OF_HEAD = (
    "kill ray::DirectoryActor",
    "kill ray::NodeActor",
    "kill daemon",
    "stop ray::DirectoryActor",
    "stop ray::NodeActor",
    "stop gcs_server",
    "stop raylet",
    "stop daemon",
    "stop machine",
)
"""Each kind, after which the fleet comes back by itself."""


@contextmanager
def fleet_of(*names: str) -> Iterator[Fleet]:
    """Yield a fleet, or skip the test where there can be none."""
    try:
        with fleetkills.fleet_of(*names) as fleet:
            yield fleet
    except UnavailableError as why:
        pytest.skip(str(why))


# spec FL5, FL6, FL8
async def test_no_child_of_a_machine_that_is_killed_runs_twice(
    tell: Callable[[str], None],
) -> None:
    def kill(machine: Machine, kind: str, number: int) -> None:
        fleet.kill(machine, kind, number).check()

    with fleet_of("a", "b", "c", "d") as fleet:
        try:
            await kill_in_turn(fleet.others, kinds_of(FLEET_KILLS, SEED), kill)
        finally:
            for kind, figures in fleet.figures.items():
                tell(f"{kind:20}: {figures}")


# spec FL2, FL5, FL6, FL8
def test_no_child_runs_twice_when_its_head_is_killed() -> None:
    with fleet_of("a", "b", "c") as fleet:
        for number, kind in enumerate(KILLS_OF_HEAD):
            fleet.kill_head(kind, number)


# spec FL8
def test_tables_are_true_after_the_end_of_each_part(
    tell: Callable[[str], None],
) -> None:
    with fleet_of("a", "b") as fleet:
        for number, kind in enumerate(ENDS):
            tell(f"{kind}: {end_part(fleet, kind, number)}")
        for number, kind in enumerate(ENDS_OF_HEAD, len(ENDS)):
            tell(f"{kind} of the head: {end_head(fleet, kind, number)}")


# spec FL8
def test_a_driver_that_is_killed_takes_no_other_child_along() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        lines = fleet.start(machine, "b-driver")
        with driver(fleet, machine, "b-held") as pid:
            os.kill(pid, signal.SIGKILL)
        assert machine.states() == {"a": "up", "b": "up"}
        assert lines.read_bytes().endswith(b"1\n")
        fleet.end(machine, "b-driver", lines)
        assert b"2" not in lines.read_bytes()


# spec FL8
def test_ray_that_is_no_node_is_left_alone_and_its_stop_leaves_nothing() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        foreign = machine.where / "foreign"
        words = ("--head", "--port=6400", f"--temp-dir={foreign}", "--num-cpus=0")
        for leaves in (True, False):
            done = machine.run(RAY, "start", *words, "--include-dashboard=false")
            assert done.returncode == 0, done.stderr
            gcs = [
                pid for pid in machine.pids("gcs_server") if machine.pids(str(foreign))
            ]
            name = f"b-{leaves}"
            lines = fleet.start(machine, name)
            if leaves:
                assert machine.fleet("leave").returncode == 0
                assert not is_running(machine)
                assert machine.pids("gcs_server") == gcs
            assert machine.run(RAY, "stop", "--force").returncode == 0
            assert not machine.pids("gcs_server")
            until(lambda: not is_running(machine))
            until(lambda: not machine.pids(str(lines)))  # noqa: B023 - at once
            fleet.recover(machine)
            fleet.end(machine, name, lines)


# spec FL8
def test_a_raylet_that_ray_has_given_up_ends_when_it_wakes() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        lines = fleet.start(machine, "b-long")
        raylet = [machine.pid_of_ray("raylet")]
        send(raylet, signal.SIGSTOP)
        try:
            pause(GIVEN_UP_S)
        finally:
            send(raylet, signal.SIGCONT)
        until(lambda: not is_running(machine))
        until(lambda: not machine.pids(str(lines)))
        fleet.recover(machine)
        fleet.end(machine, "b-long", lines)


# spec FL1, FL8
def test_a_start_that_is_killed_leaves_nothing() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        assert machine.fleet("leave").returncode == 0
        address, token = fleet.reached
        words = ("--address", address, "--token-file", token, "--node", machine.name)
        bound = ("--bind", machine.address, "--control", machine.control)
        command = machine.words(SANDHOST, "fleet", "join", *words, *bound)
        for length_s in (0.1, 1.0, 2.0, 3.0, 4.0):
            with subprocess.Popen(
                command, env=ray_processes.environment(token)
            ) as outer:
                until(lambda: machine.pids("supervisor.cluster.setup"))
                pause(length_s)
                send(machine.pids("supervisor.cluster.setup"), signal.SIGKILL)
                assert outer.wait() == 1
            assert not is_left(machine)
            assert host(machine, "doctor", "--leaks").returncode == 0
        fleet.recover(machine)


# spec FL2, FL8
def test_a_fleet_whose_head_has_no_ray_any_more_leaves_nothing() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        lines = fleet.start(machine, "b-last")
        os.kill(fleet.head.pid_of_ray("gcs_server"), signal.SIGKILL)
        until(lambda: not machine.pids(str(lines)))
        for one in (fleet.head, machine):
            one.fleet("down" if one is fleet.head else "leave")
            until(lambda: not is_running(one))  # noqa: B023 - at once
            assert host(one, "doctor", "--leaks").returncode == 0
        fleet.begin()
        fleet.end(machine, "b-last", lines)  # the directory's store has it still
