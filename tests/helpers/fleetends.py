"""Ends of a fleet's parts, and when its tables are true after them.

    with fleet_of("a", "b") as fleet:
        outcome = end_part(fleet, "kill raylet", 0)
        print(outcome.untrue_s)

Each end is one that FL8 names. A table is untrue if it lists a child that does not run,
lacks one that runs, or does not answer.
"""

import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from hostlib.linux import processes
from supervisor.cluster import ray_processes
from supervisor.cluster.client import FleetClient
from supervisor.control.client import ControlError, call
from supervisor.fleet.lease import BEAT_S, LEASE_S
from tests.helpers.fleetkills import PATIENCE_S, Fleet, is_running, pause, pids_of
from tests.helpers.fleetmachines import SANDHOST, Machine

RAY = SANDHOST.with_name("ray")

ENDS = (
    "ray stop --force",
    "kill raylet",
    "kill ray::NodeActor",
    "kill ray::DirectoryActor",
    "kill daemon",
    "kill driver",
)

CALM_S = LEASE_S + 3 * BEAT_S
"""Time without anything untrue, after which all is true: a lease has ended in it."""

RESTART_S = 1.0
"""Time from the end of a daemon to its next start (`RestartSec` of the unit)."""

ANSWER_S = 1.0
"""Time in which a daemon answers a question."""

LISTED_S = 1.0
"""Between two lists of workspaces, which wait for one in use."""

DRIVER = """
import sys, time, ray
from sandhost import fleet
address, control, node, name = sys.argv[1:]
ray.init(address=address, namespace="sandhost-fleet", log_to_driver=False)
directory = ray.get_actor("directory")
held = fleet.create(f"{node}-repo", name=name, node=node, keep=False, control=control)
print("holds", flush=True)
time.sleep(100000)
"""
"""A user's program: a driver of the fleet's Ray that has the directory, and a child."""


@dataclass
class Outcome:
    """Times of what was untrue or left after an end, in seconds from it.

    Attributes:
        untrue_s: until nothing was.
        untrue: the last of it; empty for nothing.
        ray_s: until no process of a Ray without a raylet ran.
        look_s: the longest look, which its time may be late by.
    """

    untrue_s: float = 0.0
    untrue: str = ""
    ray_s: float = 0.0
    look_s: float = 0.0


@dataclass
class Watch:
    """The tables of a fleet, beside what runs on its machines.

    Attributes:
        fleet: whose tables.
        machine: has the part that ends.
        name: of a child there that is placed again where it is lost.
        lines: the file to which it writes.
        over: name of a child that is to end; empty for none.
    """

    fleet: Fleet
    machine: Machine
    name: str
    lines: Path
    over: str = ""
    _bases: dict[str, tuple[float, set[str]]] = field(default_factory=dict, init=False)

    def run(self) -> Outcome:
        """Look at all tables from now on, until nothing is untrue for long.

        Raises:
            AssertionError: something stays untrue.
        """
        outcome, begun_s = Outcome(), time.monotonic()
        since_s = 0.0
        while since_s - outcome.untrue_s < CALM_S:
            looked_s = since_s
            is_late = since_s > LEASE_S + BEAT_S
            # Twice, for its parts are not of one moment.
            said = self.find_untruth(is_late) and self.find_untruth(is_late)
            since_s = time.monotonic() - begun_s
            outcome.look_s = max(outcome.look_s, since_s - looked_s)
            if said:
                outcome.untrue_s, outcome.untrue = since_s, said
            if self.is_ray_left():
                outcome.ray_s = since_s
            assert since_s < PATIENCE_S, outcome.untrue
            pause(0.02)
        return outcome

    def is_ray_left(self) -> bool:
        """Tell whether the machine has processes of a Ray, but no raylet."""
        return not has_raylet(self.machine) and is_running(self.machine)

    def find_untruth(self, is_late: bool = False) -> str:
        """Return the first untruth of this look; empty for none.

        Args:
            is_late: what is not known yet has to be known.
        """
        tables = self.fleet.tables()
        if not tables:
            return "the directory does not answer"
        states = {row["name"]: row["state"] for row in tables["nodes"]}
        children = {row["name"]: row for row in tables["children"]}
        found = [self._of_nodes(states, is_late), self._of_own(children, is_late)]
        for one in self.fleet.all:
            here = [row for row in children.values() if row["node"] == one.name]
            found += [self._of_children(one, here), self._of_leaks(one)]
        return next(itertools.chain(*found), "")

    def _of_nodes(self, states: dict[str, str], is_late: bool) -> Iterator[str]:
        """Yield what is untrue of nodes."""
        own = self.machine.name
        if has_raylet(self.machine):
            if not does_door_answer(self.machine):
                yield f"the door of {own} does not answer"
        else:
            if is_running(self.machine):
                yield f"processes of the Ray of {own} are left"
            if states.get(own) == "up":
                yield f"the node {own} is up without Ray"
        if is_late and "unknown" in states.values():
            yield f"a node is unknown: {states}"

    def _of_own(self, children: dict[str, Any], is_late: bool) -> Iterator[str]:
        """Yield what is untrue of the children that this is about."""
        state = children[self.name]["state"]
        if is_late and state != "running":
            yield f"{self.name} is {state}"
        if self.over and children[self.over]["state"] != "ended":
            yield f"{self.over} is {children[self.over]['state']}"

    def _of_children(self, one: Machine, here: list[dict[str, Any]]) -> Iterator[str]:
        """Yield what is untrue of the children of a machine, in either table."""
        try:
            listed = call(one.control, "ps", timeout_s=ANSWER_S)
        except (ControlError, OSError) as why:
            yield f"the daemon of {one.name} does not answer: {why}"
            return
        runs = bool(one.pids(str(self.lines)))
        live = {key_of(row) for row in listed if is_live(row)}
        if runs and self.name not in {row["name"] for row in listed}:
            yield f"the daemon of {one.name} does not list {self.name}, which runs"
        if not runs and self.name in {name for name, _, _ in live}:
            yield f"the daemon of {one.name} lists {self.name}, which does not run"
        running = {key_of(row) for row in here if row["state"] == "running"}
        if running - live:
            yield f"listed to run on {one.name}, but do not: {running - live}"
        told = {row["name"] for row in here if row["state"] in TOLD}
        if unknown := [key for key in live - running if key[0] not in told]:
            yield f"run on {one.name}, and are not listed: {unknown}"

    def _of_leaks(self, one: Machine) -> Iterator[str]:
        """Yield what is left on a machine, and which workspace is not listed."""
        try:
            leaks = call(one.control, "leaks", timeout_s=ANSWER_S)
            names = self._list_workspaces(one)
        except (ControlError, OSError) as why:
            yield f"the daemon of {one.name} does not answer: {why}"
            return
        if not leaks["clean"]:
            counts = {what: count for what, count in leaks["counts"].items() if count}
            yield f"left on {one.name}: {counts}"
        if one is self.machine and f"{one.name}-repo" not in names:
            yield f"the workspace of {self.name} is not listed"
        if self.over and any(self.over in name for name in names):
            yield f"the workspace of {self.over} is left"
        if files := os.listdir(f"/proc/{one.init}/root/dev/shm"):
            yield f"left on {one.name}: /dev/shm has {files}"
        if strays := strays_of(one):
            yield f"left on {one.name}: processes {strays}"

    def _list_workspaces(self, one: Machine) -> set[str]:
        """Return the workspaces of a daemon, as it has listed them not long ago."""
        listed_s, names = self._bases.get(one.name, (0.0, set()))
        if time.monotonic() - listed_s > LISTED_S:
            rows = call(one.control, "workspace", {"verb": "list"}, timeout_s=ANSWER_S)
            names = {row["name"] for row in rows["result"]}
            self._bases[one.name] = (time.monotonic(), names)
        return names


TOLD = ("placing", "running", "unknown")
"""States of a child that may run."""


def key_of(row: dict[str, Any]) -> tuple[str, int, int]:
    """Return by what a child is the same one in each table."""
    return (row["name"], row["incarnation"], row["pid"])


def is_live(row: dict[str, Any]) -> bool:
    """Tell whether a daemon's row is a child of the fleet whose process runs."""
    return bool(row["incarnation"] and row["pid"] and row["state"] == "running")


def has_raylet(machine: Machine) -> bool:
    """Tell whether a raylet runs on a machine."""
    for pid in machine.pids("raylet"):
        with suppress(OSError):  # it has ended
            if Path(os.readlink(f"/proc/{pid}/exe")).name == "raylet":
                return True
    return False


def does_door_answer(machine: Machine) -> bool:
    """Tell whether a machine's node answers for the fleet."""
    with suppress(ControlError, OSError):
        return bool(FleetClient(machine.control).ask("ps"))
    return False


def strays_of(machine: Machine) -> list[str]:
    """Return processes whose parents have ended, but the daemon and Ray's."""
    found = []
    mark = f"{ray_processes.MARK}=".encode()
    for pid in set(processes.children_of(machine.init)) - {machine.daemon}:
        with suppress(OSError):  # it has ended
            if mark not in Path(f"/proc/{pid}/environ").read_bytes():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [f"{pid} {b' '.join(words[:4]).decode()}"] if words[0] else []
    return found


def end_part(fleet: Fleet, kind: str, number: int) -> Outcome:
    """End a part at a moment of chance, return what follows, and bring it back.

    Raises:
        AssertionError: the tables did not become true, or something was left.
    """
    machine = fleet.others[0]
    name = f"{machine.name}-{number}"
    lines = fleet.start(machine, name)
    watch = Watch(fleet, machine, name, lines)
    with ended(watch, kind):
        outcome = watch.run()
    fleet.recover(machine)
    fleet.end(machine, name, lines)
    return outcome


@contextmanager
def ended(watch: Watch, kind: str) -> Iterator[None]:
    """End a part of a fleet, of the machine or of its head; a daemon starts again."""
    machine = watch.machine
    wait_s = random.uniform(0.0, BEAT_S)
    if kind == "kill driver":
        name = f"{watch.name}-held"
        with driver(watch.fleet, machine, name) as pid:
            pause(wait_s)
            os.kill(pid, signal.SIGKILL)
            watch.over = name
            yield
        return
    pause(wait_s)
    if kind == "ray stop --force":
        with _stopped(machine):
            yield
    elif kind == "kill daemon":
        was = machine.daemon
        os.kill(was, signal.SIGKILL)
        again = Thread(target=_start_later, args=(machine,))
        again.start()
        try:
            yield
        finally:
            again.join()
        assert machine.daemon != was, f"the daemon of {machine.name} did not start"
    else:
        what = kind.removeprefix("kill ")
        where = watch.fleet.head if what == "ray::DirectoryActor" else machine
        os.kill(pids_of(where, what)[0], signal.SIGKILL)
        yield


@contextmanager
def _stopped(machine: Machine) -> Iterator[None]:
    """Run `ray stop --force`; yield when it has ended the raylet."""
    pidfd = os.pidfd_open(pids_of(machine, "raylet")[0])
    words = machine.words(RAY, "stop", "--force")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as stop:
        try:
            assert select.select([pidfd], [], [], PATIENCE_S)[0], "the raylet runs on"
        finally:
            os.close(pidfd)
        yield
        assert stop.wait() == 0, "ray stop has failed"


@contextmanager
def driver(fleet: Fleet, machine: Machine, name: str) -> Iterator[int]:
    """Yield the pid of a user's driver on a machine, which holds a child; then end it."""
    address, token = fleet.reached
    words = (sys.executable, "-c", DRIVER, address, machine.control, machine.name, name)
    with subprocess.Popen(
        machine.words(*words),
        stdout=subprocess.PIPE,
        env=ray_processes.environment(token),
    ) as outer:
        try:
            assert outer.stdout is not None
            said = outer.stdout.readline()
            while said and said != b"holds\n":
                said = outer.stdout.readline()
            assert said, "the driver has ended"
            (pid,) = (pid for pid in machine.pids(DRIVER) if pid != outer.pid)
            yield pid
        finally:
            machine.kill(*machine.pids(DRIVER))


def _start_later(machine: Machine) -> None:
    pause(RESTART_S)
    machine.start_daemon()
