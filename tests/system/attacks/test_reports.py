"""The reported walls of a child, compared with the kernel's view.

The report of a child's walls, and what ``/proc`` shows of the same child.
"""

import os
import resource
from collections.abc import Iterator

import pytest

from supervisor.children.child import Child
from tests.system.attacks.conftest import WALLS, only
from tests.system.attacks.test_walls import Attacker, attacker

__all__ = ["attacker"]

# Of this program's own walls; what bubblewrap does nobody here tells.
pytestmark = only(*WALLS)

OF_NAMESPACES = {
    "userns": "user", "mountns": "mnt", "pidns": "pid",
    "netns": "net", "ipcns": "ipc", "utsns": "uts",
}  # fmt: skip
"""Layer -> what the kernel calls its namespace."""


async def said_by_it(attacker: Attacker, program: str) -> tuple[Child, list[str]]:
    """Run a program; return its child, and the lines that it printed."""
    child, out = await attacker.start(program)
    await child.wait_gone()
    with os.fdopen(out) as file:
        return child, file.read().splitlines()


def layers_of(child: Child) -> list[str]:
    """Return what is told of a child that ran."""
    layers = child.walls.row()["layers"]
    assert isinstance(layers, list)
    return layers


async def test_a_report_names_what_was_applied(attacker: Attacker, kind: str) -> None:
    child, lines = await said_by_it(attacker, "print(open('/proc/self/status').read())")
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    row, layers = child.walls.row(), layers_of(child)
    assert row["profile"] == kind
    assert (status["NoNewPrivs"] == "1") == ("no_new_privs" in layers)
    assert (status["Seccomp"] == "2") == ("seccomp" in layers)
    if "uid" in layers:
        own = row["details"]["uid"]  # type: ignore[index]
        assert status["Uid"].split() == status["Gid"].split() == [own] * 4
        assert status["Groups"].split() == []
    (spawned,) = attacker.stage.events("child.spawned")
    assert spawned["isolation"] == row


async def test_no_capability_is_left_in_any_set(attacker: Attacker) -> None:
    child, lines = await said_by_it(attacker, "print(open('/proc/self/status').read())")
    sets = {line[:6]: int(line[8:], 16) for line in lines if line.startswith("Cap")}
    assert len(sets) == 5
    layers = layers_of(child)
    if "capabilities" not in layers:
        return
    if os.geteuid() != 0 and "userns" not in layers:
        # A process without any may not empty it, and gains nothing.
        left = sets.pop("CapBnd")
        assert left
        assert dict(child.walls.applied)["capabilities"].endswith("bounding set")
    else:
        assert dict(child.walls.applied)["capabilities"] == "none left"
    assert not any(sets.values()), sets


async def test_a_namespace_that_is_told_of_is_its_own(attacker: Attacker) -> None:
    names = list(OF_NAMESPACES.values())
    program = f"print(*(os.readlink('/proc/self/ns/' + name) for name in {names}))"
    child, (line,) = await said_by_it(attacker, program)
    here = [os.readlink(f"/proc/self/ns/{name}") for name in names]
    pairs = zip(OF_NAMESPACES, line.split(), here, strict=True)
    own = {layer for layer, its, ours in pairs if its != ours}
    assert own == OF_NAMESPACES.keys() & layers_of(child)


# mount(8): whatever lies in what a child sees, a program of root's or a device among it.
async def test_no_mount_of_a_fresh_root_has_set_user_id_files_or_devices(
    attacker: Attacker,
) -> None:
    child, lines = await said_by_it(
        attacker, "print(open('/proc/self/mountinfo').read())"
    )
    if "mountns" not in layers_of(child):
        return
    rows = [line.split() for line in lines if line]
    flags = {row[4]: set(row[5].split(",")) for row in rows}
    assert {"/", "/usr", "/dev/null", str(attacker.scratch.tmp)} <= flags.keys()
    assert [path for path, its in flags.items() if "nosuid" not in its] == []
    devices = {path for path, its in flags.items() if "nodev" not in its}
    assert [path for path in devices if not path.startswith("/dev/")] == []
    assert "/dev/shm" not in devices


@pytest.fixture
def cores() -> Iterator[str]:
    """The kernel's view of this process's core files, which may have any size."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    most = resource.RLIM_INFINITY if os.geteuid() == 0 else before[1]
    if most == 0:
        pytest.skip("no core file is written here anyhow")
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    yield " ".join(["unlimited" if most == resource.RLIM_INFINITY else str(most)] * 2)
    resource.setrlimit(resource.RLIMIT_CORE, before)


# attack 24: a core file holds what its process knew.
async def test_with_the_layer_of_limits_there_are_no_core_files(
    cores: str, attacker: Attacker
) -> None:
    program = (
        "print(*open('/proc/self/limits').read().split('file size')[2].split()[:2])"
    )
    child, (line,) = await said_by_it(attacker, program)
    # Without that layer it has what the host has, as all that its user may do.
    assert line == ("0 0" if "rlimits" in layers_of(child) else cores)
