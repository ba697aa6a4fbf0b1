"""The commands of a fleet on a node that is in none; none of them imports Ray.

A program that is a driver of Ray hangs on a machine without a raylet.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from supervisor.cli.app import COMMANDS
from supervisor.cli.fleet import fleet
from supervisor.cluster.admission import find_place
from tests.helpers.command import ENVIRONMENT, Outcome, finished, running
from tests.helpers.daemon import daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOOK = """
import os, sys
told = f"{os.environ['TEST_IMPORTS']}/{os.getpid()}"

def hook(event, arguments):
    if event == "import":
        fd = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(fd, arguments[0].encode() + b"\\n")
        os.close(fd)

sys.addaudithook(hook)
"""


class Commands:
    """Commands, and the names of the modules that their processes look for.

    Args:
        where: a directory for their files.
    """

    def __init__(self, where: Path) -> None:
        (where / "hook").mkdir()
        (where / "hook" / "sitecustomize.py").write_text(HOOK)
        self._told = where / "imports"
        self._told.mkdir()
        paths = {
            "PYTHONPATH": str(where / "hook"),
            "TEST_IMPORTS": str(self._told),
        }
        self._env = {**ENVIRONMENT, **paths}

    def run(self, *words: str) -> tuple[Outcome, set[str]]:
        """Run a command; return how it ended, and the packages that it imported."""
        with running(*words, env=self._env) as process:
            done = finished(process)
        found = packages(self._told / str(process.pid))
        assert "supervisor" in found  # the hook is at work
        return done, found

    def with_ray(self) -> list[int]:
        """Return the processes that imported Ray."""
        return [int(one.name) for one in self._told.iterdir() if "ray" in packages(one)]


def packages(told: Path) -> set[str]:
    return {name.partition(".")[0] for name in told.read_text().split()}


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


OUTSIDE: dict[str, tuple[tuple[str, ...], int]] = {
    "leave": ((), 1),
    "down": ((), 1),
    "forget": (("worker",), 1),
    "spawn": (("--", "true"), 1),
    "run": (("--", "true"), 125),
    "ps": (("--json",), 1),
    "logs": (("w",), 1),
    "kill": (("w",), 1),
    "trace": (("w",), 1),
    "top": (("--once",), 1),
    "diff": (("w",), 2),
    "commit": (("w",), 2),
    "quota": (("--json",), 1),
}
"""Words of each command that asks a fleet, and its status where it is refused (Forms)."""

ENTRIES = ("up", "join")
"""Commands that bring a node into a fleet."""


def test_every_command_of_a_fleet_is_listed_here() -> None:
    assert {*OUTSIDE, *ENTRIES} == set(fleet.commands)


@pytest.fixture
def control() -> Iterator[str]:
    """The control socket of a daemon that may be a node, and is in no fleet."""
    # Ray's sockets take short paths alone.
    with TemporaryDirectory(dir="/tmp") as where:
        with daemon(Path(where), "[fleet]\n") as one:
            yield one.client.path


# spec FL1
def test_outside_a_fleet_a_command_says_so_and_imports_no_ray(
    commands: Commands, control: str
) -> None:
    for name, (words, status) in OUTSIDE.items():
        done, found = commands.run("fleet", name, "--control", control, *words)
        assert (done.status, done.out) == (status, b""), name
        assert done.said("this node is in none"), name
        assert "ray" not in found, name


# spec FL1
def test_without_a_daemon_a_command_says_so_and_imports_no_ray(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o600)
    token = ("--token-file", str(tmp_path / "token"))
    entries = {"up": ((), 1), "join": (token, 1)}
    for name, (words, status) in (OUTSIDE | entries).items():
        path = f"{tmp_path}/control"
        done, found = commands.run("fleet", name, "--control", path, *words)
        assert (done.status, done.out) == (status, b""), name
        assert done.said(f"cannot ask '{path}': there is no such socket"), name
        assert "ray" not in found, name


# spec FL1: a process of its own starts Ray, and is its driver for a moment.
def test_a_command_that_joins_has_another_process_import_ray(
    commands: Commands, control: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o600)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{other.getsockname()[1]}"
        words = ("--address", address, "--token-file", f"{tmp_path}/token")
        done, found = commands.run("fleet", "join", "--control", control, *words)
    assert (done.status, done.out) == (1, b"")
    assert done.said(f"cannot reach {address}: Connection refused")
    assert "ray" not in found
    assert len(commands.with_ray()) == 1


# spec FL1: a node actor has another working directory than its command.
def test_a_relative_control_socket_is_found_by_a_node_actor(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(control).parent)
    assert find_place(Path(control).name).control == control


# spec FL1
def test_the_help_of_no_command_imports_ray(commands: Commands) -> None:
    own = (name for group in COMMANDS.values() for name in group)
    lines = [*own, *(f"fleet {name}" for name in fleet.commands)]
    assert len(lines) > 40
    for words in lines:
        done, found = commands.run(*words.split(), "--help")
        assert (done.status, done.err) == (0, b""), words
        assert "ray" not in found, words
