"""The host dies by kill -9: nothing of it outlives it, and a new one starts clean."""

import os
import random
import secrets
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.delays import Stopwatch
from tests.helpers.rounds import HOST_KILLS, SEED
from tests.helpers.stage import CHILDREN
from tests.system.chaos.hostprocess import HostProcess, Hosts, marked, wait_grown

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

GONE_WITHIN_S = 1.0
"""How soon the whole tree of a killed host is gone, beside what the machine's other load
took; how soon it was is printed."""

PATIENCE_S = 30.0
"""However busy the machine is."""

TREE = ("/bin/sh", str(CHILDREN / "tree.sh"))
PYTHON_TREE = (sys.executable, "-I", "-S", str(CHILDREN / "tree.py"))


def survivors(host: HostProcess, mark: str) -> list[int]:
    """Leftovers of a killed host: processes with its mark, and its launchpad."""
    ended = select.select([host.launchpad], [], [], 0)[0]
    return marked(mark) + ([] if ended else [-1])


def kill(host: HostProcess, mark: str) -> float:
    """Kill a host, wait until nothing of it is left; how long that took, in seconds."""
    watch = Stopwatch()
    host.kill()
    while left := survivors(host, mark):
        assert watch.passed_s < PATIENCE_S, f"alive: {left}"
        select.select([host.launchpad], [], [], 0.005)
    passed_s = watch.passed_s
    assert watch.own_s < GONE_WITHIN_S, f"gone after {passed_s:.3f} s only"
    return passed_s


# spec S3, attack 28 and attack 39: at any moment, whatever its children are doing.
@pytest.mark.timeout(180 + HOST_KILLS * 10)
def test_a_killed_host_takes_its_whole_tree_with_it(
    tmp_path: Path, host_processes: Hosts, tell: Callable[[str], None]
) -> None:
    seed = SEED or secrets.randbits(32)
    tell(f"CHAOS_SEED={seed}")
    choice = random.Random(seed)
    slowest = 0.0
    for round_ in range(HOST_KILLS):
        # A number of seconds that nobody else sleeps: it stands in every argument list.
        mark = f"1000.{choice.randrange(10**12):012d}"
        commands = [choice.choice([TREE, PYTHON_TREE]) for _ in range(3)]
        words = [(*command, mark) for command in commands]
        env = {"SANDHOST_TEST_MARK": mark}
        with host_processes.open(tmp_path, *words, env=env) as host:
            time.sleep(choice.random() ** 2 * 0.4)
            if round_ == 0:  # once it is killed in full growth
                wait_grown(mark, started=6)
            slowest = max(slowest, kill(host, mark))
    tell(f"{HOST_KILLS} hosts killed; the slowest tree was gone in {slowest:.3f} s")


# attack 39: what a crash leaves is no obstacle, and nothing half done shows.
def test_a_new_host_starts_clean_after_a_crash(
    tmp_path: Path, host_processes: Hosts
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("old")
    script = (
        "printf 'OPEN a w false\\n' >&3; read -r r n <&3;"
        'printf "WRITE $n 3\\nnew" >&3; read -r r <&3; : > written; exec sleep 1000'
    )
    mark = f"1000.{secrets.randbelow(10**12):012d}"
    command = ("/bin/sh", "-c", script.replace("1000", mark))
    with host_processes.open(tmp_path, command, publish="on-close") as host:
        host_processes.hear("up")
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "written").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill(host, mark)
    assert os.listdir(root) == ["a"]
    assert (root / "a").read_text() == "old"
    finish = script.replace(
        "exec sleep 1000", 'printf "CLOSE $n\\n" >&3; read -r r <&3'
    )
    with host_processes.open(
        tmp_path, ("/bin/sh", "-c", finish), publish="on-close"
    ) as host:
        host_processes.hear("up")
        assert select.select([host.pidfd], [], [], PATIENCE_S)[0]
    assert os.listdir(root) == ["a"]
    assert (root / "a").read_text() == "new"
