"""The directories of a daemon, where another user has been there first."""

import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.config.directories import Places, make_directories

ANOTHER_USER = 4711


def places_with(scratch: Path, own: Path) -> Places:
    """Return places whose children's directory is borrowed."""
    return Places(f"{own}/run", f"{own}/state", f"{own}/run/control", str(scratch))


# attack 3, attack 4: what a link led to a moment ago says nothing of a directory.
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_borrowed_directory_is_judged_by_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, theirs = tmp_path / "scratch", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, ANOTHER_USER, ANOTHER_USER)
    scratch.symlink_to(tmp_path)
    look = os.stat
    looks: list[object] = []

    def look_and_swap(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = look(path, *args, **options)
        if os.fspath(path) == str(scratch):
            looks.append(path)
            if len(looks) == 2:  # the first one is that of `mkdir`
                scratch.unlink()
                theirs.rename(scratch)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", look_and_swap)
        with pytest.raises(PermissionError, match="it is a link, or open to others"):
            make_directories(places_with(scratch, tmp_path / "own"))


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_borrowed_directory_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(mode)
    places = places_with(scratch, tmp_path / "own")
    if mode == 0o700:
        make_directories(places)
    else:
        with pytest.raises(PermissionError, match="or open to others; remove it"):
            make_directories(places)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "state").mkdir(parents=True)
    os.chown(own / "state", ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(PermissionError, match=f"user {ANOTHER_USER} owns it"):
        make_directories(places_with(tmp_path / "scratch", own))
