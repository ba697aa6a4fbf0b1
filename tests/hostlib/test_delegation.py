"""A delegated group: the host moves aside, and what bounds children is given on."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.linux import delegation
from hostlib.linux.delegation import OWN, make_room, place_of_children
from supervisor.sandbox import attempts
from supervisor.sandbox.groups import Hierarchy, hierarchies


@pytest.fixture
def delegated(tmp_path: Path) -> Path:
    """A directory with a delegated group's files, and the mark."""
    top = tmp_path / "unit"
    top.mkdir()
    (top / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (top / "cgroup.subtree_control").write_text("")
    try:
        os.setxattr(top, "user.delegate", b"1")
    except OSError as why:
        if why.errno == errno.EOPNOTSUPP:
            pytest.skip("no extended attributes here")
        raise
    return top


def test_the_host_moves_aside_and_controllers_are_given_on(
    delegated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[tuple[str, str]] = []

    def write(path: str, text: str) -> None:  # as the kernel: what is given on is told
        wrote.append((path, text))
        if path.endswith("subtree_control"):
            with open(path, "a", encoding="ascii") as file:
                file.write(f"{text[1:]} ")

    monkeypatch.setattr(delegation, "write", write)
    assert make_room(str(delegated), (11, 12)) == ("memory", "pids", "cpu")
    aside, control = f"{delegated}/{OWN}/cgroup.procs", "cgroup.subtree_control"
    assert wrote == [
        (aside, "11"),
        (aside, "12"),  # before controllers are: or the kernel refuses them
        *((f"{delegated}/{control}", f"+{name}") for name in ("memory", "pids", "cpu")),
    ]
    # Children's groups are made beside the host's own, not in it.
    assert place_of_children(f"{delegated}/{OWN}") == str(delegated)
    assert place_of_children(str(delegated)) == str(delegated)


def test_nobody_elses_group_is_touched(delegated: Path) -> None:
    os.removexattr(delegated, "user.delegate")
    assert make_room(str(delegated), (os.getpid(),)) == ()
    assert sorted(os.listdir(delegated)) == [
        "cgroup.controllers",
        "cgroup.subtree_control",
    ]
    (delegated / OWN).mkdir()
    assert place_of_children(f"{delegated}/{OWN}") == f"{delegated}/{OWN}"


def test_without_controllers_nobody_moves(delegated: Path) -> None:
    (delegated / "cgroup.controllers").write_text("cpuset io\n")
    assert make_room(str(delegated), (os.getpid(),)) == ()
    assert not (delegated / OWN).exists()


# A host has them given on when it starts; who only looks changes nothing.
def test_what_would_be_given_on_is_told_as_not_tried(
    delegated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (Hierarchy("v2", str(delegated)),)
    monkeypatch.setattr(attempts, "hierarchies", lambda: own)
    said = "a host has memory, pids, cpu given on, which was not tried"
    assert attempts.cgroup() == f"{delegated}: bounds nothing; {said}"
    os.removexattr(delegated, "user.delegate")
    assert attempts.cgroup() == f"{delegated}: bounds nothing"


def test_what_the_kernel_refuses_is_left(delegated: Path) -> None:
    # A plain directory has no cgroup.procs to be written: nobody is moved.
    assert make_room(str(delegated), (os.getpid(),)) == ()
    assert (delegated / "cgroup.subtree_control").read_text() == ""


def test_groups_are_made_where_there_is_room(tmp_path: Path, delegated: Path) -> None:
    (delegated / OWN).mkdir()
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(f"30 1 0:27 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    groups.write_text(f"0::/unit/{OWN}\n")
    assert hierarchies(str(mounts), str(groups)) == (Hierarchy("v2", str(delegated)),)


# The real kernel, with whatever controller its version 2 has here.
@pytest.fixture
def real() -> Iterator[tuple[Path, str]]:
    """A group of version 2 that is marked as delegated, and one of its controllers."""
    places = [Path(each.group) for each in hierarchies() if each.kind == "v2"]
    if not places or os.geteuid() != 0:
        pytest.skip("takes root and a hierarchy of version 2")
    top = places[0] / f"sandhost-test-{os.getpid()}"
    try:
        top.mkdir()
    except OSError as why:
        pytest.skip(f"no group can be made: {why.strerror}")
    control = places[0] / "cgroup.subtree_control"
    given = control.read_text().split()
    there = (places[0] / "cgroup.controllers").read_text().split()
    try:
        if not there:
            pytest.skip("this hierarchy has no controllers")
        if there[0] not in given:
            control.write_text(f"+{there[0]}")
        os.setxattr(top, "user.delegate", b"1")
        yield top, there[0]
    finally:
        for inner in (*top.glob("*/"), top):
            inner.rmdir()
        if there and there[0] not in given:
            control.write_text(f"-{there[0]}")


PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from hostlib.linux import delegation
from supervisor.sandbox import attempts
place, controller = sys.argv[1:]
Path(place, "cgroup.procs").write_text(str(os.getpid()))
beside = subprocess.Popen(["sleep", "100"])
try:
    print(delegation.make_room(place, (os.getpid(), beside.pid), (controller,)))
    for pid in (os.getpid(), beside.pid):
        (line,) = [x for x in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
                   if x.startswith("0::")]
        print(line.rpartition("/")[2])
    child = Path(place, "child")
    child.mkdir()
    print(controller in (child / "cgroup.controllers").read_text().split())
finally:
    beside.kill()
    beside.wait()
"""


def test_a_real_group_gives_its_controllers_on(real: tuple[Path, str]) -> None:
    top, controller = real
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(top), controller],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"('{controller}',)", OWN, OWN, "True"]
