"""Groups of one child: in a delegated hierarchy (played), bare, and absent."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hostlib.user_values import Limits
from supervisor.sandbox.groups import (
    MOST_TRIED,
    PREFIX,
    Hierarchy,
    Reserve,
    hierarchies,
    make,
    remove_stale,
)


@pytest.fixture
def reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reserve:
    """Groups of a host beneath `tmp_path`, in a hierarchy of `pids` alone."""
    among = (Hierarchy("pids", str(tmp_path)),)
    monkeypatch.setattr("supervisor.sandbox.groups.hierarchies", lambda: among)
    return Reserve()


def test_a_delegated_group_has_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def mkdir(path: str, *rest: Any) -> None:  # as the kernel: the files come with it
        real(path, *rest)
        for name in (
            "cgroup.procs",
            "cgroup.kill",
            "memory.max",
            "pids.max",
            "cpu.max",
        ):
            Path(path, name).touch()

    monkeypatch.setattr(os, "mkdir", mkdir)
    top = tmp_path / "top"
    real(top)
    groups = make(
        "c1",
        Limits(memory=1 << 20, processes=7, cpus=0.5),
        among=(Hierarchy("v2", str(top)),),
    )
    (path,) = map(Path, groups.made)
    assert path.name.startswith(PREFIX)
    assert groups.procs() == (f"{path}/cgroup.procs",)
    assert (path / "memory.max").read_text() == "1048576"
    assert (path / "pids.max").read_text() == "7"
    assert (path / "cpu.max").read_text() == "50000 100000"
    assert groups.keeps_cpus


def test_a_joining_thread_moves_itself_alone_where_that_is_faster(
    tmp_path: Path,
) -> None:
    among = (Hierarchy("v2", str(tmp_path)), Hierarchy("pids", str(tmp_path / "1")))
    (tmp_path / "1").mkdir()
    groups = make("c1", Limits(), among=among)
    new, old = groups.made
    assert groups.procs() == (f"{new}/cgroup.procs", f"{old}/tasks")


def test_a_group_without_controllers_is_still_a_group(tmp_path: Path) -> None:
    among = (Hierarchy("v2", str(tmp_path)),)
    groups = make("c1", Limits(memory=1 << 20), among=among)
    assert len(groups.made) == 1
    assert not groups.why_not
    groups.remove()
    assert list(tmp_path.iterdir()) == []


# Version 2 in the real kernel, with whatever controllers it has here: cgroup.kill is in
# each of its groups.
def test_what_is_still_in_a_group_is_ended_with_it() -> None:
    among = tuple(each for each in hierarchies() if each.kind == "v2")
    groups = make(f"test-{os.getpid()}", Limits(), among=among)
    if not groups.made:
        pytest.skip(groups.why_not)
    (path,) = map(Path, groups.made)
    try:
        if not (path / "cgroup.kill").exists():
            pytest.skip("takes Linux 5.14")
        with subprocess.Popen(["sleep", "1000"], start_new_session=True) as somebody:
            try:
                (path / "cgroup.procs").write_text(str(somebody.pid))
                groups.remove()
                assert somebody.wait(timeout=60) == -signal.SIGKILL
            finally:
                somebody.kill()
        assert groups.remove()
        assert not path.exists()
    finally:
        groups.remove()


def test_no_hierarchy_and_a_closed_one_are_reasons(tmp_path: Path) -> None:
    assert make("c1", Limits(), among=()).why_not == "no hierarchy of groups is mounted"
    gone = Hierarchy("pids", str(tmp_path / "gone"))
    assert make("c1", Limits(), among=(gone,)).why_not == (
        "pids: No such file or directory"
    )


def test_the_own_groups_are_found_in_both_versions(tmp_path: Path) -> None:
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(
        "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "31 23 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "32 23 0:28 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 23 0:29 / /proc rw - proc proc rw\n"
        # Groups beneath, or beside, the own ones: no way to these from there.
        "34 23 0:26 /d/below /mnt/v2 rw - cgroup2 cgroup2 rw\n"
        "35 23 0:27 /elsewhere /mnt/pids rw - cgroup cgroup rw,pids\n"
    )
    groups.write_text("3:pids:/a\n2:memory:/box/b\n1:cpu:/c\n0::/d\n")
    assert hierarchies(str(mounts), str(groups)) == (
        Hierarchy("v2", "/sys/fs/cgroup/unified/d"),
        Hierarchy("memory", "/sys/fs/cgroup/memory/b"),
        Hierarchy("pids", "/sys/fs/cgroup/pids/a"),
    )
    assert hierarchies(str(tmp_path / "none"), str(groups)) == ()


# attack 39: what a host that is gone has left; a living one's is its own business.
def test_groups_of_hosts_that_are_gone_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"{PREFIX}{pid}-child-1" for pid in (ended.pid, os.getpid())]
    for name in (*names, "somebodys"):
        (tmp_path / name).mkdir()
    among = (Hierarchy("pids", str(tmp_path)),)
    assert remove_stale(among) == 1
    assert sorted(os.listdir(tmp_path)) == sorted([names[1], "somebodys"])
    assert remove_stale(among) == 0


# Somebody has mounted one in a directory of his own.
def test_a_hierarchy_that_may_not_be_looked_into_is_passed_over() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    # Not pytest's own, into which root lets nobody.
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        where = Path(name)
        where.chmod(0o777)
        (where / f"{PREFIX}{ended.pid}-child-1").mkdir()
        closed = where / "closed"
        (closed / "mount").mkdir(parents=True)
        closed.chmod(0)
        among = tuple(
            Hierarchy("pids", str(path)) for path in (closed / "mount", where)
        )
        own = os.geteuid()
        try:
            os.seteuid(own or 65534)  # root may look everywhere
            assert remove_stale(among) == 1
        finally:
            os.seteuid(own)
            closed.chmod(0o700)


def test_the_time_of_processors_has_a_group_of_its_own_only_if_it_is_limited(
    tmp_path: Path,
) -> None:
    among = (Hierarchy("cpu", str(tmp_path)),)
    assert make("c1", Limits(), among=among).made == []
    groups = make("c1", Limits(cpus=1.5), among=among)
    assert len(groups.made) == 1
    assert not groups.keeps_cpus  # its files are not there: nothing was bounded


def test_the_next_childs_groups_are_made_when_a_next_one_is_likely(
    tmp_path: Path, reserve: Reserve
) -> None:
    reserve.take("c1", Limits())
    assert reserve.restock() is None  # `run` has one child
    reserve.take("c2", Limits())
    spare = reserve.restock()
    assert spare is not None
    assert reserve.restock() is None
    (tmp_path / Path(spare.made[0]).name / "pids.max").touch()
    limited = reserve.take("c4", Limits(cpus=0.5))  # takes no group without it
    assert limited is not spare
    assert reserve.take("c5", Limits(processes=9)) is spare
    assert Path(spare.made[0], "pids.max").read_text() == "9"
    again = reserve.restock()
    assert again is not None
    (path,) = again.made
    assert path not in spare.made
    reserve.close()
    assert not Path(path).exists()


def test_groups_that_are_gone_meanwhile_are_made_anew(
    tmp_path: Path, reserve: Reserve
) -> None:
    for name in ("c1", "c2"):
        reserve.take(name, Limits())
    spare = reserve.restock()
    assert spare is not None
    os.rmdir(spare.made[0])
    taken = reserve.take("c3", Limits())
    assert taken is not spare
    assert Path(taken.made[0]).is_dir()


def test_a_host_that_is_moved_finds_its_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("here", "there")]
    for place in places:
        place.mkdir()
    own = tmp_path / "own"
    monkeypatch.setattr("supervisor.sandbox.groups.OWN_GROUPS", str(own))
    found = iter([(Hierarchy("pids", str(place)),) for place in places])
    monkeypatch.setattr("supervisor.sandbox.groups.hierarchies", lambda: next(found))
    reserve = Reserve()
    for place in places:
        own.write_text(f"4:pids:/{place.name}\n")
        for number in range(2):  # looked up once
            (path,) = reserve.take(f"{place.name}-{number}", Limits()).made
            assert Path(path).parent == place  # earlier groups are still there


def test_a_spare_without_a_group_that_there_could_be_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    among = tuple(Hierarchy(kind, str(tmp_path / kind)) for kind in ("cpu", "pids"))
    for hierarchy in among:
        Path(hierarchy.group).mkdir()
    monkeypatch.setattr("supervisor.sandbox.groups.hierarchies", lambda: among)
    reserve = Reserve()
    for name in ("c1", "c2"):
        assert (
            reserve.take(name, Limits())
            .kinds.keys()
            .isdisjoint({str(tmp_path / "cpu")})
        )
    spare = reserve.restock()
    assert spare is not None
    limited = reserve.take("c3", Limits(processes=5))
    assert set(limited.kinds.values()) == {"cpu", "pids"}
    assert reserve.take("c4", Limits()) is spare
    # Somebody had one: from now on the next child's groups have it as well.
    spare = reserve.restock()
    assert spare is not None
    assert set(spare.kinds.values()) == {"cpu", "pids"}
    assert reserve.take("c5", Limits(processes=5)) is spare
    reserve.close()


def test_what_somebody_still_dies_in_is_removed_later(
    tmp_path: Path, reserve: Reserve
) -> None:
    made = [reserve.take(name, Limits()) for name in ("c1", "c2")]
    held = [Path(groups.made[0], "somebody") for groups in made]
    for path in held:
        path.touch()  # rmdir(2) fails, as it does for a group that is not empty
    for groups in made:
        reserve.give_back(groups)
    assert not reserve.tidy()
    held[0].unlink()
    assert not reserve.tidy()
    held[1].unlink()
    assert reserve.tidy()
    assert os.listdir(tmp_path) == []


def test_nobody_waits_for_a_group_that_stays(
    reserve: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3 * MOST_TRIED):
        groups = reserve.take(f"c{number}", Limits())
        Path(groups.made[0], "somebody").touch()
        reserve.give_back(groups)
    tried: list[str] = []
    real = os.rmdir

    def rmdir(path: str) -> None:
        tried.append(path)
        real(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert not reserve.tidy()
    assert len(tried) == MOST_TRIED
