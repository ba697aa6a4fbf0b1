"""A daemon in a process of its own: started, ready, asked, stopped.

`sandhost serve` as its service manager sees it, with the manager's notify socket in the
test's hand.
"""

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.client import ChildRow, HostClient
from supervisor.config.directories import directories_of
from supervisor.config.host import HostSection
from tests.helpers import canary
from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    TIMEOUT_S,
    kind_of,
    server_of_forks,
)

if TYPE_CHECKING:
    from tests.helpers.forkserver import Forked

HEAD = """
[host]
runtime_dir = "{where}/run"
state_dir = "{where}/state"
grace = "{grace}"
"""


def scratch_of(where: Path) -> Path:
    """Return what the children of a daemon with such directories have theirs in."""
    section = HostSection(runtime_dir=f"{where}/run", state_dir=f"{where}/state")
    return Path(directories_of(section)[2])


def left_in(where: Path) -> list[str]:
    """Return the names of children's directories that are there."""
    scratch = scratch_of(where)
    return os.listdir(scratch) if scratch.exists() else []


class Daemon:
    """A running daemon.

    Attributes:
        process: its own.
        client: asks it.
        where: its directories are in it.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | Forked",
        where: Path,
        ear: socket.socket,
    ) -> None:
        self.process = process
        self.where = where
        self.client = HostClient(str(where / "run" / "control"))
        self._ear = ear

    def hear(self, text: str) -> dict[str, str]:
        """Wait for a message to the service manager that begins with a text."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            patience = max(0.0, deadline - time.monotonic())
            assert select.select([self._ear], [], [], patience)[0], f"no {text}"
            message = self._ear.recv(65_536).decode()
            if message.startswith(text):
                return dict(line.split("=", 1) for line in message.splitlines())

    def take_heard(self) -> list[str]:
        """Return the messages to the service manager that are yet to be read."""
        heard = []
        while not self.is_silent(0.0):
            heard.append(self._ear.recv(65_536).decode())
        return heard

    def is_silent(self, for_s: float = 2.5) -> bool:
        """Tell whether no message to the service manager comes for a while."""
        return not select.select([self._ear], [], [], for_s)[0]

    def row(self, name: str) -> ChildRow:
        """Return the row of `ps` of one child."""
        (row,) = (row for row in self.client.ps() if row.name == name)
        return row

    def wait(self, is_so: Callable[[], Any], what: str = "it") -> Any:
        """Ask until something is so; each question may be a request to the daemon."""
        deadline = time.monotonic() + TIMEOUT_S
        pause_s = 0.005
        while not (found := is_so()):
            assert time.monotonic() < deadline, f"{what} never came"
            assert self.process.poll() is None, self.said()
            select.select([], [], [], pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return found

    def log(self, name: str) -> bytes:
        """Return all that is kept of what a child said."""
        data = b"".join(entry.data for entry in self.client.logs(name))
        canary.told(f"log of {name}", data)
        return data

    def said(self) -> str:
        """Return what the daemon said on stderr so far."""
        return (self.where / "stderr").read_text()

    def send(self, number: int) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Stop it and return its exit status."""
        self.send(number)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def daemon(
    where: Path,
    config: str = "",
    *options: str,
    grace: str = "5s",
    ready: bool = True,
    forked: bool = True,
    **changes: Any,
) -> Iterator[Daemon]:
    """Start a daemon; at the end it is killed if it still runs.

    Args:
        where: its directories are made in it.
        config: its configuration, beside those.
        options: of `serve`.
        grace: that of its children.
        ready: whether to wait until it says so.
        forked: False for one that is looked at as a start leaves it.
        changes: as for `subprocess.Popen`; then it is started, but for `env`.
    """
    (where / "c.toml").write_text(HEAD.format(where=where, grace=grace) + config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        address = f"@sandhost-test-{os.urandom(8).hex()}"
        ear.bind("\0" + address[1:])
        env = {**ENVIRONMENT, "NOTIFY_SOCKET": address, **changes.pop("env", {})}
        wrapper = changes.pop("wrapper", ())
        words = ["serve", "--config", str(where / "c.toml"), *options]
        server = server_of_forks() if forked and not wrapper and not changes else None
        canary.ACCOUNT.hosts += 1
        process: subprocess.Popen[bytes] | Forked
        with (where / "stderr").open("ab") as err, open(os.devnull, "rb") as null:
            if server is not None and server.takes(words, env):
                streams = [null.fileno(), err.fileno(), err.fileno()]
                kind = kind_of(words)
                process = server.start(words, str(where), env, streams, kind=kind)
            else:
                process = subprocess.Popen(
                    [*wrapper, SANDHOST, *words],
                    stdin=null,
                    stdout=err,
                    stderr=err,
                    env=env,
                    cwd=where,
                    **changes,
                )
        with process:
            try:
                running = Daemon(process, where, ear)
                if ready:
                    running.hear("READY=1")
                yield running
            finally:
                process.kill()
