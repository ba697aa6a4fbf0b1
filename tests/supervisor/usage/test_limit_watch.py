"""The nearness of a child to its limits: news, and real children."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from hostlib.linux.cgroup_files import refusals as group_refusals
from hostlib.user_values import Limits
from supervisor.observe.families import families
from supervisor.observe.loop import Conditions
from supervisor.observe.registry import Metrics, attach_metrics
from supervisor.sandbox.groups import hierarchies
from supervisor.sandbox.plan import PROFILES
from supervisor.spec import ChildSpec
from supervisor.usage.limits import Level, LimitNews, Use, uses
from supervisor.usage.samples import Sample
from tests.helpers.stage import Puppet, Stage, eventually, stage
from vfs.ledger import Ledger

__all__ = ["stage"]

MIB = 1 << 20

HAS_PIDS = any(h.kind in {"v2", "pids"} for h in hierarchies())


def told(*used: float, allowed: int = 100) -> list[str]:
    """The reports while the use of one limit goes through figures."""
    news = LimitNews()
    found = [news.find_news([Use("bytes", now, allowed)]) for now in used]
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
        for use in news.find_news([Use("cpu", now, 100)]):
            assert use.level > last
            last = use.level


def used(open_files: int, size_bytes: int, files: int) -> Ledger:
    """Return a ledger of which so much is used."""
    ledger = Ledger()
    ledger.open_files.charge(open_files)
    ledger.size_bytes.charge(size_bytes)
    ledger.files.charge(files)
    return ledger


def test_only_what_is_limited_is_looked_at() -> None:
    spec = ChildSpec(("x",), "/", "/", max_open_files=4)
    sample = Sample(7, 1, "running", 3.0, None, 0, None, 1, 6, 5 * MIB)
    assert uses(spec, used(4, 9, 9), sample) == [Use("open_files", 4, 4)]
    rlimits = (
        (resource.RLIMIT_AS, 6 * MIB, 6 * MIB),
        (resource.RLIMIT_CPU, 3, 4),
        (resource.RLIMIT_NPROC, 8, 8),
    )
    spec = ChildSpec(
        ("x",), "/", "/", max_open_files=4, max_bytes=10, max_files=9, rlimits=rlimits
    )
    found = {use.limit: use for use in uses(spec, used(0, 9, 9), sample)}
    assert [name for name, use in found.items() if use.level is Level.NEAR] == ["bytes"]
    reached = [name for name, use in found.items() if use.level is Level.REACHED]
    assert reached == ["files", "cpu"]
    assert found["memory"] == Use("memory", 5 * MIB, 6 * MIB)
    assert found["processes"] == Use("processes", 7, 8)
    # Without a sample the ledger still tells.
    assert [use.limit for use in uses(spec, Ledger(), None)] == [
        "open_files",
        "bytes",
        "files",
    ]


# spec HM8: addresses that are reserved and not used are no memory
@pytest.mark.slow
@pytest.mark.skipif(
    not any(h.kind in {"v2", "memory"} for h in hierarchies()),
    reason="no group here bounds memory",
)
async def test_memory_is_what_a_group_counts_where_one_bounds_it(stage: Stage) -> None:
    stage.sandbox = PROFILES["auto"]
    limits = Limits(memory=200 * MIB)
    code = "import mmap, time; a = mmap.mmap(-1, 2 << 30); b = b'x' * (60 << 20);"
    spec = stage.spec(
        ("/usr/bin/python3", "-c", f"{code} print(1, flush=True); time.sleep(600)"),
        group_limits=limits,
        rlimits=limits.rlimits(),
    )
    child = await stage.host.spawn(spec)
    sample = Sample(7, 1, "running", 0.0, None, 0, None, 1, 0, 3 << 30)

    def taken() -> float:
        child.limits.look()
        return next(u.used for u in child.limits.uses(sample) if u.limit == "memory")

    await eventually(lambda: 60 * MIB <= taken() < 100 * MIB)
    # Of a child whose addresses are bounded these are what counts.
    child.limits.memory_in_groups = None
    used = {use.limit: use.used for use in child.limits.uses(sample)}
    assert used["memory"] == 3 << 30


# Figures of the ledger, and those of a sample of the process.
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


def refusing(*looks: tuple[float, int]) -> list[str]:
    """The reports of (used, refused so far) at one look after the other."""
    news = LimitNews()
    found = [news.find_news([Use("bytes", used, 100, n)]) for used, n in looks]
    return [use.level.name for uses in found for use in uses]


# A refusal reaches a limit, however little is used; it is told once until it stops.
def test_a_refusal_is_a_limit_that_was_reached() -> None:
    assert refusing((50, 0), (50, 3), (50, 9), (50, 10)) == ["REACHED"]
    assert refusing((50, 3), (50, 3), (50, 4)) == ["REACHED", "REACHED"]
    assert refusing((95, 0), (95, 1), (95, 1)) == ["NEAR", "REACHED"]


REFUSED = {
    "open_files": ({"max_open_files": 1}, ["OPEN a w false", "OPEN b w false"]),
    "bytes": ({"max_bytes": 10}, ["OPEN a w false", "WRITE {no} 11\n0123456789a"]),
    "files": ({"max_files": 1}, ["OPEN a w false", "OPEN b w false"]),
    "file_size": (
        {"max_file_bytes": 10},
        ["OPEN a w false", "WRITE {no} 11\n0123456789a"],
    ),
}


async def ask_all(puppet: Puppet, lines: list[str]) -> None:
    """Ask one request after the other; the last one is refused."""
    number, reply = "", b""
    for line in lines:
        head, _, data = line.format(no=number).partition("\n")
        reply = await puppet.ask(f"{head}\n{data}".encode())
        if not number:
            number = reply.split()[1].decode()
    assert reply.startswith(b"ERROR"), reply


# Counted where it is refused, so that it is told of whoever never fills its limit.
@pytest.mark.slow
@pytest.mark.parametrize("limit", REFUSED)
async def test_what_a_limit_refuses_is_counted_and_told(
    stage: Stage, limit: str
) -> None:
    metrics = attach_metrics(stage.host)
    changes, lines = REFUSED[limit]
    puppet = await stage.puppet(name="hungry", **changes)
    await ask_all(puppet, lines)
    await ask_all(
        puppet, [lines[-1].format(no="1000")] if "{no}" in lines[-1] else lines[-1:]
    )
    assert refusals(metrics) == {limit: 2}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Conditions(stage.host).run, 0.01)
        await eventually(lambda: stage.events("child.limit"))
        nursery.cancel_scope.cancel()
    event = stage.events("child.limit")[-1]
    assert (event["name"], event["limit"], event["level"]) == (
        "hungry", limit, "reached",
    )  # fmt: skip
    assert event["refused"] == 2
    await puppet.leave()
    assert refusals(metrics) == {limit: 2}, "of who is gone, too"


# A child that ends before anybody looks is told of at its end.
@pytest.mark.slow
async def test_a_refusal_is_told_at_the_end_at_the_latest(stage: Stage) -> None:
    puppet = await stage.puppet(name="hungry", max_bytes=10)
    await ask_all(puppet, REFUSED["bytes"][1])
    assert stage.events("child.limit") == []
    await puppet.leave()
    puppet.child.limits.tell(None)  # a look during its clean-up
    (event,) = stage.events("child.limit")
    assert (event["limit"], event["level"], event["used"]) == ("bytes", "reached", 0)


def refusals(metrics: Metrics) -> dict[str, float]:
    """Return the metric's values that are not 0."""
    (family,) = (f for f in families(metrics) if f.name == "sandhost_limit_refusals")
    return {labels[0]: value for labels, value in family.values if value}


# Refusals of the kernel in a child's groups: forks that are too many.
@pytest.mark.slow
@pytest.mark.skipif(not HAS_PIDS, reason="no group can bound processes here")
async def test_refused_forks_are_counted_and_told(stage: Stage) -> None:
    metrics = attach_metrics(stage.host)
    script = "for i in 1 2 3 4 5 6; do sleep 600 & done; exec sleep 600"
    changes = {"sandbox": PROFILES["auto"], "group_limits": Limits(processes=4)}
    child = await stage.sh(script, name="bomb", **changes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Conditions(stage.host).run, 0.01)
        await eventually(lambda: stage.events("child.limit"))
        nursery.cancel_scope.cancel()
    assert stage.events("child.limit")[-1]["limit"] == "processes"
    assert stage.events("child.limit")[-1]["level"] == "reached"
    assert refusals(metrics)["processes"] >= 1
    child.stop(0)
    await child.wait_gone()
    assert refusals(metrics)["processes"] >= 1


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("pids.events", "max 17\nmax.imposed 3\n", {"processes": 17}),
        ("memory.events", "low 0\nmax 900\noom 4\noom_kill 3\n", {"memory": 4}),
        ("memory.oom_control", "under_oom 0\noom_kill 2\n", {"memory": 2}),
        ("memory.failcnt", "12\n", {}),
    ],
)
def test_what_groups_refused_is_read(
    tmp_path: Path, file: str, text: str, found: dict[str, int]
) -> None:
    (tmp_path / file).write_text(text)
    assert group_refusals([str(tmp_path), str(tmp_path / "gone")]) == found


# A wall clock that jumps (a resumed machine, a wrong time server) moves no timer.
@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [86_400.0 * 365, -86_400.0 * 365])
async def test_a_clock_that_jumps_ends_nobody_and_is_no_lag(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    child = await stage.puppet(timeout_s=60.0)
    await child.do("1")
    metrics = attach_metrics(stage.host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metrics.watch_lag)
        nursery.start_soon(Conditions(stage.host).run, 0.01)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        await eventually(lambda: metrics.lag.total > 0)
        assert (await child.ask(b"OPEN a w false\n")).startswith(b"OK")
        nursery.cancel_scope.cancel()
    assert metrics.lag_worst_s < 86_400
    assert not child.child.gone.is_set()
    assert not child.child.timed_out
    # The journal says what the clock says, and goes on.
    await child.kill()
    assert stage.events("child.gone")
