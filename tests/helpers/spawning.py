"""Real children for the tests of spawning.

Programs they run, and eyes on their ends.

The programs print pids on descriptor 3, one a line; a test turns each into a pidfd at
once, so that "it is dead" is asked of that process and not of a number. Used by
`tests/supervisor`.
"""

import os
import select
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio

from hostlib.linux import processes
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from supervisor.spawn.launcher import Launcher
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spawn.process import ExitStatus, SpawnedProcess
from supervisor.spawn.request import SpawnRequest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = (sys.executable, "-I", "-S", "-c")

WAYS = ("forked", "from stock")
"""How a child starts: forked for its order, or forked before, and waiting for it (ADR 47)."""

# A whole family that does not want to die: the child, a stopped grandchild, and a
# daemon (double fork, own session, empty environment) that holds descriptor 3.
FAMILY = r"""
import os, signal
def say():
    os.write(3, b"%d\n" % os.getpid())
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
say()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    say()
    os.execve("/bin/sleep", ["sleep", "1000"], {})
if os.fork() == 0:
    say()
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    signal.pause()
"""
FAMILY_SIZE = 3

# A host in a process of its own. argv: the file that children have as descriptor 3, to
# which the host itself says the launchpad's pid; how many children; their command. It
# ends when they have.
HOST = r"""
from supervisor.spawn.launchpad.start import start_launchpad
launchpad = start_launchpad()
import os, sys, trio
from hostlib.linux import processes
from supervisor.spawn.launcher import Launcher
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spawn.request import SpawnRequest
async def main():
    where, count, *argv = sys.argv[1:]
    three = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fds = ((0, 0), (1, 1), (2, 2), (three, 3))
    request = SpawnRequest(argv[0], tuple(argv), {}, os.open("/", os.O_RDONLY), fds)
    async with trio.open_nursery() as nursery:
        launcher = Launcher(launchpad)
        await nursery.start(launcher.run)
        children = [await launcher.spawn(request) for _ in range(int(count))]
        os.write(three, b"launchpad %d\n" % launchpad.pid)
        for child in children:
            await child.wait_exit()
        nursery.cancel_scope.cancel()
trio.run(main)
"""


@asynccontextmanager
async def started(way: str, cwd: Path) -> AsyncIterator["LauncherStage"]:
    """Open a stage whose children start in one of the `WAYS`."""
    async with staged(cwd) as stage:
        if way == "from stock":
            for _ in range(2):  # a shape that was ordered twice is kept in stock
                _, status = await stage.output(("/bin/true",))
                assert status.code == 0
            with from_stock(stage.launcher):
                yield stage
        else:
            yield stage


async def stocked(launcher: Launcher) -> set[int]:
    """Wait until a child is in stock; return the pids of those that are."""
    with trio.fail_after(30):
        while True:
            if stock := await launcher.stock():
                return {pid for pid, _ in stock}
            await trio.sleep(0.002)


@contextmanager
def from_stock(launcher: Launcher) -> Iterator[None]:
    """Start each child when one is in stock; check that children are such ones."""
    spawn, came = launcher.spawn, list[bool]()

    async def wait_and_spawn(request: SpawnRequest) -> SpawnedProcess:
        stock = await stocked(launcher)
        process = await spawn(request)
        came.append(process.pid in stock)
        return process

    with patch.object(launcher, "spawn", wait_and_spawn):
        yield
    assert any(came) or not came, "no child came from the stock"


def host_command(where: str | Path, count: int, argv: tuple[str, ...]) -> list[str]:
    """The command of a `HOST`; run it in `ROOT`."""
    return [sys.executable, "-c", HOST, os.fspath(where), str(count), *argv]


class Watched:
    """One process, by a pidfd taken while it was alive."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not select.select([self.pidfd], [], [], 0)[0]

    async def ended(self) -> None:
        """Wait for its end."""
        await trio.lowlevel.wait_readable(self.pidfd)


@contextmanager
def watching(pids: list[int]) -> Iterator[list[Watched]]:
    """Watch processes; gives the pidfds back at the end."""
    watched = [Watched(pid) for pid in pids]
    try:
        yield watched
    finally:
        for process in watched:
            os.close(process.pidfd)


def all_ended_within(watched: list[Watched], timeout_s: float) -> bool:
    """Wait, without Trio, until each has ended; False if the time is up before."""
    deadline_s = time.monotonic() + timeout_s
    left = {process.pidfd for process in watched}
    while left:
        patience_s = max(0.0, deadline_s - time.monotonic())
        ended, _, _ = select.select(left, [], [], patience_s)
        if not ended:
            return False
        left.difference_update(ended)
    return True


@asynccontextmanager
async def staged(cwd: Path) -> AsyncIterator["LauncherStage"]:
    """Make the test process a host with a launcher, and undo all of it at the end.

    If the launchpad is lost, children of the test process that were there before are
    spared: they are the test run's.
    """
    own_children = processes.children_of(os.getpid())
    launchpad = start_launchpad()
    launcher = Launcher(launchpad, own_children)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(launcher.run)
            stage = LauncherStage(launcher, launchpad.pid, nursery.cancel_scope, cwd)
            try:
                yield stage
            finally:
                os.close(stage.cwd_fd)
                os.close(stage.null)
                nursery.cancel_scope.cancel()
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


class LauncherStage:
    """A running launcher and what most tests spawn with: see `staged`.

    Attributes:
        launcher: Runs until the stage ends.
        launchpad: The pid of its launchpad.
        scope: Cancel it to stop the launcher.
        cwd_fd: The directory that children start in.
        null: The null device, readable and writable.
        layers: arguments of each layer of the sandbox, for all requests.
    """

    def __init__(
        self, launcher: Launcher, launchpad: int, scope: trio.CancelScope, cwd: Path
    ) -> None:
        self.launcher = launcher
        self.launchpad = launchpad
        self.scope = scope
        self.cwd_fd = os.open(cwd, os.O_RDONLY | os.O_DIRECTORY)
        self.null = os.open(os.devnull, os.O_RDWR)
        self.layers: dict[str, object] = {}

    def request(
        self,
        argv: tuple[str, ...],
        fds: tuple[tuple[int, int], ...] = (),
        **changes: Any,
    ) -> SpawnRequest:
        """Ask for argv[0], with the null device where `fds` names nothing."""
        named = {target for _, target in fds}
        standard = tuple((self.null, n) for n in range(3) if n not in named)
        request = SpawnRequest(
            argv[0],
            argv,
            {},
            self.cwd_fd,
            (*standard, *fds),
            layers=self.layers,
        )
        return replace(request, **changes)

    async def output(
        self,
        argv: tuple[str, ...],
        fds: tuple[tuple[int, int], ...] = (),
        **changes: Any,
    ) -> tuple[bytes, ExitStatus]:
        """Run a child to its end; what it wrote to descriptor 1, and how it ended."""
        ours, theirs = os.pipe()
        try:
            process = await self.launcher.spawn(
                self.request(argv, (*fds, (theirs, 1)), **changes)
            )
        finally:
            os.close(theirs)
        async with trio.lowlevel.FdStream(ours) as stream:
            written = b"".join([part async for part in stream])
        status = await process.wait_exit()
        await process.wait_swept()
        process.close()
        return written, status

    async def family(self, program: str = FAMILY) -> tuple[SpawnedProcess, list[int]]:
        """Start a family; the child and the pids of all, itself first."""
        ours, theirs = os.pipe()
        try:
            argv = (*PYTHON, program)
            process = await self.launcher.spawn(self.request(argv, ((theirs, 3),)))
        finally:
            os.close(theirs)
        async with trio.lowlevel.FdStream(ours) as stream:
            text = b""
            while text.count(b"\n") < FAMILY_SIZE:
                text += await stream.receive_some()
        pids = [int(line) for line in text.split()]
        return process, sorted(pids, key=lambda pid: pid != process.pid)
