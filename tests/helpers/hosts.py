r"""A real host in a test, and the proof that nothing is left of it.

    async def test_x(stage: Stage) -> None:
        child = await stage.puppet()
        assert await child.ask(b"PING\n") == b"OK"
        await child.kill()
        stage.assert_nothing_left()

`opened`, which opens a host around a fresh launchpad in the test's own process and
compares descriptors, processes and tables when it is over; the fixture `stage` for the
usual case; `Puppet`, a child that a test leads by the hand.
"""

import ast
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.journal import open_journal
from hostlib.linux import processes
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from hostlib.log import Log
from supervisor.children.child import Child
from supervisor.host import Host, open_host
from supervisor.parts import Settings
from supervisor.sandbox.plan import PROFILES
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spec import ChildSpec, minimal_env
from tests.helpers import canary
from tests.helpers.delays import kept_waiting_s
from tests.helpers.leaks import Holdings, holdings, left_over
from tests.helpers.stock import only_stock_beneath

CHILDREN = Path(__file__).parent / "children"
"""The programs that children run."""

PYTHON = (sys.executable, "-I", "-S")
"""An interpreter that starts quickly and knows the standard library only."""

NEIGHBOUR_S = 0.1
"""The longest that another client's READ may take, whatever anybody does (spec S5)."""


class Stage:
    """An open host, and what tests do with it.

    Attributes:
        host: the host.
        root: the root of children that are given none.
        launchpad: the pid of its launchpad.
        journal: the path of its journal.
        sandbox: what children run in for which nothing else is said.
        wrapper: the words before a child's own for which nothing else is said.
    """

    def __init__(self, host: Host, where: Path, launchpad: int) -> None:
        self.host = host
        self.where = where
        self.root = where / "root"
        self.launchpad = launchpad
        self.journal = where / "journal"
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.sandbox = PROFILES["none"]
        self.wrapper: tuple[str, ...] = ()
        self.pipes: list[int] = []
        self._before = self._held()

    def spec(
        self, command: tuple[str, ...], *, wrapper: tuple[str, ...] = (), **changes: Any
    ) -> ChildSpec:
        """Describe a child with the null device for stdio, restricted to `root`.

        Args:
            command: what it runs.
            wrapper: words before these; the stage's if there are none.
            changes: what differs from what is usual here.
        """
        command = (*(wrapper or self.wrapper), *command)
        known = {
            "cwd": str(self.where),
            "root": str(self.root),
            "env": minimal_env(str(self.where)),
            "stdio": (self.null, self.null, self.null),
            "sandbox": self.sandbox,
        }
        return ChildSpec(command, **{**known, **changes})

    async def spawn(self, *command: str, **changes: Any) -> Child:
        """Start a child."""
        child = await self.host.spawn(self.spec(command, **changes))
        assert child.failure is None, child.failure
        return child

    async def sh(self, script: str, **changes: Any) -> Child:
        """Start a shell."""
        return await self.spawn("/bin/sh", "-c", script, **changes)

    def script(self, name: str) -> str:
        """Return the path of a program of `CHILDREN` that a child may read."""
        script = CHILDREN / name
        if self.sandbox.layers:  # it may read its working directory, and not this one
            script = self.where / name
            if not script.exists():
                shutil.copy(CHILDREN / name, script)
        return str(script)

    async def puppet(self, **changes: Any) -> "Puppet":
        """Start a child that does what it is told."""
        command = (*PYTHON, self.script("puppet.py"))
        stdin, ours = os.pipe2(os.O_CLOEXEC)
        theirs, stdout = os.pipe2(os.O_CLOEXEC)
        try:
            child = await self.spawn(*command, stdio=(stdin, stdout, 2), **changes)
        finally:
            os.close(stdin)
            os.close(stdout)
            self.pipes += [ours, theirs]
        return Puppet(child, ours, theirs)

    def pid_of(self, child: "Puppet", said: int) -> int:
        """Return the pid, here, of a process beneath a child that it calls `said`."""
        for pid, _ in processes.trees_beneath(self.launchpad, [child.pid]):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            (numbers,) = [t for t in status.splitlines() if t.startswith("NSpid:")]
            if int(numbers.split()[-1]) == said:
                return pid
        raise AssertionError(f"no process {said} beneath {child.pid}")

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Read the journal: all events, or those of one name."""
        lines = self.journal.read_bytes().splitlines()
        found = [json.loads(text) for text in lines]
        return [row for row in found if event is None or row["event"] == event]

    def assert_nothing_left(self) -> None:
        """Check that every child's descriptors, rows, memory and processes are gone."""
        host = self.host
        assert not host.children
        assert not host.fs.tables.clients
        assert not host.fs.tables.files
        assert not host.pump.sessions
        assert host.pump.statistics().deadlines == 0
        assert host.budget.used_bytes == 0
        assert only_stock_beneath(self.launchpad)
        left = left_over(self._before, self._held())
        assert not left, "left behind: " + "; ".join(left)

    def _held(self) -> Holdings:
        """The descriptors of the host, without the test's pipes to children."""
        held = holdings()
        mine = {n: t for n, t in held.descriptors.items() if n not in self.pipes}
        return Holdings(mine, held.children)

    def close(self) -> None:
        """Give the test's own descriptors back."""
        for fd in (self.null, *self.pipes):
            os.close(fd)


class Puppet:
    """A child that evaluates expressions in the words of `children/puppet.py`."""

    def __init__(self, child: Child, tell_fd: int, hear_fd: int) -> None:
        self.child = child
        self._tell_fd = tell_fd
        self._hear_fd = hear_fd
        self._heard = b""
        self._is_told = False
        # Its first answer; `hear` takes it when it comes, for nobody waits for it.
        self.tell(f"around({canary.masked()!r})")

    @property
    def client_id(self) -> str:
        """The id of its connection."""
        assert self.child.session is not None
        return self.child.session.client.id

    @property
    def pid(self) -> int:
        """Its pid."""
        assert self.child.process is not None
        return self.child.process.pid

    def tell(self, expression: str) -> None:
        """Have it evaluate an expression; `hear` has the value."""
        data = expression.encode() + b"\n"
        assert os.write(self._tell_fd, data) == len(data), "more than a pipe holds"

    async def hear(self) -> Any:
        """Wait for the value of the oldest expression that it was told."""
        if not self._is_told:
            said = await self._line()
            canary.around_a_puppet(ast.literal_eval(said.decode()))
            self._is_told = True
        text = await self._line()
        canary.told("a puppet", text)
        return ast.literal_eval(text.decode())

    async def _line(self) -> bytes:
        while b"\n" not in self._heard:
            await trio.lowlevel.wait_readable(self._hear_fd)
            more = os.read(self._hear_fd, 65_536)
            if not more:
                raise EOFError(f"the puppet is gone: {await self.child.wait_gone()}")
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\n")
        return text

    async def do(self, expression: str) -> Any:
        """Have it evaluate an expression, and return the value."""
        self.tell(expression)
        return await self.hear()

    async def ask(self, data: bytes) -> bytes:
        """Have it send a request; return the reply line without LF."""
        reply: bytes = await self.do(f"ask({data!r})")
        return reply

    async def open(
        self, name: bytes, mode: bytes = b"r", claim: bytes = b"false"
    ) -> int:
        """Have it open a file that it may open."""
        fileno = await self.do(f"opened({name!r}, {mode!r}, {claim!r})")
        assert isinstance(fileno, int), fileno
        return fileno

    async def write(self, fileno: int, data: bytes) -> bytes:
        """Have it WRITE; return the reply line."""
        return await self.ask(b"WRITE %d %d\n%b" % (fileno, len(data), data))

    async def read(self, fileno: int, size: int) -> bytes:
        """Have it READ; return the bytes, or the error line."""
        data: bytes = await self.do(f"read({fileno}, {size})")
        return data

    async def kill(self) -> int:
        """End it by SIGKILL, and wait until nothing of it is left."""
        assert self.child.process is not None
        self.child.process.send_signal(9)
        return await self.child.wait_gone()

    async def leave(self) -> int:
        """Have it exit with 0, and wait until nothing of it is left."""
        self.tell("os._exit(0)")
        return await self.child.wait_gone()


@asynccontextmanager
async def opened(
    where: Path, settings: Settings | None = None, *, log_level: str = "ERROR"
) -> AsyncIterator[Stage]:
    """Open a host in this process, and check at the end that nothing of it is left."""
    with canary.held():
        before = holdings()
        (where / "root").mkdir(exist_ok=True)
        launchpad = start_launchpad()
        journal = open_journal(str(where / "journal"), pytest.fail)
        log = Log(log_level, as_json=True)
        try:
            async with open_host(launchpad, settings, journal=journal, log=log) as host:
                stage = Stage(host, where, launchpad.pid)
                try:
                    yield stage
                    await host.stop(grace_s=0.0)
                    stage.assert_nothing_left()
                finally:
                    stage.close()
        finally:
            journal.close()
            prctl(PR_SET_CHILD_SUBREAPER, 0)
            gc.unfreeze()  # a process of tests opens many hosts
        left = left_over(before, holdings())
        assert not left, "left behind by the host: " + "; ".join(left)


LONGER = 3
"""So many times as long a second look is: what the host does will be there again."""


async def slowest_read(
    stage: Stage, child: Puppet, fileno: int, count: int, at_once: int = 10
) -> float:
    """Have a child READ many times; return the slowest, in seconds.

    From what is late is taken off what the machine's other load had of the processors
    meanwhile. A late event is looked for once more, and longer.

    Args:
        stage: its host.
        child: who READs.
        fileno: of a file that it has open.
        count: how often.
        at_once: READs between two looks at the kernel's account, which is for all of them.
    """
    slowest_s = 0.0
    pids = os.getpid(), stage.pid_of(child, await child.do("os.getpid()"))
    for reads in (count, LONGER * count):
        slowest_s = 0.0
        for _ in range(reads // at_once):
            kept_s = kept_waiting_s(*pids)
            took_s = await child.do(f"slowest({fileno}, {at_once})")
            if took_s >= NEIGHBOUR_S:
                took_s -= kept_waiting_s(*pids) - kept_s
            slowest_s = max(slowest_s, took_s)
        if slowest_s < NEIGHBOUR_S:
            break
    return slowest_s


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A host with the settings that `run` has."""
    async with opened(tmp_path) as open_stage:
        yield open_stage


def descriptors() -> set[int]:
    """The numbers of this process's, that is the host's, open descriptors."""
    return set(holdings().descriptors)


async def eventually(is_so: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until something that no event tells is so; fail if it never is."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        await trio.sleep(0.002)
