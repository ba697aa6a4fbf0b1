"""The daemon dies by kill -9 at any moment.

Nothing outlives it, the next one is clean.
"""

import json
import os
import random
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.daemon import Daemon, daemon, left_in
from tests.helpers.delays import Stopwatch
from tests.helpers.rounds import SEED, SERVE_KILLS
from tests.helpers.stage import CHILDREN
from tests.system.chaos.hostprocess import marked, wait_grown

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

GONE_WITHIN_S = 1.0
"""How soon a killed daemon's processes are gone, beside what the machine's other load
took."""

PATIENCE_S = 30.0
"""However busy the machine is."""

STAGED = (
    "while :; do printf 'OPEN a w false\\n' >&3; read -r r n <&3;"
    ' printf "WRITE $n 4\\nnew\\n" >&3; read -r r <&3;'
    ' printf "CLOSE $n\\n" >&3; read -r r <&3; done'
)
"""Writes a file again and again, which shows only when it is closed."""


def configured(where: Path, mark: str) -> str:
    """Children of every kind: trees that daemonize, one that writes, one that returns."""
    env = f"env = {{ SANDHOST_TEST_MARK = '{mark}' }}\n"
    tree = f"['/bin/sh', '{CHILDREN}/tree.sh', '{mark}']"
    python = f"['{sys.executable}', '-I', '-S', '{CHILDREN}/tree.py', '{mark}']"
    commands = {
        "tree": f"command = {tree}\npolicy = 'open'\n",
        # It ignores SIGTERM.
        "python": f"command = {python}\npolicy = 'open'\nstop_signal = 'KILL'\n",
        "walled": f"command = ['sleep', '{mark}']\nafter = ['tree']\n",
        "writer": f"command = ['sh', '-c', '''{STAGED}''']\npolicy = 'open'\n",
        "again": "command = ['true']\nrestart = 'always'\nbackoff = '1ms'\n"
        "max_restarts = 1000000\n",
    }
    return (
        f"[policy.open]\nsandbox = 'none'\nroot = '{where}/root'\n"
        "publish = 'on-close'\n"
    ) + "".join(f"[child.{n}]\n{text}{env}" for n, text in commands.items())


def wait_gone(mark: str) -> None:
    """Wait until no process has the mark."""
    deadline = time.monotonic() + PATIENCE_S
    while left := marked(mark):
        assert time.monotonic() < deadline, f"alive: {left}"
        select.select([], [], [], 0.01)


def kill(running: Daemon, mark: str) -> float:
    """Kill a daemon, wait until nothing of it is left; how long that took, in seconds."""
    watch = Stopwatch()
    running.send(signal.SIGKILL)
    running.process.wait(PATIENCE_S)
    wait_gone(mark)
    passed_s = watch.passed_s
    assert watch.own_s < GONE_WITHIN_S, f"gone after {passed_s:.3f} s only"
    return passed_s


def is_clean(running: Daemon) -> None:
    """Check that a daemon that began after a crash has all that it should have."""
    running.hear("READY=1")
    states = {row.name: row.state for row in running.client.ps()}
    assert set(states) == {"tree", "python", "walled", "writer", "again"}
    assert all(states[name] == "running" for name in states if name != "again"), states


# spec S3, attack 39: at any moment of its start and of its life.
@pytest.mark.timeout(180 + SERVE_KILLS * 20)
def test_a_daemon_that_is_killed_leaves_nothing_and_comes_back(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    seed = SEED or secrets.randbits(32)
    tell(f"CHAOS_SEED={seed}")
    choice = random.Random(seed)
    # A number of seconds that nobody else sleeps: it stands in every argument list.
    mark = f"1000.{choice.randrange(10**12):012d}"
    env = {"SANDHOST_TEST_MARK": mark}
    root = tmp_path / "root"
    root.mkdir()
    config = configured(tmp_path, mark)
    slowest, ready = 0.0, 0
    starting_s = 0.0
    for round_ in range(SERVE_KILLS):
        begun = time.monotonic()
        with daemon(tmp_path, config, ready=False, env=env) as running:
            if round_ % 2 == 0:
                is_clean(running)
                starting_s = time.monotonic() - begun
                ready += 1
                if round_ == 0:  # once it is killed in full growth
                    wait_grown(mark, started=8)
                time.sleep(choice.random() ** 2 * 0.4)
            else:  # at some moment of a start, as long as the last one took
                time.sleep(choice.random() * starting_s)
            assert running.process.poll() is None, running.said()
            slowest = max(slowest, kill(running, mark))
        # Never half a file: the old one, or the new one.
        if (root / "a").exists():
            assert (root / "a").read_text() == "new\n"
    with daemon(tmp_path, config, env=env) as running:
        assert running.end() == 0
    wait_gone(mark)
    assert set(os.listdir(root)) <= {"a", "grown", "grown-py"}  # no staged file
    assert not left_in(tmp_path)
    assert not (tmp_path / "run" / "control").exists()
    started = [row for row in journal(tmp_path) if row["event"] == "host.started"]
    assert ready < len(started) <= SERVE_KILLS + 1
    tell(
        f"{SERVE_KILLS} daemons killed, {ready} of them ready; the slowest tree was"
        f" gone in {slowest:.3f} s; the journal knows {len(started)} starts"
    )


def journal(where: Path) -> list[dict[str, object]]:
    """Return every line of the journal: each is whole, and none is missing."""
    files = sorted((where / "state" / "journal").iterdir())
    lines = b"".join(file.read_bytes() for file in files).splitlines()
    return [json.loads(line) for line in lines]
