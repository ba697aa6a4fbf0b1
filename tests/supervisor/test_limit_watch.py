"""How near a child is to its limits: what is news, and real children that come near."""

import resource
import time
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from supervisor.limit_watch import Level, LimitNews, Use, uses
from supervisor.loop_watch import Conditions, Lag
from supervisor.spec import ChildSpec
from supervisor.watcher import Sample
from tests.helpers.hosts import Stage, eventually, stage

__all__ = ["stage"]

MIB = 1 << 20


def told(*used: float, allowed: int = 100) -> list[str]:
    """What is told while the use of one limit goes through figures."""
    news = LimitNews()
    found = [news.of("c", [Use("bytes", now, allowed)]) for now in used]
    return [use.level.name for uses in found for use in uses]


def test_each_level_is_news_once_until_the_child_is_well_again() -> None:
    assert told(89, 90, 95, 99, 100, 120) == ["NEAR", "REACHED"]
    assert told(120, 95, 85, 120) == ["REACHED"]
    assert told(95, 79, 95) == ["NEAR", "NEAR"]
    assert told(0, 50, 89) == []


@given(st.lists(st.integers(0, 150), max_size=40))
def test_a_level_is_never_told_twice_in_a_row(figures: list[int]) -> None:
    news = LimitNews()
    last = Level.WELL
    for now in figures:
        if now < 80:
            last = Level.WELL
        for use in news.of("c", [Use("cpu", now, 100)]):
            assert use.level > last
            last = use.level


def test_a_child_that_is_gone_is_forgotten() -> None:
    news = LimitNews()
    full = [Use("files", 1, 1)]
    assert news.of("a", full) == full
    assert news.of("b", full) == full
    news.forget_all_but({"b"})
    assert news.of("a", full) == full
    assert news.of("b", full) == []


def test_only_what_is_limited_is_looked_at() -> None:
    spec = ChildSpec(("x",), "/", "/", max_open_files=4)
    sample = Sample(7, 1, "running", 3.0, None, 0, None, 1, 6, 5 * MIB)
    assert uses(spec, (4, 0, 9, 9), sample) == [Use("open_files", 4, 4)]
    rlimits = (
        (resource.RLIMIT_AS, 6 * MIB, 6 * MIB),
        (resource.RLIMIT_CPU, 3, 4),
        (resource.RLIMIT_NPROC, 8, 8),
    )
    spec = ChildSpec(
        ("x",), "/", "/", max_open_files=4, max_bytes=10, max_files=9, rlimits=rlimits
    )
    found = {use.limit: use for use in uses(spec, (0, 0, 9, 9), sample)}
    assert [name for name, use in found.items() if use.level is Level.NEAR] == ["bytes"]
    reached = [name for name, use in found.items() if use.level is Level.REACHED]
    assert reached == ["files", "cpu"]
    assert found["memory"] == Use("memory", 5 * MIB, 6 * MIB)
    assert found["processes"] == Use("processes", 7, 8)
    # Without a sample the ledger still tells.
    assert [use.limit for use in uses(spec, (0, 0, 0, 0), None)] == [
        "open_files",
        "bytes",
        "files",
    ]


# What the ledger counts, and what only a sample of the process tells.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "changes", "deed"),
    [
        ("open_files", {"max_open_files": 2}, "OPEN b w false"),
        ("bytes", {"max_bytes": 10}, "WRITE {no} 10\n0123456789"),
        ("files", {"max_files": 1}, None),
        ("memory", {"rlimits": ((resource.RLIMIT_AS, 400 * MIB, 400 * MIB),)}, 370),
        ("cpu", {"rlimits": ((resource.RLIMIT_CPU, 1, 600),)}, "burn"),
    ],
)
async def test_a_child_that_comes_near_a_limit_is_told(
    stage: Stage, limit: str, changes: dict[str, Any], deed: str | int | None
) -> None:
    child = await stage.puppet(name="hungry", **changes)
    number = (await child.ask(b"OPEN a w false\n")).split()[1].decode()
    if deed == "burn":
        await child.do("[signal.signal(signal.SIGXCPU, signal.SIG_IGN)] and 1")
        await child.do("next(i for i in iter(int, 1) if time.process_time() > 1.1)")
    elif isinstance(deed, int):
        size = deed * MIB
        taken = f"_held.update({{-1: __import__('mmap').mmap(-1, {size})}})"
        await child.do(taken)
    elif deed is not None:
        line, _, data = deed.format(no=number).partition("\n")
        await child.ask(f"{line}\n{data}".encode())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Conditions(stage.host).run, 0.01)
        await eventually(lambda: stage.events("child.limit"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    (event,) = stage.events("child.limit")
    assert (event["name"], event["limit"]) == ("hungry", limit)
    assert event["level"] in {"near", "reached"}
    assert event["used"] >= 0.9 * event["allowed"]
    assert event["child_id"] == child.child.id


# A wall clock that jumps (a resumed machine, a wrong time server) moves no timer.
@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [86_400.0 * 365, -86_400.0 * 365])
async def test_a_clock_that_jumps_ends_nobody_and_is_no_lag(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    child = await stage.puppet(timeout_s=60.0)
    await child.do("1")
    lag = Lag(stage.host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.run)
        nursery.start_soon(Conditions(stage.host).run, 0.01)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        await eventually(lambda: lag.last_s > 0)
        assert (await child.ask(b"OPEN a w false\n")).startswith(b"OK")
        nursery.cancel_scope.cancel()
    assert lag.worst_s < 86_400
    assert not child.child.gone.is_set()
    assert not child.child.timed_out
    # The journal says what the clock says, and goes on.
    await child.kill()
    assert stage.events("child.gone")
