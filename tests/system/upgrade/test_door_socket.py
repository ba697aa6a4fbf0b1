"""The door's socket while the host is replaced: connections stay, more may come."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from tests.helpers.command import TIMEOUT_S
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import assert_clean, replace_daemon

pytestmark = pytest.mark.slow

CONFIG = """
[policy.p]
sandbox = "none"
root = "{root}"
[child.a]
command = ["/bin/sh", "-c", "echo $FSPROXY_SOCKET; exec sleep 1000"]
policy = "p"
"""


def connected(path: str) -> socket.socket:
    """Connect as a program of the child does."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(TIMEOUT_S)
    sock.connect(path)
    return sock


def ask(sock: socket.socket, request: bytes) -> bytes:
    """Send a request; return the line of its reply."""
    sock.sendall(request)
    reply = b""
    while not reply.endswith(b"\n"):
        piece = sock.recv(1)
        assert piece, reply
        reply += piece
    return reply.rstrip(b"\n")


def path_of(running: Daemon) -> str:
    """Return what the child says of its socket."""
    said: bytes = running.wait(lambda: running.log("a"))
    return os.fsdecode(said.split()[0])


# spec HM6, S3
def test_a_connection_stands_and_the_path_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as name:
        where = Path(name)
        (where / "root").mkdir()
        with daemon(where, CONFIG.format(root=where / "root")) as running:
            path = path_of(running)
            with connected(path) as old, connected(path) as half:
                assert ask(old, b"OPEN a w+ false\n") == b"OK 1000"
                assert ask(old, b"WRITE 1000 5\nhello") == b"OK 5"
                half.sendall(b"PI")
                for _ in range(2):
                    replace_daemon(running)
                    assert ask(old, b"SEEK 1000 0\n") == b"OK 0"
                    with connected(path) as new:
                        assert ask(new, b"STAT false a\n").startswith(b"OK ")
                assert ask(half, b"NG\n") == b"OK"
                # One that waits in the queue while the programs change is let in.
                with connected(path) as waiting:
                    waiting.sendall(b"PING\n")
                    replace_daemon(running)
                    assert ask(waiting, b"") == b"OK"
            assert_clean(running)
            assert running.end() == 0
            assert not os.path.exists(path)
