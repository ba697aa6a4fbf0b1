"""A host whose children have names is replaced: things that stay or end."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from supervisor.network.statistics import NetworkStatistics
from tests.helpers.command import sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import assert_clean, replace_daemon
from tests.supervisor.network.netns import OUTSIDE, Namespace

pytestmark = pytest.mark.slow

# A server of the child: each connection has one line, and is answered with one.
CHILD = """
import socket
held = []
def do(word, *args):
    if word == "open":
        held.append(socket.create_connection((args[0], int(args[1])), timeout=20))
        return held[-1].recv(1).decode() + " " + held[-1].getpeername()[0]
    try:
        while held[-1].recv(65536):
            pass
    except ConnectionResetError:
        return "reset"
    return "whole"
server = socket.create_server(("127.0.0.1", 8000))
while True:
    with server.accept()[0] as sock:
        try:
            said = do(*sock.makefile().readline().split())
        except OSError as why:
            said = type(why).__name__
        sock.sendall(said.encode())
"""
CONFIG = """
[policy.p]
network = ["web.test:80", "old.test:80"]
publish = ["8000"]
limits = { net_bytes = 1000000 }
[child.c]
policy = "p"
command = %s
"""
HOSTS = "".join(f"203.0.113.5 {name}.test.\n" for name in ("web", "old", "new"))
MOUNT = 'mount --bind "$0" /etc/hosts && exec "$@"'


class World:
    """Servers of the test's own, and a host with one child among them.

    Attributes:
        running: the host.
        ends: accepted by servers: each sends a byte, and no more.
    """

    def __init__(self, running: Daemon) -> None:
        self.running = running
        self._server = socket.create_server(("203.0.113.5", 80))
        self._other = socket.create_server(("203.0.113.5", 81))
        self.ends: list[socket.socket] = []

    def close(self) -> None:
        """Close what the test has opened."""
        for sock in (self._server, self._other, *self.ends):
            sock.close()

    def tell(self, line: str) -> str:
        """Have the child do something; return what it says."""
        host, port = self.figures().published[0].address.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(f"{line}\n".encode())
            return sock.makefile().read()

    def open(self, name: str, port: int = 80) -> str:
        """Have the child begin a download; return the address that it came to."""
        address = ("127.0.0.1", int(self.figures().published[0].address.split(":")[1]))
        with socket.create_connection(address, timeout=60) as sock:
            sock.sendall(f"open {name} {port}\n".encode())
            server = self._server if port == 80 else self._other
            server.settimeout(60)
            self.ends.append(server.accept()[0])
            self.ends[-1].sendall(b"x")
            word, where = sock.makefile().read().split()
        assert word == "x"
        return where

    def is_up(self) -> bool:
        """Tell whether the child listens."""
        with suppress(OSError):
            return self.tell("open localhost 1") == "ConnectionRefusedError"
        return False

    def figures(self) -> NetworkStatistics:
        """Return the child's figures."""
        return self.running.client.network("c")


@contextmanager
def world(where: Path) -> Iterator[World]:
    """Run a host in a net namespace that is all the world."""
    (where / "hosts").write_text(HOSTS)
    command = json.dumps([sys.executable, "-c", CHILD])
    wrapper = ("unshare", "--mount", "sh", "-c", MOUNT, str(where / "hosts"))
    outside = Namespace(OUTSIDE)
    try:
        with (
            outside.entered(),
            daemon(where, CONFIG % command, wrapper=wrapper) as running,
        ):
            made = World(running)
            running.wait(made.is_up)
            try:
                yield made
            finally:
                made.close()
    finally:
        outside.close()


def is_reset(sock: socket.socket) -> bool:
    """Tell whether a connection ends by reset."""
    sock.settimeout(60)
    try:
        return bool(sock.recv(1)) and False
    except ConnectionResetError:
        return True


def journal(where: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of a name."""
    files = sorted((where / "state" / "journal").iterdir())
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row["event"] == event]


# spec NET6, NET12, T3: a download under way is reset and told; all else goes on.
def test_a_network_by_name_goes_on_under_the_next_program(tmp_path: Path) -> None:
    with world(tmp_path) as stage:
        running, network = stage.running, stage.running.client.network
        addresses = {name: stage.open(f"{name}.test") for name in ("old", "web")}
        assert stage.tell("open other.test 80") == "gaierror"
        network("c", allow=["new.test:81"], deny=["old.test:80"], cut=True)
        assert is_reset(stage.ends[0])
        before = stage.figures()
        env = {"SANDHOST_CONTROL": running.client.path}
        outcome = sandhost("reload", "--exec", "--json", env=env)
        told = json.loads(outcome.out)
        assert told["generation"] == 1
        # That of the test to the child's port may not be over yet.
        assert told["connections_reset"] in {1, 2}
        (event,) = journal(tmp_path, "network.reset")
        assert event["connections"] == told["connections_reset"]
        assert is_reset(stage.ends[1])
        assert stage.tell("wait") == "reset"
        # Rules, refusals, figures, addresses and the published port are as they were.
        after = stage.figures()
        assert (
            after.rules
            == before.rules
            == ("web.test:80", "new.test:81", "!old.test:80")
        )
        assert after.published == before.published
        assert after.refused == before.refused
        assert [row.connections for row in after.names] == [1, 1]
        assert stage.open("web.test") == addresses["web"]
        assert stage.open("new.test", 81) not in addresses.values()
        assert stage.tell("open old.test 80") == "gaierror"
        assert stage.tell(f"open {addresses['old']} 80") == "ConnectionResetError"
        assert_clean(running)
        # Once more, with a port that is closed, and opened by the program after next.
        network("c", deny=["new.test:81"])
        replace_daemon(running)
        assert stage.tell("open web.test 81") == "ConnectionRefusedError"
        network("c", allow=["new.test:81", "old.test:80"])
        assert stage.open("new.test", 81) not in addresses.values()
        assert stage.open("old.test") == addresses["old"]
        assert stage.figures().bytes_in > after.bytes_in
        # spec NET12: what the launchpad adds reaches the namespace as before.
        assert stage.tell("open 203.0.113.5 80") == "OSError"
        network("c", allow=["203.0.113.5:80"])
        assert stage.open("203.0.113.5") == "203.0.113.5"
        assert_clean(running)
        assert running.end() == 0
    assert "ERROR" not in running.said()


# spec NET14: what was used of a limit stays used.
def test_the_bytes_of_a_child_are_counted_on(tmp_path: Path) -> None:
    with world(tmp_path) as stage:
        stage.open("web.test")
        stage.ends[0].sendall(bytes(900_000))
        stage.running.wait(lambda: stage.figures().bytes_in > 900_000)
        replace_daemon(stage.running)
        stage.open("web.test")
        # Earlier bytes stay counted; the connection of the order was as well.
        stage.ends[1].sendall(bytes(200_000))
        assert is_reset(stage.ends[1])
        reasons = [row.reason for row in stage.figures().refused]
        assert reasons == ["limit-net_bytes"]


# spec NET6: a hand-over that fails ends no connection.
def test_a_program_that_is_not_replaced_resets_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as stage:
        stage.open("web.test")
        (tmp_path / "c.toml").write_text("[nonsense]\n")
        env = {"SANDHOST_CONTROL": stage.running.client.path}
        assert sandhost("reload", "--exec", env=env).status != 0
        stage.ends[0].sendall(b"more")
        stage.ends[0].shutdown(socket.SHUT_WR)
        assert stage.tell("wait") == "whole"
        assert not journal(tmp_path, "network.reset")
