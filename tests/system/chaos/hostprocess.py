"""Hosts in processes of their own: started quickly, killed, traced, looked for.

The test's side of `children/host.py`, and the search for processes by a mark that they
carry in their environment or arguments.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import canary
from tests.helpers.command import read_until
from tests.helpers.stage import CHILDREN

GROWN_WITHIN_S = 30.0
"""How soon trees of processes have grown, however busy the machine is."""


@dataclass(slots=True)
class HostProcess:
    """A host that was started; its pidfds are held until it is left.

    Attributes:
        pid: of the host.
        pidfd: of the host.
        launchpad: pidfd of its launchpad.
    """

    pid: int
    pidfd: int
    launchpad: int

    def kill(self) -> None:
        """End it by SIGKILL; nothing if it has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return


class Hosts:
    """The process that becomes one host after the other."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._heard = b""

    def hear(self, word: str) -> list[str]:
        """Wait for a line that begins with a word; return what follows it."""
        while True:
            while b"\n" not in self._heard:
                assert self._process.stdout is not None
                self._heard += read_until(self._process.stdout.fileno(), b"\n")
            line, _, self._heard = self._heard.partition(b"\n")
            words = line.decode().split()
            if words and words[0] == word:
                return words[1:]

    @contextmanager
    def open(
        self, where: Path, *commands: tuple[str, ...], **spec: Any
    ) -> Iterator[HostProcess]:
        """Start a host for these children; at the end it is killed and waited for."""
        (where / "root").mkdir(exist_ok=True)
        order = {"where": str(where), "children": commands, **spec}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid, launchpad = map(int, self.hear("host"))
        canary.ACCOUNT.hosts += 1
        host = HostProcess(pid, os.pidfd_open(pid), os.pidfd_open(launchpad))
        try:
            yield host
        finally:
            host.kill()
            self.hear("ended")
            os.close(host.pidfd)
            os.close(host.launchpad)


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Start the process that becomes hosts; end it when the block ends."""
    command = [sys.executable, "-I", str(CHILDREN / "host.py")]
    env = {**os.environ, canary.VARIABLE: canary.KEY}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        try:
            yield Hosts(process)
        finally:
            process.kill()


def marked(mark: str) -> list[int]:
    """The pids of all processes that have a mark in environment or arguments.

    A zombie has neither: it is no survivor, and its parent's business.
    """
    wanted = mark.encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            for file in ("cmdline", "environ"):
                with open(f"/proc/{name}/{file}", "rb") as text:
                    if wanted in text.read():
                        found.append(int(name))
                        break
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or somebody else's
    return found


def wait_grown(mark: str, started: int) -> None:
    """Wait until more processes have a mark than were started with it."""
    deadline = time.monotonic() + GROWN_WITHIN_S
    while len(marked(mark)) <= started:
        assert time.monotonic() < deadline, "the trees do not grow: nothing is proved"
        time.sleep(0.005)
