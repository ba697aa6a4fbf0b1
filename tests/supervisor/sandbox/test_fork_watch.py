"""A child that passes its limit of processes is held back until it is calm."""

import errno
import math
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from hostlib.user_values import Limits
from supervisor.children.child import Child
from supervisor.sandbox import start
from supervisor.sandbox.fork_watch import CALM_S, CPUS, LOOK_S, REFUSALS, ForkWatch
from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.spawn.request import SpawnRequest
from tests.helpers.stage import Stage, eventually, stage

if TYPE_CHECKING:
    from hostlib.journal import Journal

__all__ = ["stage"]


TEN = Limits(processes=10)


NONE = {1: "-1", 2: "max 100000"}
LITTLE = {1: str(int(CPUS * 100_000)), 2: f"{int(CPUS * 100_000)} 100000"}


@dataclass
class Spec:
    """The part of a child's description that the watch reads."""

    group_limits: Limits
    name: str = "bomb"


@dataclass
class Someone:
    """A child with groups that are plain directories, version 1 or version 2."""

    top: Path
    limits: Limits = TEN
    version: int = 1
    id: str = "c1"
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = Spec(self.limits)
        self.groups = [str(self.top / name) for name in ("other", "cpu", "pids")]
        for group in self.groups:
            Path(group).mkdir()
        self.bound_file = self.top / (
            "pids/cpu.max" if self.version == 2 else "cpu/cpu.cfs_quota_us"
        )
        # As its own limits say, as its start does.
        cpus = self.limits.cpus
        own = NONE[self.version] if cpus is None else str(int(cpus * 100_000))
        self.bound_file.write_text(own)
        (self.top / "cpu/cpu.cfs_period_us").touch()
        self.refuse(0)

    def refuse(self, number: int) -> None:
        (self.top / "pids/pids.events").write_text(f"max {number}\nmax.imposed 0\n")

    def bound(self) -> str:
        """Return what was written last: the kernel replaces, a plain file does not."""
        if text := self.bound_file.read_text():
            self._bound = text
            self.bound_file.write_text("")
        return self._bound

    def write(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[ForkWatch]:
        """Have it looked after in a block."""
        watch = ForkWatch(cast("Journal", self))
        child, spec = self.child, self.child.spec
        watch.watch(child.id, spec.name, spec.group_limits, self.groups)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            yield watch
            watch.forget(child.id)
            nursery.cancel_scope.cancel()

    @property
    def child(self) -> Child:
        return cast("Child", self)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_bomb_is_held_back_until_it_is_calm(
    version: int, tmp_path: Path, autojump_clock: object, no_leaks: None
) -> None:
    del autojump_clock, no_leaks
    one = Someone(tmp_path, version=version)
    async with one.watched() as watch:
        assert one.bound() == NONE[version]
        one.refuse(REFUSALS)
        await trio.sleep(1.5 * LOOK_S)
        assert one.bound() == LITTLE[version]
        assert one.told == [
            (
                "child.held_back",
                {
                    "child_id": "c1",
                    "name": "bomb",
                    "limit": "processes",
                    "refused": REFUSALS,
                    "cpus": CPUS,
                },
            )
        ]
        for number in range(1, 6):  # it goes on, slowly: it is not let go
            one.refuse(REFUSALS + number)
            await trio.sleep(CALM_S - 2 * LOOK_S)
            assert one.bound() == LITTLE[version]
        await trio.sleep(CALM_S + LOOK_S)
        assert one.bound() == NONE[version]
        assert [event for event, _ in one.told] == ["child.held_back", "child.let_go"]
        watch.forget(one.child.id)
        assert list(watch.descriptors()) == []


async def test_who_begins_again_is_held_back_for_twice_as_long(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    async with one.watched():
        refused = 0
        for calm_s in (1, 2, 4, 8, 16, 32, 64, 64, 64):
            refused += REFUSALS
            one.refuse(refused)
            await trio.sleep(calm_s * CALM_S - LOOK_S)
            assert one.bound() == LITTLE[1]
            await trio.sleep(4 * LOOK_S)
            assert one.bound() == NONE[1]


async def test_who_takes_no_for_an_answer_is_let_be(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    async with one.watched():
        for number in range(1, 10):
            one.refuse(number * (REFUSALS // 2 - 1))
            await trio.sleep(LOOK_S)
        assert one.told == []


async def test_what_was_refused_before_is_no_news(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    one.refuse(REFUSALS * 10)  # a program before this one has looked at that
    async with one.watched():
        await trio.sleep(2 * LOOK_S)
        assert one.told == []


@pytest.mark.parametrize("cpus", [0.5, 0.05])
async def test_nobody_is_given_more_than_its_own_limit(
    cpus: float, tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path, Limits(processes=10, cpus=cpus))
    async with one.watched() as watch:
        one.refuse(REFUSALS)
        await trio.sleep(2 * LOOK_S)
        assert one.bound() == str(int(min(cpus, CPUS) * 100_000))
        watch.forget(one.child.id)  # it is about to be killed
        assert one.bound() == str(int(cpus * 100_000))


def without_limit(one: Someone) -> None:
    one.spec.group_limits = Limits()


def without_cpu(one: Someone) -> None:
    one.bound_file.unlink()


def without_count(one: Someone) -> None:
    (one.top / "pids/pids.events").unlink()


@pytest.mark.parametrize("change", [without_limit, without_cpu, without_count])
async def test_what_cannot_be_counted_or_bounded_is_let_be(
    change: Callable[[Someone], None], tmp_path: Path
) -> None:
    one = Someone(tmp_path)
    change(one)
    async with one.watched() as watch:
        assert list(watch.descriptors()) == []


async def test_a_count_that_is_gone_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)

    def gone(*_: object) -> bytes:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    async with one.watched() as watch:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", gone)
            await trio.sleep(2 * LOOK_S)
        assert list(watch.descriptors()) == []


async def test_a_host_without_such_children_is_not_woken(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    async with one.watched() as watch:
        await trio.sleep(2 * LOOK_S)
        watch.forget(one.child.id)
        await trio.sleep(2 * LOOK_S)
        await trio.testing.wait_all_tasks_blocked()
        now = trio.lowlevel.current_statistics()
        assert now.seconds_to_next_deadline == math.inf


async def test_a_late_look_has_seen_a_longer_time(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    one = Someone(tmp_path)
    async with one.watched():
        before = 0
        for late, is_told in ((4, False), (1, True)):
            await trio.testing.wait_all_tasks_blocked()
            one.refuse(before + 3 * REFUSALS)
            before += 3 * REFUSALS
            mock_clock.jump(late * LOOK_S)
            await trio.testing.wait_all_tasks_blocked()
            assert bool(one.told) is is_told


async def test_the_program_after_this_one_knows_who_is_held_back(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    one.bound_file.write_text(LITTLE[1])
    async with one.watched():
        assert one.bound() == LITTLE[1]
        await trio.sleep(CALM_S + 2 * LOOK_S)
        assert one.bound() == NONE[1]
        assert [event for event, _ in one.told] == ["child.let_go"]


async def test_a_group_that_is_gone_is_no_fault(
    tmp_path: Path, autojump_clock: object, no_leaks: None
) -> None:
    del autojump_clock, no_leaks
    one = Someone(tmp_path)
    async with one.watched():
        one.bound_file.unlink()
        one.refuse(REFUSALS)
        await trio.sleep(2 * LOOK_S)
        assert one.told == []  # nothing was bounded, and nobody is told it was


BOMB = """
import os, signal, time
is_calm = []
signal.signal(signal.SIGUSR1, lambda *_: is_calm.append(True))
while not is_calm:
    try:
        if os.fork() == 0:
            time.sleep(100)
    except OSError:
        pass
time.sleep(100)
"""


async def bomb(stage: Stage) -> Child:
    """Start one that is calm from SIGUSR1 on.

    Skips where nothing can be done about it.
    """
    limits = Limits(processes=8)
    child = await stage.spawn(
        *(sys.executable, "-I", "-S", "-c", BOMB),
        sandbox=PROFILES["auto"],
        group_limits=limits,
        rlimits=limits.rlimits(),
    )
    if not list(stage.host.forks.descriptors()):
        pytest.skip("no group here counts refused forks and bounds processors' time")
    return child


def bound_of(child: Child) -> str:
    """Return the bound of a child's group, as the kernel has it."""
    for group in child.limits.groups.made:
        for name in ("cpu.max", "cpu.cfs_quota_us"):
            if os.path.exists(path := f"{group}/{name}"):
                return Path(path).read_text().split()[0]
    raise AssertionError("no group bounds its time")


@pytest.mark.slow
async def test_a_fork_bomb_is_held_back_and_let_go(stage: Stage) -> None:
    child = await bomb(stage)
    await eventually(lambda: stage.events("child.held_back"))
    (event,) = stage.events("child.held_back")
    assert (event["child_id"], event["limit"]) == (child.id, "processes")
    assert event["refused"] >= REFUSALS
    assert bound_of(child) == str(int(CPUS * 100_000))
    child.send_signal(signal.SIGUSR1)
    await eventually(lambda: stage.events("child.let_go"))
    assert bound_of(child) in {"-1", "max"}


@pytest.mark.slow
async def test_whoever_is_killed_has_the_time_to_end(stage: Stage) -> None:
    child = await bomb(stage)
    await eventually(lambda: stage.events("child.held_back"))
    child.send_signal(signal.SIGKILL)
    assert bound_of(child) in {"-1", "max"}  # at once, and it is not gone yet
    with trio.fail_after(30):
        await child.wait_gone()
    assert list(stage.host.forks.descriptors()) == []


def most_processes(child: Child) -> tuple[int, int]:
    """Return the RLIMIT_NPROC of a child's process."""
    assert child.process is not None
    lines = Path(f"/proc/{child.process.pid}/limits").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Max processes")]
    soft, hard, *_ = line.removeprefix("Max processes").split()
    return int(soft), int(hard)


# The group is the one that is to refuse; where there is none, the rlimit is the limit.
async def test_the_rlimit_is_twice_what_a_group_keeps(stage: Stage) -> None:
    limits = Limits(processes=60)
    auto = PROFILES["auto"]
    more = {"group_limits": limits, "rlimits": limits.rlimits()}
    kept = await stage.sh("sleep 100", sandbox=auto, **more)
    times = 2 if kept.limits.groups.kept_processes(limits) else 1
    assert most_processes(kept) == (60 * times, 60 * times)
    bare = make_profile("bare", sorted(auto.layers - {"cgroup"}))
    assert most_processes(await stage.sh("sleep 100", sandbox=bare, **more)) == (60, 60)
    # A group that could not be joined once is not asked for again.
    stage.host.machine.lacking["cgroup"] = "it is full"
    assert most_processes(await stage.sh("sleep 100", sandbox=auto, **more)) == (60, 60)
    limits = Limits(cpus=1.0)
    child = await stage.host.spawn(
        stage.spec(("/bin/true",), sandbox=auto, group_limits=limits)
    )
    assert child.failure is not None
    assert "nothing keeps the limit 'cpus': it is full" in child.failure.text


def test_nobody_is_given_a_limit_that_the_host_may_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = (resource.RLIMIT_NPROC, 100, 100)
    for most, wanted in ((-1, 200), (300, 200), (150, 150), (90, 100)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, most))
        assert start.report_group(limit, 100) == (limit[0], wanted, wanted)
    # A lower one is nobody else's to keep.
    assert start.report_group(limit, 101) == limit
    assert start.report_group(limit, None) == limit
    others = (resource.RLIMIT_NOFILE, 100, 100)
    assert start.report_group(others, 100) == others


@pytest.mark.slow
async def test_a_tool_is_held_back_with_its_child(stage: Stage) -> None:
    limits = Limits(processes=20)
    more = {"group_limits": limits, "rlimits": limits.rlimits()}
    child = await stage.sh("sleep 100", sandbox=PROFILES["auto"], **more)
    if not list(stage.host.forks.descriptors()):
        pytest.skip("no group here counts refused forks and bounds processors' time")
    assert child.wanted is not None
    cwd_fd = os.open(stage.where, os.O_PATH | os.O_DIRECTORY)
    request = SpawnRequest(
        executable=sys.executable,
        argv=(sys.executable, "-I", "-S", "-c", BOMB),
        env={},
        cwd_fd=cwd_fd,
        fds=tuple((stage.null, number) for number in range(3)),
        rlimits=limits.rlimits(),
    )
    host = stage.host
    tool, _ = await start.spawn(host.launcher, host.machine, request, child.wanted)
    os.close(cwd_fd)
    await eventually(lambda: stage.events("child.held_back"))
    child.stop(0.0)
    await child.wait_gone()
    tool.send_signal(9)
    await tool.wait_swept()
    tool.close()
