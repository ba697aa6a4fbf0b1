"""Kills of a fleet's machines: what is done to them, and what follows.

    with fleet_of("a", "b") as fleet:
        fleet.kill(fleet.others[0], "kill raylet", 0).check()

Each child appends its incarnation to a file every 10 ms, through a system call that no
host looks at. An older one behind a newer one has run beside its successor.
"""

import json
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from supervisor.cluster import ray_processes
from supervisor.cluster.client import FleetClient
from supervisor.control.client import ControlError
from tests.helpers import fleetmachines
from tests.helpers.fleetmachines import SANDHOST, Machine

STOPPED_S = 20.0
"""How long what is stopped or cut off stays so."""

BACK_S = 20.0
"""For a node to come back by itself; then it leaves and joins again."""

CALM_LOOKS = 10
"""Of processes that go on: none is stopped in so many looks."""

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


@dataclass
class Remains:
    """The traces of a child that has ended.

    Attributes:
        name: of the child.
        ran_twice: it wrote an older incarnation behind a newer one.
        left: remains of it, or of its node.
    """

    name: str
    ran_twice: bool
    left: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fail where there is any.

        Raises:
            AssertionError: it ran twice, or has left something.
        """
        assert not self.ran_twice, f"{self.name} ran twice"
        assert not self.left, f"{self.name} has left {', '.join(self.left)}"


class Fleet:
    """A fleet whose machines are killed; its head goes on.

    Attributes:
        head: has room for all children.
        others: die.
        all: of these, the head first.
        figures: by kind.
        reached: its address, and the file of its token.
    """

    def __init__(self, found: tuple[Machine, ...], shared: Path) -> None:
        self.all = found
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

    def tables(self) -> dict[str, Any]:
        """Return `fleet ps`; nothing where the directory does not answer."""
        with suppress(ControlError):
            return dict(self._ask("ps"))
        return {}

    def _is_up(self, machine: Machine) -> bool:
        nodes = self.tables().get("nodes", ())
        return any(
            (node["name"], node["state"]) == (machine.name, "up") for node in nodes
        )

    def _wait(self, awaited: str, is_so: Callable[[], object]) -> None:
        """Wait until something is so.

        Raises:
            AssertionError: it is not in time; the text has the nodes and the children.
        """
        try:
            until(is_so)
        except AssertionError:
            rows = self._ask("ps")
            running = [row for row in rows["children"] if row["state"] != "ended"]
            raise AssertionError(
                f"{awaited}: not so after {PATIENCE_S:g} s: {rows['nodes']} {running}"
            ) from None

    def kill(self, machine: Machine, kind: str, number: int) -> Remains:
        """Do one kill, look at what follows, and bring the node back.

        Raises:
            AssertionError: something did not come in time.
        """
        name = f"{machine.name}-{number}"
        lines = self.start(machine, name)
        with killed(machine, kind):
            self._watch(machine, kind, name, lines)
        self.recover(machine)
        remains = self.remains_of(machine, name, lines)
        self.figures[kind].rounds += 1
        return remains

    def start(self, machine: Machine, name: str) -> Path:
        """Start a child on a machine; return the file to which it writes."""
        self.recover(machine)  # a raylet that was stopped may end itself late
        lines = self._shared / f"{machine.name}-lines" / name
        lines.touch()
        lines.chmod(0o666)
        words = (sys.executable, "-I", "-S", "-c", LOOP, str(lines))
        self._spawn(name, *words, policy=machine.name, labels=[machine.name])
        is_there = partial(self._is, name, state="running", node=machine.name)
        self._wait(f"{name} runs on {machine.name}", is_there)
        self._wait(f"{name} writes", lambda: lines.stat().st_size)
        return lines

    def end(self, machine: Machine, name: str, lines: Path) -> None:
        """End a child; fail where it ran twice or anything of it is left."""
        self.remains_of(machine, name, lines).check()

    def remains_of(self, machine: Machine, name: str, lines: Path) -> Remains:
        """End a child; return what it wrote, and what its machine has left of it."""
        self._wait(f"{name} runs", partial(self._is, name, state="running"))
        self._ask("kill", name=name, signal="KILL")
        self._wait(f"{name} has ended", partial(self._is, name, state="ended"))
        numbers = [int(word) for word in lines.read_text().split()]
        remains = Remains(name, numbers != sorted(numbers))
        for one in self.all:
            remains.left += [f"process {pid}" for pid in one.pids(str(lines))]
            remains.left += os.listdir(f"/proc/{one.init}/root/dev/shm")
            try:
                is_clean = partial(is_without_leaks, one)
                self._wait(f"{one.name} is without leaks", is_clean)
            except AssertionError:
                remains.left.append(host(one, "doctor", "--leaks").stdout.strip())
        listed = json.loads(host(machine, "workspace", "list", "--json").stdout)
        assert f"{machine.name}-repo" in [row["name"] for row in listed]
        rows = json.loads(host(machine, "ps", "--json").stdout)
        remains.left += [row["name"] for row in rows if row["name"] == name]
        return remains

    def kill_head(self, kind: str, number: int) -> None:
        """Do one kill at the head, and look at a child elsewhere."""
        machine = self.others[0]
        name = f"{machine.name}-{number}"
        lines = self.start(machine, name)
        with killed(self.head, kind):
            pause(STOPPED_S if kind.startswith("stop") else 0.0)
        for one in self.all:
            self._wait(f"{one.name} is up", partial(self._is_up, one))
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
            self._wait(
                f"{name} writes again", lambda: lines.read_bytes().endswith(b"2\n")
            )

    def recover(self, machine: Machine) -> None:
        """Return when a node is up again, by itself or by leaving and joining."""
        with suppress(AssertionError):
            fleetmachines.until(
                lambda: is_running(machine) and self._is_up(machine), BACK_S
            )
            return
        machine.fleet("leave")
        assert not is_left(machine), f"the node {machine.name} is left"
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


def is_without_leaks(machine: Machine) -> bool:
    """Return whether a daemon has leaked nothing."""
    return bool(host(machine, "doctor", "--leaks").returncode == 0)


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
        go_on(machine)


def go_on(machine: Machine) -> None:
    """Have all processes of a machine go on.

    nsenter(1), by which another thread asks this machine something, stops itself once it
    sees that its child was stopped: also after it was told to go on.
    """
    calm = 0
    while calm < CALM_LOOKS:
        stopped = [pid for pid in machine.pids() if is_stopped(pid)]
        send(stopped, signal.SIGCONT)
        calm = 0 if stopped else calm + 1
        pause(0.05)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"
    return False


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
    """Yield a fleet; at the end it is down, and nothing is left.

    Raises:
        UnavailableError: there can be no machines here.
    """
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as top:
        shared = Path(top)
        shared.chmod(0o755)
        config = CONFIG
        for name in names:
            config += POLICY.format(name=name, shared=shared)
            for part in ("repo", "lines"):
                (shared / f"{name}-{part}").mkdir()
                (shared / f"{name}-{part}").chmod(0o777)
        with fleetmachines.machines(*names, config=config) as found:
            fleet = Fleet(found, shared)
            yield fleet
            assert fleet.head.fleet("down").returncode == 0
            for one in found:
                until(lambda: not is_left(one))  # noqa: B023 - at once
                assert not os.listdir(f"/proc/{one.init}/root/dev/shm")


def kinds_of(count: int, seed: int | None = None) -> list[str]:
    """Return the kinds of so many kills, each as often, in an order of chance."""
    kinds = (list(KILLS) * (count // len(KILLS) + 1))[:count]
    random.Random(seed).shuffle(kinds)
    return kinds


async def kill_in_turn(
    machines: Sequence[Machine],
    kinds: Sequence[str],
    kill: Callable[[Machine, str, int], object],
) -> None:
    """Do kills, on each machine one after the other, on all at once."""
    left = list(enumerate(kinds))

    async def kill_on(machine: Machine) -> None:
        while left:
            number, kind = left.pop()
            await trio.to_thread.run_sync(kill, machine, kind, number)

    async with trio.open_nursery() as nursery:
        for machine in machines:
            nursery.start_soon(kill_on, machine)
