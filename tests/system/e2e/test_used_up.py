"""A host whose user has used up what the kernel counts per user: it goes on.

A host that is not root has the user of its children, and shares that with them: processes
and threads, and the watches of epoll(7).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.control.client import ControlError
from tests.helpers.command import TIMEOUT_S, read_until
from tests.helpers.daemon import Daemon, daemon, left_in
from tests.system.attacks.test_unprivileged import nobodys_command

pytestmark = pytest.mark.slow

MOST = 200
"""Processes and threads that the host's user may have, as the host has it."""

INSTEAD = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NPROC, ({MOST}, {MOST}))
os.execv(sys.argv[1], [sys.argv[1], *sys.argv[3:]])
"""
"""Starts another installation's command in place of the one that it is given."""

FILLER = f"""
import os, signal, sys
made = []
for _ in range({MOST}):
    made.append(os.fork())
    if not made[-1]:
        os.execv("/bin/sleep", ["sleep", "1000"])
print("full", flush=True)
sys.stdin.read()
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""

NO_WATCH = """
import errno, os, runpy, select, sys
where, sys.argv = sys.argv[1], sys.argv[2:]
class Epoll:
    def __init__(self):
        self._real = select_epoll()
    def __getattr__(self, name):
        return getattr(self._real, name)
    def register(self, fd, *events):
        if os.path.exists(where):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._real.register(fd, *events)
select_epoll, select.epoll = select.epoll, Epoll
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a command for which there is no epoll watch left while a file is there; its
launchpad has some."""

AGAIN = """
[policy.none]
sandbox = "none"
[policy.walled]
sandbox = "auto"
[child.{policy}]
command = ["/bin/sh", "-c", "echo here; echo >&2 there; sleep 0.01"]
policy = "{policy}"
restart = "always"
backoff = "10ms"
max_restarts = 10000
"""

CONFIG = """
[policy.walled]
sandbox = "auto"
[child.victim]
command = ["/bin/sleep", "1000"]
policy = "walled"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of a user of no rights."""
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        yield Path(name)


@contextmanager
def nobodys_daemon(where: Path, command: list[str], env: Any) -> Iterator[Daemon]:
    """Start a daemon that is not root."""
    installed = str(Path(command[-1]).with_name("sandhost"))
    wrapper = (*command, "-c", INSTEAD, installed)
    with daemon(where, CONFIG, wrapper=wrapper, env=env) as running:
        yield running


@contextmanager
def used_up(command: list[str], env: Any) -> Iterator[None]:
    """Let a user have more processes than such a host may have."""
    with subprocess.Popen(
        [*command, "-c", FILLER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    ) as filler:
        try:
            assert filler.stdout is not None
            read_until(filler.stdout.fileno(), b"full\n")
            yield
        finally:
            filler.communicate(timeout=TIMEOUT_S)


# attack 29, spec S4, S5
def test_a_host_that_can_start_no_thread_goes_on(place: Path) -> None:
    command, env = nobodys_command(place)
    with nobodys_daemon(place, command, env) as running:
        pid = running.process.pid
        assert running.row("victim").pid is not None  # imports what that takes
        with used_up(command, env):
            # Those that have nothing to do end by themselves.
            running.wait(lambda: os.listdir(f"/proc/{pid}/task") == [str(pid)])
            running.client.kill("victim", "KILL")
            running.wait(lambda: running.row("victim").pid is None)
            running.wait(lambda: left_in(place) == [], "the end of its directories")
            with pytest.raises(ControlError, match="end processes, or raise") as why:
                running.client.spawn(["/bin/true"], policy="walled")
            assert "Resource temporarily unavailable" in str(why.value)
            running.wait(lambda: left_in(place) == [], "the end of its directories")
        running.client.spawn(["/bin/sleep", "1000"], name="after", policy="walled")
        assert running.row("after").pid is not None
        assert running.end() == 0, running.said()


# attack 18, spec S5
@pytest.mark.parametrize("policy", ["none", "walled"])
def test_a_host_without_an_epoll_watch_goes_on(tmp_path: Path, policy: str) -> None:
    flag, log = tmp_path / "used-up", tmp_path / "state" / "logs" / policy
    wrapper = (sys.executable, "-c", NO_WATCH, str(flag))

    def said() -> int:
        return sum(path.stat().st_size for path in log.glob("*"))

    with daemon(tmp_path, AGAIN.format(policy=policy), wrapper=wrapper) as running:
        running.wait(said, "its first words")
        flag.touch()
        for _ in range(3):
            before = said()
            running.wait(lambda: said() > before, "more")  # noqa: B023 - waited for here
        flag.unlink()
        assert running.row(policy).restarts > 0
        assert running.end() == 0, running.said()
