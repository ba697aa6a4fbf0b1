"""A host in a world of its own, of root or of a user with user namespaces.

The world is `ruleworld`; the children are `children/prober.py`, and do what they are told.
"""

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from supervisor.client import HostClient
from tests.helpers.certificates import certificate
from tests.helpers.command import ENVIRONMENT, SANDHOST, TIMEOUT_S
from tests.helpers.stage import CHILDREN
from tests.system.e2e import ruleworld

SAID = "from the world"
BIG_BYTES = 300_000


class Command(NamedTuple):
    """How a host is started.

    Attributes:
        words: `sandhost`, and what comes before it.
        env: its environment.
        inner: `sandhost` as its children call it.
    """

    words: tuple[str, ...] = (SANDHOST,)
    env: Mapping[str, str] = ENVIRONMENT
    inner: str = SANDHOST


class NetworkHost:
    """A host that runs.

    Attributes:
        place: its working directory.
        command: how it was started.
        client: asks it.
        world: the pid of what it is started by.
    """

    def __init__(self, place: Path, command: Command, door: socket.socket) -> None:
        self.place = place
        self.command = command
        self.client = HostClient(str(place / "home" / "control"))
        self.world = 0
        self._door = door
        self._children: dict[str, Any] = {}

    def wait_for(self, *names: str) -> None:
        """Wait until some children are there."""
        while not set(names) <= self._children.keys():
            try:
                sock, _ = self._door.accept()
            except TimeoutError:
                raise AssertionError((self.place / "stderr").read_text()) from None
            sock.settimeout(TIMEOUT_S)
            with sock:
                file = sock.makefile("rw")
            self._children[file.readline().strip()] = file

    def do(self, child: str, expression: str) -> Any:
        """Have a child evaluate an expression; return the value."""
        file = self._children[child]
        print(expression, file=file, flush=True)
        return ast.literal_eval(file.readline())

    def refused(self, child: str) -> dict[tuple[str, int | None], str]:
        """Return what was refused, by name and port, with the reason."""
        rows = self.client.network(child).refused
        return {(row.name, row.port): row.reason for row in rows}

    def events(self, child: str, kind: str) -> list[dict[str, Any]]:
        """Return what the journal says of a child, of one kind of event."""
        child_id = self.client.network(child).child_id
        lines = self.client.events(follow=False, lines=None)
        rows = [line.event for line in lines if line.event is not None]
        own = [row for row in rows if row.get("child_id") == child_id]
        return [row for row in own if row["event"] == kind]

    def failed(self, child: str) -> dict[str, str]:
        """Return what could not be reached, by name, with the reason."""
        rows = self.events(child, "network.failed")
        return {row["name"]: row["reason"] for row in rows}

    def asked(self) -> set[str]:
        """Return the names that the host's name server was asked for."""
        lines = (self.place / "questions").read_text().splitlines()
        return {line.split()[0] for line in lines}

    def wait_for_questions(self, *names: str) -> None:
        """Wait until the host's name server was asked for some names."""
        deadline = time.monotonic() + TIMEOUT_S
        while not set(names) <= self.asked():
            assert time.monotonic() < deadline, f"{names} were not asked for"
            time.sleep(0.01)

    @property
    def resident_bytes(self) -> int:
        """The memory that the host's process has."""
        size: int = self.client.stats()["usage"]["rss_bytes"]
        return size

    def end(self, *children: str) -> None:
        """Have children end, which they do when nothing more can come."""
        for name in children:
            self._children.pop(name).close()

    def close(self) -> None:
        """Give the test's own descriptors back."""
        self.end(*self._children)


@contextmanager
def network_place(name: str = "ok.test") -> Iterator[Path]:
    """Make a directory for a world, of which a host's user has `home`."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    with tempfile.TemporaryDirectory() as where:
        made = Path(where)
        made.chmod(0o755)
        (made / "home").mkdir()
        certificate(made, name)
        (made / "said").write_text(SAID)
        (made / "big").write_bytes(bytes(BIG_BYTES))
        shutil.copy(CHILDREN / "prober.py", made)
        yield made


@contextmanager
def network_host(
    place: Path, command: Command, children: tuple[str, ...], *words: str
) -> Iterator[NetworkHost]:
    """Run a host in a world of its own, until its end.

    Args:
        place: made by `network_place`.
        command: how `sandhost` is started.
        children: those to wait for.
        words: of `sandhost`.
    """
    world = ("unshare", "--net", "--mount", sys.executable, ruleworld.__file__)
    with socket.socket(socket.AF_UNIX) as door, (place / "stderr").open("wb") as err:
        door.bind(os.fspath(place / "door"))
        (place / "door").chmod(0o777)
        door.listen()
        door.settimeout(TIMEOUT_S)
        host = NetworkHost(place, command, door)
        process = subprocess.Popen(
            [*world, str(place), *command.words, *words],
            stdin=subprocess.DEVNULL, stdout=err, stderr=err,
            env=dict(command.env), cwd=place, process_group=0,
        )  # fmt: skip
        with process:
            host.world = process.pid
            try:
                host.wait_for(*children)
                yield host
                if words[0] == "serve":
                    [*host.client.stop()]
                assert process.wait(TIMEOUT_S) == 0, (place / "stderr").read_text()
            finally:
                host.close()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
