"""Trying what profiles require: nothing of a trial is left, however it has gone.

Trials in a host of the test's own.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.user_values import Limits
from supervisor.config import profile_trials
from supervisor.config.document import Config
from supervisor.config.loader import load_config
from supervisor.config.profile_trials import Findings, try_profiles
from supervisor.sandbox import start
from supervisor.sandbox.groups import PREFIX, Groups, Hierarchy, Reserve, hierarchies
from tests.helpers.stage import Stage, descriptors, eventually, stage
from tests.helpers.stock import strangers

__all__ = ["stage"]

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives children users")

PROFILES = """
[sandbox.one]
required = ["no_new_privs"]
[sandbox.two]
layers = ["no_new_privs", "seccomp"]
required = ["seccomp"]
[policy.p]
sandbox = "one"
[policy.q]
sandbox = "two"
[policy.r]
sandbox = "one"
network = "host"
[policy.again]
sandbox = "one"
"""

KEYS = [f"policy.{name}.sandbox" for name in ("p", "q", "r", "again")]


def config_of(where: Path, text: str) -> Config:
    """Read a configuration."""
    (where / "c.toml").write_text(text)
    return load_config(str(where / "c.toml"))


async def tried(stage: Stage, text: str = PROFILES) -> Findings:
    """Try what the profiles of a configuration require, in the host of a stage."""
    host = stage.host
    return await try_profiles(host.launcher, host.machine, config_of(stage.where, text))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hierarchy that is played.

    Where trials make their groups, all of which must go.
    """
    place = tmp_path / "groups"
    place.mkdir()
    among = (Hierarchy("pids", str(place)),)
    monkeypatch.setattr("supervisor.sandbox.groups.hierarchies", lambda: among)
    yield place
    assert list(place.iterdir()) == []


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Groups]:
    """Return what groups trials have taken."""
    found: list[Groups] = []
    take = Reserve.take

    def taking(reserve: Reserve, child: str, limits: Limits) -> Groups:
        found.append(take(reserve, child, limits))
        assert found[-1].made
        return found[-1]

    monkeypatch.setattr(Reserve, "take", taking)
    return found


def trials_in(groups: Path) -> set[Path]:
    """Return the groups that are there."""
    return set(groups.iterdir())


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the filter of system calls be none that the kernel takes."""
    asked = start.request_layers

    def asks(*args: Any, **more: Any) -> Any:
        found, lost = asked(*args, **more)
        if "seccomp" in found:
            found["seccomp"] = b"no filter"
        return found, lost

    monkeypatch.setattr(start, "request_layers", asks)


# One for each profile and network, whatever number of policies names it.
async def test_a_profile_is_tried_once(
    stage: Stage, groups: Path, taken: list[Groups]
) -> None:
    assert await tried(stage) == Findings()
    assert len(taken) == 3
    assert not stage.host.machine.users
    await eventually(lambda: not strangers(stage.launchpad))  # reaped a moment later


async def test_what_cannot_be_had_leaves_nothing_either(
    stage: Stage, groups: Path, taken: list[Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    found = await tried(stage)
    assert [fault.key for fault in found.faults] == [KEYS[1]]
    assert "'seccomp', which is required, is missing" in found.faults[0].reason
    assert found.untried == ()
    assert len(taken) == 3
    assert not stage.host.machine.users


# A host has so many users for its children: a trial that kept one would take it away
# from them with every reload.
@of_root
async def test_users_of_trials_are_given_back(
    stage: Stage, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = stage.host.machine
    monkeypatch.setattr("supervisor.sandbox.plan.USERS", 1)
    for _ in range(3):
        assert await tried(stage) == Findings()
    others = {
        machine.take_user() for _ in range(1 + (machine.launchpad_pid is not None))
    }
    found = await tried(stage)
    assert found.faults == ()
    assert [key for key, _ in found.untried] == KEYS
    assert "users of this host have one" in found.untried[0][1]
    assert machine.users == others
    machine.give_user_back(others.pop())
    assert await tried(stage) == Findings()
    assert machine.users == others


# attack 18: what may be there in a moment says nothing of the machine.
@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "open"), (start, "layers_on_the_wire"), (Reserve, "take")],
    ids=["open", "layers", "groups"],
)
async def test_what_this_host_lacks_for_a_moment_is_told_and_no_fault(
    stage: Stage,
    groups: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
) -> None:
    usual = getattr(where, name)

    def lacking(*args: Any, **more: Any) -> Any:
        if where is not os or args[0] == "/":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return usual(*args, **more)

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, lacking)
        found = await tried(stage)
    text = "what it requires could not be tried: request: Too many open files"
    assert found == Findings(untried=tuple((key, text) for key in KEYS))
    assert not stage.host.machine.users
    assert descriptors() == before
    assert await tried(stage) == Findings()


# The numbers of trials are the process's: two reloads may be under way.
async def test_two_are_tried_at_once(
    stage: Stage, groups: Path, taken: list[Groups]
) -> None:
    found: list[Findings] = []

    async def trying() -> None:
        found.append(await tried(stage))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trying)
    assert found == [Findings()] * 3
    assert len(taken) == 9
    assert not stage.host.machine.users


async def test_a_trial_that_is_broken_off_leaves_nothing(
    stage: Stage, groups: Path, taken: list[Groups]
) -> None:
    for turns in range(0, 200, 7):  # of the loop, into it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tried, stage)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert not stage.host.machine.users
        assert not trials_in(groups)
    assert taken


def busy(groups: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Have something in the groups of each trial; return what that is."""
    spawn = start.spawn
    inside: list[Path] = []

    async def spawn_and_stay(*args: Any) -> Any:
        (group,) = trials_in(groups) - {path.parent for path in inside}
        inside.append(group / "process")
        inside[-1].mkdir()
        return await spawn(*args)

    monkeypatch.setattr(start, "spawn", spawn_and_stay)
    return inside


# A process that failed to exec is on its way out of its groups for a moment.
async def test_groups_that_are_not_empty_yet_are_waited_for(
    stage: Stage, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = busy(groups, monkeypatch)

    async def leave() -> None:
        await eventually(lambda: len(inside) == 3)
        await trio.sleep(0.02)
        for path in inside:
            path.rmdir()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        assert await tried(stage) == Findings()


# Where nobody waits any more they are tried once more, like those of a host that ends.
async def test_groups_that_were_not_empty_when_a_trial_was_broken_off(
    stage: Stage, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = busy(groups, monkeypatch)
    close = Reserve.close

    def leave_and_close(reserve: Reserve) -> None:
        for path in inside:
            path.rmdir()
        close(reserve)

    with monkeypatch.context() as patch, trio.CancelScope() as scope:
        patch.setattr(Reserve, "close", leave_and_close)
        patch.setattr(Reserve, "tidy", lambda _: scope.cancel())
        await tried(stage)
    assert scope.cancelled_caught
    assert inside


# A process that stays there is stuck in the kernel.
async def test_groups_that_stay_are_not_waited_for_without_end(
    stage: Stage, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = busy(groups, monkeypatch)
    monkeypatch.setattr(profile_trials, "GROUPS_S", 0.02)
    with trio.fail_after(30):
        assert await tried(stage) == Findings()
    assert len(inside) == 3
    for path in inside:
        path.rmdir()
        path.parent.rmdir()


# In the groups of this machine, if it gives any.
async def test_groups_of_the_kernels_are_removed(stage: Stage) -> None:
    among = [Path(hierarchy.group) for hierarchy in hierarchies()]
    probe = Reserve().take("probe", Limits())
    is_there = bool(probe.made)
    probe.remove()
    if not is_there:
        pytest.skip("no group can be made here")
    text = '[sandbox.g]\nrequired = ["cgroup"]\n[policy.p]\nsandbox = "g"\n'
    for _ in range(3):
        assert await tried(stage, text) == Findings()
        for place in among:
            assert not list(place.glob(f"{PREFIX}{os.getpid()}-trial-*"))
