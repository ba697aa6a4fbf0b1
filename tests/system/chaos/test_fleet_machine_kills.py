"""Machines of a fleet are killed, stopped and cut off.

No child runs twice, and nothing is left.

Each child appends its incarnation to a file every 10 ms, through a system call that no
host looks at. An older one behind a newer one has run beside its successor. Times are
printed, and not judged: they are those of a machine where much else runs.
"""

import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.cluster import ray_processes
from supervisor.cluster.client import FleetClient
from supervisor.control.client import ControlError
from tests.helpers import fleetmachines
from tests.helpers.fleetmachines import SANDHOST, Machine, UnavailableError
from tests.helpers.rounds import FLEET_KILLS, LONG_ALONE, SEED
from tests.helpers.stage import PYTHON

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), *LONG_ALONE]

STOPPED_S = 20.0
"""How long what is stopped or cut off stays so."""

GIVEN_UP_S = 80.0
"""Ray gives a silent raylet up after 65 s."""

BACK_S = 20.0
"""For a node to come back by itself; then it leaves and joins again."""

PATIENCE_S = 240.0

CONFIG = """
max_children = 64
[fleet]
"""

POLICY = """
[workspace.{name}-repo]
base = "{shared}/{name}-repo"
[workspace.{name}-lines]
base = "{shared}/{name}-lines"
mode = "direct"
[policy.{name}]
workspace = ["{name}-repo", "{name}-lines"]
"""
"""Of the children of one machine, which have their workspaces alone."""

LOOP = """
import os, sys, time
with open(sys.argv[1], "ab", buffering=0) as lines:
    while True:
        lines.write(os.environ["SANDHOST_FLEET_INCARNATION"].encode() + b"\\n")
        time.sleep(0.01)
"""

KILLS = {
    "kill raylet": True,
    "kill daemon": True,
    "kill ray::NodeActor": False,
    "stop raylet": False,
    "stop daemon": True,
    "stop ray::NodeActor": True,
    "stop all": True,
    "stop machine": True,
    "cut": True,
}
"""Each kind, and whether it loses the node's children for sure."""

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

until = partial(fleetmachines.until, patience_s=PATIENCE_S)


@dataclass
class Figures:
    """The times of one kind of kill, in seconds from the kill."""

    rounds: int = 0
    gone: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    placed: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the middle and the longest of each time, and how many there are."""
        shown = [f"{self.rounds:3} rounds"]
        for name in ("gone", "told", "placed"):
            times = sorted(getattr(self, name)) or [0.0]
            middle, last = times[len(times) // 2], times[-1]
            count = len(getattr(self, name))
            shown.append(f"{name} {middle:4.1f} to {last:4.1f} ({count})")
        return ", ".join(shown)


class Fleet:
    """A fleet whose machines are killed; its head goes on.

    Attributes:
        head: has room for all children.
        others: die.
        figures: by kind.
        reached: its address, and the file of its token.
    """

    def __init__(self, found: tuple[Machine, ...], shared: Path) -> None:
        self.head, *self.others = found
        self.figures = {kind: Figures() for kind in KILLS}
        self._shared = shared
        self.begin()

    def begin(self) -> None:
        """Have all nodes up."""
        labels = ",".join(one.name for one in self.others)
        self.reached = self.head.up("--labels", labels)
        for one in self.others:
            self._join(one)
        # With these the head is never the first choice.
        for number in range(1 + len(self.others)):
            name = f"rest-{secrets.token_hex(4)}-{number}"
            self._spawn(name, "sleep", "100000", node=self.head.name)

    def _join(self, machine: Machine) -> None:
        machine.join(*self.reached, "--labels", machine.name)

    def _ask(self, do: str, **args: object) -> Any:
        return FleetClient(self.head.control).ask(do, args)

    def _spawn(
        self, name: str, *command: str, policy: str | None = None, **needs: object
    ) -> None:
        program = {"command": command, "policy": policy, "restart": "always"}
        self._ask("spawn", name=name, program=program, needs=needs)

    def _row(self, name: str) -> dict[str, Any]:
        """Return a child; nothing where the directory does not answer."""
        with suppress(ControlError):
            return dict(self._ask("find", name=name))
        return {}

    def _is(self, name: str, **wanted: object) -> bool:
        row = self._row(name)
        return all(row.get(key) == value for key, value in wanted.items())

    def _is_lost(self, name: str) -> bool:
        row = self._row(name)
        state, number = row.get("state"), row.get("incarnation", 0)
        return number > 1 or state in {"waiting", "placing", "lost"}

    def _is_up(self, machine: Machine) -> bool:
        with suppress(ControlError):
            nodes = self._ask("ps")["nodes"]
            return any(
                (node["name"], node["state"]) == (machine.name, "up") for node in nodes
            )
        return False

    def kill(self, machine: Machine, kind: str, number: int) -> None:
        """Do one kill, look at what follows, and bring the node back."""
        name = f"{machine.name}-{number}"
        lines = self.start(machine, name)
        with killed(machine, kind):
            self._watch(machine, kind, name, lines)
        self.recover(machine)
        self.end(machine, name, lines)
        self.figures[kind].rounds += 1

    def start(self, machine: Machine, name: str) -> Path:
        """Start a child on a machine; return the file to which it writes."""
        until(partial(self._is_up, machine))
        lines = self._shared / f"{machine.name}-lines" / name
        lines.touch()
        lines.chmod(0o666)
        words, needs = (*PYTHON, "-c", LOOP, str(lines)), [machine.name]
        self._spawn(name, *words, policy=machine.name, labels=needs)
        until(partial(self._is, name, state="running", node=machine.name))
        until(lambda: lines.stat().st_size)
        return lines

    def end(self, machine: Machine, name: str, lines: Path) -> None:
        """End a child; look at what it wrote, and at what its machine has left of it."""
        until(partial(self._is, name, state="running"))
        self._ask("kill", name=name, signal="KILL")
        until(partial(self._is, name, state="ended"))
        numbers = [int(word) for word in lines.read_text().split()]
        assert numbers == sorted(numbers), f"{name} ran twice"
        for one in (self.head, *self.others):
            assert not one.pids(str(lines))
            assert not os.listdir(f"/proc/{one.init}/root/dev/shm")
            until(lambda: host(one, "doctor", "--leaks").returncode == 0)  # noqa: B023
        listed = json.loads(host(machine, "workspace", "list", "--json").stdout)
        assert f"{machine.name}-repo" in [row["name"] for row in listed]
        rows = json.loads(host(machine, "ps", "--json").stdout)
        assert name not in [row["name"] for row in rows]

    def kill_head(self, kind: str, number: int) -> None:
        """Do one kill at the head, and look at a child elsewhere."""
        machine = self.others[0]
        name = f"{machine.name}-{number}"
        lines = self.start(machine, name)
        with killed(self.head, kind):
            pause(STOPPED_S if kind.startswith("stop") else 0.0)
        for one in (self.head, *self.others):
            until(partial(self._is_up, one))
        self.end(machine, name, lines)

    def _watch(self, machine: Machine, kind: str, name: str, lines: Path) -> None:
        """Note when the child is gone, told and placed again; wait while it is so."""
        figures, begun_s = self.figures[kind], time.monotonic()
        head = self.head.name
        awaited: list[tuple[list[float], Callable[[], bool]]] = [
            (figures.gone, lambda: not machine.pids(str(lines))),
            (figures.told, lambda: self._is_lost(name)),
            (figures.placed, lambda: self._is(name, state="running", node=head)),
        ]
        stays_s = 0.0 if kind in {"kill raylet", "kill daemon"} else STOPPED_S
        while True:
            since_s = time.monotonic() - begun_s
            for one in tuple(awaited):
                if one[1]():
                    one[0].append(time.monotonic() - begun_s)
                    awaited.remove(one)
            is_over = not (awaited and KILLS[kind])
            if is_over and since_s >= stays_s:
                break
            assert since_s < PATIENCE_S, f"{name} is not lost after {kind}"
            pause(0.05)
        if self._is_lost(name):
            until(lambda: lines.read_bytes().endswith(b"2\n"))

    def recover(self, machine: Machine) -> None:
        """Return when a node is up again, by itself or by leaving and joining."""
        with suppress(AssertionError):
            fleetmachines.until(
                lambda: is_running(machine) and self._is_up(machine), BACK_S
            )
            return
        machine.fleet("leave")
        assert not is_left(machine)
        self._join(machine)


def pause(length_s: float) -> None:
    """Wait."""
    select.select([], [], [], length_s)


def host(machine: Machine, *words: str) -> Any:
    """Run a command of the daemon of a machine."""
    return machine.run(SANDHOST, *words, "--control", machine.control)


def is_running(machine: Machine) -> bool:
    """Return whether anything of a node's Ray runs."""
    return ray_processes.is_running(machine.directory)


def is_left(machine: Machine) -> bool:
    """Return whether anything of a node's Ray is there: processes, or its sessions."""
    return ray_processes.is_there(machine.directory)


@contextmanager
def killed(machine: Machine, kind: str) -> Iterator[None]:
    """Do a kill; what is stopped or cut off goes on at the end."""
    verb, _, what = kind.partition(" ")
    if verb == "cut":
        machine.cut()
        yield
        machine.restore()
    elif what == "machine":
        machine.freeze()
        yield
        machine.thaw()
    elif verb == "kill":
        os.kill(pids_of(machine, what)[0], signal.SIGKILL)
        yield
        if what == "daemon":
            machine.start_daemon()
    else:
        pids = pids_of(machine, what)
        send(pids, signal.SIGSTOP)
        yield
        send(pids, signal.SIGCONT)


def pids_of(machine: Machine, what: str) -> list[int]:
    """Return the processes of a part of a node."""
    if what == "all":
        return [pid for pid in machine.pids() if pid != machine.init]
    return [machine.daemon if what == "daemon" else machine.pid_of_ray(what)]


def send(pids: list[int], number: int) -> None:
    """Signal processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def fleet_of(*names: str) -> Iterator[Fleet]:
    """Yield a fleet; at the end it is down, and nothing is left."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as top:
        shared = Path(top)
        shared.chmod(0o755)
        config = CONFIG
        for name in names:
            config += POLICY.format(name=name, shared=shared)
            for part in ("repo", "lines"):
                (shared / f"{name}-{part}").mkdir()
                (shared / f"{name}-{part}").chmod(0o777)
        try:
            with fleetmachines.machines(*names, config=config) as found:
                fleet = Fleet(found, shared)
                yield fleet
                assert fleet.head.fleet("down").returncode == 0
                for one in found:
                    until(lambda: not is_left(one))  # noqa: B023 - at once
                    assert not os.listdir(f"/proc/{one.init}/root/dev/shm")
        except UnavailableError as why:
            pytest.skip(str(why))


# spec FL5, FL6, FL8
async def test_no_child_of_a_machine_that_is_killed_runs_twice(
    tell: Callable[[str], None],
) -> None:
    choice = random.Random(SEED)
    kinds = (list(KILLS) * (FLEET_KILLS // len(KILLS) + 1))[:FLEET_KILLS]
    choice.shuffle(kinds)
    left = list(enumerate(kinds))

    async def kill_on(machine: Machine) -> None:
        while left:
            number, kind = left.pop()
            await trio.to_thread.run_sync(fleet.kill, machine, kind, number)

    with fleet_of("a", "b", "c", "d") as fleet:
        try:
            async with trio.open_nursery() as nursery:
                for machine in fleet.others:
                    nursery.start_soon(kill_on, machine)
        finally:
            for kind, figures in fleet.figures.items():
                tell(f"{kind:20}: {figures}")


# spec FL2, FL5, FL6, FL8
def test_no_child_runs_twice_when_its_head_is_killed() -> None:
    with fleet_of("a", "b", "c") as fleet:
        for number, kind in enumerate(KILLS_OF_HEAD):
            fleet.kill_head(kind, number)


RAY = SANDHOST.with_name("ray")

DRIVER = """
import sys, time, ray
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
held = ray.get_actor(sys.argv[3])
print("holds", flush=True)
time.sleep(100000)
"""


# spec FL8
def test_a_driver_that_is_killed_takes_nothing_along() -> None:
    with fleet_of("a", "b") as fleet:
        machine = fleet.others[0]
        lines = fleet.start(machine, "b-driver")
        address, token = fleet.reached
        words = (sys.executable, "-c", DRIVER, address, "sandhost-fleet", "directory")
        with subprocess.Popen(
            machine.words(*words),
            stdout=subprocess.PIPE,
            env=ray_processes.environment(token),
        ) as outer:
            assert outer.stdout is not None
            said = outer.stdout.readline()
            while said and said != b"holds\n":
                said = outer.stdout.readline()
            assert said
            (driver,) = (pid for pid in machine.pids(DRIVER) if pid != outer.pid)
            os.kill(driver, signal.SIGKILL)
        until(lambda: not machine.pids(DRIVER))
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
