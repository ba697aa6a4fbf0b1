"""The watcher: samples of real processes, and whose they are."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from hostlib.linux import processes
from supervisor.usage import samples
from supervisor.usage.samples import SLICE_PROCESSES, STATES, Sample, Watcher
from tests.helpers.spawning import ROOT
from tests.helpers.stage import Stage, stage

pytestmark = pytest.mark.slow

__all__ = ["stage"]

OWN = os.getpid()


def identity(pid: int) -> tuple[int, int]:
    """(pid, create_time) of a process that is there."""
    stat = processes.read_parent_and_start(pid)
    assert stat is not None
    return pid, stat[1]


async def sampled(pid: int) -> Sample:
    """Sample one process once."""
    name = identity(pid)
    return (await Watcher().sample([name]))[name]


@contextmanager
def zombie() -> Iterator[int]:
    """A process that has ended and is not waited for within the block."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


# ---------------------------------------------------------------- what is seen


# spec S2
async def test_a_child_is_seen_with_what_it_uses(stage: Stage) -> None:
    puppet = await stage.puppet()
    await puppet.do("1")
    # On a busy machine it has answered, and is not back in its read(2) yet.
    while (sample := await sampled(puppet.pid)).state == "running":
        await trio.lowlevel.checkpoint()
    assert sample.state == "sleeping"
    assert sample.descriptors == 4  # 0, 1, 2 and its door
    assert sample.threads == 1
    assert sample.descendants == 0
    assert 1_000_000 < sample.rss_bytes < 100_000_000
    assert 0 <= sample.cpu_time_s < 20
    assert sample.cpu_percent is None


# spec S2
async def test_descendants_are_counted_at_any_depth(stage: Stage) -> None:
    puppet = await stage.puppet()
    await puppet.do("daemon()")
    script = "(sleep 1000 & sleep 1000 & echo; wait) & wait"
    await puppet.do(
        f"os.popen({script!r}).readline()"  # a shell, a shell, two that sleep
    )
    assert (await sampled(puppet.pid)).descendants == 5


async def test_a_fork_bomb_is_counted_up_to_a_bound(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MAX_DESCENDANTS", 2)
    puppet = await stage.puppet()
    await puppet.do("[forked()[0] for _ in range(5)]")
    assert (await sampled(puppet.pid)).descendants == 2


async def test_a_second_sample_tells_the_percent_between_the_two(stage: Stage) -> None:
    puppet = await stage.puppet()
    name = identity(puppet.pid)
    eye = Watcher()
    await eye.sample([name])
    burn = "next(i for i in iter(int, 1) if time.process_time() > 0.3)"
    await puppet.do(burn)
    second = (await eye.sample([name]))[name]
    assert second.cpu_percent is not None
    assert second.cpu_percent > 0
    assert second.cpu_time_s >= 0.25  # counted in ticks of 10 ms
    third = (await eye.sample([name]))[name]
    assert third.cpu_percent is not None
    assert third.cpu_percent >= 0


async def test_a_stopped_process_is_said_to_be(stage: Stage) -> None:
    puppet = await stage.puppet()
    process = puppet.child.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    while (await sampled(puppet.pid)).state != "stopped":
        await trio.lowlevel.checkpoint()


# A glance tells what a sample tells, of what it reads.
async def test_a_glance_agrees_with_a_sample(stage: Stage) -> None:
    puppet = await stage.puppet()
    await puppet.do("[forked()[0] for _ in range(3)]")
    process = puppet.child.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    while (sample := await sampled(puppet.pid)).state != "stopped":
        await trio.lowlevel.checkpoint()
    name, eye = identity(puppet.pid), Watcher()
    (seen,) = (await eye.glance([name], {name})).values()
    # The kernel counts resident pages for each core, and sums up at times: proc(5).
    assert abs(seen.rss_bytes - sample.rss_bytes) < 1_048_576
    looked = replace(sample, descriptors=None, cpu_percent=None)
    assert replace(seen, rss_bytes=0) == replace(looked, rss_bytes=0)
    assert seen.descendants > 0
    assert (await eye.glance([name]))[name].descendants == 0
    with zombie() as pid:
        gone = identity(pid)
        assert (await eye.glance([gone]))[gone].state == "zombie"
    # attack 27: what is gone, and what has another's number, is left out
    assert await eye.glance([gone, (name[0], name[1] - 1)]) == {}
    # A word for every letter that proc(5) has today, psutil's own.
    assert {STATES[letter.encode()] for letter in "RSDTtZXI"} == {
        getattr(psutil, f"STATUS_{word}")
        for word in (
            *("RUNNING", "SLEEPING", "DISK_SLEEP", "STOPPED", "TRACING_STOP"),
            *("ZOMBIE", "DEAD", "IDLE"),
        )
    }


# ---------------------------------------------------------------- whose it is


# spec S2
async def test_a_zombie_is_seen_as_one() -> None:
    with zombie() as pid:
        sample = await sampled(pid)
    assert sample.state == "zombie"
    assert sample.rss_bytes == 0
    assert not sample.descriptors


# spec S2
async def test_a_process_that_is_gone_is_left_out() -> None:
    with zombie() as pid:
        name = identity(pid)
    assert set(await Watcher().sample([name, identity(OWN)])) == {identity(OWN)}


# attack 27: the pid is another process's now
async def test_a_pid_that_was_given_away_is_not_sampled() -> None:
    pid, create_time = identity(OWN)
    assert await Watcher().sample([(pid, create_time - 1)]) == {}


# attack 27: it was given away while the numbers were being read
async def test_numbers_of_a_pid_that_was_given_away_meanwhile_are_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [True, False]
    monkeypatch.setattr(samples, "is_same_process", lambda *_: answers.pop(0))
    assert await Watcher().sample([identity(OWN)]) == {}
    assert not answers


async def test_what_a_process_used_before_its_pid_was_given_away_does_not_count() -> (
    None
):
    eye = Watcher()
    name = identity(OWN)
    await eye.sample([name])
    await eye.sample([])
    assert (await eye.sample([name]))[name].cpu_percent is None


# ---------------------------------------------------------------- at whose cost


class _Steps(trio.abc.Instrument):
    """Counts the steps of one task."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.count = 0
        self._task = task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


# spec S5
async def test_many_processes_are_sampled_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "SLICE_S", 1000.0)  # the clock must not help
    eye = Watcher()
    await eye.sample([identity(OWN)])
    steps = _Steps(trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(steps)
    await eye.sample([identity(OWN)] * (10 * SLICE_PROCESSES))
    trio.lowlevel.remove_instrument(steps)
    assert steps.count == 10


# spec S5
async def test_a_slice_ends_early_when_processes_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "SLICE_S", -1.0)  # every process takes too long
    eye = Watcher()
    await eye.sample([identity(OWN)])
    steps = _Steps(trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(steps)
    await eye.sample([identity(OWN)] * 20)
    trio.lowlevel.remove_instrument(steps)
    assert steps.count == 20


def test_psutil_is_imported_by_the_first_sample_only() -> None:
    code = """
import os, sys
import trio
from hostlib.linux import processes
from supervisor.usage.samples import Watcher
eye = Watcher()
print("psutil" in sys.modules)
name = os.getpid(), processes.read_parent_and_start(os.getpid())[1]
print(len(trio.run(eye.sample, [name])), "psutil" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"False", b"1", b"True"]


def test_a_row_holds_what_ps_shows() -> None:
    sample = Sample(1, 2, "running", 1.234, None, 5, None, 6, 7)
    row: dict[str, Any] = sample.row()
    assert row == {
        "state": "running",
        "cpu_time_s": 1.23,
        "cpu_percent": None,
        "rss_bytes": 5,
        "descriptors": None,
        "threads": 6,
        "descendants": 7,
    }


# spec S5: what a stats row and a benchmark tell of it.
async def test_the_longest_slice_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SLICE_S", 1000.0)
    ticks = iter([0.0, 0.25, 1.0, 1.125, 2.0, 2.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    eye = Watcher()
    assert eye.longest_slice_s == 0
    await eye.sample([identity(OWN)] * (SLICE_PROCESSES + 1))
    assert eye.longest_slice_s == 0.25
    # A shorter one changes nothing.
    await eye.sample([])
    assert eye.longest_slice_s == 0.25
