"""Ends of a fleet's parts, and when its tables are true after them.

    with fleet_of("a", "b") as fleet:
        outcome = end_part(fleet, "kill raylet", 0)
        print(outcome.untrue_s)

Each end is one that FL8 names. A table is untrue if it lists a child that does not run,
lacks one that runs, or does not answer; what is left counts like an untruth.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from hostlib.linux import processes
from supervisor.cluster import ray_processes
from supervisor.cluster.client import door_of
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
"""Of a part of a node that is not the head, or of the directory."""

ENDS_OF_HEAD = ("ray stop --force", "kill raylet")
"""Ends of the head, and of the fleet with it (FL2)."""

CALM_S = LEASE_S + 3 * BEAT_S
"""Time without anything untrue, after which all is true: a lease has ended in it."""

RESTART_S = 1.0
"""Time from the end of a daemon to its next start (`RestartSec` of the unit)."""

LATE_S = LEASE_S + BEAT_S
"""Time after which all is known: a lease has ended, and the directory has seen it."""

ANSWER_S = 1.0
"""Time in which a question is answered; silence for so long is untrue."""

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
        untrue_s: until the first look that found nothing any more.
        untrue: the last that was found; empty for nothing.
        ray_s: until no process of a Ray without a raylet was seen.
        look_s: the longest look, which a time may be late by.
        is_lost: the child there was lost.
    """

    untrue_s: float = 0.0
    untrue: str = ""
    ray_s: float = 0.0
    look_s: float = 0.0
    is_lost: bool = False


def observe(machine: Machine, find: Callable[[bool], str]) -> Outcome:
    """Look for what is untrue from now on, until nothing is for long.

    Args:
        machine: whose Ray is looked at.
        find: returns the first untruth; its argument is true once a lease has ended.

    Raises:
        AssertionError: something stays untrue.
    """
    outcome, begun_s = Outcome(), time.monotonic()
    with ray_seen(machine, outcome, begun_s):
        since_s, was_untrue = 0.0, False
        while was_untrue or since_s - outcome.untrue_s < CALM_S:
            looked_s = since_s
            said = find(since_s > LATE_S)
            since_s = time.monotonic() - begun_s
            outcome.look_s = max(outcome.look_s, since_s - looked_s)
            if said:
                outcome.untrue = said
            if said or was_untrue:
                outcome.untrue_s = since_s
            was_untrue = bool(said)
            assert since_s < PATIENCE_S, outcome.untrue
            pause(0.02)
    return outcome


@contextmanager
def ray_seen(machine: Machine, outcome: Outcome, begun_s: float) -> Iterator[None]:
    """Note until when a machine has processes of a Ray without a raylet."""
    is_over = Event()

    def look() -> None:
        while not is_over.wait(0.05):
            if not has_raylet(machine) and is_running(machine):
                outcome.ray_s = time.monotonic() - begun_s

    thread = Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


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
    _is_silent: bool = field(default=False, init=False)
    _spaces: dict[str, tuple[float, list[dict[str, Any]]]] = field(
        default_factory=dict, init=False
    )

    def find_untruth(self, is_late: bool) -> str:
        """Return the first untruth; empty for none.

        Args:
            is_late: a node may be unknown no more, and the child has to run.
        """
        self._is_silent = False
        said = next(self._untruths(is_late), "")
        if self._is_silent:
            return said or "a daemon does not list its workspaces"
        # Once more, for the parts of a look are not of one moment.
        return said and next(self._untruths(is_late), "")

    def find_remains(self, _is_late: bool) -> str:
        """Return the first thing that is left of a fleet without a head."""
        return next(self._remains(), "")

    def _remains(self) -> Iterator[str]:
        for one in self.fleet.all:
            if one.pids(str(self.lines)):
                yield f"{self.name} runs on {one.name}"
            listed = self._ask(one, "ps")
            if listed is None:
                yield f"the daemon of {one.name} does not answer"
            elif listed:
                yield f"the daemon of {one.name} lists {len(listed)} children"
            if used := [
                row["name"] for row in self._list_workspaces(one) if row["child"]
            ]:
                yield f"workspaces on {one.name} that nothing uses: {used}"
            if not has_raylet(one) and is_running(one):
                yield f"processes of the Ray of {one.name} are left"
            if tables_of(one):
                yield f"the door of {one.name} answers for the directory"
            yield from self._of_leaks(one)

    def _ask(self, one: Machine, do: str, **args: object) -> Any:
        """Return what a daemon answers; None where it does not."""
        try:
            return call(one.control, do, args or None, timeout_s=ANSWER_S)
        except (ControlError, OSError):
            self._is_silent = True
            return None

    def _untruths(self, is_late: bool) -> Iterator[str]:
        """Yield what is untrue."""
        tables = tables_of(self.fleet.head)
        if not tables:
            self._is_silent = True
            yield "the directory does not answer"
            return
        states = {row["name"]: row["state"] for row in tables["nodes"]}
        children = {row["name"]: row for row in tables["children"]}
        yield from self._of_nodes(states, is_late)
        yield from self._of_own(children, is_late)
        for one in self.fleet.all:
            here = [row for row in children.values() if row["node"] == one.name]
            yield from self._of_children(one, here)
            yield from self._of_leaks(one)

    def _of_nodes(self, states: dict[str, str], is_late: bool) -> Iterator[str]:
        """Yield what is untrue of nodes."""
        own = self.machine.name
        if has_raylet(self.machine):
            if not tables_of(self.machine):
                self._is_silent = True
                yield f"the door of {own} does not answer"
            if is_late and set(states.values()) != {"up"}:
                yield f"a node is not up: {states}"
            return
        if is_running(self.machine):
            yield f"processes of the Ray of {own} are left"
        if states.get(own) == "up":
            yield f"the node {own} is up without Ray"
        if is_late and states.get(own) == "unknown":
            yield f"the node {own} is still unknown"

    def _of_own(self, children: dict[str, Any], is_late: bool) -> Iterator[str]:
        """Yield what is untrue of the children that this is about."""
        state = children.get(self.name, {}).get("state")
        if is_late and state != "running":
            yield f"{self.name} is {state}"
        state = children.get(self.over, {}).get("state")
        if self.over and state != "ended":
            yield f"{self.over} is {state}"

    def _of_children(self, one: Machine, here: list[dict[str, Any]]) -> Iterator[str]:
        """Yield what is untrue of the children of a machine, in either table."""
        listed = self._ask(one, "ps")
        if listed is None:
            yield f"the daemon of {one.name} does not answer"
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
        spaces = self._list_workspaces(one)
        names = {row["name"] for row in listed} | {row["id"] for row in listed}
        if idle := [
            row["name"] for row in spaces if row["child"] and row["child"] not in names
        ]:
            yield f"workspaces on {one.name} that nothing uses: {idle}"

    def _of_leaks(self, one: Machine) -> Iterator[str]:
        """Yield what is left on a machine, and which workspace is not listed."""
        leaks = self._ask(one, "leaks")
        if leaks is None:
            yield f"the daemon of {one.name} does not answer"
            return
        if not leaks["clean"]:
            counts = {what: count for what, count in leaks["counts"].items() if count}
            yield f"left on {one.name}: {counts}"
        names = {row["name"] for row in self._list_workspaces(one)}
        if one is self.machine and f"{one.name}-repo" not in names:
            yield f"the workspace of {self.name} is not listed"
        if self.over and any(self.over in name for name in names):
            yield f"the workspace of {self.over} is left"
        if files := os.listdir(f"/proc/{one.init}/root/dev/shm"):
            yield f"left on {one.name}: /dev/shm has {files}"
        if strays := strays_of(one):
            yield f"left on {one.name}: processes {strays}"

    def _list_workspaces(self, one: Machine) -> list[dict[str, Any]]:
        """Return the workspaces of a daemon, as it has listed them not long ago."""
        listed_s, rows = self._spaces.get(one.name, (0.0, []))
        if time.monotonic() - listed_s > LISTED_S:
            answer = self._ask(one, "workspace", verb="list")
            if answer is None:
                return []
            rows = answer["result"]
            self._spaces[one.name] = (time.monotonic(), rows)
        return rows


TOLD = ("placing", "running", "unknown")
"""States of a child that may run."""


def key_of(row: dict[str, Any]) -> tuple[str, int, int]:
    """Return the name, incarnation and pid of a child, which each table has."""
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


def tables_of(machine: Machine) -> dict[str, Any]:
    """Return `fleet ps` as a machine's door has it; nothing where it does not answer."""
    with suppress(ControlError, OSError):
        return dict(call(door_of(machine.control), "ps", {}, timeout_s=ANSWER_S))
    return {}


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


def orphans_of(machine: Machine) -> dict[str, int]:
    """Return what ended hosts have left on a machine; its `/tmp` is shared."""
    done = machine.run(SANDHOST, "doctor", "--leaks", "--json")
    counts = json.loads(done.stdout)["counts"]
    return {what: counts[what] for what in ("launchpads", "orphans") if counts[what]}


def end_part(fleet: Fleet, kind: str, number: int) -> Outcome:
    """End a part at a moment of chance, return what follows, and bring it back.

    Raises:
        AssertionError: the tables did not become true, or something was left.
    """
    machine = fleet.others[0]
    name = f"{machine.name}-{number}"
    lines = fleet.start(machine, name)
    watch = Watch(fleet, machine, name, lines)
    with end_and_restart(watch, machine, kind):
        outcome = observe(machine, watch.find_untruth)
    assert not orphans_of(machine), f"left on {machine.name}: {orphans_of(machine)}"
    outcome.is_lost = not lines.read_bytes().endswith(b"1\n")
    fleet.recover(machine)
    fleet.end(machine, name, lines)
    return outcome


def end_head(fleet: Fleet, kind: str, number: int) -> Outcome:
    """End the head's Ray, return what follows, and begin the fleet again.

    Raises:
        AssertionError: something was left.
    """
    machine = fleet.others[0]
    name = f"{machine.name}-{number}"
    lines = fleet.start(machine, name)
    watch = Watch(fleet, machine, name, lines)
    with end_and_restart(watch, fleet.head, kind):
        outcome = observe(fleet.head, watch.find_remains)
    outcome.is_lost = True
    for one, command in ((fleet.head, "down"), (machine, "leave")):
        one.fleet(command)
        assert not is_running(one), f"the Ray of {one.name} is left"
        assert not orphans_of(one), f"left on {one.name}: {orphans_of(one)}"
    fleet.begin()
    fleet.end(machine, name, lines)  # the directory's store has it still
    return outcome


@contextmanager
def end_and_restart(watch: Watch, machine: Machine, kind: str) -> Iterator[None]:
    """End a part of a machine, or the directory; a daemon starts again."""
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
        with _run_ray_stop(machine):
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
def _run_ray_stop(machine: Machine) -> Iterator[None]:
    """Run `ray stop --force`; yield when it has ended the raylet."""
    pidfd = os.pidfd_open(pids_of(machine, "raylet")[0])
    words = machine.words(RAY, "stop", "--force")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as stop:
        try:
            assert select.select([pidfd], [], [], PATIENCE_S)[0], "the raylet runs on"
            yield
            assert stop.wait(PATIENCE_S) == 0, "ray stop has failed"
        finally:
            os.close(pidfd)
            stop.kill()


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
            said = b""
            while b"holds\n" not in said:
                assert select.select([outer.stdout], [], [], PATIENCE_S)[0], said
                piece = os.read(outer.stdout.fileno(), 4096)
                assert piece, f"the driver has ended: {said!r}"
                said += piece
            (pid,) = (pid for pid in machine.pids(DRIVER) if pid != outer.pid)
            yield pid
        finally:
            machine.kill(*machine.pids(DRIVER))


def _start_later(machine: Machine) -> None:
    pause(RESTART_S)
    machine.start_daemon()
