"""Rules of a nested child.

Kept where a namespace can be made, else refused (spec NET2).
"""

import json
import os
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.helpers.command import SANDHOST, heard, running, sandhost
from tests.system.e2e.networkhost import Command, network_host, network_place

pytestmark = pytest.mark.slow

OPEN = """
[policy.run]
network = ["a.example:80", "b.example:80"]
sandbox = "open"
[sandbox.open]
layers = ["uid", "userns", "mountns", "netns"]
"""
"""Neither Landlock, which refuses mounts, nor the filter of system calls."""

CONNECT = """
import socket
for name in ("a.example", "b.example"):
    try:
        sock = socket.create_connection((name, 80), 60)
        sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print(name, "ended", sock.recv(1))
    except socket.gaierror as why:
        print(name, "unknown")
    except OSError as why:
        print(name, why.errno)
"""


# spec NET2: it has at most what it asked for, and its parent's host decides once more.
# attack 62
def test_a_nested_child_dials_by_its_parents_names(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip(
            "a user namespace within another one's root needs a host that is root"
        )
    tmp_path.chmod(0o755)
    (tmp_path / "c.toml").write_text(OPEN)
    (tmp_path / "connect.py").write_text(CONNECT)
    words = ("--config", "c.toml", "--journal", "journal")
    nested = (SANDHOST, "relay", "--network", "a.example:80", "--")
    outcome = sandhost(
        *("run", *words, "--", *nested, "python3", "connect.py"), cwd=tmp_path
    )
    assert outcome.status == 0, outcome.err
    first, second = outcome.out.decode().splitlines()
    assert first == "a.example 104"
    assert second == "b.example unknown"
    events = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    refused = [row for row in events if row["event"].startswith("network.")]
    assert [(row["name"], row["port"]) for row in refused] == [("a.example", 80)]
    # spec NET11: what its own rules refuse is told by the relay.
    told = "b.example: no-rule; the rule 'b.example:443' would allow it"
    assert outcome.err.decode().count(told) == 1


# spec NET2, NET12: what its parent has at this moment, and not at its start.
def test_a_nested_child_is_judged_by_the_rules_of_its_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    relay = f"{SANDHOST} relay --network"
    asked = f"for name in old new; do {relay} $name.example -- true; echo $?; done"
    script = f"echo begun; read line; {asked}"
    options = ("--network", "old.example", "--control", str(tmp_path / "control"))
    with running("run", *options, "--", "sh", "-c", script, stdin=PIPE) as process:
        change = ("--deny", "old.example", "--allow", "new.example")
        heard(process, b"begun")
        changed = sandhost(
            "network", "child-1", *change, "--control", str(tmp_path / "control")
        )
        assert changed.status == 0, changed.err
        out, err = process.communicate(b"go\n", timeout=60)
    assert b"cannot allow 'old.example'" in err
    # The rule is had; the sandbox lets nobody make the namespace for it.
    assert b"the sandbox layer 'netns'" in err
    assert out.split() == [b"2", b"125"]


# spec NET2: in a usual sandbox it may make no namespace, and is told so.
# attack 62
def test_a_nested_child_that_may_make_no_namespace_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    nested = (SANDHOST, "relay", "--network", "a.example", "--", "touch", "done")
    outcome = sandhost("run", "--network", "a.example", "--", *nested, cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("cannot keep the network's rules: the sandbox layer 'netns'")
    outcome = sandhost("run", "--network", "b.example", "--", *nested, cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said("cannot allow 'a.example': the parent has no rule for port 443")


LIMITED = """
[policy.run]
network = ["ok.test:80,7,9"]
sandbox = "open"
limits = { connections = 2 }
[sandbox.open]
layers = ["uid", "userns", "mountns", "netns"]
"""
LIMIT_BYTES = 100_000


# spec NET14: what a nested child uses counts against its parent's limits.
# spec Forms: `run --limit`, with its reason in `sandhost network` and the journal.
def test_a_nested_child_uses_up_its_parents_limits() -> None:
    with network_place() as place:
        control, journal = (str(place / "home" / name) for name in ("control", "j"))
        (place / "c.toml").write_text(LIMITED)
        config = str(place / "c.toml")
        words = ["--config", config, "--control", control, "--journal", journal]
        words += ["--limit", f"net_bytes={LIMIT_BYTES}"]
        run = ("run", *words, "--", "python3", "prober.py", "child-1")
        with network_host(place, Command(), ("child-1",), *run) as host:
            rule = ("--network", "ok.test:80,7,9")
            relay = (SANDHOST, "relay", *rule, "--", "python3", "prober.py", "nested")
            host.do("child-1", f"start(*{relay})")
            host.wait_for("nested")
            both = ("child-1", "nested")
            for child in both:
                assert host.do(child, "hold('kept', 'ok.test', 9, 4)") == b"half"
            for child in both:
                assert host.do(child, "get('ok.test')") == "reset"
            for child in both:
                assert host.do(child, "held('kept', b'.')") == "reset"
            more = f"send('ok.test', 7, bytes({LIMIT_BYTES}))"
            assert host.do("nested", more) == "reset"
            told = sandhost("network", "child-1", "--json", "--control", control)
            host.end("nested", "child-1")
        figures = json.loads(told.out)
        assert 0 < figures["bytes_in"] + figures["bytes_out"] <= LIMIT_BYTES
        events = map(json.loads, Path(journal).read_text().splitlines())
        refused = [row for row in events if row["event"] == "network.refused"]
        for rows in (figures["refused"], refused):
            reasons = {row["port"]: row["reason"] for row in rows}
            assert (reasons[80], reasons[7]) == ("limit-connections", "limit-net_bytes")
