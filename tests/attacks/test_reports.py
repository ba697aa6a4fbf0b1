"""What a child is said to run in, compared with what the kernel says of it.

What it is: the report of a child's walls, and what ``/proc`` shows of the same child.  What
it is not: attacks on these walls (``test_walls``).
"""

import os

from supervisor.child import Child
from tests.attacks.conftest import WALLS, only
from tests.attacks.test_walls import Attacker, attacker

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
        # Who has none may not empty it, and gets nothing by it.
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
