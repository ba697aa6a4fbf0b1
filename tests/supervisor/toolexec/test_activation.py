"""A socket that the service manager opened for tools: one for all children."""

import socket
from functools import partial
from pathlib import Path

import pytest
import trio

from supervisor.toolexec.listeners import activated_listener
from tests.helpers.daemon import Daemon, daemon, scratch_of
from tests.helpers.toolruns import program

pytestmark = pytest.mark.slow

# As a service manager does: descriptor 3, and the pid of who is to take it.
MANAGER = (
    'exec 3<&"$1"; shift; export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=toolexec;'
    ' exec "$@"'
)
ASK = (
    'curl -sS "$AIFO_TOOLEEXEC_URL" -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN"'
    ' -H "X-Aifo-Proto: 2" -H "X-Aifo-Exec-Id: same" -d tool=go -d cwd=.;'
    ' echo "$AIFO_TOOLEEXEC_URL"; exec sleep 1000'
)


def config(where: Path, toolexec: str) -> str:
    """Say two children that have the same tool run, by their tokens."""
    text = f"[policy.open]\nnetwork = 'host'\n{toolexec}"
    text += f"[sidecar.my]\nkind = 'go'\npath = ['{where}/bin']\n"
    for name in ("a", "b"):
        text += (
            f"[child.{name}]\npolicy = 'open'\ncommand = ['sh', '-c', '''{ASK}''']\n"
        )
    return text


def told(running: Daemon, name: str, text: bytes) -> bool:
    """Tell whether a child has said a text."""
    return text in running.log(name)


# spec toolexec 1: tokens tell children apart that share a listener.
# spec E4
def test_children_share_the_socket_and_are_told_apart(tmp_path: Path) -> None:
    program(tmp_path / "bin", "go", "pwd")
    section = "[toolexec]\nlisten = ['tcp://127.0.0.1:0']\n"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/exec"
        fd = sock.fileno()
        wrapper = ("bash", "-c", MANAGER, "sh", str(fd))
        text = config(tmp_path, section)
        with daemon(tmp_path, text, wrapper=wrapper, pass_fds=(fd,)) as running:
            for name in ("a", "b"):
                running.wait(partial(told, running, name, url.encode()))
            said = {name: running.log(name) for name in ("a", "b")}
            roots = {name: log.decode().split()[0] for name, log in said.items()}
            assert len(set(roots.values())) == 2, said
            where = str(scratch_of(tmp_path))
            assert all(root.startswith(where) for root in roots.values()), said
            assert "activated" not in running.said()
            assert running.end() == 0


def test_without_the_section_nobody_takes_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        fd = sock.fileno()
        wrapper = ("bash", "-c", MANAGER, "sh", str(fd))
        text = "[child.a]\ncommand = ['sleep', '1000']\n"
        with daemon(tmp_path, text, wrapper=wrapper, pass_fds=(fd,)) as running:
            assert "Nobody takes the activated socket toolexec" in running.said()
            assert running.end() == 0


async def test_what_cannot_be_listened_on_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        with pytest.raises(OSError, match="use ListenStream"):
            activated_listener(sock)
        sock.listen()
        url, listener = activated_listener(sock)
        assert url == f"unix://{path}"
        await listener.aclose()
    await trio.Path(path).unlink()  # it is the manager's
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(b"\0sandhost-" + tmp_path.name.encode())
        sock.listen()
        with pytest.raises(OSError, match="no path"):
            activated_listener(sock)
