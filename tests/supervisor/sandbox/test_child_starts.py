"""A start that goes wrong for what a child has made, or for a fault.

One start's failure.
"""

from dataclasses import replace
from typing import NoReturn

import pytest

from supervisor.sandbox import start
from supervisor.sandbox.plan import PROFILES, Profile, make_profile
from supervisor.sandbox.scratch import remove_tree
from tests.helpers.stage import Stage, stage

__all__ = ["stage"]

pytestmark = [pytest.mark.slow, pytest.mark.attack]


# attack 3: it lies in the child's root, so the child may have made it
@pytest.mark.parametrize(
    "sandbox",
    [PROFILES["auto"], make_profile("landlock", ["landlock"])],
    ids=lambda profile: profile.name,
)
async def test_a_link_of_its_own_is_no_working_directory(
    stage: Stage, sandbox: Profile
) -> None:
    stage.sandbox = sandbox
    outside = stage.where / "outside"
    outside.mkdir()
    (stage.root / "work").symlink_to(outside)
    spec = stage.spec(("/bin/true",), cwd=str(stage.root / "work"))
    child = await stage.host.spawn(spec)
    assert child.failure is not None
    assert "cannot use the working directory" in child.failure.text
    assert child.status == 125
    # The operator may well have made one elsewhere.
    (stage.where / "link").symlink_to(outside)
    other = await stage.sh("pwd -P", cwd=str(stage.where / "link"))
    assert await other.wait_gone() == 0


# attack 3: it lies where tools write, or other children
async def test_a_link_of_a_tools_is_no_working_directory(stage: Stage) -> None:
    stage.sandbox = PROFILES["auto"]
    work = stage.where / "work"
    for name in ("work", "outside"):
        (stage.where / name).mkdir()
    (work / "app").symlink_to(stage.where / "outside")
    settings = stage.host.settings
    stage.host.settings = replace(settings, written=frozenset({str(work)}))
    child = await stage.host.spawn(stage.spec(("/bin/true",), cwd=str(work / "app")))
    assert child.failure is not None
    assert "cannot use the working directory" in child.failure.text
    other = await stage.sh("pwd -P", cwd=str(work))
    assert await other.wait_gone() == 0


# It said that the directory had been replaced.
@pytest.mark.parametrize("name", ["self", "self/fd", "thread-self", "1", "self/task"])
async def test_a_processs_directory_is_said_to_be_one(stage: Stage, name: str) -> None:
    stage.sandbox = PROFILES["auto"]
    child = await stage.host.spawn(stage.spec(("/bin/true",), cwd=f"/proc/{name}"))
    assert child.failure is not None
    assert f"cannot use the working directory '/proc/{name}': it is /proc/" in (
        child.failure.text
    )
    assert "name a directory that is not a process's" in child.failure.text
    for usual in ("/proc", "/proc/sys/kernel", "/proc/self/cwd"):
        other = await stage.sh("exit 3", cwd=usual)
        assert await other.wait_gone() == 3


def fail(*_: object, **__: object) -> NoReturn:
    raise RecursionError("deeper than anybody thought")


@pytest.mark.parametrize("where", ["the look", "the child"])
async def test_a_fault_in_one_start_is_that_starts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stage.sandbox = PROFILES["auto"]
    before = await stage.sh("sleep 100")
    with monkeypatch.context() as patched:
        if where == "the look":
            patched.setattr(start, "layers_on_the_wire", fail)
        else:
            patched.setattr("supervisor.children.child_walls.WantedWalls", fail)
        child = await stage.host.spawn(stage.spec(("/bin/true",)))
    assert child.failure is not None
    assert "RecursionError: deeper than anybody thought" in child.failure.text
    (gone,) = stage.events("child.gone")
    assert "internal error" in gone["failure"]
    after = await stage.sh("exit 3")
    assert await after.wait_gone() == 3
    before.stop(0.0)
    await before.wait_gone()
    stage.assert_nothing_left()


async def test_a_directory_600_levels_deep_is_one(stage: Stage) -> None:
    stage.sandbox = PROFILES["auto"]
    maker = await stage.sh(
        "cd root; i=0; while [ $i -lt 600 ]; do mkdir a; cd -P a; i=$((i+1)); done",
        sandbox=PROFILES["none"],
    )
    assert await maker.wait_gone() == 0
    (stage.root / "link").symlink_to("a/" * 600)
    try:
        child = await stage.sh("exit 3", cwd=str(stage.root / "link"))
        assert await child.wait_gone() == 3
    finally:
        remove_tree(stage.root / "a")
