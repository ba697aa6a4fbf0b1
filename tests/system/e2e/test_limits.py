"""`--limit` of `sandhost run`: each bound is kept, and said to the child alone."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

RAW = """
ask() { printf "$1" >&3; IFS= read -r reply <&3; printf '%s\\n' "$reply"; }
"""
DENIED_BY_QUOTA = "Disk quota exceeded"


def limited(limit: str, script: str, root: Path | None = None) -> Outcome:
    options: tuple[str | Path, ...] = () if root is None else ("--root", root)
    words = ("run", *options, "--limit", limit, "--", "sh", "-c", RAW + script)
    outcome = sandhost(*words)
    assert outcome.err == b""
    return outcome


# attack 18
def test_open_files() -> None:
    script = (
        "for n in a b c d; do ask \"OPEN $n w false\\n\"; done; ask 'CLOSE 1001\\n';"
    )
    outcome = limited("open_files=3", script + "ask 'OPEN e w false\\n'")
    assert outcome.out.decode().splitlines() == [
        "OK 1000",
        "OK 1001",
        "OK 1002",
        "ERROR failed to open file 'd': Too many open files",
        "OK",
        "OK 1003",
    ]


# Nothing is what was asked for, not what is usual.
def test_no_open_files_at_all() -> None:
    outcome = limited("open_files=0", "ask 'OPEN a w false\\n'; ask 'PING\\n'")
    assert outcome.out.decode().splitlines() == [
        "ERROR failed to open file 'a': Too many open files",
        "OK",
    ]


# spec W5, attack 20: one file, behind the door and beside it.
def test_the_size_of_a_file(tmp_path: Path) -> None:
    script = (
        "ask 'OPEN a w false\\n'; ask 'WRITE 1000 6\\nabcdef'; ask 'WRITE 1000 5\\nghijk';"
        "ask 'TRUNCATE 1000 11\\n'; ask 'OPEN b w false\\n'; ask 'WRITE 1001 10\\n0123456789';"
        "trap '' XFSZ; head -c 100 /dev/zero 2>/dev/null > $TMPDIR/x; wc -c < $TMPDIR/x"
    )
    outcome = limited("file_size=10", script, tmp_path)
    assert outcome.out.decode().splitlines() == [
        "OK 1000",
        "OK 6",
        "ERROR failed to write: File too large",
        "ERROR failed to truncate: File too large",
        "OK 1001",
        "OK 10",
        "10",
    ]
    assert (tmp_path / "a").read_bytes() == b"abcdef"


# spec W5
def test_bytes(tmp_path: Path) -> None:
    script = (
        "ask 'OPEN a w false\\n'; ask 'WRITE 1000 6\\nabcdef'; ask 'WRITE 1000 5\\nghijk';"
        "ask 'WRITE 1000 4\\nghij'; ask 'WRITE 1000 1\\nx'; ask 'TRUNCATE 1000 11\\n';"
        "ask 'SEEK 1000 0\\n'; ask 'WRITE 1000 3\\nABC'; ask 'TRUNCATE 1000 2\\n';"
        "ask 'SEEK 1000 2\\n'; ask 'WRITE 1000 8\\nyyyyyyyy'"
    )
    outcome = limited("bytes=10", script, tmp_path)
    assert outcome.out.decode().splitlines() == [
        "OK 1000",
        "OK 6",
        f"ERROR failed to write: {DENIED_BY_QUOTA}",
        "OK 4",
        f"ERROR failed to write: {DENIED_BY_QUOTA}",
        f"ERROR failed to truncate: {DENIED_BY_QUOTA}",
        "OK 0",
        "OK 3",
        "OK",
        "OK 2",
        "OK 8",
    ]
    assert (tmp_path / "a").read_bytes() == b"AByyyyyyyy"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    script = (
        "ask 'OPEN old w false\\n'; ask 'OPEN a w false\\n'; ask 'MKDIR false d\\n';"
        "ask 'OPEN b w false\\n'; ask 'OPEN a r+ false\\n'; ask 'REMOVE false d\\n';"
        "ask 'OPEN b w false\\n'"
    )
    outcome = limited("files=2", script, tmp_path)
    assert outcome.out.decode().splitlines() == [
        "OK 1000",
        "OK 1001",
        "OK",
        f"ERROR failed to open file 'b': {DENIED_BY_QUOTA}",
        "OK 1002",
        "OK",
        "OK 1003",
    ]


def test_cpu() -> None:
    outcome = limited("cpu=1", "while :; do :; done")
    assert outcome.status in {128 + 24, 128 + 9}  # SIGXCPU, or SIGKILL a second later


def test_memory() -> None:
    program = "bytearray(400 << 20)"
    words = ("--", sys.executable, "-I", "-S", "-c", program)
    # By its own bound it is refused the memory; by its group it is killed (spec HM8).
    assert sandhost("run", "--limit", "memory=200M", *words).status in {1, 128 + 9}
    assert sandhost("run", "--limit", "memory=1G", *words).status == 0


# Root is not bound by the number of its processes; the limit is set all the same.
def test_processes_and_the_others_are_set_for_the_kernel() -> None:
    script = "ulimit -p; ulimit -t; ulimit -v; cat /proc/self/cgroup"
    outcome = limited("processes=77,cpu=5,memory=512M", script)
    processes, cpu, memory, *groups = outcome.out.splitlines()
    # Twice as many where a group keeps their number: it is the one that is to refuse.
    in_group = any(b":pids:" in line and b"/sandhost-child-" in line for line in groups)
    assert processes == (b"154" if in_group else b"77")
    bounded = any(b"memory" in row and b"/sandhost-child-" in row for row in groups)
    assert (cpu, memory) == (b"5", b"unlimited" if bounded else b"524288")


def test_several_limits_may_be_given_apart() -> None:
    words = ("run", "--limit", "cpu=5", "--limit", "open_files=1", "--", "sh", "-c")
    script = RAW + "ulimit -t; ask 'OPEN a w false\\n'; ask 'OPEN b w false\\n'"
    lines = sandhost(*words, script).out.splitlines()
    assert lines[:2] == [b"5", b"OK 1000"]
    assert lines[2].endswith(b"Too many open files")


# A passed limit is the child's own error: another child of the same
# pipeline does not see it.
def test_a_limit_is_each_childs_own() -> None:
    script = "printf 'OPEN a w false\\n' >&3; read -r r <&3; echo $r"
    words = ("--", "sh", "-c", script, ":::", "sh", "-c", f"cat; {script}")
    outcome = sandhost("pipeline", "--limit", "open_files=1", *words)
    assert outcome.out.splitlines() == [b"OK 1000", b"OK 1001"]


# The processors' time of all its processes together: a group keeps it, or it is refused.
def test_the_time_of_processors_is_kept_or_the_start_is_refused() -> None:
    script = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while True: pass\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: pass\n"
        "os.kill(0, 9)\n"
    )
    words = ("run", "--limit", "cpus=0.2", "--journal", "/dev/stderr")
    outcome = sandhost(*words, "--", sys.executable, "-I", "-S", "-c", script)
    if outcome.status == 125:
        assert outcome.said("nothing keeps the limit 'cpus'")
        assert outcome.said("delegate that controller (systemd: Delegate=cpu)")
        pytest.skip("no group here keeps the time of processors")
    assert outcome.status == 128 + 9
    events = [json.loads(line) for line in outcome.err.splitlines() if line[:1] == b"{"]
    (exited,) = [event for event in events if event["event"] == "child.exited"]
    # A fifth of 1.5 s, a period at each end, and what the start took; not twice 1.5 s.
    assert exited["utime_s"] + exited["stime_s"] < 1.0


def test_without_groups_nothing_keeps_the_time_of_processors() -> None:
    outcome = sandhost("run", "--sandbox", "none", "--limit", "cpus=1", "--", "true")
    assert outcome.status == 125
    assert outcome.said(
        "--limit: cpus: nothing keeps it in sandbox 'none': it takes the"
    )


@pytest.mark.parametrize("value", ["0", "0.001", "-1", "nan", "1e3", "", "0x1"])
def test_a_number_of_processors_is_one(value: str) -> None:
    outcome = sandhost("run", "--limit", f"cpus={value}", "--", "true")
    assert outcome.status == 125
    assert outcome.said("not a limit of cpus")


# With less nothing starts, and of what there is no more nobody can have it.
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("memory=0", "limit memory is 0: nothing starts with less than 1M"),
        ("memory=1", "limit memory is 1: nothing starts with less than 1M"),
        (
            "memory=999999999T",
            "limit memory is 999999999T: at most 9223372036854775807",
        ),
        ("file_size=8388608T", "at most 9223372036854775807"),
        ("bytes=999999999999999T", "at most 9223372036854775807"),
        ("cpu=0", "limit cpu is 0: nothing starts with less than 1"),
        ("cpu=999999999999999", "at most 9223372035"),
        ("processes=0", "limit processes is 0: nothing starts with less than 1"),
        ("processes=4194305", "limit processes is 4194305: at most 4194304"),
        ("time=0", "not a limit of time: '0'; more than 0s"),
        ("time=soon", "not a limit of time: 'soon'; not a time"),
        ("cpu=0,memory=0,wishes=1", "1M; leave it out for no limit; not a limit"),
    ],
)
def test_a_limit_that_nobody_can_keep_is_refused(limit: str, said: str) -> None:
    outcome = sandhost("run", "--limit", limit, "--", "true")
    assert outcome.status == 125
    assert outcome.said("--limit: ")
    assert outcome.said(said)


@pytest.mark.parametrize("limit", ["open_files=0", "bytes=0", "files=0", "file_size=0"])
def test_none_at_all_is_a_limit(limit: str) -> None:
    assert sandhost("run", "--limit", limit, "--", "true").status == 0


# 3.4: wall time, by an option and by a policy; the shorter of two.
@pytest.mark.parametrize(
    "options",
    [
        ("--limit", "time=300ms"),
        ("--limit", "time=1h", "--timeout", "300ms"),
        ("--limit", "time=0.3", "--timeout", "1h"),
    ],
)
def test_a_child_whose_time_is_up_is_ended(options: tuple[str, ...]) -> None:
    begin = time.monotonic()
    assert sandhost("run", *options, "--", "sleep", "1000").status == 124
    assert time.monotonic() - begin >= 0.3
    assert sandhost("run", *options, "--", "true").status == 0


def test_a_policy_says_how_long_its_children_may_run(tmp_path: Path) -> None:
    config = (
        '[policy.p]\nlimits = { time = "300ms", files = 3 }\n'
        '[child.long]\ncommand = ["sleep", "1000"]\npolicy = "p"\n'
    )
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("long").state == "ended")
        words = ("ps", "--json", "--control", tmp_path / "run" / "control")
        (row,) = json.loads(sandhost(*words).out)
        assert row["reason"] == "was killed by SIGTERM: its time limit was up"
        # Of who has no process nothing is reported that it would run in.
        assert row["isolation"] is None
        assert running.end() == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        '[policy.p]\nlimits = { time = "soon" }\n'
        '[sidecar.s]\nkind = "node"\nlimits = { time = "1h" }\n'
    )
    outcome = sandhost("check-config", wrong)
    assert outcome.status == 2
    assert b"policy.p.limits.time: not a limit of time: 'soon'" in outcome.err
    assert b"sidecar.s.limits.time: a tool has memory, cpu, processes" in outcome.err
