"""`sandhost pipeline`: children joined stdout to stdin, each with its own door."""

import hashlib
import signal
from pathlib import Path

import pytest

from tests.helpers.command import (
    SANDHOST,
    beneath,
    finished,
    heard,
    running,
    sandhost,
    still_there,
)

pytestmark = pytest.mark.slow

MEGABYTES = 8


def test_megabytes_run_through_three_stages(tmp_path: Path) -> None:
    data = bytes(range(256)) * (4096 * MEGABYTES)
    (tmp_path / "in").write_bytes(data)
    shell = ("sh", "-c")
    words = (
        *(*shell, "$0 fs cat in", SANDHOST, ":::"),
        *("tr", "a", "b", ":::"),
        *(*shell, "$0 fs put out", SANDHOST),
    )
    outcome = sandhost("pipeline", "--root", tmp_path, "--", *words)
    assert (outcome.status, outcome.out, outcome.err) == (0, b"", b"")
    written = (tmp_path / "out").read_bytes()
    wanted = data.replace(b"a", b"b")
    assert hashlib.sha256(written).digest() == hashlib.sha256(wanted).digest()


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ((0, 0, 0), 0),
        ((3, 0, 0), 3),
        ((0, 4, 0), 4),
        ((3, 4, 0), 4),
        ((3, 4, 5), 5),
        ((0, 0, 5), 5),
    ],
)
def test_the_status_is_that_of_the_last_that_failed(
    statuses: tuple[int, int, int], status: int
) -> None:
    parts = [("sh", "-c", f"cat >/dev/null; exit {code}") for code in statuses]
    words = (*parts[0], ":::", *parts[1], ":::", *parts[2])
    outcome = sandhost("pipeline", "--", *words)
    assert (outcome.status, outcome.err) == (status, b"")


def test_the_first_reads_stdin_and_the_last_writes_stdout() -> None:
    words = ("pipeline", "--", "cat", ":::", "tr", "a-z", "A-Z", ":::", "cat")
    with running(*words, stdin=-1) as process:
        assert process.stdin is not None
        process.stdin.write(b"some words\n")
        assert finished(process).out == b"SOME WORDS\n"


def test_a_part_that_cannot_be_started_does_not_hang_the_others() -> None:
    outcome = sandhost(
        "pipeline", "--", "echo", "x", ":::", "no-such-command", ":::", "cat"
    )
    assert outcome.status == 127
    assert outcome.said("cannot start 'no-such-command'")


# A writer whose reader leaves ends by SIGPIPE, as in any shell; it did fail.
def test_a_reader_that_leaves_ends_its_writer() -> None:
    outcome = sandhost("pipeline", "--", "yes", ":::", "head", "-1")
    assert outcome.out == b"y\n"
    assert outcome.status == 128 + signal.SIGPIPE


def test_one_part_is_a_pipeline_too() -> None:
    outcome = sandhost("pipeline", "--", "echo", "one")
    assert (outcome.status, outcome.out) == (0, b"one\n")


# spec T2: no part has the door, or the pipe, of another one.
def test_every_part_has_its_own_door_and_no_other_descriptor() -> None:
    look = "ls /proc/self/fd | tr '\\n' ' ' >&2; readlink /proc/$$/fd/3 >&2"
    part = ("sh", "-c", look)
    outcome = sandhost("pipeline", "--", *part, ":::", *part, ":::", *part)
    lines = outcome.err.decode().split("\n")
    doors = {
        word for line in lines for word in line.split() if word.startswith("socket:")
    }
    assert len(doors) == 3
    # `ls` has the directory that it lists as its fourth.
    assert outcome.err.count(b"0 1 2 3 4 ") == 3


def test_a_timeout_of_a_pipeline_is_124() -> None:
    words = ("--timeout", "300ms", "--", "sleep", "1000", ":::", "cat")
    assert sandhost("pipeline", *words).status == 124


# spec S6
def test_a_signal_stops_every_part() -> None:
    part = ("sh", "-c", "echo $$ >&2; exec sleep 1000")
    words = ("pipeline", "--", *part, ":::", *part, ":::", "sh", "-c", "echo up; cat")
    with running(*words) as process:
        heard(process, b"up\n")
        children = beneath(process.pid)
        assert len(children) > 3
        process.send_signal(signal.SIGTERM)
        outcome = finished(process)
    assert outcome.status == 143
    assert not still_there(children)
