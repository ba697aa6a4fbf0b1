"""Asking a host: what is said when nobody answers, or somebody else does."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.control.client import ControlError, call, control_path
from tests.helpers.control import ask, path
from tests.helpers.hosts import stage
from tests.helpers.spawning import ROOT

pytestmark = pytest.mark.slow

__all__ = ["path", "stage"]


@contextlib.contextmanager
def impostor(path: Path, says: bytes) -> Iterator[None]:
    """Listen at a path, say something to whoever connects, and close."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(says)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_no_socket_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="there is no such socket") as why:
        call(str(tmp_path / "control"), "ps")
    assert "\n" not in str(why.value)


# attack 39
def test_a_dead_hosts_socket_is_said_in_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(ControlError, match="nobody listens, so its host has ended"):
        call(path, "ps")


def test_something_else_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match="it is not a socket"):
        call(str(tmp_path / "file"), "ps")


@pytest.mark.parametrize(
    "says", [b"", b"220 ready\n", b"[]\n", b'{"v":2,"ok":true}\n', b'{"v":1', b"\xff\n"]
)
def test_an_impostor_is_found_out(tmp_path: Path, says: bytes) -> None:
    with (
        impostor(tmp_path / "control", says),
        pytest.raises(ControlError, match="is not a sandhost of this version"),
    ):
        call(str(tmp_path / "control"), "ps")


def test_a_host_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control"))
        silent.listen()
        with pytest.raises(ControlError, match=r"no answer .* within 0\.1 s"):
            call(str(tmp_path / "control"), "ps", timeout_s=0.1)


async def test_a_refusal_reaches_the_asker(path: str) -> None:
    with pytest.raises(ControlError, match="refused: it does not know 'reboot'"):
        await ask(path, "reboot")


async def test_a_host_of_one_child_says_who_takes_orders(path: str) -> None:
    with pytest.raises(ControlError, match="orders are for `sandhost serve`"):
        await ask(path, "kill")


def test_asking_needs_no_framework() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        " import supervisor.control.client, supervisor.tables; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"trio", "msgspec", "psutil", "rich", "typer", "loguru"}


def test_the_path_comes_from_the_option_the_environment_or_the_run_time_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SANDHOST_CONTROL", raising=False)
    assert control_path(None) is None
    (tmp_path / "sandhost").mkdir()
    (tmp_path / "sandhost" / "control").touch()
    assert control_path(None) == str(tmp_path / "sandhost" / "control")
    monkeypatch.setenv("SANDHOST_CONTROL", "/elsewhere")
    assert control_path(None) == "/elsewhere"
    assert control_path("/given") == "/given"
