"""`sandhost logs`: how much it prints, and what it tells of each line."""

import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, read_until, sandhost
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

TIME = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"

TWO_STREAMS = """
[child.a]
command = ["sh", "-c", '''echo one; echo two >&2; printf 'red \\033[31m\\n'; exec sleep 1000''']
"""


def logs(running: Daemon, *words: str) -> Outcome:
    """Print a log, over a pipe."""
    outcome = sandhost("logs", *words, "--control", running.client.path)
    assert outcome.status == 0, outcome.err
    return outcome


def on_terminal(running: Daemon, *words: str, until: bytes) -> bytes:
    """Print a log on a terminal; return what came."""
    screen, terminal = pty.openpty()
    command = [SANDHOST, "logs", *words, "--control", running.client.path]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=ENVIRONMENT
    ) as process:
        try:
            os.close(terminal)
            return read_until(screen, until)
        finally:
            process.kill()
            os.close(screen)


def said(running: Daemon, text: bytes) -> None:
    """Wait until a log holds a text."""
    running.wait(lambda: text in running.log("a"), "its words")


# Not so many as the child goes on writing meanwhile, and not without end.
def test_the_last_lines_of_a_child_that_goes_on_writing(tmp_path: Path) -> None:
    config = "[child.a]\ncommand = ['yes', 'a line that is written on and on']\n"
    log = 'log = { max_size = "64M", keep = 1 }\n'
    with daemon(tmp_path, config + log) as running:
        said(running, b"on\n")
        for count in (1, 7, 1000):
            out = logs(running, "-n", str(count), "a").out
            assert out == b"a line that is written on and on\n" * count
        assert logs(running, "-n", "0", "a").out == b""


def test_all_of_a_log_ends_though_the_child_goes_on(tmp_path: Path) -> None:
    config = "[child.a]\ncommand = ['yes', 'on and on']\n"
    with daemon(tmp_path, config) as running:
        said(running, b"on\n")
        out = logs(running, "a").out
        assert out.endswith(b"on and on\n")


def test_times_and_streams_are_told_of_each_line(tmp_path: Path) -> None:
    begun_s = time.time()
    with daemon(tmp_path, TWO_STREAMS) as running:
        said(running, b"red")
        said(running, b"two")
        start, *lines = logs(running, "-t", "a").out.splitlines()
        assert re.fullmatch(rb"--- started at " + TIME + rb" ---", start)
        assert {line.split(b" ", 1)[1] for line in lines} == {
            b"out | one",
            b"err | two",
            b"out | red ^[[31m",
        }
        assert all(re.match(TIME + b" ", line) for line in lines)
        told = [entry.marks for entry in running.client.logs("a")]
        times = [mark.time_s for marks in told for mark in marks]
        assert all(begun_s - 1 <= time_s <= time.time() for time_s in times)
        # Over a pipe, and in the files, there is what the child said and nothing else.
        plain = logs(running, "a").out
        assert b"red \x1b[31m\n" in plain
        kept = tmp_path / "state" / "logs" / "a"
        assert b"".join(file.read_bytes() for file in kept.glob("*.log")) == plain
        assert not [path for path in kept.glob("[!.]*") if path.is_dir()]


def test_a_terminal_gets_nothing_that_it_might_obey(tmp_path: Path) -> None:
    with daemon(tmp_path, TWO_STREAMS) as running:
        said(running, b"red")
        said(running, b"two")
        shown = on_terminal(running, "a", until=b"^[[31m\r\n")
        assert b"\x1b" not in shown
        assert b"out | one\r\n" in shown
        assert b"err | two\r\n" in shown
        raw = on_terminal(running, "--raw", "a", until=b"\x1b[31m\r\n")
        assert b"out |" not in raw


def test_a_restart_is_marked(tmp_path: Path) -> None:
    config = (
        "[child.a]\ncommand = ['sh', '-c', 'echo again']\nrestart = 'always'\n"
        "backoff = '1ms'\nmax_restarts = 2\n"
    )
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("a").state == "given up", "its end")
        lines = logs(running, "-t", "a").out.splitlines()
        assert [line.startswith(b"--- started at") for line in lines] == [
            *(True, False) * 3
        ]


def test_what_came_since_a_time_is_printed(tmp_path: Path) -> None:
    config = (
        "[policy.p]\nsandbox = 'none'\n[child.a]\npolicy = 'p'\ncommand = ['sh', '-c', "
        "'echo early; read -r line <go; echo late; exec sleep 1000']\n"
        f"cwd = '{tmp_path}'\n"
    )
    os.mkfifo(tmp_path / "go")
    with daemon(tmp_path, config) as running:
        said(running, b"early\n")
        (entry,) = running.client.logs("a")
        since_s = entry.marks[0].time_s + 0.05  # more than two times differ by at least
        running.wait(lambda: time.time() > since_s, "a moment")
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_s))
        moment += f".{int(since_s % 1 * 1e6):06}Z"
        assert logs(running, "--since", moment, "a").out == b""
        (tmp_path / "go").write_text("\n")
        said(running, b"late\n")
        assert logs(running, "--since", moment, "a").out == b"late\n"
        assert logs(running, "--since", "1h", "a").out == b"early\nlate\n"
        assert logs(running, "--since", "1h", "-n", "1", "a").out == b"late\n"
        command = ("logs", "--since", "soon", "a", "--control", running.client.path)
        assert sandhost(*command).status == 2


def test_a_log_of_an_older_daemon_is_read_without_times(tmp_path: Path) -> None:
    kept = tmp_path / "state" / "logs" / "a"
    kept.mkdir(0o700, parents=True)
    (kept / f"{0:020}.log").write_bytes(b"old one\nold two\n")
    config = "[child.a]\ncommand = ['sh', '-c', 'echo new; exec sleep 1000']\n"
    with daemon(tmp_path, config) as running:
        said(running, b"new\n")
        old, other, start, new = logs(running, "-t", "a").out.splitlines()
        assert old.split() == [b"-", b"-", b"|", b"old", b"one"]
        assert other.endswith(b"old two")
        assert start.startswith(b"--- started at")
        assert new.endswith(b" out | new")
        assert logs(running, "a").out == b"old one\nold two\nnew\n"
