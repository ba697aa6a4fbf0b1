"""Files that the operator removes in the base, unrecorded, while a child runs.

In a user namespace the kernel does not say what a file of the layer was copied from.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.supervisor.workspace.scene import (
    Scene,
    is_in_user_namespace,
    run_as_a_user,
    selection,
    write,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def changed(scene: Scene) -> Scene:
    """Return a workspace with three files of the base changed and two renamed."""
    for name in ("edited", "d/edited", "old", "d/old", "removed"):
        write(scene.base / name, f"{name}\n")
    scene.make()
    return scene


def change(top: Path) -> None:
    """Do what the child does."""
    write(top / "edited", "new\n")
    write(top / "d/edited", "new\n")
    (top / "old").rename(top / "renamed")
    (top / "d/old").rename(top / "d/renamed")
    (top / "removed").unlink()


def commit(scene: Scene) -> tuple[list[bytes], list[bytes]]:
    """Return the paths of conflicts, and what a commit has applied without them."""
    scene.end_run()
    with scene.open() as workspace:
        result = workspace.commit(selection(skips_conflicts=True))
    return [one.path for one in result.conflicts], list(result.applied)


# spec WS11
def test_a_file_that_is_removed_after_it_was_edited_is_not_made_again(
    changed: Scene,
) -> None:
    with changed.run() as top:
        change(top)
        (changed.base / "edited").unlink()
    found, applied = commit(changed)
    assert found == [b"edited"]
    assert set(applied) == {b"d/edited", b"d/old", b"d/renamed", b"old", b"removed",
                            b"renamed"}  # fmt: skip
    assert not (changed.base / "edited").exists()
    assert (changed.base / "renamed").read_text() == "old\n"


# spec WS11
def test_a_directory_that_is_removed_after_a_write_in_it_is_not_made_again(
    changed: Scene,
) -> None:
    with changed.run() as top:
        write(top / "d/edited", "new\n")
        shutil.rmtree(changed.base / "d")
    found, applied = commit(changed)
    assert b"d" in found
    assert applied == []
    assert not (changed.base / "d").exists()


# spec WS11
def test_what_was_renamed_in_the_workspace_is_no_conflict(changed: Scene) -> None:
    with changed.run() as top:
        change(top)
    found, applied = commit(changed)
    assert (found, len(applied)) == ([], 7)


# spec WS11: it was copied from what the operator has removed, whatever it is called now
def test_what_was_renamed_and_edited_is_none_where_its_directory_is_as_it_was(
    changed: Scene,
) -> None:
    with changed.run() as top:
        change(top)
        write(top / "d/renamed", "new\n")
        write(changed.base / "operator's")
    found, applied = commit(changed)
    assert (found, len(applied)) == ([], 7)
    assert (changed.base / "d/renamed").read_text() == "new\n"


# spec WS3a, WS11
def test_the_same_goes_for_a_mount_of_a_user(tmp_path: Path) -> None:
    if os.geteuid() != 0 or is_in_user_namespace():
        pytest.skip("this is such a user")
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inner")
    run_as_a_user("pytest", *options, __file__)
