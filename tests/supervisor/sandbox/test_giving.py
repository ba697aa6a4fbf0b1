"""Giving a directory to a user: all files of its owner, at any depth."""

import os
from pathlib import Path

import pytest

from supervisor.sandbox import ownership
from supervisor.sandbox.scratch import remove_tree

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives things away"),
]

FIRST, SECOND = 1_500_000_001, 1_500_000_002


def owners(top: Path) -> dict[str, int]:
    found = {".": top.lstat().st_uid}
    for path in top.rglob("*"):
        found[str(path.relative_to(top))] = path.lstat().st_uid
    return found


def test_all_of_it_changes_hands_and_no_link_is_followed(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for name in ("a/b/c", "d"):
        (top / name).mkdir(parents=True)
    for name in ("file", "a/file", "a/b/c/file"):
        (top / name).touch()
    (top / "a" / "link").symlink_to(outside)
    (top / "d" / "link").symlink_to(outside / "file")
    for user in (FIRST, SECOND, 0):
        ownership.give([str(top)], user)
        assert set(owners(top).values()) == {user}
        assert set(owners(outside).values()) == {0}


def test_what_is_somebody_elses_in_there_stays_so(tmp_path: Path) -> None:
    # A hard link to a file of the host's, where the machine lets one be made.
    top = tmp_path / "top"
    top.mkdir()
    ownership.give([str(top)], FIRST)
    (tmp_path / "file").touch()
    os.link(tmp_path / "file", top / "name")
    ownership.give([str(top)], SECOND)
    assert owners(top) == {".": SECOND, "name": 0}


def test_the_user_passes_through_what_is_the_hosts_alone(tmp_path: Path) -> None:
    for mode in (0o700, 0o755):
        base = tmp_path / f"{mode:o}"
        base.mkdir()
        base.chmod(mode)
        for name in ("one", "other"):
            (base / name).mkdir()
        ownership.give([str(base / "one"), str(base / "other")], FIRST)
        shared = (0o710, ownership.KEEPER, FIRST) if mode == 0o700 else (mode, 0, 0)
        assert owned(base) == shared


def owned(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mode & 0o7777, found.st_uid, found.st_gid


def test_what_it_lies_in_is_kept_by_nobody_and_given_to_the_next(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    base = tmp_path / "base"
    (base / "own").mkdir(parents=True)
    base.chmod(0o700)
    fd = os.open(base, os.O_RDONLY)
    ownership.give_to_keeper(fd)
    assert ownership.is_kept(fd)
    assert owned(base)[:2] == (0o700, ownership.KEEPER)
    for user in (FIRST, SECOND):
        ownership.give([str(base / "own")], user)
        assert owned(base) == (0o710, ownership.KEEPER, user)
    os.close(fd)


def test_nothing_is_kept_where_it_could_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(ownership, "find_chown_fault", lambda _user: "no such user")
    ownership.give_to_keeper(fd)
    assert not ownership.is_kept(fd)
    os.close(fd)


# A root without capabilities passes where its user may; a sidecar's lies in two.
def test_who_stays_root_has_it_back(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    above, base, own = (tmp_path / name for name in ("a", "a/base", "a/base/own"))
    own.mkdir(parents=True)
    for path in (above, base):
        os.chown(path, ownership.KEEPER, FIRST)
        path.chmod(0o710)
    os.chown(tmp_path, ownership.KEEPER, -1)
    ownership.take_parents_from_keeper([str(own), str(tmp_path / "gone")])
    assert {owned(path) for path in (above, base)} == {(0o700, 0, os.getegid())}
    assert tmp_path.stat().st_uid == ownership.KEEPER  # that is none of its business


# attack 4: who may write what it lies in has put a link in the place of that.
def test_nothing_is_had_back_through_a_link(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "own").mkdir(parents=True)
    os.chown(base, ownership.KEEPER, -1)
    (tmp_path / "link").symlink_to("base")
    ownership.take_parents_from_keeper([str(tmp_path / "link" / "own")])
    assert base.stat().st_uid == ownership.KEEPER


def test_what_is_the_users_already_is_passed_over(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    ownership.give([str(top)], FIRST)
    (top / "new").touch()
    ownership.give([str(top)], FIRST)
    assert owners(top) == {".": FIRST, "new": 0}


def test_a_link_in_its_place_is_none(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "link").symlink_to("to")
    with pytest.raises(OSError, match="symbolic links"):
        ownership.give([str(tmp_path / "link")], FIRST)
    assert owners(tmp_path / "to") == {".": 0}


# attack 4: who may write what it lies in has put a link in the place of that.
def test_a_link_on_the_way_to_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "to" / "run").mkdir(parents=True)
    (tmp_path / "to" / "run" / "file").touch()
    (tmp_path / "base").symlink_to("to")
    with pytest.raises(OSError, match="symbolic links") as caught:
        ownership.give([str(tmp_path / "base" / "run")], FIRST)
    assert caught.value.filename == str(tmp_path / "base" / "run")
    assert set(owners(tmp_path / "to").values()) == {0}


# attack 11: deeper than any recursion, and than any path is long
@pytest.mark.slow
def test_no_depth_is_too_deep(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    try:
        ownership.give([str(top)], FIRST)
        assert os.fstat(here).st_uid == FIRST
    finally:
        os.close(here)
        assert remove_tree(top) is None  # deeper than what removes others goes


def test_what_keeps_a_user_from_its_own_is_found(tmp_path: Path) -> None:
    user = os.getegid()  # the group has the user's number
    middle, own = tmp_path / "top" / "middle", tmp_path / "top" / "middle" / "own"
    own.mkdir(parents=True)
    top = middle.parent
    for mode, closed in ((0o700, str(middle)), (0o710, ""), (0o701, "")):
        middle.chmod(mode)
        assert ownership.find_closed_parent(user, str(own), str(top)) == closed
    middle.chmod(0o700)
    top.chmod(0o700)
    assert ownership.find_closed_parent(user, str(own), str(top)) == str(
        middle
    )  # the nearest
    assert ownership.find_closed_parent(user, str(middle), str(top)) == str(top)
    assert not ownership.find_closed_parent(user, str(own), str(top), mapped=True)
    middle.chmod(0o077)
    assert ownership.find_closed_parent(user, str(own), str(top), mapped=True) == str(
        middle
    )
    middle.chmod(0o700)
    os.chown(middle, FIRST, 0)
    assert ownership.find_closed_parent(SECOND, str(own), str(top), mapped=True) == str(
        middle
    )
    middle.chmod(0o710)
    assert not ownership.find_closed_parent(SECOND, str(own), str(top), mapped=True)
    assert ownership.find_closed_parent(SECOND, str(own), str(top)) == str(middle)
    (tmp_path / "other").mkdir()
    assert not ownership.find_closed_parent(user, str(own), str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        ownership.find_closed_parent(user, str(own), str(tmp_path / "gone"))
