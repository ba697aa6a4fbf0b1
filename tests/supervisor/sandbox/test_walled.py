"""A child that does something to its own directories.

Its start fails, nothing else.

Between the host's look at what a child sees and the child's first step there is time;
here it is used by who stands in that place: `swapped_meanwhile`.
"""

import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.sandbox import orders as sandbox_orders
from supervisor.sandbox import start as sandbox_start
from supervisor.sandbox.groups import GroupBounds
from supervisor.sandbox.host_directories import locations_of
from supervisor.sandbox.plan import (
    LAYERS,
    PROFILES,
    Machine,
    Profile,
    Walls,
    WantedWalls,
    make_profile,
)
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.spawn.request import SpawnError, SpawnRequest
from tests.helpers.spawning import LauncherStage, staged

pytestmark = pytest.mark.attack

AUTO = PROFILES["auto"]
LANDLOCK = make_profile("landlock", ["landlock"])


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Return a directory with a child's root, and one that is none of its business."""
    tmp_path.chmod(0o755)
    for name in ("root", "root/sub", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "secret").write_text("s3cret")
    return tmp_path


@pytest.fixture
async def stage(places: Path) -> AsyncIterator[LauncherStage]:
    async with staged(places) as stage:
        yield stage


async def start(stage: LauncherStage, machine: Machine, wanted: WantedWalls) -> None:
    """Start a small program, and wait until nothing is left of it."""
    cwd_fd = os.open(wanted.files.cwd, os.O_PATH | os.O_DIRECTORY)
    try:
        request = stage.request(("/bin/true",), cwd_fd=cwd_fd)
        process, _ = await sandbox_start.spawn(stage.launcher, machine, request, wanted)
    finally:
        os.close(cwd_fd)
    await process.wait_exit()
    await process.wait_swept()
    process.close()


async def start_with_a_root(
    stage: LauncherStage, machine: Machine, wanted: WantedWalls
) -> dict[str, str]:
    """Start it as its own user in a fresh root, if there is one; say what is lacking."""
    if machine.lacking.get("uid") is None:
        wanted.user = machine.take_user()
    await start(stage, machine, wanted)
    if "mountns" in machine.lacking:
        pytest.skip(f"no mount namespace: {machine.lacking}")
    return dict(machine.lacking)


def swapped_meanwhile(
    monkeypatch: pytest.MonkeyPatch, swap: Callable[[], None]
) -> None:
    """Do something after the host has looked, and before the child is started."""
    look = sandbox_orders.layers_on_the_wire

    def looked(*args: Any) -> dict[str, object]:
        found = look(*args)
        swap()
        return found

    monkeypatch.setattr(sandbox_start, "layers_on_the_wire", looked)


# attack 4: a host that is root opened the name again, and followed it out of the walls
@pytest.mark.slow
@pytest.mark.parametrize(
    "instead", ["/proc/1/rootOUTSIDE", "/proc/1/rootBEFORE", "OUTSIDE", "directory"]
)
async def test_a_working_directory_is_the_one_that_is_held(
    tmp_path: Path, stage: LauncherStage, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    root, machine = tmp_path / "root", Machine()
    wanted = WantedWalls(
        AUTO, "none", ShownFiles(str(root / "sub"), shared=(str(root),))
    )
    lacking = await start_with_a_root(stage, machine, wanted)

    def swap() -> None:
        (root / "sub").rename(root / "before")
        if instead == "directory":
            (root / "sub").mkdir()
        else:
            # BEFORE is the very directory, but seen from outside of the walls.
            to = instead.replace("OUTSIDE", str(tmp_path / "outside"))
            (root / "sub").symlink_to(to.replace("BEFORE", str(root / "before")))

    swapped_meanwhile(monkeypatch, swap)
    with pytest.raises(SpawnError, match="replaced by something else") as refused:
        await start(stage, machine, wanted)
    assert refused.value.stage == "cwd"
    assert machine.lacking == lacking, "and the machine lacks nothing for that"


@pytest.mark.slow
@pytest.mark.parametrize("profile", [AUTO, LANDLOCK], ids=lambda profile: profile.name)
async def test_a_link_in_a_working_directorys_place_refuses_one_start(
    tmp_path: Path, stage: LauncherStage, profile: Profile
) -> None:
    root, machine = tmp_path / "root", Machine()
    wanted = WantedWalls(
        profile, "none", ShownFiles(str(root / "sub"), theirs={str(root): True})
    )
    wanted.bounds = GroupBounds(why_none="none here")
    if "uid" not in machine.lacking:
        wanted.user = machine.take_user()
    await start(stage, machine, wanted)
    lacking = dict(machine.lacking)
    (root / "sub").rmdir()
    (root / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(SpawnError, match="cannot use the working directory") as refused:
        await start(stage, machine, wanted)
    assert refused.value.stage == "cwd"
    assert refused.value.exit_status == 125
    assert machine.lacking == lacking
    # A link to a file that it sees anyhow is no harm.
    (root / "sub").unlink()
    (root / "sub").symlink_to("/usr/bin")
    await start(stage, machine, wanted)


# attack 4: whoever may write around what is hidden moves it between look and start.
@pytest.mark.slow
@pytest.mark.parametrize("instead", ["nothing", "directory", "link"])
async def test_what_is_to_be_hidden_is_where_the_host_saw_it(
    tmp_path: Path, stage: LauncherStage, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    root, machine = tmp_path / "root", Machine()
    wanted = WantedWalls(AUTO, "none", ShownFiles(str(root), shared=(str(root),)))
    wanted.bounds = GroupBounds(why_none="none here")
    held = os.open(root / "sub", os.O_PATH)
    wanted.files.hidden = locations_of(held)
    lacking = await start_with_a_root(stage, machine, wanted)

    def swap() -> None:
        (root / "sub").rename(root / "before")
        if instead == "directory":
            (root / "sub").mkdir()
        elif instead == "link":
            (root / "sub").symlink_to("before")

    swapped_meanwhile(monkeypatch, swap)
    with pytest.raises(SpawnError, match="to be hidden from it, was moved") as refused:
        await start(stage, machine, wanted)
    assert refused.value.stage == "mountns"
    assert refused.value.text.endswith("; put it back")
    assert f"{root}/sub, which" in refused.value.text
    assert machine.lacking == lacking, "and the machine lacks nothing for that"
    monkeypatch.undo()
    wanted.files.hidden = locations_of(held)
    await start(stage, machine, wanted)
    os.close(held)


class _Launcher:
    """Refuses a layer, to everybody or to who brings a path along."""

    def __init__(self, layer: str, number: int, path: bytes = b"") -> None:
        self.asked: list[SpawnRequest] = []
        self._fault = SpawnError(number, layer, "no", os.strerror(number))
        self._path = path

    async def spawn(self, request: SpawnRequest) -> Any:
        self.asked.append(request)
        found = self._path in repr(request.layers).encode()
        if self._fault.stage in request.layers and found:
            raise self._fault
        if request.executable == "/":
            raise SpawnError(errno.EACCES, "exec", "a directory")

        class Process:
            applied: tuple[tuple[str, str], ...] = ()

        return Process()


async def tried(
    launcher: Any, machine: Machine, cwd: Path, profile: Profile = AUTO
) -> Walls:
    request = SpawnRequest("/bin/true", ("true",), {}, 0, ())
    wanted = WantedWalls(
        profile, "none", ShownFiles(str(cwd)), user=machine.take_user()
    )
    _, walls = await sandbox_start.spawn(launcher, machine, request, wanted)
    return walls


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        "supervisor.sandbox.ownership.find_chown_fault", lambda _user: ""
    )
    return Machine()


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("layer", ["mountns", "landlock"])
async def test_what_fails_for_one_childs_paths_only_is_that_childs(
    tmp_path: Path, machine: Machine, layer: str, is_required: bool
) -> None:
    launcher = _Launcher(layer, errno.EINVAL, os.fsencode(tmp_path))
    profile = make_profile("mine", None, [layer] if is_required else [])
    with pytest.raises(SpawnError) as refused:
        await tried(launcher, machine, tmp_path, profile)
    text = refused.value.text
    said = (
        f"cannot have the layer '{layer}' for this child's own paths: Invalid argument"
    )
    assert text.startswith(f"{said}, at {tmp_path}")
    assert len(text.replace(str(tmp_path), "/srv/work")) <= 160
    assert refused.value.exit_status == 125
    assert not machine.lacking
    assert len(launcher.asked) == 2
    assert os.fsencode(tmp_path) not in repr(launcher.asked[1].layers).encode()


# attack 50
async def test_a_directory_that_cannot_show_owners_costs_its_child_the_start(
    tmp_path: Path, machine: Machine
) -> None:
    launcher = _Launcher("uid", errno.EINVAL, os.fsencode(tmp_path))
    with pytest.raises(SpawnError, match="or name a profile without 'uid'"):
        await tried(launcher, machine, tmp_path)
    assert not machine.lacking


@pytest.mark.parametrize("layer", ["mountns", "landlock", "uid", "netns", "seccomp"])
async def test_what_is_required_and_fails_for_everybody_is_missing(
    tmp_path: Path, machine: Machine, layer: str
) -> None:
    launcher = _Launcher(layer, errno.ENOSYS)
    with pytest.raises(SpawnError, match=f"'{layer}' is required and missing"):
        await tried(launcher, machine, tmp_path, make_profile("mine", None, [layer]))


# attack 50: nobody is root for that.
@pytest.mark.parametrize("layer", ["mountns", "uid"])
async def test_what_fails_for_everybody_makes_no_child_root(
    tmp_path: Path, machine: Machine, layer: str
) -> None:
    launcher = _Launcher(layer, errno.ENOSYS)
    with pytest.raises(SpawnError, match="cannot start a child as a user of its own: "):
        await tried(launcher, machine, tmp_path)
    assert all("uid" in request.layers for request in launcher.asked)


@pytest.mark.parametrize("layer", ["mountns", "landlock", "netns", "seccomp"])
async def test_what_fails_for_everybody_the_machine_lacks(
    tmp_path: Path, machine: Machine, layer: str
) -> None:
    profile = make_profile("as root", LAYERS.keys() - {"uid"})
    launcher = _Launcher(layer, errno.ENOSYS)
    walls = await tried(launcher, machine, tmp_path, profile)
    assert machine.lacking == {layer: os.strerror(errno.ENOSYS)}
    assert layer in walls.missing


async def test_whatever_goes_wrong_while_it_is_looked_at_is_one_starts_failure(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> dict[str, object]:
        raise RecursionError("too deep")

    monkeypatch.setattr(sandbox_start, "layers_on_the_wire", fail)
    launcher = _Launcher("landlock", errno.EINVAL)
    with pytest.raises(SpawnError, match=r"internal error \(RecursionError: too deep"):
        await tried(launcher, machine, tmp_path)
    assert not launcher.asked
