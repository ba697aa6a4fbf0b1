"""`--journal F`: valid JSON lines with the agreed names, for any names of files."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import sandhost

pytestmark = pytest.mark.slow

EVENTS = {
    "host.started",
    "host.stopping",
    "child.spawned",
    "child.exited",
    "child.gone",
    "client.connected",
    "client.gone",
    "file.opened",
    "file.closed",
    "file.auto_closed",
    "security.denied",
}

LIFE = (
    'ask() { printf "$1" >&3; IFS= read -r reply <&3; };'
    "ask 'OPEN a w false\\n'; ask 'WRITE 1000 3\\nabc'; ask 'CLOSE 1000\\n';"
    "ask 'OPEN b w false\\n'; ask 'OPEN /etc/passwd r true\\n'; exit 3"
)


def events(path: Path) -> list[dict[str, Any]]:
    """Every line of a journal; each must be an object with time and event."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.split(b"\n")[:-1]]
    for row in rows:
        assert datetime.fromisoformat(row["time"]).tzinfo is not None
        assert row["event"] in EVENTS
    return rows


def test_the_life_of_a_child_is_told_in_order(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    words = ("run", "--journal", journal, "--log-level", "error")
    assert sandhost(*words, "--", "sh", "-c", LIFE).status == 3
    rows = events(journal)
    assert {row["event"] for row in rows} == EVENTS
    order = [row["event"] for row in rows]
    assert order[0] == "host.started"
    life = ("child.spawned", "file.opened", "file.closed", "file.auto_closed")
    ends = ("client.gone", "child.exited", "child.gone")
    first = [order.index(event) for event in (*life, *ends)]
    assert first == sorted(first)
    (spawned,) = [row for row in rows if row["event"] == "child.spawned"]
    (ended,) = [row for row in rows if row["event"] == "child.exited"]
    assert (ended["code"], ended["signal"]) == (3, None)
    assert spawned["command"] == ["sh", "-c", LIFE]
    for row in rows:
        if not row["event"].startswith("host."):
            assert row["child_id"] == spawned["child_id"]
        if row["event"].startswith(("file.", "security.")):
            assert row["client_id"] == spawned["client_id"]


def test_a_journal_is_appended_to_and_private(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    for _ in range(2):
        assert sandhost("run", "--journal", journal, "--", "true").status == 0
    assert [row["event"] for row in events(journal)].count("host.started") == 2
    assert journal.stat().st_mode & 0o077 == 0


NAMES = [
    b"plain",
    b"two words  and more",
    b'quote" and \\backslash\\n',
    b'"}\r{"event":"child.gone"',
    b"\x1b[2J\x1b]0;title\x07",
    b"\xff\xfe not UTF-8 \x80",
    "Ümläut \u202e and \u2028 too".encode(),
    b"tab\there",
    b"\x7f\x01\x02",
    b"x" * 255,
]

OPEN_ALL = (
    "import os, sys\n"
    "for name in eval(sys.argv[1]):\n"
    "    os.write(3, b'OPEN %b w false\\n' % name); os.read(3, 4096)\n"
    "    os.write(3, b'OPEN /%b r true\\n' % name); os.read(3, 4096)\n"
    "old, new = b'plain', b'new\\nline\\r\\x1b[0m'\n"
    "os.write(3, b'RENAME false %d %d\\n%b%b' % (len(old), len(new), old, new))\n"
    "assert os.read(3, 99) == b'OK\\n'\n"
)


# attacks 13 and 23: N events are N lines, and names say nothing but themselves.
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_names_forge_no_line(tmp_path: Path, log_format: str) -> None:
    journal, root = tmp_path / "journal", tmp_path / "root"
    root.mkdir()
    options = ("--journal", journal, "--root", root, "--log-format", log_format)
    child = (sys.executable, "-I", "-S", "-c", OPEN_ALL, repr(NAMES))
    outcome = sandhost("run", *options, "--log-level", "info", "--", *child)
    assert outcome.status == 0
    rows = events(journal)
    opened = [row["filename"] for row in rows if row["event"] == "file.opened"]
    denied = [row["filename"] for row in rows if row["event"] == "security.denied"]
    gone = [row["filename"] for row in rows if row["event"] == "file.auto_closed"]
    assert len(opened) == len(denied) == len(gone) == len(NAMES)
    assert (
        opened == gone == [name.decode("utf-8", "backslashreplace") for name in NAMES]
    )
    assert [name.lstrip("/") for name in denied] == opened
    assert [row["event"] for row in rows].count("child.gone") == 1
    # The log says each thing on a line of its own, without a control character.
    lines = outcome.err.split(b"\n")
    assert not set(outcome.err) - {10} & {*range(32), 127}
    for said in (b"Denied OPEN", b"Auto-closed fileno"):
        assert sum(said in line for line in lines) == len(NAMES)
    if log_format == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines if line)
    assert len(os.listdir(root)) == len(NAMES)


# attack 13: nor does the command line, nor a variable.
def test_a_command_forges_no_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    words = (
        "--journal",
        journal,
        "--env",
        "A=\n{}",
        "--",
        "true",
        '\n{"event": "x"}\n',
    )
    assert sandhost("run", *words).status == 0
    (spawned,) = [row for row in events(journal) if row["event"] == "child.spawned"]
    assert spawned["command"] == ["true", '\n{"event": "x"}\n']


FLOOD = (
    "import os\n"
    "for number in range(1000):\n"
    "    name = b'/%d/' % number + b'\\xff' * 4000\n"
    "    os.write(3, b'OPEN %b r true\\n' % name)\n"
    "    while not os.read(3, 65536).endswith(b'\\n'): pass\n"
)


# attack 13, attack 23: what a child is denied fills no journal, and none of it is lost
# without a count.
def test_denials_are_bounded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    words = ("run", "--journal", journal, "--log-format", "text", "--")
    outcome = sandhost(*words, sys.executable, "-I", "-S", "-c", FLOOD)
    assert outcome.status == 0
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in journal.read_bytes().splitlines()
    ]
    denied = [row for row in rows if row["event"] == "security.denied"]
    left_out = [row for row in rows if row["event"] == "security.left_out"]
    assert 100 <= len(denied) < 200
    assert len(denied) + sum(row["denials"] for row in left_out) == 1000
    assert all(len(row["filename"]) == 256 for row in denied)
    assert denied[7]["filename"].startswith("/7/\\xff\\xff")
    assert {row["filename_bytes"] for row in denied[:10]} == {4003}
    order = [row["event"] for row in rows]
    assert "security.left_out" in order[order.index("client.gone") :]
    assert order[-2:] == ["child.gone", "host.stopping"]
    assert outcome.err.count(b"Denied OPEN") == len(denied)
    assert b"more denials of child-1 were left out" in outcome.err


# A connected client is gone at the end, and no other is.
def test_a_child_that_cannot_be_started_has_no_client(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    outcome = sandhost("run", "--journal", journal, "--", "no-such-command")
    assert outcome.status == 127
    told = [json.loads(line)["event"] for line in journal.read_bytes().splitlines()]
    assert told == ["host.started", "child.gone", "host.stopping"]
