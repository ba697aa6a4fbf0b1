"""A kept child without a daemon: orders before its task, a start that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from hostlib.log import Log
from supervisor.children.specs import ChildOptions
from supervisor.config.child import ChildSection
from supervisor.kept_children.kept_child import KeptChild, SharedParts
from supervisor.kept_children.kept_state import KeptChildState
from supervisor.spawn.restarts import Phase, RestartsState


def make_child(name: str, scratch_dir: str | None = None) -> KeptChild:
    """Return a child that nobody has started."""
    host: Any = SimpleNamespace(log=Log())
    log: Any = SimpleNamespace(segments=SimpleNamespace(dropped_bytes=0))
    shared = SharedParts(scratch_dir, trio.Semaphore(1))
    section = ChildSection(["true"])
    return KeptChild(host, name, section, ChildOptions(), log, shared)


async def test_a_stop_right_after_a_start_waits_for_no_other_child(
    autojump_clock: MockClock,
) -> None:
    del autojump_clock
    other, child = make_child("other"), make_child("child")
    assert other.begin()
    assert child.begin()
    child.stop()
    with trio.fail_after(1):
        await child.run([other])
    assert child.phase is Phase.STOPPED
    assert child.settled.is_set()


@pytest.mark.parametrize("wait_s", [1.5, 1000.0])
async def test_a_stop_right_after_a_hand_over_waits_for_no_restart(
    autojump_clock: MockClock, wait_s: float
) -> None:
    del autojump_clock
    child = make_child("child")
    state = KeptChildState(
        name="child",
        section={},
        options={},
        phase=Phase.BACKING_OFF.value,
        reason=None,
        status=1,
        configured=True,
        restarts=RestartsState(1, 1, 0.0, []),
        dropped_bytes=0,
        wait_s=wait_s,
    )
    child.restore(state, None)
    child.stop()
    with trio.fail_after(1):
        await child.run([])
    assert child.phase is Phase.STOPPED


async def test_a_second_stop_and_start_begin_anew(autojump_clock: MockClock) -> None:
    del autojump_clock
    child = make_child("child")
    for _ in range(2):
        assert child.begin()
        child.stop()
        assert not child.settled.is_set()
        await child.run([])
        assert child.settled.is_set()


async def test_a_start_without_directories_gives_its_place_back(tmp_path: Path) -> None:
    child = make_child("child", str(tmp_path / "absent"))
    for _ in range(2):  # there is one place
        assert child.begin()
        with trio.fail_after(5):
            await child.run([])
    reason = "did not start: cannot make its directories: No such file or directory"
    assert (child.phase, child.reason) == (Phase.ENDED, reason)
