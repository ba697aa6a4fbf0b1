"""Standard descriptors that are closed, a terminal or a broken pipe.

Ctrl-C on one.
"""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    beneath,
    read_until,
    shell,
    still_there,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_the_null_device_for_the_child(closed: str) -> None:
    outcome = shell(f"$S run -- sh -c 'echo out; echo err >&2; cat; exit 9' {closed}")
    assert outcome.status == 9
    assert outcome.out == (b"" if ">&-" in closed.split() else b"out\n")
    assert outcome.err == (b"" if "2>&-" in closed.split() else b"err\n")


# attack 6: with 0, 1, 2 closed no descriptor of the host takes their place.
def test_closed_descriptors_leave_no_room_for_the_hosts(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "found = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        "open(sys.argv[1], 'w').write(' '.join(found))"
    )
    run = "exec $S run --sandbox none -- "  # it writes into its working directory
    script = run + '"$PYTHON" -I -S -c "$PROGRAM" out <&- >&- 2>&-'
    env = {"PROGRAM": program, "PYTHON": sys.executable}
    assert shell(script, env=env, cwd=tmp_path).status == 0
    assert (tmp_path / "out").read_text().split() == ["/dev/null"] * 3


@pytest.mark.parametrize("command", ["no-such-command", "/etc/passwd"])
def test_a_failure_without_stderr_is_the_status_alone(command: str) -> None:
    outcome = shell(f"$S run -- {command} 2>&-")
    assert outcome.status == (127 if command == "no-such-command" else 126)
    assert (outcome.out, outcome.err) == (b"", b"")


def test_a_reader_that_leaves_ends_the_child_as_in_any_pipe() -> None:
    script = "{ $S run -- yes; echo $? >&2; } | head -1"
    outcome = shell(script)
    assert outcome.out == b"y\n"
    assert outcome.err == b"141\n"


def test_output_to_a_full_device_is_the_childs_error() -> None:
    outcome = shell("$S run -- sh -c 'echo x || exit 5' >/dev/full")
    assert outcome.status == 5
    assert b"Traceback" not in outcome.err


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `sandhost` as the leader of a session on a terminal of its own."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            ["setsid", "--ctty", SANDHOST, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**ENVIRONMENT, "TERM": "xterm"},
        ) as process:
            os.close(theirs)
            theirs = -1
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        for fd in (ours, theirs):
            if fd >= 0:
                os.close(fd)


def test_a_child_has_the_terminal_for_its_input_and_output() -> None:
    with on_a_terminal("run", "--", "sh", "-c", "test -t 0 && read x; echo got $x") as (
        process,
        terminal,
    ):
        os.write(terminal, b"hello\n")
        read_until(terminal, b"got hello")
        assert process.wait(60) == 0


# spec S6
def test_control_c_on_the_terminal_stops_run_and_its_child() -> None:
    script = "echo child $$; exec sleep 1000"
    with on_a_terminal("run", "--", "sh", "-c", script) as (process, terminal):
        read_until(terminal, b"\n")
        children = beneath(process.pid)
        assert len(children) > 1
        os.write(terminal, b"\x03")
        assert process.wait(60) == 130
        assert not still_there(children)


# Not the terminal's SIGINT, but the host's SIGTERM ends the child: it has a session of
# its own.
def test_control_c_lets_a_child_leave_in_order() -> None:
    script = (
        "trap 'echo in order; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    )
    with on_a_terminal("run", "--", "sh", "-c", script) as (process, terminal):
        read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        read_until(terminal, b"in order")
        assert process.wait(60) == 130


def test_two_control_cs_insist(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[host]\ngrace = '10m'\n")
    script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done"
    words = ("run", "--config", str(config), "--", "sh", "-c", script)
    with on_a_terminal(*words) as (process, terminal):
        read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        read_until(terminal, b"asked")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.write(terminal, b"\x03")
        assert process.wait(60) == 130


def test_a_terminal_that_hangs_up_stops_run_and_its_child() -> None:
    script = "echo child $$; exec sleep 1000"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", SANDHOST, "run", "--", "sh", "-c", script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=ENVIRONMENT,
    ) as process:
        os.close(theirs)
        read_until(ours, b"\n")
        children = beneath(process.pid)
        assert len(children) > 1
        os.close(ours)  # SIGHUP for the leader of the session
        assert process.wait(60) == 129
    assert not still_there(children)
