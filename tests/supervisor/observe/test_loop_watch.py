"""Watching the daemon itself: what of a child's states is news; the loop's lag."""

import errno
import os
import select

import pytest
import trio
import trio.testing

from hostlib.systemd import Notifier, watchdog_interval_s
from supervisor.observe.loop import Conditions
from supervisor.observe.registry import LAG_WARNING_S, attach_metrics
from supervisor.usage.samples import Sample, Samples, Watcher
from tests.helpers.stage import Stage, eventually, stage

__all__ = ["stage"]


def sample(state: str, pid: int = 7) -> dict[tuple[int, int], Sample]:
    """Samples of one process in a state."""
    return {(pid, 1): Sample(pid, 1, state, 0.0, None, 0, None, 1, 0)}


def told(*states: str) -> list[str]:
    """The reports while a process goes through states, one a sample."""
    conditions = Conditions(None)  # type: ignore[arg-type]
    news = [conditions.news(sample(state)) for state in states]
    return [word for found in news for word in found.values()]


def test_a_state_is_news_once_when_it_lasts() -> None:
    assert told("disk-sleep", "sleeping", "disk-sleep") == []
    assert told("disk-sleep", "disk-sleep", "disk-sleep") == ["stuck"]
    assert told("stopped", "stopped", "sleeping", "running") == ["stopped", "well"]
    assert told("stopped", "tracing-stop") == ["stopped"]
    assert told("zombie", "zombie") == ["zombie"]


def test_a_process_that_is_gone_is_no_news() -> None:
    conditions = Conditions(None)  # type: ignore[arg-type]
    conditions.news(sample("stopped"))
    assert conditions.news(sample("stopped"))
    assert conditions.news({}) == {}
    assert conditions.news(sample("sleeping")) == {}


@pytest.mark.slow
async def test_a_loop_that_was_held_is_told(stage: Stage) -> None:
    metrics = attach_metrics(stage.host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metrics.watch_lag)
        await trio.testing.wait_all_tasks_blocked()
        # Clients of a host suffer from code that does not await.
        select.select([], [], [], 0.5 + 2 * LAG_WARNING_S)
        await eventually(lambda: metrics.lag_warnings)
        nursery.cancel_scope.cancel()
    assert metrics.lag_worst_s > LAG_WARNING_S
    assert stage.events("host.lagged")


# A child with the host's last descriptor does not end it: the next look tells.
# attack 18
async def test_children_that_cannot_be_looked_at_are_looked_at_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    said: list[tuple[str, str]] = []

    async def glance(_watcher: Watcher, targets: object, _: object = ()) -> Samples:
        looks.append(targets)
        await trio.lowlevel.checkpoint()
        if len(looks) < 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return {}

    monkeypatch.setattr(Watcher, "glance", glance)
    monkeypatch.setattr(stage.host.log, "write", lambda *words: said.append(words))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Conditions(stage.host).run, 0.001)
        await eventually(lambda: len(looks) > 5)
        nursery.cancel_scope.cancel()
    text = "cannot look at the children: Too many open files; trying again"
    assert said == [("WARNING", text)]


def test_without_a_manager_nothing_is_sent() -> None:
    notifier = Notifier(None)
    notifier.ready("x")
    assert notifier.descriptors() == ()
    notifier.close()
    assert watchdog_interval_s() is None
