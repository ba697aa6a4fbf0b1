"""Tables for people: within the width, one line a row, no terminal controls."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from hostlib.messages import printable
from supervisor.observe.tables import (
    CUT,
    TABLES,
    WIDTH,
    Column,
    render,
    to_json,
)
from tests.helpers.spawning import ROOT

CHILD: dict[str, Any] = {
    "id": "child-1",
    "pid": 4711,
    "state": "running",
    "command": ["/bin/sh", "-c", "sleep 1000"],
    "restarts": 2,
    "isolation": {"label": "auto-1", "profile": "auto"},
    "usage": {
        "state": "sleeping",
        "cpu_time_s": 3.14,
        "cpu_percent": 0.5,
        "rss_bytes": 3_400_000,
        "descriptors": 4,
        "threads": 1,
        "descendants": 2,
    },
}
CLIENT: dict[str, Any] = {
    "id": "c1",
    "pipe_id": "child-1:socketpair",
    "open_files": [1000, 1002],
    "connected_at": "2031-05-06T07:08:09.123456Z",
    "parent_id": None,
    "pid": 4711,
    "child": "web",
}
FILE: dict[str, Any] = {
    "fileno": 1000,
    "filename": "report.txt",
    "mode": "r+",
    "client_id": "c1",
    "opened_at": "2031-05-06T07:08:09.123456Z",
    "is_top_level": False,
    "offset": 42,
    "child": "web",
}
ACCOUNT = {
    "client_id": None,
    "parent_id": None,
    "spent": 1250.5,
    "reserved": 40.0,
    "limit": 5000.0,
    "calls": 3,
    "under_way": 1,
    "max_calls": None,
    "child": None,
}
WORKSPACE = {
    "name": "repo",
    "base": "/srv/repo",
    "mode": "review",
    "state": "in use",
    "child": "child-1",
    "created_at": "2026-01-01T00:00:00.5Z",
    "changed": 3,
    "bytes": 4096,
    "snapshots": [],
}
ROWS = {
    "ps": CHILD,
    "clients": CLIENT,
    "files": FILE,
    "quota": ACCOUNT,
    "workspaces": WORKSPACE,
}

# As long, as wide and as strange as each can be.
WORST = {
    "ps": {
        **CHILD,
        "id": "child-1000000",
        "pid": 4_194_304,
        "command": ["\N{CJK UNIFIED IDEOGRAPH-65E5}" * 500, "\x1b[2J\r\n\x9b"],
        "usage": {
            "state": "sleeping",
            "cpu_time_s": 1e9,
            "cpu_percent": 6400.0,
            "rss_bytes": 10**15,
            "descriptors": 1_048_576,
            "threads": 100_000,
            "descendants": 10_000,
        },
        "workspaces": [{"name": "w" * 64, "changed": 10**9, "bytes": 10**15}] * 3,
        "network": {"mode": "rules", "refused": 10**9},
    },
    "clients": {
        **CLIENT,
        "id": "c1000000",
        "parent_id": "c1000000",
        "pipe_id": "child-1000000:socketpair",
        "open_files": list(range(1000, 2000)),
    },
    "files": {
        **FILE,
        "fileno": 10**9,
        "client_id": "c1000000",
        "filename": "e\N{COMBINING ACUTE ACCENT}\x00\n" * 1000,
        "offset": 10**18,
    },
    "workspaces": {
        **WORKSPACE,
        "name": "w" * 64,
        "base": "/\x1b\n" * 1000,
        "state": "cannot be read: " + "x" * 500,
        "changed": 10**9,
        "bytes": 10**15,
    },
    "quota": {
        "client_id": "c" + "9" * 9,
        "parent_id": "c" + "9" * 9,
        "spent": 1e9,
        "reserved": 1e9,
        "limit": 1e9,
        "calls": 10**9,
        "under_way": 10**3,
        "max_calls": 10**12,
    },
}


def cells(text: str) -> int:
    """Columns on a terminal, for the characters used here."""
    return sum(2 if c >= "\u3000" else c != "\u0301" for c in text)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("terminal", [False, True])
def test_every_line_fits_whatever_the_rows_hold(kind: str, terminal: bool) -> None:
    rows = [WORST[kind], ROWS[kind], {**ROWS[kind], "usage": None}]
    text = render(TABLES[kind], rows, width=WIDTH)
    if terminal:
        drawn = render(TABLES[kind], [WORST[kind]], terminal=True, width=WIDTH)
        text = drawn.replace("\x1b[1m", "").replace("\x1b[36m", "")
        text = text.replace("\x1b[0m", "")
    lines = text.splitlines()
    assert len(lines) == (2 if terminal else 4)
    assert max(map(cells, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines)


# spec WS20
def test_workspaces_are_shown_where_a_child_has_one() -> None:
    plain = {**CHILD, "workspaces": []}
    row = {**CHILD, "workspaces": [{"name": "repo", "changed": 3, "bytes": 4096}]}
    head, _, second = render(TABLES["ps"], [plain, row]).splitlines()
    shown = ["WORKSPACE", "CHANGED", "BYTES"]
    at = head.split().index("WORKSPACE")
    assert head.split()[at : at + 3] == shown
    assert second.split()[at : at + 3] == ["repo", "3", "4K"]
    assert "WORKSPACE" not in render(TABLES["ps"], [plain])


def test_an_ordinary_table_is_complete() -> None:
    head, row = render(TABLES["ps"], [CHILD]).splitlines()
    assert head.split() == [
        "CHILD", "PID", "STATE", "RESTARTS", "UPTIME", "ISOLATION", "CPU%", "TIME",
        "RSS", "FDS", "THR", "SUB", "COMMAND", "REASON",
    ]  # fmt: skip
    assert row.split() == [
        "child-1", "4711", "running", "2", "-", "auto-1", "0.5", "3.1s", "3.24M", "4",
        "1", "2", "/bin/sh", "-c", "sleep", "1000", "-",
    ]  # fmt: skip


def test_what_is_not_known_is_a_dash() -> None:
    row = {**CHILD, "pid": None, "state": "starting", "usage": None, "isolation": None}
    words = render(TABLES["ps"], [row]).splitlines()[1].split()
    assert words[:12] == ["child-1", "-", "starting", "2", *["-"] * 8]


def test_how_long_a_process_has_been_there_is_told() -> None:
    began = datetime.now(UTC) - timedelta(hours=3, minutes=2)
    row = {**CHILD, "started_at": began.isoformat().replace("+00:00", "Z")}
    assert render(TABLES["ps"], [row]).splitlines()[1].split()[4] == "3h02m"


# A name or a reason is the child's own word, or a sentence: figures stand beside it.
@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("key", ["name", "reason", "command"])
def test_a_long_word_cuts_nothing_that_follows(key: str, width: int) -> None:
    long = ["a" * 300] if key == "command" else "a" * 300
    row = {**CHILD, "name": "web", "reason": "exited with 3", key: long}
    head, line = render(TABLES["ps"], [row], width=width).splitlines()
    words = line.split()
    assert words[1:6] == ["4711", "running", "2", "-", "auto-1"]
    assert words[0].startswith("web" if key != "name" else "aaaaaaa")
    assert head.endswith("REASON") or head.split()[-1] == "REASON"
    end = line[head.index("REASON") :]
    assert end.startswith("aaaaaaa" if key == "reason" else "exited ")
    command = line[head.index("COMMAND") : head.index("REASON")]
    assert command.startswith("aaaaaaa" if key == "command" else "/bin/sh")


def test_figures_that_matter_less_go_before_names_are_cut() -> None:
    assert "COMMAND" in (
        head := render(TABLES["ps"], [CHILD], width=80).splitlines()[0]
    )
    assert "RSS" in head
    assert "SUB" not in head
    assert "SUB" in render(TABLES["ps"], [CHILD], width=140).splitlines()[0]


def test_clients_files_and_accounts_name_the_child() -> None:
    assert render(TABLES["clients"], [CLIENT]).splitlines()[1].split()[1] == "web"
    assert render(TABLES["files"], [FILE]).splitlines()[1].split()[3] == "web"
    assert (
        render(TABLES["quota"], [{**ACCOUNT, "child": "web"}])
        .splitlines()[1]
        .split()[1]
        == "web"
    )


@pytest.mark.parametrize("state", ["zombie", "stopped"])
def test_a_process_that_does_not_run_is_said_not_to(state: str) -> None:
    row = {**CHILD, "usage": {**CHILD["usage"], "state": state}}
    assert render(TABLES["ps"], [row]).splitlines()[1].split()[2] == state


def test_what_was_cut_says_so() -> None:
    row = {**FILE, "filename": "a" * 200}
    long = render(TABLES["files"], [row], width=WIDTH).splitlines()[1]
    assert long.endswith("a" + CUT)
    assert len(long) == WIDTH
    short = render(TABLES["files"], [FILE]).splitlines()[1]
    assert short.endswith(" report.txt")


@pytest.mark.parametrize("width", [300, None])
def test_what_there_is_room_for_is_not_cut(width: int | None) -> None:
    row = {**FILE, "filename": "a" * 150}
    assert (
        render(TABLES["files"], [row], width=width).splitlines()[1].endswith("a" * 150)
    )


def test_an_empty_table_is_its_head() -> None:
    assert len(render(TABLES["clients"], []).splitlines()) == 1


def test_numbers_stand_right_and_words_left() -> None:
    columns = (
        Column("N", lambda row: str(row["n"]), is_right=True),
        Column("W", lambda row: row["w"]),
    )
    rows = [{"n": 5, "w": "a"}, {"n": 500, "w": "bcd"}]
    assert render(columns, rows) == "  N W\n  5 a\n500 bcd\n"


# attack 13
def test_what_a_child_chose_reaches_no_terminal_as_an_order() -> None:
    name = "\x1b]0;x\x07\x9b2J\r\n\u202e[red]\x7f"
    for terminal in (False, True):
        text = render(TABLES["files"], [{**FILE, "filename": name}], terminal=terminal)
        assert "?]0;x??2J???[red]?" in text
    assert printable(name) == "?]0;x??2J???[red]?"


def test_on_a_terminal_the_head_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    head, row = render(TABLES["ps"], [CHILD], terminal=True).splitlines()
    assert head.startswith("\x1b[1mCHILD")
    assert row.startswith("\x1b[36mchild-1\x1b[0m")


# spec S1
def test_json_is_the_rows_and_nothing_else() -> None:
    rows = [WORST["files"], FILE]
    text = to_json(rows)
    assert json.loads(text) == rows
    assert text.isascii()
    assert "\x1b" not in text


def test_rich_is_imported_for_a_terminal_only() -> None:
    code = (
        "import sys; from supervisor.observe.tables import TABLES, render;"
        " render(TABLES['ps'], []); print('rich' in sys.modules);"
        " render(TABLES['ps'], [], terminal=True); print('rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"False", b"True"]
