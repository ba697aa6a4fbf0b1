"""A host whose child uses a secret is replaced: the child goes on using it."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from tests.helpers.certificates import certificate
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import assert_clean, replace_daemon
from tests.supervisor.network.netns import OUTSIDE, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

FIRST, SECOND = "tok-first-8Zq3", "tok-second-5Hn1"

# A server of the child: each connection asks the server outside, and is told the answer.
CHILD = """
import socket, urllib.request
server = socket.create_server(("127.0.0.1", 8000))
while True:
    with server.accept()[0] as sock:
        try:
            url = "http://web.test.sandhost/"
            said = urllib.request.urlopen(url, timeout=30).read().decode()
        except OSError as why:
            said = repr(why)
        sock.sendall(said.encode())
"""
CONFIG = """
[credential.web]
host = "web.test"
header = "X-Key: {file}"
file = "%(where)s/key"
ca_file = "%(where)s/tls-made.pem"
[policy.p]
%(credentials)s
publish = ["8000"]
"""
MOUNT = 'mount --bind "$0" /etc/hosts && exec "$@"'


def serve(listener: socket.socket, context: ssl.SSLContext, keys: list[str]) -> None:
    """Note the key of each request, and answer with it."""
    with suppress(OSError):  # the listener is closed
        while True:
            raw, _ = listener.accept()
            with suppress(OSError), context.wrap_socket(raw, server_side=True) as sock:
                lines = sock.recv(65536).decode().split("\r\n")
                (key,) = [row[7:] for row in lines if row.lower().startswith("x-key: ")]
                keys.append(key)
                body = f"key {key}\n".encode()
                size = b"Content-Length: %d\r\n\r\n" % len(body)
                sock.sendall(b"HTTP/1.1 200 OK\r\n" + size + body)


@contextmanager
def world(where: Path) -> Iterator[tuple[Daemon, list[str]]]:
    """Run a host in a net namespace with its server; give the keys that come there."""
    (where / "hosts").write_text("203.0.113.5 web.test.\n")
    (where / "key").write_text(FIRST)
    (where / "key").chmod(0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(where, "web.test"))
    wrapper = ("unshare", "--mount", "sh", "-c", MOUNT, str(where / "hosts"))
    outside = Namespace(OUTSIDE)
    keys: list[str] = []
    try:
        with outside.entered(), socket.create_server(("203.0.113.5", 443)) as listener:
            args = (listener, context, keys)
            threading.Thread(target=serve, args=args, daemon=True).start()
            with daemon(where, config(where), wrapper=wrapper) as running:
                command = [sys.executable, "-c", CHILD]
                running.client.spawn(command, name="c", policy="p")
                running.wait(lambda: is_up(running))
                yield running, keys
            listener.shutdown(socket.SHUT_RDWR)
    finally:
        outside.close()


def config(where: Path, credentials: str = 'credentials = ["web"]') -> str:
    """Return the configuration beside the daemon's own directories."""
    return CONFIG % {"where": where, "credentials": credentials}


def ask(running: Daemon) -> str:
    """Have the child ask, and return what it was answered."""
    host, port = running.client.network("c").published[0].address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        return sock.makefile().read()


def is_up(running: Daemon) -> bool:
    """Tell whether the child answers."""
    with suppress(OSError, IndexError):
        return bool(ask(running))
    return False


# spec NET15, T3: the secret is read anew by the next program, and handed over by none.
def test_a_credential_goes_on_under_the_next_program(tmp_path: Path) -> None:
    with world(tmp_path) as (running, keys):
        assert ask(running) == "key [redacted]\n"
        assert set(keys) == {FIRST}
        keys.clear()
        (tmp_path / "key").write_text(SECOND)
        replace_daemon(running)
        assert ask(running) == "key [redacted]\n"
        assert keys == [SECOND]
        rules = running.client.network("c").rules
        assert rules == ("web.test.sandhost:80",)
        # A right that was taken away stays away.
        running.client.network("c", deny=["web.test.sandhost:80"])
        replace_daemon(running)
        assert "[redacted]" not in ask(running)
        assert keys == [SECOND]
        running.client.network("c", allow=["web.test.sandhost:80"])
        assert ask(running) == "key [redacted]\n"
        assert_clean(running)
        assert running.end() == 0
        said = running.said()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        if path.name != "key":
            assert not {FIRST, SECOND} & {*path.read_text(errors="replace").split()}
    assert FIRST not in said
    assert SECOND not in said


# spec NET15: a program without it goes on with the child, and says so.
def test_a_credential_that_is_gone_is_told(tmp_path: Path) -> None:
    with world(tmp_path) as (running, keys):
        keys.clear()
        path = tmp_path / "c.toml"
        text = path.read_text().replace('credentials = ["web"]', "")
        path.write_text(text.replace("[credential.web]", "[credential.other]"))
        replace_daemon(running)
        assert "[redacted]" not in ask(running)
        assert not keys
        assert "the credential 'web' is gone" in running.said()
