"""`sandhost network`: what a child reached and was refused.

Its rules, changed live.
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.client import HostClient
from tests.helpers.command import running, sandhost

# A child that connects to what its input says, a line each.
CHILD = """
import socket, sys
for line in sys.stdin:
    host, port = line.split()
    try:
        sock = socket.create_connection((host, int(port)), timeout=10)
        print("reset" if not sock.recv(1) else "data", flush=True)
    except socket.gaierror:
        print("no name", flush=True)
    except OSError as why:
        print(type(why).__name__, flush=True)
"""

# The connect succeeds, and the name, which nobody knows outside, ends it.
UNKNOWN = "ConnectionResetError"


class Room:
    """A child of `run`, and the control socket of its host."""

    def __init__(self, process: Any, control: str) -> None:
        self._process = process
        self.control = control

    def tell(self, line: str) -> str:
        """Have the child do something; return what it says."""
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        said: bytes = self._process.stdout.readline()
        return said.decode().strip()

    def network(self) -> dict[str, Any]:
        """Return what the command tells of the child."""
        words = ("network", "child-1", "--json", "--control", self.control)
        outcome = sandhost(*words)
        assert outcome.status == 0, outcome.err
        found: dict[str, Any] = json.loads(outcome.out)
        return found


@contextmanager
def room(tmp_path: Path, *options: str) -> Iterator[Room]:
    """Run a child with some options of the network."""
    control = str(tmp_path / "c")
    more = ("--control", control, "--journal", str(tmp_path / "j"))
    words = ("run", *more, *options, "--", "python3", "-c", CHILD)
    with running(*words, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        child = Room(process, control)
        assert child.tell("localhost 1")  # it runs, and so does its host
        yield child
        process.stdin.close()
        assert process.wait(30) == 0


def journal(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind, without their times."""
    events = map(json.loads, (tmp_path / "j").read_text().splitlines())
    return [
        {k: v for k, v in event.items() if k not in {"time", "event"}}
        for event in events
        if event["event"] == kind
    ]


# spec NET6, NET11, NET12, Forms: what was refused; the next connect obeys.
@pytest.mark.slow
def test_rules_of_a_running_child_are_changed(tmp_path: Path) -> None:
    with room(tmp_path, "--network", "a.example") as child:
        assert child.tell("b.example 8080") == "no name"
        assert child.tell("a.example 80") == "ConnectionRefusedError"
        words = ("network", "child-1", "--control", child.control)
        changed = sandhost(
            *words, "--allow", "b.example:8080", "--allow", "a.example:80"
        )
        assert changed.status == 0, changed.err
        assert child.tell("b.example 8080") == UNKNOWN
        assert child.tell("a.example 80") == UNKNOWN
        found = child.network()
        assert found["rules"] == ["a.example", "b.example:8080", "a.example:80"]
        refused = found["refused"][0]
        told = {key: refused[key] for key in ("name", "port", "reason", "rule")}
        assert told == {
            "name": "b.example",
            "port": None,
            "reason": "no-rule",
            "rule": "b.example:443",
        }
        denied = sandhost(*words, "--deny", "b.example:8080", "--cut")
        assert denied.status == 0, denied.err
        assert child.tell("b.example 8080") == "no name"
        by_client = HostClient(child.control).network("child-1")
        assert by_client.rules == ("a.example", "a.example:80", "!b.example:8080")
    changes = journal(tmp_path, "network.changed")
    assert changes == [
        {"child_id": "child-1", "allow": allow, "deny": deny, "cut": bool(deny)}
        for allow, deny in (
            (["b.example:8080", "a.example:80"], []),
            ([], ["b.example:8080"]),
        )
    ]
    event = journal(tmp_path, "network.refused")[0]
    assert (event["name"], event["reason"]) == ("b.example", "no-rule")


# spec NET12, Forms: unknown, or a faulty rule: one line, exit 1 and nothing changed.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), b"cannot tell of 'nobody': no such child runs"),
        (("child-1", "--allow", "x y"), b"cannot read the rule 'x y'"),
        (("child-1", "--allow", "!b.example"), b"b.example"),
        (("child-1", "--allow", "b.example:8000"), b"port 8000 is published"),
        (("child-1", "--allow", "127.0.0.2:81"), b"is the child's own loopback"),
    ],
)
def test_what_cannot_be_changed_is_refused(
    tmp_path: Path, words: tuple[str, ...], said: bytes
) -> None:
    with room(tmp_path, "--network", "a.example", "--publish", "8000") as child:
        # A child may run before its host has its rules; from the answer on they are there.
        assert child.tell("b.example 443") == "no name"
        outcome = sandhost("network", *words, "--control", child.control)
        assert outcome.status == 1
        assert said in outcome.err
        assert len(outcome.err.splitlines()) == 1
        assert child.network()["rules"] == ["a.example"]


# spec NET13: the smallest list that would have sufficed, of what was not reached too.
@pytest.mark.slow
def test_what_was_learned_is_printed(tmp_path: Path) -> None:
    options = ("--network", "learn", "--within", "*:443,80")
    with (
        socket.socket() as nobody,  # listens on nothing
        room(tmp_path, *options, "--upstream", closed_proxy(nobody)) as child,
    ):
        assert child.tell("a.example 80") == UNKNOWN
        assert child.network()["mode"] == "learn"
        words = ("network", "child-1", "--rules", "--control", child.control)
        outcome = sandhost(*words)
        assert outcome.status == 0, outcome.err
        assert outcome.out == b"a.example:80\n"
        assert json.loads(sandhost(*words, "--json").out) == ["a.example:80"]


def closed_proxy(sock: socket.socket) -> str:
    """Return the URL of a proxy that refuses connections as long as a socket is open."""
    sock.bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


# spec Forms, NET10: `ps` has the network of each child, also where it is a word.
@pytest.mark.slow
def test_ps_tells_the_network(tmp_path: Path) -> None:
    options = ("--network", "a.example", "--publish", "8000")
    with room(tmp_path, *options) as child:
        child.tell("b.example 443")
        (row,) = json.loads(sandhost("ps", "--json", "--control", child.control).out)
        network = row["network"]
        assert (network["mode"], network["rules"]) == ("rules", ["a.example"])
        assert network["refused"] >= 1
        (published,) = network["published"]
        assert published["port"] == 8000
        assert published["address"].startswith("127.0.0.1:")
        shown = sandhost("ps", "--control", child.control).out
        assert b"NETWORK" in shown
        assert b"rules," in shown
    with room(tmp_path) as child:
        (row,) = json.loads(sandhost("ps", "--json", "--control", child.control).out)
        assert row["network"]["mode"] == "none"
        assert b"NETWORK" not in sandhost("ps", "--control", child.control).out
        outcome = sandhost(
            "network", "child-1", "--allow", "a.example", "--control", child.control
        )
        assert outcome.status == 1
        assert b"has no rules" in outcome.err


# spec NET8: where a proxy resolves, NET3 is its affair, and the report says so.
@pytest.mark.slow
def test_the_report_tells_that_a_proxy_looks_names_up(tmp_path: Path) -> None:
    proxy = "http://proxy.example:3128"
    options = ("--network", "a.example", "--upstream", proxy)
    with room(tmp_path, *options) as child:
        child.tell("b.example 443")
        (row,) = json.loads(sandhost("ps", "--json", "--control", child.control).out)
        left_to = {"judgement of addresses": f"the proxy {proxy} looks names up"}
        assert left_to.items() <= row["isolation"]["missing"].items()
        assert row["network"]["upstream"] == proxy
        assert b"rules, upstream, " in sandhost("ps", "--control", child.control).out
        assert child.network()["upstream"] == proxy
        shown = sandhost("network", "child-1", "--control", child.control).out
        assert f"{proxy} looks names up: their addresses are not" in shown.decode()
    (spawned,) = journal(tmp_path, "child.spawned")
    assert left_to.items() <= spawned["isolation"]["missing"].items()
    with room(tmp_path, "--network", "a.example") as child:
        assert "upstream" not in child.network()
        (row,) = json.loads(sandhost("ps", "--json", "--control", child.control).out)
        assert not left_to.keys() & row["isolation"]["missing"].keys()


# spec NET14: what is over a limit is reset, with the reason.
@pytest.mark.slow
def test_connections_are_limited(tmp_path: Path) -> None:
    options = ("--network", "a.example:80", "--limit", "connections=0")
    with room(tmp_path, *options) as child:
        assert child.tell("a.example 80") == UNKNOWN
        (refused,) = child.network()["refused"]
        assert (refused["name"], refused["reason"]) == (
            "a.example",
            "limit-connections",
        )
