"""Who runs into its limit of processes again and again is held back, until it is calm."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from supervisor.child import Child
from supervisor.fork_watch import CALM_S, CPUS, LOOK_S, REFUSALS, ForkWatch
from supervisor.options import Limits
from supervisor.sandbox import PROFILES
from tests.helpers.hosts import Stage, eventually, stage

if TYPE_CHECKING:
    from supervisor.journal import Journal

__all__ = ["stage"]


TEN = Limits(processes=10)


@dataclass
class Spec:
    """What the watch reads of a child's description."""

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
        self.bound_file.touch()
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

    def watched(self, nursery: trio.Nursery) -> ForkWatch:
        watch = ForkWatch(cast("Journal", self))
        watch.watch(self.child, self.groups)
        nursery.start_soon(watch.run)
        return watch

    @property
    def child(self) -> Child:
        return cast("Child", self)


NONE = {1: "-1", 2: "max 100000"}
LITTLE = {1: str(int(CPUS * 100_000)), 2: f"{int(CPUS * 100_000)} 100000"}


@pytest.mark.parametrize("version", [1, 2])
async def test_a_bomb_is_held_back_until_it_is_calm(
    version: int, tmp_path: Path, autojump_clock: object, no_leaks: None
) -> None:
    del autojump_clock, no_leaks
    one = Someone(tmp_path, version=version)
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
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
        watch.forget(one.child)
        assert list(watch.descriptors()) == []
        nursery.cancel_scope.cancel()


async def test_who_begins_again_is_held_back_for_twice_as_long(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        for number in (1, 2, 4):
            one.refuse(number * REFUSALS * 2)
            await trio.sleep(number * CALM_S - LOOK_S)
            assert one.bound() == LITTLE[1]
            await trio.sleep(4 * LOOK_S)
            assert one.bound() == NONE[1]
        watch.forget(one.child)
        nursery.cancel_scope.cancel()


async def test_who_takes_no_for_an_answer_is_let_be(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        for number in range(1, 10):
            one.refuse(number * (REFUSALS // 2 - 1))
            await trio.sleep(LOOK_S)
        assert one.told == []
        watch.forget(one.child)
        nursery.cancel_scope.cancel()


async def test_what_was_refused_before_is_no_news(
    tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path)
    one.refuse(REFUSALS * 10)  # a program before this one has looked at that
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        await trio.sleep(2 * LOOK_S)
        assert one.told == []
        watch.forget(one.child)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("cpus", [0.5, 0.05])
async def test_nobody_is_given_more_than_its_own_limit(
    cpus: float, tmp_path: Path, autojump_clock: object
) -> None:
    del autojump_clock
    one = Someone(tmp_path, Limits(processes=10, cpus=cpus))
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        one.refuse(REFUSALS)
        await trio.sleep(2 * LOOK_S)
        assert one.bound() == str(int(min(cpus, CPUS) * 100_000))
        watch.forget(one.child)  # it is about to be killed
        assert one.bound() == str(int(cpus * 100_000))
        nursery.cancel_scope.cancel()


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
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        assert list(watch.descriptors()) == []
        nursery.cancel_scope.cancel()


async def test_a_group_that_is_gone_is_no_fault(
    tmp_path: Path, autojump_clock: object, no_leaks: None
) -> None:
    del autojump_clock, no_leaks
    one = Someone(tmp_path)
    async with trio.open_nursery() as nursery:
        watch = one.watched(nursery)
        one.bound_file.unlink()
        one.refuse(REFUSALS)
        await trio.sleep(2 * LOOK_S)
        assert one.told == []  # nothing was bounded, and nobody is told it was
        watch.forget(one.child)
        nursery.cancel_scope.cancel()


BOMB = """
import os, time
for _ in range(9):
    try:
        if os.fork() == 0:
            time.sleep(100)
    except OSError:
        pass
end = time.monotonic() + 0.8
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            time.sleep(100)
    except OSError:
        pass
time.sleep(100)
"""


async def bomb(stage: Stage) -> Child:
    """Start one that is calm after a while; skips where nothing can be done about it."""
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
    for group in child._groups.made:
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
    await eventually(lambda: stage.events("child.let_go"))
    assert bound_of(child) in {"-1", "max"}


@pytest.mark.slow
async def test_whoever_is_killed_has_the_time_to_end(stage: Stage) -> None:
    child = await bomb(stage)
    await eventually(lambda: stage.events("child.held_back"))
    child.stop(0.0)
    with trio.fail_after(10):
        await child.wait_gone()
    assert list(stage.host.forks.descriptors()) == []
