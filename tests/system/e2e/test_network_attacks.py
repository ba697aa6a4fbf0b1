"""Ways out of a network by name, tried by a child in the usual sandbox.

The host's name server is the test's own, and lies; what it was asked is written down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, TIMEOUT_S
from tests.system.e2e import nameworld

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

CLOSED = {
    "chain.test": "private-address",
    "mixed.test": "private-address",
    "private.test": "private-address",
    "mapped.test": "private-address",
    "meta.test": "private-address",
    "loop.test": "own-address",
    "own.test": "own-address",
}
NAMES = ("ok.test", "rebind.test", *CLOSED)

WORDS = """
import glob, json, socket, sys

def get(host, port=80, said=None):
    try:
        sock = socket.create_connection((host, port), 30)
        head = "GET / HTTP/1.1\\r\\nHost: %s\\r\\nConnection: close\\r\\n\\r\\n"
        sock.sendall((head % (said or host)).encode())
        data = b""
        while piece := sock.recv(4096):
            data += piece
        return data.partition(b"\\r\\n\\r\\n")[2].decode().strip()
    except socket.gaierror:
        return "no name"
    except OSError as why:
        return type(why).__name__

def send(address, port):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(5)
    try:
        sock.connect((address, port))
        sock.send(b"x" * 32)
        sock.send(b"x" * 32)
        return repr(sock.recv(100))
    except OSError as why:
        return type(why).__name__
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the child sees, of a host that is root in a world of its own."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def tried(place: Path, script: str, *rules: str) -> dict[str, str]:
    """Return what a child has found out, as its script has printed it."""
    (place / "try.py").write_text(WORDS + script)
    (place / "try.py").chmod(0o644)
    world = (
        "unshare",
        "--net",
        "--mount",
        sys.executable,
        nameworld.__file__,
        str(place),
    )
    options = [word for rule in rules for word in ("--network", rule)]
    run = (SANDHOST, "run", *options, "--journal", "journal", "--", "python3", "try.py")
    done = subprocess.run(
        [*world, *run],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def refused(place: Path) -> dict[str, str]:
    """Return the reasons of the journal, by name."""
    rows = map(json.loads, (place / "journal").read_text().splitlines())
    return {
        row["name"]: row["reason"] for row in rows if row["event"] == "network.refused"
    }


def questions(place: Path) -> list[str]:
    """Return the names that the host's name server was asked for."""
    lines = (place / "questions").read_text().splitlines()
    return [line.split()[0] for line in lines]


# spec NET3, NET6: whatever a name server says, and however often it is asked.
# attack 57
def test_names_that_stand_for_closed_addresses_are_refused(place: Path) -> None:
    script = f"print(json.dumps({{name: get(name) for name in {NAMES}}}))"
    found = tried(place, script, *(f"{name}:80" for name in NAMES))
    assert found.pop("ok.test") == f"{nameworld.PUBLIC} ok.test"
    # It is private from the second question on, and is asked once.
    assert found.pop("rebind.test") == f"{nameworld.PUBLIC} rebind.test"
    assert found == dict.fromkeys(CLOSED, "ConnectionResetError")
    assert refused(place) == CLOSED
    lines = (place / "questions").read_text().splitlines()
    assert lines.count("rebind.test 1") == 1


# spec NET1, NET4: an address is a right of its own, in whatever form it is written.
# attack 58
def test_addresses_without_a_rule_have_no_route(place: Path) -> None:
    forms = (
        *(nameworld.PUBLIC, nameworld.PRIVATE, nameworld.METADATA, "203.0.113.1"),
        *("3405803781", "0313.0.0161.05", "0xcb007105", "203.28933"),
    )
    script = f"print(json.dumps({{form: get(form) for form in {forms}}}))"
    found = tried(place, script, "ok.test:80", "*.test:80")
    assert found == dict.fromkeys(forms, "OSError")
    # By a wide rule an address is reached, and no closed one is.
    found = tried(place, script, "0.0.0.0/0:80")
    public = {form for form in forms if form not in forms[1:4]}
    for form in forms:
        if form in public:
            assert found[form].startswith(nameworld.PUBLIC), form
        else:
            assert found[form] == "ConnectionResetError", form


# spec NET7: told, and harmless: it is the granted name's server that answers.
# attack 59
def test_a_host_header_of_another_name_reaches_the_granted_server(place: Path) -> None:
    script = "print(json.dumps({'said': get('ok.test', said='private.test')}))"
    found = tried(place, script, "ok.test:80")
    assert found == {"said": f"{nameworld.PUBLIC} private.test"}
    assert set(questions(place)) == {"ok.test"}


# spec NET5: a refused name carries nothing out, whatever its type and its way.
# attack 60
def test_no_question_for_a_refused_name_leaves_the_host(place: Path) -> None:
    script = """
def ask(name, kind, tcp=False):
    labels = b"".join(bytes((len(part),)) + part for part in name.encode().split(b"."))
    packet = b"\\x12\\x34\\1\\0\\0\\1" + bytes(6) + labels + b"\\0" + kind.to_bytes(2, "big") + b"\\0\\1"
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", 53))
    sock.send(len(packet).to_bytes(2, "big") + packet if tcp else packet)
    return str(sock.recv(4096)[5 if tcp else 3] & 15)

found = {}
for kind in (1, 28, 16, 5, 15, 65, 255, 12):
    for tcp in (False, True):
        found[f"{kind} {tcp}"] = ask(f"data{kind}{tcp}.out.test", kind, tcp)
for number in range(200):
    get(f"secret-{number}.out.test")
found["ok"] = get("ok.test")
print(json.dumps(found))
"""
    found = tried(place, script, "ok.test:80")
    assert found.pop("ok") == f"{nameworld.PUBLIC} ok.test"
    assert set(found.values()) == {"3"}  # NXDOMAIN
    assert set(questions(place)) == {"ok.test"}


# spec NET4: no way leads past the names: UDP, abstract sockets, the tables of others.
# attack 62
def test_there_is_no_other_way_out(place: Path) -> None:
    script = f"""
address = socket.gethostbyname("ok.test")
found = {{}}
for where in ("{nameworld.NAME_SERVER}", "{nameworld.PUBLIC}", "{nameworld.PRIVATE}"):
    found["udp " + where] = send(where, 53)
for port in (53, 80, 443):
    found[f"udp name {{port}}"] = send(address, port)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        socket.socket(socket.AF_UNIX, kind).connect({nameworld.ABSTRACT!r})
        found[f"abstract {{kind}}"] = "connected"
    except OSError as why:
        found[f"abstract {{kind}}"] = type(why).__name__
for kind, protocol in ((socket.SOCK_RAW, 1), (socket.SOCK_RAW, 6)):
    try:
        socket.socket(socket.AF_INET, kind, protocol)
        found[f"raw {{protocol}}"] = "made"
    except OSError as why:
        found[f"raw {{protocol}}"] = type(why).__name__
tables = {{}}
for name in ("tcp", "unix", "udp"):
    for path in (f"/proc/net/{{name}}", *glob.glob(f"/proc/[0-9]*/net/{{name}}")):
        try:
            tables[path] = open(path).read()
        except OSError:
            pass
text = "".join(tables.values())
found["of others"] = str([
    path for path, text in tables.items() if "of-the-world" in text or "057100CB" in text
])
found["read"] = str(len(tables) > 2)
print(json.dumps(found))
"""
    found = tried(place, script, "ok.test:80", "ok.test:443")
    assert found.pop("read") == "True"
    assert found.pop("of others") == "[]"
    for name in [name for name in found if name.startswith("udp 2")]:
        assert found.pop(name) == "OSError", name  # unreachable
    assert found.pop(f"udp {nameworld.PRIVATE}") == "OSError"
    assert {found.pop(f"udp name {port}") for port in (80, 443)} == {
        "ConnectionRefusedError"
    }
    assert found.pop("udp name 53") in {"ConnectionRefusedError", "TimeoutError"}
    assert set(found.values()) <= {"ConnectionRefusedError", "PermissionError"}
    assert not questions(place)
