"""`top` and `trace` from outside.

Scripts, a real terminal of 80 columns, a daemon.
"""

import fcntl
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.cluster.names import DOOR
from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    TIMEOUT_S,
    heard,
    running,
    sandhost,
)
from tests.helpers.daemon import daemon
from tests.helpers.scrape import curl, parsed

pytestmark = pytest.mark.slow

BUSY = """
ask() { printf "$1" >&3; IFS= read -r reply <&3; }
ask 'OPEN note w false\\n'
ask 'WRITE 1000 3\\nabc'
ask 'OPEN /etc/passwd r true\\n'
echo ready
while [ -z "$ONCE" ]; do ask 'SEEK 1000 5\\n'; sleep 0.01; done
"""


@contextmanager
def host(where: Path, *options: str | Path) -> Iterator[Path]:
    """Run a busy child with a control socket; gives the socket's path."""
    control = where / "control"
    words = ("run", "--control", control, "--log-level", "error", *options)
    with running(*words, "--", "sh", "-c", BUSY) as process:
        heard(process, b"ready")
        yield control


# ---------------------------------------------------------------- for scripts


def test_top_without_a_terminal_prints_one_table(tmp_path: Path) -> None:
    with host(tmp_path) as control:
        for options in ((), ("--once",), ("--sort", "requests", "--interval", "0.3s")):
            outcome = sandhost("top", "--control", control, *options)
            assert outcome.status == 0, outcome.err
            head, row, *rest = outcome.out.decode().splitlines()
            assert not rest
            assert head.startswith("CHILD")
            assert row.endswith("'/etc/passwd'")  # over a pipe nothing is cut
            assert row.startswith("child-1")
            # Where the disk is busy its child may wait for it at both looks.
            assert row.split()[1] in {"running", "stuck"}
            assert "VFS" in row


def test_top_as_json_has_every_figure(tmp_path: Path) -> None:
    with host(tmp_path) as control:
        outcome = sandhost("top", "--json", "--control", control)
        (row,) = json.loads(outcome.out)
        assert row["name"] == "child-1"
        assert row["requests_per_s"] > 0
        assert row["bytes_in_per_s"] > 0
        assert row["open_files"] > 0
        assert row["rss_bytes"] > 1_000_000
        assert row["last_error"].startswith("ERROR VFS access denied")
        assert row["errors"] == 1
        none = sandhost("top", "--json", "--control", control, "--filter", "nobody")
        assert json.loads(none.out) == []


def test_top_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert sandhost("top", "--control", absent).said("there is no such socket")
    bad = sandhost("top", "--control", absent, "--sort", "beauty")
    assert bad.status == 2
    assert bad.said("there are: cpu, rss")
    assert sandhost("top", "--interval", "0s", "--control", absent).said("at least")


# ---------------------------------------------------------------- a terminal


class Terminal:
    """`sandhost top`, or another, in a terminal of 80 columns and 24 lines."""

    def __init__(self, command: tuple[str, ...], *words: str | Path) -> None:
        self.fd, theirs = pty.openpty()
        size = struct.pack("4H", 24, 80, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(theirs)
        self.kept = theirs
        env = {**ENVIRONMENT, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [SANDHOST, *command, "--interval", "0.2s", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
        )
        self.seen = ""

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self.fd, keys.encode())

    def until(self, pattern: str) -> str:
        """Wait until what came since the last call holds a pattern."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            # A frame begins where the cursor is sent home, not behind the one before.
            text = re.sub(r"\x1b\[[0-9;]*H", "\n", self.seen)
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
            if re.search(pattern, text):
                self.seen = ""
                return text
            patience = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.fd], [], [], patience)
            assert ready, f"{pattern!r} did not come, but {text[-2000:]!r}"
            self.seen += os.read(self.fd, 65_536).decode(errors="replace")

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.kept)


@contextmanager
def terminal(
    *words: str | Path, command: tuple[str, ...] = ("top",)
) -> Iterator[Terminal]:
    """Open a terminal with `top` in it."""
    opened = Terminal(command, *words)
    try:
        yield opened
    finally:
        opened.close()


# spec FL3, FL11: the node actor was killed, and left its socket.
def test_top_of_a_fleet_words_faults(tmp_path: Path) -> None:
    text = "cannot ask the fleet: the node actor here has ended"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/{DOOR}")
        words = ("--control", f"{tmp_path}/control")
        outcome = sandhost("fleet", "top", "--once", *words)
        assert (outcome.status, outcome.said(text)) == (1, True), outcome.err
        with terminal(*words, command=("fleet", "top")) as top:
            top.until(text[:40])  # the line has 80 columns
            top.press("q")
            assert top.process.wait(TIMEOUT_S) == 0


def test_top_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    with host(tmp_path) as control, terminal("--control", control) as top:
        text = top.until(r"child-1 +running.*\n(.*\n)*.*q quit")
        lines = re.split(r"\r?\n", text)
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("CHILD ") for line in lines)
        top.until(r"1 children, [1-9]\d* requests/s")
        top.press("r")
        top.until("by requests")
        top.press("/nobody\r")
        top.until("0 shown")
        top.press("\x1b")
        top.until(r"child-1 +running")
        top.press("k")
        top.until("choose a child")
        top.press("\x1b[B")
        top.press("k")
        top.until("SIGTERM to child-1[?]")
        top.press("n")
        top.until("nothing was killed")
        top.press("q")
        assert top.process.wait(TIMEOUT_S) == 0
        after = termios.tcgetattr(top.kept)
        assert after == top.before, "the terminal is as it was"


def test_top_kills_a_child_of_a_daemon(tmp_path: Path) -> None:
    config = '[child.victim]\ncommand = ["/bin/sleep", "1000"]\n'
    with daemon(tmp_path, config) as served:
        with terminal("--control", tmp_path / "run" / "control") as top:
            top.until(r"victim +running")
            top.press("\x1b[B")
            top.press("k")
            top.until("SIGTERM to victim[?]")
            top.press("y")
            top.until("SIGTERM sent to victim")
        served.wait(lambda: served.row("victim").status is not None, "its end")
        assert served.row("victim").status == 128 + 15


def test_top_says_that_a_host_is_gone_and_goes_on(tmp_path: Path) -> None:
    with host(tmp_path) as control, terminal("--control", control) as top:
        top.until(r"child-1 +running")
        control.unlink()
        top.until("cannot ask '")
        top.press("q")
        assert top.process.wait(TIMEOUT_S) == 0


# ---------------------------------------------------------------- trace


def test_trace_tells_a_clients_life_from_a_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    words = ("run", "--journal", journal, "--log-level", "error", "--env", "ONCE=1")
    assert sandhost(*words, "--", "sh", "-c", BUSY).status == 0
    outcome = sandhost("trace", "c1", "--journal", journal)
    assert outcome.status == 0, outcome.err
    events = [line.split()[4] for line in outcome.out.decode().splitlines()]
    assert events == [
        "client.connected", "child.spawned", "file.opened", "security.denied",
        "file.auto_closed", "client.gone", "child.exited", "child.gone",
    ]  # fmt: skip
    rows = sandhost("trace", "c1", "--journal", journal, "--json").out.splitlines()
    assert [json.loads(row)["event"] for row in rows] == events


def test_trace_asks_a_daemon_and_knows_children_by_name(tmp_path: Path) -> None:
    command = json.dumps(["/bin/sh", "-c", BUSY])
    config = f'[child.web]\ncommand = {command}\nenv = {{ ONCE = "1" }}\n'
    control = tmp_path / "run" / "control"
    with daemon(tmp_path, config) as served:
        served.wait(lambda: served.row("web").status is not None, "its end")
        outcome = sandhost("trace", "web", "--control", control)
        assert outcome.status == 0, outcome.err
        text = outcome.out.decode()
        for words in ("child.spawned", "security.denied   OPEN", "child.gone", " note"):
            assert words in text
        with running("trace", "web", "--follow", "--control", control) as following:
            heard(following, b"child.gone")


def test_trace_says_what_is_missing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text('not json\n{"event": "host.started"}\n')
    nobody = sandhost("trace", "c1", "--journal", empty)
    assert nobody.status == 2
    assert nobody.said("cannot trace 'c1': the journal has no event of it")
    assert sandhost("trace", "c1", "--journal", tmp_path / "x").said("cannot read")
    both = sandhost("trace", "c1", "--journal", empty, "--follow")
    assert both.said("leave --journal out")
    with host(tmp_path) as control:
        outcome = sandhost("trace", "c1", "--control", control)
        assert outcome.said("give the file of its --journal")


# ---------------------------------------------------------------- figures


def test_a_daemon_tells_its_figures_from_before_its_first_child(tmp_path: Path) -> None:
    config = """
[metrics]
listen = "tcp://127.0.0.1:0"
[child.web]
command = ["/bin/sleep", "1000"]
"""
    with daemon(tmp_path, config) as served:
        (port,) = re.findall(
            r"Metrics at http://127.0.0.1:(\d+)/metrics", served.said()
        )
        figures = parsed(curl(f"http://127.0.0.1:{port}/metrics").body)
        assert figures["sandhost_children_spawned_total"] == 1
        assert figures["sandhost_children{state=running}"] == 1
        served.wait(lambda: _lag_count(port) > 1, "a look at the loop")
        assert curl(f"http://127.0.0.1:{port}/").status == 404, "no page unless asked"
        assert served.end() == 0


def _lag_count(port: str) -> float:
    text = curl(f"http://127.0.0.1:{port}/metrics").body
    return parsed(text)["sandhost_loop_lag_seconds_count"]


def test_a_port_that_is_taken_ends_a_run_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "c.toml"
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f'[metrics]\nlisten = "{listen}"\n')
        outcome = sandhost("run", "--config", config, "--", "echo", "ran")
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(f"cannot listen at {listen}: Address already in use; choose")
