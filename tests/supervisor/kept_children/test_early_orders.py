"""A kept child without a daemon: orders before its task, a start that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hostlib.log import Log
from supervisor.children.specs import ChildOptions
from supervisor.config.child import ChildSection
from supervisor.kept_children.kept_child import KeptChild, SharedParts
from supervisor.kept_children.kept_state import KeptChildState
from supervisor.spawn.restarts import Phase, RestartsState


def make_child(
    name: str, scratch_dir: str | None = None, room: int = 1, **section_keys: Any
) -> KeptChild:
    """Return a child that nobody has started."""
    journal = SimpleNamespace(write=lambda *_, **__: None)
    host: Any = SimpleNamespace(log=Log(), journal=journal)
    log: Any = SimpleNamespace(segments=SimpleNamespace(dropped_bytes=0))
    shared = SharedParts(scratch_dir, trio.Semaphore(room))
    section = ChildSection(["true"], **section_keys)
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


# `ps` shows the number.
async def test_an_end_on_request_counts_no_restart(autojump_clock: MockClock) -> None:
    del autojump_clock
    child = make_child("child", room=0, restart="always")
    async with trio.open_nursery() as nursery:
        assert child.begin()
        nursery.start_soon(child.run, [])
        await wait_all_tasks_blocked()  # for a place to start
        child.stop()
    assert child.phase is Phase.STOPPED
    assert child.extra_fields()["restarts"] == 0


async def test_a_start_on_request_between_two_begins_with_a_clean_record(
    tmp_path: Path,
) -> None:
    keys: dict[str, Any] = {
        "restart": "always",
        "max_restarts": 1,
        "backoff": "1h",
        "within": "1d",
    }
    child = make_child("child", str(tmp_path / "absent"), **keys)
    assert child.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.run, [])
        await wait_all_tasks_blocked()
        assert child.phase is Phase.BACKING_OFF
        assert not child.begin()
        await wait_all_tasks_blocked()
        phase = child.phase
        child.stop()
    assert phase is Phase.BACKING_OFF  # and not given up
