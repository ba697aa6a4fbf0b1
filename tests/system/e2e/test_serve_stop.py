"""How a daemon stops: in time, naming who blocks; and what a killed one leaves."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import TIMEOUT_S, sandhost
from tests.helpers.daemon import Daemon, daemon, left_in, scratch_of
from tests.helpers.hanging import hanging

pytestmark = pytest.mark.slow

STUBBORN = """
[child.stubborn]
command = ["sh", "-c", '''trap "" TERM
printf "OPEN held w false\\n" >&3; read -r r <&3
echo ready; while :; do sleep 1000; done''']
"""


# spec S6: who does not end within the grace period is killed, and named.
def test_a_stop_names_who_blocks_and_exits_1(tmp_path: Path) -> None:
    with daemon(tmp_path, STUBBORN, grace="200ms") as running:
        running.wait(lambda: b"ready" in running.log("stubborn"), "its word")
        assert running.end() == 1
        said = running.said()
    (line,) = (row for row in said.splitlines() if "does not end" in row)
    text = json.loads(line)["message"]
    assert text.startswith("child stubborn (pid ")
    for part in ("stopping", "sleeping", "open files: held", "OPEN held", "killed"):
        assert part in text


def test_stop_of_the_command_line_waits_for_the_end(tmp_path: Path) -> None:
    with daemon(tmp_path, STUBBORN, grace="2s") as running:
        running.wait(lambda: b"ready" in running.log("stubborn"), "its word")
        outcome = sandhost("stop", "--control", running.client.path)
        assert outcome.status == 0
        assert outcome.said("waiting: child stubborn")
        assert running.process.wait(TIMEOUT_S) == 1


# Of a crowd some are named, and nobody before the grace period has passed.
def test_a_stop_of_many_names_ten(tmp_path: Path) -> None:
    crowd = "".join(
        f"[child.s{n}]\ncommand = ['sh', '-c', '''trap \"\" TERM; echo ready\n"
        "while :; do sleep 1000; done''']\n"
        for n in range(12)
    )
    with daemon(tmp_path, crowd, grace="3s") as running:
        names = [f"s{n}" for n in range(12)]
        running.wait(lambda: all(b"ready" in running.log(name) for name in names))
        outcome = sandhost("stop", "--control", running.client.path)
        assert outcome.status == 0
        *named, rest = outcome.err.decode().splitlines()
        assert len({line.split()[4] for line in named}) == 10
        assert all("waiting: child s" in line for line in named)
        assert "waiting: 2 more; the daemon's log names them" in rest
        assert running.process.wait(TIMEOUT_S) == 1
        assert running.said().count("does not end") == 12
        told = [text for text in running.take_heard() if "does not end" in text]
        assert len(told) == 10  # so does the service manager


def test_a_stop_names_nobody_before_the_grace_period_has_passed(tmp_path: Path) -> None:
    with daemon(tmp_path, STUBBORN, grace="1500ms") as running:
        running.wait(lambda: b"ready" in running.log("stubborn"), "its word")
        reports = list(running.client.stop())
        assert (reports[0].blocking, reports[0].left) == ([], 1)
        assert [row["name"] for r in reports for row in r.blocking] == ["stubborn"]
        assert all(report.overdue for report in reports if report.blocking)


def test_a_second_signal_insists(tmp_path: Path) -> None:
    with daemon(tmp_path, STUBBORN, grace="1h") as running:
        running.wait(lambda: b"ready" in running.log("stubborn"), "its word")
        running.send(signal.SIGTERM)
        running.hear("STOPPING=1")
        assert running.end() == 1


def test_a_stopped_child_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    config = "[child.a]\ncommand = ['sleep', '1000']\n"
    with daemon(tmp_path, config, grace="200ms") as running:
        running.client.kill("a", "STOP")
        state = running.wait(
            lambda: (usage := running.row("a").usage) and usage.state == "stopped"
        )
        assert state
        assert running.end() == 1
        assert "its process is stopped" in running.said()


def test_the_watchdog_is_fed(tmp_path: Path) -> None:
    with daemon(tmp_path, env={"WATCHDOG_USEC": "200000"}) as running:
        for _ in range(3):
            running.hear("WATCHDOG=1")
        running.send(signal.SIGSTOP)  # a loop that does not turn
        assert silent(running)
        running.send(signal.SIGCONT)
        running.hear("WATCHDOG=1")


def silent(running: Daemon) -> bool:
    """Whether no message comes any more from one that was stopped."""
    stopped = f"/proc/{running.process.pid}/stat"
    running.wait(lambda: ") T " in Path(stopped).read_text(), "the stop")
    running.take_heard()
    return running.is_silent(0.5)


# attack 39: what a dead host left is found, said and removed; nobody survives it.
def test_a_daemon_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    config = "[child.a]\ncommand = ['sh', '-c', 'setsid sleep 1000 & sleep 1000']\n"
    for round_ in range(3):
        with daemon(tmp_path, config) as running:
            row = running.row("a")
            pidfd = os.pidfd_open(row.pid or 0)
            running.send(signal.SIGKILL)
            running.process.wait(TIMEOUT_S)
            assert select.select([pidfd], [], [], TIMEOUT_S)[0]
            os.close(pidfd)
        assert left_in(tmp_path), round_
    with daemon(tmp_path, config) as running:
        said = running.said()
        assert "did not end in order" in said
        assert "a scratch directory" in said
        assert "a control socket that nobody listens on" in said
        assert running.row("a").state == "running"
        assert len(left_in(tmp_path)) == 1
        assert running.end() == 0


def test_an_orphan_is_ended_only_with_proof(tmp_path: Path) -> None:
    scratch = scratch_of(tmp_path) / "sandhost-abc"
    scratch.parent.mkdir(0o700, parents=True)
    scratch.mkdir()
    orphan = ["sleep", "1000"]
    mine = subprocess.Popen(orphan, env={"TMPDIR": f"{scratch}/tmp"})
    other = subprocess.Popen(orphan, env={"TMPDIR": f"{tmp_path}/else"})
    with mine, other:
        try:
            with daemon(tmp_path) as running:
                assert mine.wait(TIMEOUT_S) == -signal.SIGKILL
                assert other.poll() is None
                assert f"an orphan: pid {mine.pid}" in running.said()
                assert not scratch.exists()
        finally:
            mine.kill()
            other.kill()


def test_staged_files_are_removed_after_a_crash_unless_they_may_be_in_use(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "mine").write_text("stays")
    old, young = root / ".sandhost-old", root / ".sandhost-young"
    for file in (old, young):
        file.write_text("staged")
    hour_ago = time.time() - 3600
    os.utime(old, (hour_ago, hour_ago))
    config = f'[policy.p]\nroot = "{root}"\n'
    with daemon(tmp_path, config) as running:
        running.send(signal.SIGKILL)
        running.process.wait(TIMEOUT_S)
    with daemon(tmp_path, config) as running:
        assert "(left alone)" in running.said()
        assert running.end() == 0
    assert sorted(p.name for p in root.iterdir()) == [".sandhost-young", "mine"]


@contextmanager
def starting(where: Path, config: str) -> Iterator[Daemon]:
    """Start a daemon that listens, and is not ready for the exec of ``{}`` hangs."""
    with hanging(where) as program:
        with daemon(where, config.format(program), ready=False) as running:
            running.wait(lambda: Path(running.client.path).exists(), "its socket")
            yield running


@contextmanager
def hung_and_ended(where: Path) -> Iterator[Daemon]:
    """Start one with a child whose exec hangs, and one that has ended."""
    config = "[child.a]\ncommand = ['{}']\n[child.b]\ncommand = ['true']\n"
    with starting(where, config) as running:
        running.wait(lambda: running.row("b").state == "ended", "its end")
        yield running


# spec S6: an exec that hangs is nothing that a child has to be waited for.
def test_a_child_whose_exec_hangs_is_stopped(tmp_path: Path) -> None:
    with hung_and_ended(tmp_path) as running:
        begun_s = time.monotonic()
        assert sandhost("stop", "a", "--control", running.client.path).status == 0
        running.wait(lambda: running.row("a").state == "stopped", "its end")
        assert time.monotonic() - begun_s < 10
        assert running.end() == 0


# spec S6: it says that it is ready when all were started, and is stopped before that as well.
def test_a_daemon_that_is_not_ready_yet_is_stopped(tmp_path: Path) -> None:
    with hung_and_ended(tmp_path) as running:
        begun_s = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - begun_s < 10


# A start that goes on gets more time from the service manager, one that hangs does not.
def test_a_start_tells_how_far_it_is(tmp_path: Path) -> None:
    config = "[child.a]\ncommand = ['{}']\n[child.b]\ncommand = ['true']\n"
    with starting(tmp_path, config) as running:
        told = running.hear("STATUS=starting 1 of 2")
        assert int(told["EXTEND_TIMEOUT_USEC"]) == 30_000_000
        assert running.is_silent()
        running.send(signal.SIGTERM)
        running.hear("STOPPING=1")


# spec S6: who insists does not put the end off.
def test_a_child_whose_exec_hangs_is_stopped_however_often_that_is_asked_for(
    tmp_path: Path,
) -> None:
    with starting(tmp_path, "[child.a]\ncommand = ['{}']\n") as running:
        until_s = time.monotonic() + 5
        while running.process.poll() is None and time.monotonic() < until_s:
            running.send(signal.SIGTERM)
            time.sleep(0.2)
        assert running.process.poll() is not None


# Of children that are to be started at once there are 16 (``SharedParts.room``): who waits for
# those is stopped as who is being started.
def test_a_child_that_waits_for_starts_that_hang_is_stopped(tmp_path: Path) -> None:
    hung = [f"[child.h{n}]\ncommand = ['{{0}}']\n" for n in range(16)]
    config = "".join([*hung, "[child.z]\ncommand = ['true']\n"])
    with starting(tmp_path, config) as running:
        time.sleep(0.5)  # the others have their places
        stop = ("stop", "z", "--control", running.client.path)
        assert sandhost(*stop).status == 0
        running.wait(lambda: running.row("z").state == "stopped", "its end")
        assert running.row("h0").state != "stopped"
        assert running.end() == 0


# A configuration that starts what hangs can be mended.
def test_a_child_whose_exec_hangs_is_reloaded_away(tmp_path: Path) -> None:
    with hanging(tmp_path) as program, daemon(tmp_path) as running:
        config = tmp_path / "c.toml"
        before = config.read_text()
        config.write_text(f"{before}\n[child.a]\ncommand = ['{program}']\n")
        running.send(signal.SIGHUP)
        running.wait(running.client.ps, "its start")
        config.write_text(before)
        reload = ("reload", "--control", running.client.path)
        assert sandhost(*reload).status == 0
        running.wait(lambda: "Reloaded: " in running.said(), "the first")
        assert running.end() == 0
