"""A commit's own changes are no conflict later; the operator's still are."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_settlement as settlement_module
from supervisor.workspace.commit import CommitResult
from supervisor.workspace.linux import sync_file_system
from supervisor.workspace.upper import remove_committed
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write

pytestmark = pytest.mark.slow


def commit(
    scene: Scene, only: tuple[str, ...] = (), *, is_frozen: bool = False
) -> CommitResult:
    with scene.open() as workspace:
        return workspace.commit(selection(only=[*only]), is_frozen=is_frozen)


def conflicts(result: CommitResult) -> list[str]:
    return [os.fsdecode(found.path) for found in result.conflicts]


def names(base: Path) -> list[str]:
    return sorted(map(os.fsdecode, tree_of(base)))


@pytest.fixture
def filled(scene: Scene) -> Scene:
    """Return a workspace on a base with a directory ``d``, in which are some things."""
    for path in ("d/one", "d/two", "d/sub/three", "d/sub/four"):
        write(scene.base / path, "old\n")
    scene.make()
    return scene


# spec WS11
def test_the_rest_of_a_removed_directory_follows_a_part_of_it(filled: Scene) -> None:
    with filled.run() as top:
        shutil.rmtree(top / "d")
    filled.end_run()
    for path in ("d/one", "d/sub/three", "d/sub/four"):
        assert commit(filled, (f"/{path}",)).applied == (path.encode(),)
    assert commit(filled).applied == (b"d",)
    assert names(filled.base) == []


# spec WS11
def test_the_rest_of_a_directory_that_was_removed_step_by_step_follows_a_part(
    filled: Scene,
) -> None:
    for path in ("d/sub", "d"):
        with filled.run() as top:
            shutil.rmtree(top / path)
        filled.end_run()
    for path in ("d/sub/three", "d/one", "d/sub/four"):
        assert commit(filled, (f"/{path}",)).applied == (path.encode(),)
    assert commit(filled).applied == (b"d",)


# spec WS11, WS12a
@pytest.mark.parametrize("takes_its_place", [None, "file", "directory"])
def test_the_rest_of_a_removed_directory_follows_what_was_moved_out_of_it(
    filled: Scene, takes_its_place: str | None
) -> None:
    write(filled.base / "other/five")
    with filled.run() as top:
        (top / "d/sub").rename(top / "moved")
        shutil.rmtree(top / "d")
        if takes_its_place == "file":
            write(top / "d")
        elif takes_its_place == "directory":
            (top / "other").rename(top / "d")
    filled.end_run()
    assert b"moved" in commit(filled, ("/moved",)).applied
    assert commit(filled).conflicts == ()
    assert filled.rows() == []
    assert filled.seen() == tree_of(filled.base)


# spec WS10, WS12a
def test_a_part_of_a_removed_directory_comes_with_the_move_of_the_one_around(
    filled: Scene,
) -> None:
    with filled.run() as top:
        (top / "d").rename(top / "e")
        shutil.rmtree(top / "e/sub")
    filled.end_run()
    assert commit(filled, ("/e/sub/three",)).applied == (b"e", b"e/sub/three")
    assert names(filled.base) == ["e", "e/one", "e/sub", "e/sub/four", "e/two"]
    assert commit(filled).applied == (b"e/sub",)
    assert names(filled.base) == ["e", "e/one", "e/two"]


# spec WS11, WS12a
def test_what_a_later_run_changes_in_a_renamed_directory_is_no_conflict(
    filled: Scene,
) -> None:
    with filled.run() as top:
        (top / "d").rename(top / "e")
    filled.end_run()
    with filled.run() as top:
        write(top / "e/one", "edited\n")
        write(top / "e/new")
        shutil.rmtree(top / "e/sub")
    filled.end_run()
    assert commit(filled).conflicts == ()
    assert names(filled.base) == ["e", "e/new", "e/one", "e/two"]


# spec WS11, WS12a
def test_what_a_commit_has_moved_away_is_not_missed_by_the_next(filled: Scene) -> None:
    with filled.run() as top:
        (top / "d/one").chmod(0o600)
    filled.end_run()
    with filled.run() as top:
        (top / "d").rename(top / "e")
        (top / "d/one").mkdir(parents=True)
    filled.end_run()
    assert b"e" in commit(filled, ("/e",)).applied
    assert commit(filled).conflicts == ()
    assert (filled.base / "d/one").is_dir()


# spec WS11, WS12a
def test_a_new_directory_in_the_place_of_a_renamed_one_is_no_conflict(
    filled: Scene,
) -> None:
    (filled.base / "empty").mkdir()
    with filled.run() as top:
        (top / "empty").rename(top / "e")
    filled.end_run()
    with filled.run() as top:
        write(top / "new/file")
        (top / "new").rename(top / "e")
    filled.end_run()
    assert commit(filled).conflicts == ()
    assert filled.seen() == tree_of(filled.base)


# spec WS12a: the child has moved it, and not removed it.
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_directory_that_took_the_place_of_a_renamed_one_is_not_removed(
    filled: Scene, *, is_made_anew: bool
) -> None:
    with filled.run() as top:
        write(top / "d/new")
    filled.end_run()
    (filled.base / "d").rename(filled.base / "aside")
    write(filled.base / "d/six")
    with filled.run() as top:
        (top / "d").rename(top / "e")
        if is_made_anew:
            write(top / "d/seven")
    filled.end_run()
    with filled.open() as workspace:
        result = workspace.commit(selection(skips_conflicts=True))
    assert {"d" if not is_made_anew else "d/six", "e"} <= {*conflicts(result)}
    assert (filled.base / "d/six").exists()


# spec WS11, WS12a
def test_what_was_moved_after_a_commit_and_changed_again_is_no_conflict(
    filled: Scene,
) -> None:
    def change(top: Path) -> None:
        write(top / "d/sub/three", "twice\n")
        (top / "d").rename(top / "e")

    commit_of_running_child(filled, "d/sub/three", change)
    assert commit(filled).conflicts == ()
    assert (filled.base / "e/sub/three").read_text() == "twice\n"


# spec WS3c, WS11: a mount goes on to show a file that was replaced beneath it.
def test_a_look_at_a_running_child_takes_nothing_as_seen_that_it_may_not_see(
    filled: Scene,
) -> None:
    commit_of_running_child(filled, "d/one", lambda _: None)
    assert filled.rows() == []
    with filled.run() as top:
        assert (top / "d/one").exists()
        with filled.open() as workspace:
            lock = workspace.directory.lock_for("child")
        write(filled.base / "new", "operator's\n").rename(filled.base / "d/one")
        assert filled.rows() == []
        with (top / "d/one").open("a") as file:
            file.write("child's\n")
        os.close(lock)
    filled.end_run()
    if conflicts(commit(filled)) != ["d/one"]:
        assert "operator's\n" in (filled.base / "d/one").read_text()


# spec WS11: a conflict that is not settled lasts, however the directory is removed.
@pytest.mark.parametrize("way", ["removed", "in a renamed one", "renamed over"])
def test_a_directory_with_an_old_conflict_in_it_is_not_removed(
    filled: Scene, way: str
) -> None:
    write(filled.base / "other/five")
    with filled.run() as top:
        write(top / "d/sub/three", "edited\n")
    filled.end_run()
    write(filled.base / "d/sub/three", "operator's\n")
    with filled.run() as top:
        shutil.rmtree(top / "d/sub")
        if way == "in a renamed one":
            (top / "d").rename(top / "e")
        elif way == "renamed over":
            (top / "other").rename(top / "d/sub")
    filled.end_run()
    commit(filled)
    assert (filled.base / "d/sub/three").read_text() == "operator's\n"


# spec WS11
@pytest.mark.parametrize("is_before", [True, False])
def test_an_edit_beside_a_part_of_a_removed_directory_keeps_the_rest(
    filled: Scene, monkeypatch: pytest.MonkeyPatch, *, is_before: bool
) -> None:
    with filled.run() as top:
        shutil.rmtree(top / "d")
    filled.end_run()

    def edit_then_settle(*arguments: object) -> None:
        write(filled.base / "d/two", "operator's\n")
        remove_committed(*arguments)  # type: ignore[arg-type]

    if is_before:  # the commit records what it did
        monkeypatch.setattr(settlement_module, "remove_committed", edit_then_settle)
    assert commit(filled, ("/d/one",)).applied == (b"d/one",)
    if not is_before:
        write(filled.base / "d/two", "operator's\n")
    assert conflicts(commit(filled)) == ["d"]
    assert (filled.base / "d/two").read_text() == "operator's\n"


def commit_of_running_child(
    scene: Scene,
    made: str,
    change: Callable[[Path], object],
    edits: tuple[Callable[[Path], object], Callable[[Path], object]] = (str, str),
) -> None:
    """Have a child make a file that is committed while it runs, and then change more.

    Args:
        scene: whose child it is.
        made: the file.
        change: the child's work then.
        edits: the operator's work before the commit, and after it.
    """
    with scene.run() as top:
        write(top / made)
        with scene.open() as workspace:
            lock = workspace.directory.lock_for("child")
        edits[0](scene.base)
        assert made.encode() in commit(scene, (f"/{made}",), is_frozen=True).applied
        edits[1](scene.base)
        change(top)
        os.close(lock)
    scene.end_run()


# spec WS11: a commit moves on the times of the directories that it writes in.
@pytest.mark.parametrize("made", ["d/sub/new", "d/new", "d/new/sub/file"])
def test_a_directory_that_a_commit_wrote_in_is_removed_by_the_next(
    filled: Scene, made: str
) -> None:
    commit_of_running_child(filled, made, lambda top: shutil.rmtree(top / "d"))
    assert commit(filled).conflicts == ()
    assert names(filled.base) == []


# spec WS11
@pytest.mark.parametrize("path", ["d", "."])
def test_a_directory_that_a_commit_wrote_in_gets_its_mode_from_the_next(
    filled: Scene, path: str
) -> None:
    made = os.path.normpath(f"{path}/new")
    commit_of_running_child(filled, made, lambda top: (top / path).chmod(0o700))
    assert commit(filled).conflicts == ()
    assert (filled.base / path).stat().st_mode & 0o777 == 0o700


# spec WS11: what the child removed after a commit stays removed.
def test_a_directory_that_was_committed_and_made_anew_lacks_what_was_in_it(
    scene: Scene,
) -> None:
    def make_anew(top: Path) -> None:
        shutil.rmtree(top / "d")
        write(top / "d/e/two")

    scene.make()
    commit_of_running_child(scene, "d/e/one", make_anew)
    assert commit(scene).applied == (b"d/e/one", b"d/e/two")
    assert names(scene.base) == ["d", "d/e", "d/e/two"]
    write(scene.base / "d/three", "operator's\n")
    assert scene.rows() == []
    assert scene.seen() == tree_of(scene.base)


# spec WS11
def test_a_directory_of_two_commits_of_a_running_child_is_removed_by_the_next(
    scene: Scene,
) -> None:
    def commit_again(top: Path) -> None:
        write(top / "d/e/two")
        commit(scene, is_frozen=True)
        shutil.rmtree(top / "d")

    scene.make()
    commit_of_running_child(scene, "d/e/one", commit_again)
    assert commit(scene).conflicts == ()
    assert names(scene.base) == []


def made_anew(scene: Scene, mode: int) -> Scene:
    """Return a workspace in which a directory was removed and made anew."""
    with scene.run() as top:
        shutil.rmtree(top / "d")
        write(top / "d/new", "new\n")
        (top / "d").chmod(mode)
    scene.end_run()
    return scene


# spec WS10
def test_what_was_removed_in_a_directory_made_anew_stays_so_when_its_mode_is_committed(
    filled: Scene,
) -> None:
    made_anew(filled, 0o711)
    before = filled.seen()
    with filled.open() as workspace:
        chosen = selection(only=["/d"], but=["/d/?*"])
        assert workspace.commit(chosen).applied == (b"d",)
    assert filled.seen() == before
    assert commit(filled).conflicts == ()
    assert names(filled.base) == ["d", "d/new"]


# spec WS12
def test_what_the_operator_makes_in_a_directory_that_was_made_anew_shows_there(
    filled: Scene,
) -> None:
    made_anew(filled, 0o755)
    assert commit(filled).conflicts == ()
    write(filled.base / "d/another", "operator's\n")
    assert filled.rows() == []
    assert filled.seen() == tree_of(filled.base)


# spec WS12a
def test_a_new_directory_in_the_place_of_a_renamed_one_stays_new(
    filled: Scene,
) -> None:
    def rename_and_make_anew(top: Path) -> None:
        (top / "d").rename(top / "x")
        write(top / "d/new", "new\n")

    commit_of_running_child(filled, "d/sub/five", rename_and_make_anew)
    filled.rows()  # a look, which takes what was committed from the layer
    seen = filled.seen()
    assert {b"d/new", b"x/sub/five"} < seen.keys()
    assert b"d/one" not in seen
    assert commit(filled).conflicts == ()
    assert filled.seen() == seen == tree_of(filled.base)


# spec WS12: what was judged was another content.
def test_a_file_that_is_written_to_before_its_mode_is_set_is_a_conflict(
    filled: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled.run() as top:
        (top / "d/one").chmod(0o600)
    filled.end_run()

    def edit_then_sync(fd: int) -> None:
        monkeypatch.undo()
        (filled.base / "d/one").write_text("operator's\n")
        sync_file_system(fd)

    monkeypatch.setattr(commit_module, "sync_file_system", edit_then_sync)
    assert conflicts(commit(filled)) == ["d/one"]
    assert (filled.base / "d/one").stat().st_mode & 0o777 == 0o644


def make_another(base: Path) -> None:
    write(base / "d/another", "operator's\n")


def move_in(base: Path) -> None:
    (base / "aside").rename(base / "d/aside")


def set_mode(base: Path) -> None:
    (base / "d").chmod(0o711)


def set_mode_of_new(base: Path) -> None:
    (base / "d/new").chmod(0o711)


# spec WS11
@pytest.mark.parametrize(
    ("edit", "when"),
    [
        *itertools.product(
            (make_another, move_in, set_mode), ("before", "within", "after")
        ),
        (set_mode_of_new, "within"),
        (set_mode_of_new, "after"),
    ],
)
def test_what_the_operator_changed_in_such_a_directory_keeps_it(
    filled: Scene,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Path], None],
    when: str,
) -> None:
    write(filled.base / "aside/five")

    real = settlement_module.record_applied

    def edit_then_record(*arguments: Any) -> None:
        edit(filled.base)
        real(*arguments)

    edits = edit if when == "before" else str, edit if when == "after" else str
    if when == "within":  # the steps are done, and not recorded yet
        monkeypatch.setattr(settlement_module, "record_applied", edit_then_record)
    made = "d/new/file"
    commit_of_running_child(filled, made, lambda top: shutil.rmtree(top / "d"), edits)
    before = tree_of(filled.base)
    assert conflicts(commit(filled)) == ["d"]
    assert tree_of(filled.base) == before
