"""The effect of the rules: mounts, their places, and hidden paths."""

import os
from pathlib import Path

import pytest

from supervisor.sandbox.host_directories import (
    HiddenDirectories,
    Location,
    locations_of,
)
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.sandbox.view import PathRule, View
from supervisor.sandbox.visible import view_of

WORK = PathRule("/w", "execute", mapped=True)
BASE = Location("/w/tmp/base", (1, 2))
STATE = Location("/w/state", (1, 3))


def trees(view: View) -> list[tuple[str, str, object]]:
    """Return what is mounted, and what of that is hidden."""
    return [(os.fsdecode(a), b, c) for a, b, c in view.mounts()]


def test_what_is_hidden_comes_after_what_it_lies_in_and_before_what_lies_in_it() -> (
    None
):
    own = (PathRule("/w/tmp/base/tmp", "write"), PathRule("/w/tmp/base/run", "write"))
    view = View((*own, WORK), (), "/w").hide((BASE, STATE))
    assert trees(view) == [
        ("/w", "execute", True),
        ("/w/state", "hide", (1, 3)),
        ("/w/tmp/base", "hide", (1, 2)),
        ("/w/tmp/base/run", "write", False),
        ("/w/tmp/base/tmp", "write", False),
    ]


@pytest.mark.parametrize("kind", ["execute", "read"])
def test_what_is_hidden_is_there_again_if_a_rule_names_it(kind: str) -> None:
    # Without what hides it, it would be there with what it lies in.
    rules = (WORK, PathRule("/w/state/bin", kind, mapped=True))
    view = View(rules, (), "/w").hide((STATE,))
    assert trees(view)[1:] == [
        ("/w/state", "hide", (1, 3)),
        ("/w/state/bin", kind, True),
    ]
    assert len(trees(View(rules, (), "/w"))) == 1


def test_what_lies_in_nothing_that_is_seen_is_not_hidden() -> None:
    view = View(
        (PathRule("/w/tmp/base/tmp", "write"), PathRule("/w/tmp", "list")), (), "/x"
    )
    assert trees(view.hide((BASE, STATE))) == [("/w/tmp/base/tmp", "write", False)]


@pytest.mark.parametrize("kind", ["execute", "write"])
def test_a_working_directory_that_is_hidden_to_others_is_there_as_it_is(
    kind: str,
) -> None:
    rules = (
        PathRule("/w/state", kind, mapped=True),
        PathRule("/w/other", kind, mapped=True),
    )
    view = View(rules, (), "/w/state").hide((STATE,))
    assert trees(view) == [("/w/other", kind, True), ("/w/state", kind, False)]


def test_it_is_hidden_by_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/x/state": frozenset({"/w/state"})}
    monkeypatch.setattr("supervisor.sandbox.view.other_names", names.__getitem__)
    view = View((WORK,), (), "/w").hide((Location("/x/state", (1, 3)),))
    assert trees(view)[1:] == [("/w/state", "hide", (1, 3))]


def test_landlock_hears_nothing_of_it() -> None:
    view = View((WORK,), (), "/w").hide((BASE, STATE))
    assert view.landlock() == ((b"/w", "execute"),)


def test_links_are_made_in_what_hides_but_not_in_what_is_seen() -> None:
    links = (("/w/a", "b"), ("/w/state/a", "b"), ("/w/state/bin/a", "b"), ("/a", "b"))
    rules = (WORK, PathRule("/w/state/bin", "execute", mapped=True))
    view = View(rules, links, "/w").hide((STATE,))
    made = view.symlinks(view.mounts())
    assert made == ((b"/a", b"b"), (b"/w/state/a", b"b"))


def test_what_is_everybodys_keeps_its_owners(tmp_path: Path) -> None:
    for mode, mapped in ((0o1777, False), (0o777, True), (0o1755, True), (0o700, True)):
        tmp_path.chmod(mode)
        for own in ((), (str(tmp_path / "own"),)):
            rules = view_of("/bin/true", ShownFiles(str(tmp_path), own=own)).rules
            assert PathRule(str(tmp_path), "execute", mapped=mapped) in rules


# ------------------------------------------------------------------- where it is now


def test_a_directory_is_where_it_is_now(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    for name in ("a/state", "later"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "later").rmdir()
    (tmp_path / "link").symlink_to("a")
    apart = HiddenDirectories(
        (str(tmp_path / "link" / "state"), str(tmp_path / "later"))
    )
    found = (tmp_path / "a" / "state").stat()
    identity = (found.st_dev, found.st_ino)
    assert apart.locations() == (Location(str(tmp_path / "a" / "state"), identity),)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a" / "state").mkdir(parents=True)
    (tmp_path / "later").mkdir()
    first, second = apart.locations()
    assert first == Location(str(tmp_path / "b" / "state"), identity)
    assert second.path == str(tmp_path / "later")
    assert len(list(apart.descriptors())) == 2
    apart.close()
    assert apart.locations() == ()


def test_what_is_removed_lies_nowhere(tmp_path: Path) -> None:
    for name in ("gone", "gone (deleted)"):
        (tmp_path / "gone").mkdir()
        fd = os.open(tmp_path / "gone", os.O_PATH)
        (tmp_path / "gone").rename(tmp_path / name)
        assert [found.path for found in locations_of(-1, fd)] == [str(tmp_path / name)]
        (tmp_path / name).rmdir()
        assert locations_of(-1, fd) == ()
        os.close(fd)
