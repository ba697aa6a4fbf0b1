"""Asking a host: what is said when nobody answers, or somebody else does."""

import contextlib
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib import paths
from supervisor.control.client import (
    ControlError,
    Exchange,
    call,
    control_path,
    find_control,
)
from supervisor.fleet.link import LEAVE_REQUEST
from tests.helpers.command import shell
from tests.helpers.control import ask, path
from tests.helpers.spawning import ROOT
from tests.helpers.stage import stage

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
    with pytest.raises(ControlError, match="its host has ended"):
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
        pytest.raises(ControlError, match="no sandhost of this version answers"),
    ):
        call(str(tmp_path / "control"), "ps")


def test_a_host_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control"))
        silent.listen()
        with pytest.raises(ControlError, match=r"no answer .* within 0\.1 s"):
            call(str(tmp_path / "control"), "ps", timeout_s=0.1)


# spec FL8: the children of a node may take their time to be gone.
@pytest.mark.parametrize("do", ["kill", LEAVE_REQUEST])
def test_an_order_is_waited_for_from_one_sign_of_life_to_the_next(
    tmp_path: Path, do: str
) -> None:
    path = tmp_path / "control"
    with impostor(path, b" "), contextlib.closing(Exchange(str(path), do)) as exchange:
        before_s = exchange.until_s
        assert not exchange.take()
        assert exchange.until_s > before_s


async def test_a_refusal_reaches_the_asker(path: str) -> None:
    with pytest.raises(ControlError, match="refused: it does not know 'reboot'"):
        await ask(path, "reboot")


async def test_a_host_of_one_child_says_who_takes_orders(path: str) -> None:
    with pytest.raises(ControlError, match="orders are for `sandhost serve`"):
        await ask(path, "kill")


def test_asking_needs_no_framework() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        " import supervisor.control.client, supervisor.observe.tables; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"trio", "msgspec", "psutil", "rich", "typer", "loguru"}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The run-time directories of this user's daemon and of root's, not there yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("SANDHOST_CONTROL", raising=False)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(paths, "ROOT_RUNTIME_DIR", str(tmp_path / "root"))
    return tmp_path / "own" / "sandhost", tmp_path / "root"


def test_the_path_comes_from_the_option_the_environment_or_a_usual_place(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control_path(None) is None
    for place in reversed(places):
        place.mkdir(parents=True)
        (place / "control").touch()
        assert control_path(None) == str(place / "control")
    monkeypatch.setenv("SANDHOST_CONTROL", "/elsewhere")
    assert control_path(None) == "/elsewhere"
    assert control_path("/given") == "/given"


# attack 39
def test_what_a_dead_daemon_left_does_not_hide_roots(
    places: tuple[Path, Path],
) -> None:
    for place in places:
        place.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(places[0] / "control"))
        alive.bind(str(places[1] / "control"))
        assert control_path(None) == str(places[0] / "control")
        alive.listen()
        assert control_path(None) == str(places[1] / "control")


def test_each_place_that_was_tried_is_told(places: tuple[Path, Path]) -> None:
    own, root = places
    root.touch()
    with pytest.raises(ControlError) as why:
        find_control(None)
    assert str(why.value) == (
        f"cannot find a host: '{own}/control' is not there, '{root}/control' is not"
        " there; start sandhost serve, or name a socket by --control or"
        " $SANDHOST_CONTROL"
    )


def test_a_command_finds_the_daemon_of_root_by_itself(tmp_path: Path) -> None:
    script = (
        "mount -t tmpfs none /run || exit 99; export HOME=$PWD; unset XDG_RUNTIME_DIR;"
        " $S serve >/dev/null 2>&1 & until [ -S /run/sandhost/control ];"
        " do kill -0 $! || exit 98; done;"
        " XDG_RUNTIME_DIR=$PWD/own $S ps; s=$?; kill $!; wait $!; exit $s"
    )
    outcome = shell(
        f"exec unshare --mount sh -c {shlex.quote(script)}",
        cwd=tmp_path,
        env={"STATE_DIRECTORY": str(tmp_path / "state")},
    )
    if outcome.status == 99 or b"unshare" in outcome.err:
        pytest.skip(f"cannot mount: {outcome.err!r}")
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out.startswith(b"CHILD ")


# Root's own place may be closed to this user, and another user may make a temporary one.
def test_a_place_of_another_user_is_not_asked(tmp_path: Path) -> None:
    user = next(entry.pw_uid for entry in pwd.getpwall() if entry.pw_name == "nobody")
    place = Path(f"/tmp/sandhost-{user}")
    if os.geteuid() != 0 or place.exists():
        pytest.skip("takes root, and a place that is free")
    wrapper = f"setpriv --reuid {user} --regid {user} --clear-groups"
    if shell(f"exec {wrapper} $S --version", cwd=tmp_path).status != 0:
        pytest.skip("that user may not read this installation")
    other = user - 1
    place.mkdir()
    try:
        os.chown(place, other, other)
        (place / "control").touch()
        outcome = shell(f"unset XDG_RUNTIME_DIR; exec {wrapper} $S ps", cwd=tmp_path)
    finally:
        shutil.rmtree(place)
    assert outcome.status == 2
    assert outcome.said(f"'{place}/control' is another user's")
