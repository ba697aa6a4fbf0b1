"""A path that the operator changed as well is never overwritten."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_plan as plan_module
from supervisor.workspace import commit_settlement as settlement_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace.commit import CommitResult, Committer, UnfinishedCommitError
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.linux import (
    read_birth_time_ns,
    rename,
    sync_file_system,
)
from supervisor.workspace.record import RecordFiles
from supervisor.workspace.selection import NoMatchError
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="others rename no directory")


def commit(scene: Scene, **patterns: list[str] | bool) -> CommitResult:
    with scene.open() as workspace:
        return workspace.commit(selection(**patterns))


def conflicts(result: CommitResult) -> list[str]:
    return [os.fsdecode(found.path) for found in result.conflicts]


@pytest.fixture
def edited(scene: Scene) -> Scene:
    """Return a workspace in which ``a`` was edited and ``b`` was made."""
    write(scene.base / "a", "old\n")
    write(scene.base / "c", "old\n")
    scene.make()
    with scene.run() as top:
        write(top / "a", "new\n")
        write(top / "b", "new\n")
    return scene


# spec WS11
def test_a_file_that_both_changed_refuses_the_whole_commit(edited: Scene) -> None:
    write(edited.base / "a", "operator's\n")
    before = tree_of(edited.base)
    result = commit(edited)
    assert conflicts(result) == ["a"]
    assert result.applied == ()
    assert result.is_refused
    assert tree_of(edited.base) == before


# spec WS11
def test_conflicts_that_are_skipped_stay_in_the_workspace(edited: Scene) -> None:
    write(edited.base / "a", "operator's\n")
    result = commit(edited, skips_conflicts=True)
    assert conflicts(result) == ["a"]
    assert result.applied == (b"b",)
    assert result.left == (b"a",)
    assert (edited.base / "a").read_text() == "operator's\n"
    assert edited.rows() == [("a", "modified")]


# spec WS11
def test_the_workspace_s_side_wins_where_it_is_named(edited: Scene) -> None:
    write(edited.base / "a", "operator's\n")
    assert commit(edited, theirs=["a"]).applied == (b"a", b"b")
    assert (edited.base / "a").read_text() == "new\n"


# spec WS11
def test_the_base_s_side_wins_where_it_is_named(edited: Scene) -> None:
    write(edited.base / "a", "operator's\n")
    assert commit(edited, mine=["a"]).applied == (b"b",)
    assert (edited.base / "a").read_text() == "operator's\n"
    assert edited.rows() == []
    assert edited.seen() == tree_of(edited.base)


# spec WS11
@pytest.mark.parametrize("is_removed", [False, True])
def test_the_base_s_side_cannot_be_shown_through_a_directory_made_anew(
    scene: Scene, is_removed: bool
) -> None:
    write(scene.base / "d/a", "old\n")
    scene.make()
    with scene.run() as top:
        shutil.rmtree(top / "d")
        (top / "d").mkdir()
        if not is_removed:
            write(top / "d/a", "new\n")
    seen = scene.seen()
    with pytest.raises(WorkspaceError, match="its directory was made anew or removed"):
        commit(scene, mine=["d/a"])
    assert scene.seen() == seen
    assert (scene.base / "d/a").read_text() == "old\n"


# spec WS11
def test_an_edit_between_the_steps_and_their_record_is_a_conflict(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = settlement_module.record_applied

    def edit_then_record(*arguments: Any) -> None:
        write(edited.base / "a", "operator's\n")  # in place, and after the exchange
        real(*arguments)

    with edited.run() as top, edited.open() as workspace:
        lock = workspace.directory.lock_for("child")
        monkeypatch.setattr(settlement_module, "record_applied", edit_then_record)
        assert workspace.commit(selection(), is_frozen=True).applied == (b"a", b"b")
        write(top / "a", "newer\n")
        os.close(lock)
    edited.end_run()
    assert conflicts(commit(edited)) == ["a"]
    assert (edited.base / "a").read_text() == "operator's\n"


# spec WS11
def test_what_a_commit_of_a_running_child_wrote_is_no_conflict(scene: Scene) -> None:
    scene.make()
    with scene.run() as top:
        write(top / "d/e/a", "one\n")
        with scene.open() as workspace:
            lock = workspace.directory.lock_for("child")
            assert workspace.commit(selection(), is_frozen=True).applied
        (top / "d/e").rename(top / "f")
        write(top / "d/new")
        os.close(lock)
    scene.end_run()
    assert commit(scene).conflicts == ()
    assert tree_of(scene.base).keys() == {b"d", b"d/new", b"f", b"f/a"}


# spec WS11
def test_a_change_before_the_child_s_first_write_is_no_conflict(scene: Scene) -> None:
    write(scene.base / "a", "old\n")
    scene.make()
    with scene.run() as top:
        write(scene.base / "a", "operator's\n")
        _tick(scene)
        write(top / "a", "new\n")
    assert commit(scene).applied == (b"a",)


# spec WS11
def test_a_change_after_the_child_s_first_write_is_one_without_a_record(
    scene: Scene,
) -> None:
    write(scene.base / "a", "old\n")
    scene.make()
    with scene.run() as top:
        write(top / "a", "new\n")
        write(scene.base / "a", "operator's\n")
    assert conflicts(commit(scene)) == ["a"]


# spec WS11
def test_what_was_removed_in_the_base_is_not_made_again(edited: Scene) -> None:
    (edited.base / "a").unlink()
    assert conflicts(commit(edited)) == ["a"]


# spec WS11
def test_what_both_made_is_a_conflict(edited: Scene) -> None:
    write(edited.base / "b", "operator's\n")
    assert conflicts(commit(edited)) == ["b"]


# spec WS11
def test_what_conflicts_in_a_removed_directory_keeps_the_whole_of_it(
    scene: Scene,
) -> None:
    for name in ("d/one", "d/sub/two", "other"):
        write(scene.base / name)
    scene.make()
    with scene.run() as top:
        for name in ("d/one", "d/sub/two", "other"):
            (top / name).unlink()
        (top / "d/sub").rmdir()
        (top / "d").rmdir()
    write(scene.base / "d/sub/two", "operator's\n")
    result = commit(scene, skips_conflicts=True)
    assert conflicts(result) == ["d"]
    assert result.applied == (b"other",)
    assert (scene.base / "d/one").exists()


# spec WS11
def test_a_removed_directory_is_in_conflict_also_with_a_record(scene: Scene) -> None:
    write(scene.base / "d/one")
    scene.make()
    with scene.run() as top:
        (top / "d/one").unlink()
        (top / "d").rmdir()
    assert scene.rows() == [("d", "deleted")]  # a look, which records
    write(scene.base / "d/two")
    assert conflicts(commit(scene)) == ["d"]


# spec WS12a
def test_a_renamed_directory_is_in_conflict_if_its_old_path_is_another(
    scene: Scene,
) -> None:
    write(scene.base / "d/one")
    scene.make()
    with scene.run() as top:
        (top / "d").rename(top / "e")
    (scene.base / "d").rename(scene.base / "aside")
    write(scene.base / "d/one", "operator's\n")
    # The operator's new directory, which the child's whiteout hides, is kept as well.
    assert conflicts(commit(scene)) == ["d", "e"]


# spec WS11, WS12a
def test_a_new_directory_at_the_old_place_of_a_renamed_one_makes_no_conflict(
    scene: Scene,
) -> None:
    write(scene.base / "d/one")
    scene.make()
    with scene.run() as top:
        (top / "d").rename(top / "e")
        (top / "d").mkdir()
    scene.rows()
    with scene.run() as top:
        (top / "d").rmdir()
        shutil.rmtree(top / "e")
    assert commit(scene).conflicts == ()
    assert tree_of(scene.base) == {}


# spec WS11, WS12a
@of_root
def test_the_base_s_side_of_a_directory_that_was_renamed_in_a_renamed_one(
    scene: Scene,
) -> None:
    write(scene.base / "m/d/in/one")
    write(scene.base / "two")
    before = tree_of(scene.base / "m")
    scene.make()
    with scene.run() as top:
        (top / "m/d").rename(top / "m/e")
        (top / "m/e/in").rename(top / "m/e/inner")
        write(top / "two", "new\n")
    result = commit(scene, mine=["/m/"])
    assert (result.applied, result.conflicts) == ((b"two",), ())
    assert tree_of(scene.base / "m") == before
    assert scene.seen() == tree_of(scene.base)
    assert scene.rows() == []


# spec WS11
def test_a_side_is_chosen_by_a_pattern_of_directories(scene: Scene) -> None:
    write(scene.base / "d/one", "old\n")
    scene.make()
    with scene.run() as top:
        shutil.rmtree(top / "d")
        write(top / "two")
    scene.end_run()
    write(scene.base / "d/one", "operator's\n")
    assert conflicts(commit(scene)) == ["d"]
    result = commit(scene, mine=["d/"])
    assert (result.applied, result.conflicts) == ((b"two",), ())
    assert scene.seen() == tree_of(scene.base)
    assert (scene.base / "d/one").read_text() == "operator's\n"


# spec WS13
def test_a_set_group_id_that_its_parent_in_the_base_lacks_is_guarded(
    scene: Scene,
) -> None:
    write(scene.base / "plain/file")
    write(scene.base / "shared/file").parent.chmod(0o2775)
    scene.make()
    with scene.run() as top:
        (top / "plain").chmod(0o2775)  # which new directories in it get from it
        for name in ("plain", "shared"):
            (top / name / "new/inner").mkdir(parents=True)
            (top / name / "new").chmod(0o2775)
            (top / name / "new/inner").chmod(0o2775)
    result = commit(scene, but=["/plain"])
    assert (result.guarded, result.conflicts) == ((), ())
    assert (scene.base / "shared/new/inner").stat().st_mode & 0o7777 == 0o2775
    result = commit(scene)
    assert result.guarded == (b"plain", b"plain/new", b"plain/new/inner")
    assert result.applied == ()
    assert commit(scene, allow=["*"]).applied


# spec WS8
def test_ends_of_lines_are_kept_in_a_patch(scene: Scene) -> None:
    texts = {
        "crlf": (b"one\r\ntwo\r\n", b"one\r\n2\r\n"),
        "mixed": (b"one\r\ntwo\n", b"one\ntwo\r\n"),
        "gained": (b"one", b"one\n"),
        "lost": (b"one\r\n", b"one\r"),
    }
    for name, (old, _) in texts.items():
        (scene.base / name).write_bytes(old)
    scene.make()
    with scene.run() as top:
        for name, (_, new) in texts.items():
            (top / name).write_bytes(new)
        (top / "new").write_bytes(b"a\r\nb")
        seen = tree_of(top)
    with scene.open() as workspace:
        patch = b"".join(workspace.patch())
    assert b" one\r\n-two\r\n+2\r\n" in patch
    assert b"-one\n\\ No newline at end of file\n+one\n" in patch
    assert b"-one\r\n+one\r\n\\ No newline at end of file\n" in patch
    assert b"+a\r\n+b\n\\ No newline at end of file\n" in patch
    subprocess.run(["git", "apply", "-"], cwd=scene.base, input=patch, check=True)
    assert tree_of(scene.base) == seen


# spec WS12
def test_a_base_that_was_replaced_is_not_touched(edited: Scene) -> None:
    edited.base.rename(edited.top / "aside")
    edited.base.mkdir()
    with pytest.raises(WorkspaceError, match="another directory is there now"):
        commit(edited)
    assert tree_of(edited.base) == {}


# spec WS12
def test_a_base_that_was_made_anew_with_the_same_inode_is_not_touched(
    edited: Scene,
) -> None:
    state_file = edited.upper.parent / "state"
    shutil.rmtree(edited.base)
    edited.base.mkdir()
    fd = os.open(edited.base, os.O_RDONLY)
    is_kept = read_birth_time_ns(fd) is not None
    os.close(fd)
    state = json.loads(state_file.read_bytes())
    state["inode"] = edited.base.stat().st_ino  # ext4 has given the same one
    state_file.write_text(json.dumps(state))
    if is_kept:
        with pytest.raises(WorkspaceError, match="another directory is there now"):
            commit(edited)
        assert tree_of(edited.base) == {}
    # A record of an older version does not have it.
    del state["born_ns"]
    state_file.write_text(json.dumps(state))
    assert "a" in conflicts(commit(edited))


# spec WS12
def test_an_editor_that_is_quicker_than_a_step_undoes_the_commit(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sync_file_system

    def edit_then_sync(fd: int) -> None:
        write(edited.base / "new", "operator's\n")
        (edited.base / "new").rename(edited.base / "a")  # as editors save
        monkeypatch.setattr(commit_module, "sync_file_system", real)
        real(fd)

    monkeypatch.setattr(commit_module, "sync_file_system", edit_then_sync)
    result = commit(edited)
    assert conflicts(result) == ["a"]
    assert result.applied == ()
    assert tree_of(edited.base).keys() == {b"a", b"c"}
    assert (edited.base / "a").read_text() == "operator's\n"


def commit_and_edit(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, edit: Callable[[int], None]
) -> int:
    """Commit, with ``c`` edited too, and an edit before each rename, by its number.

    Returns:
        How many renames there were; the commit was undone.
    """
    with edited.run() as top:
        write(top / "c", "new\n")
    edited.end_run()
    calls = 0

    def edit_then_rename(*words: Any) -> None:
        nonlocal calls
        calls += 1
        edit(calls)
        rename(*words)

    monkeypatch.setattr(steps_module, "rename", edit_then_rename)
    assert commit(edited).applied == ()
    monkeypatch.undo()
    return calls


def save_over(path: Path, text: str) -> None:
    """Save a file as editors do: a new one takes its place."""
    saved = path.with_name("saved")
    write(saved, text)
    saved.rename(path)


# spec WS12
@pytest.mark.parametrize(
    ("saves", "path"),
    [
        ({1: "a", 2: "a"}, "a"),  # before it is exchanged, and before it comes back
        ({1: "a", 2: "a", 3: "a"}, "a"),
        ({2: "b", 3: "a"}, "a"),  # before b is put, which undoes a
        ({3: "c", 5: "b"}, "b"),  # before c comes out, which undoes b
    ],
)
def test_what_an_editor_saves_again_while_a_commit_is_undone_stays(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, saves: dict[int, str], path: str
) -> None:
    def save(call: int) -> None:
        if call in saves:
            save_over(edited.base / saves[call], f"{call}\n")

    calls = commit_and_edit(edited, monkeypatch, save)
    assert calls > max(saves)
    last = max(call for call, saved in saves.items() if saved == path)
    assert (edited.base / path).read_text() == f"{last}\n"


# spec WS12: what the operator writes into what a commit has put, before or while that is
# undone: a was there before, b is new.
@pytest.mark.parametrize(("path", "at"), [("a", 4), ("a", 6), ("b", 4), ("b", 5)])
def test_an_edit_in_place_of_what_a_commit_has_put_stays(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, path: str, at: int
) -> None:
    def edit(call: int) -> None:
        if call == 3:  # before c is put, which undoes all
            save_over(edited.base / "c", "saved\n")
        if call == at:
            (edited.base / path).write_text("operator's\n")

    assert commit_and_edit(edited, monkeypatch, edit) > at - 1
    assert (edited.base / path).read_text() == "operator's\n"
    assert (edited.base / "c").read_text() == "saved\n"
    assert (edited.base / "b").exists() is (path == "b")
    assert path == "a" or (edited.base / "a").read_text() == "old\n"
    assert path in conflicts(commit(edited))
    assert (edited.base / path).read_text() == "operator's\n"


def _save(base: Path) -> None:
    write(base / "new", "operator's\n")
    (base / "new").rename(base / "a")


def _write_in_place(base: Path) -> None:
    (base / "a").write_text("operator's\n")


def _write_inside(base: Path) -> None:
    write(base / "d" / "x", "operator's\n")


# spec WS11
@pytest.mark.parametrize(
    ("edit", "path"), [(_save, "a"), (_write_in_place, "a"), (_write_inside, "d")]
)
def test_an_editor_that_is_quicker_than_the_staging_makes_a_conflict(
    edited: Scene,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Path], None],
    path: str,
) -> None:
    write(edited.base / "d" / "x", "old\n")
    with edited.run() as top:
        shutil.rmtree(top / "d")
    edited.end_run()
    real = Committer.commit

    def edit_then_commit(committer: Committer, *args: Any) -> None:
        edit(edited.base)  # after the look, before anything is staged
        real(committer, *args)

    monkeypatch.setattr(Committer, "commit", edit_then_commit)
    before = tree_of(edited.base).keys()
    result = commit(edited)
    assert conflicts(result) == [path]
    assert result.applied == ()
    assert tree_of(edited.base).keys() == before
    wanted = edited.base / ("a" if path == "a" else "d/x")
    assert wanted.read_text() == "operator's\n"
    monkeypatch.undo()
    assert conflicts(commit(edited)) == [path]


# spec WS11: while the rows are chosen, when their record is written, when they are staged.
@pytest.mark.parametrize(
    ("owner", "moment"),
    [
        (plan_module, "choose_rows"),
        (RecordFiles, "save"),
        (commit_module, "CommitJournal"),
    ],
)
def test_what_vanishes_while_a_commit_judges_it_is_a_conflict(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, owner: object, moment: str
) -> None:
    write(edited.base / "d/e/x", "old\n")
    with edited.run() as top:
        shutil.rmtree(top / "d")
    edited.end_run()
    before = tree_of(edited.base)
    real = getattr(owner, moment)

    def remove_first(*words: Any, **named: Any) -> Any:
        shutil.rmtree(edited.base / "d", ignore_errors=True)
        return real(*words, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, moment, remove_first)
        result = commit(edited, skips_conflicts=True)
    assert result.applied == ()
    assert conflicts(result) == ["d"]
    assert {b"a", b"b", b"d"} == set(result.left)
    assert tree_of(edited.base) == {
        path: facts for path, facts in before.items() if not path.startswith(b"d")
    }
    assert commit(edited).applied == (b"a", b"b")


# spec WS13
@pytest.mark.chaos
def test_no_link_of_the_base_is_followed_by_a_commit(scene: Scene) -> None:
    write(scene.base / "d/file", "old\n")
    outside = scene.top / "outside"
    write(outside / "file", "outside\n")
    scene.make()
    stop = threading.Event()
    thread = threading.Thread(target=_swap, args=(scene.base / "d", outside, stop))
    thread.start()
    applied = 0
    try:
        for number in range(200 if LONG else 60):
            write(scene.upper / "d/file", f"{number}\n")  # as the child would
            with contextlib.suppress(OSError, UnfinishedCommitError):
                applied += len(commit(scene, theirs=["*"]).applied)
    finally:
        stop.set()
        thread.join()
    assert applied
    assert tree_of(outside) == {b"file": ("file", 0o644, b"outside\n")}


def _swap(directory: Path, outside: Path, stop: threading.Event) -> None:
    """Put a link in the place of a directory, and the directory back, on and on."""
    aside = directory.with_name("aside")
    while not stop.is_set():
        with contextlib.suppress(OSError):
            directory.rename(aside)
            directory.symlink_to(outside)
        with contextlib.suppress(OSError):
            directory.unlink()
        with contextlib.suppress(OSError):
            aside.rename(directory)
        if aside.exists():  # a commit has made the directory anew
            shutil.rmtree(aside, ignore_errors=True)


# spec WS6
@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/pre-commit",
        "sub/.git/config",
        ".envrc",
        ".github/workflows/x.yml",
        ".git",
    ],
)
def test_what_the_operator_s_tools_run_is_taken_only_if_it_is_allowed(
    scene: Scene, path: str
) -> None:
    scene.make()
    with scene.run() as top:
        write(top / path)
        write(top / "plain")
    result = commit(scene)
    assert path in map(os.fsdecode, result.guarded)
    assert result.applied == ()
    assert tree_of(scene.base) == {}
    assert os.fsencode(path) in commit(scene, allow=[path]).applied


def put_file_in_place(top: Path) -> None:
    """Replace a directory by a file."""
    shutil.rmtree(top / ".github")
    write(top / ".github")


def put_directory_in_place(top: Path) -> None:
    """Replace a directory by another one of the base."""
    shutil.rmtree(top / ".github")
    (top / "other").rename(top / ".github")


def move_aside(top: Path) -> None:
    """Rename a directory."""
    (top / ".github").rename(top / "aside")


# spec WS6
@pytest.mark.parametrize(
    "take_away",
    [
        pytest.param(move_aside, marks=of_root),
        put_file_in_place,
        pytest.param(put_directory_in_place, marks=of_root),
    ],
)
def test_what_is_guarded_is_taken_away_only_if_that_is_allowed(
    scene: Scene, take_away: Callable[[Path], object]
) -> None:
    write(scene.base / ".github/workflows/x.yml")
    write(scene.base / "other/file")
    scene.make()
    with scene.run() as top:
        take_away(top)
    before = tree_of(scene.base)
    assert commit(scene).guarded == (b".github/workflows/x.yml",)
    assert tree_of(scene.base) == before
    assert commit(scene, allow=[".github/workflows/**"]).guarded == ()
    assert not (scene.base / ".github/workflows").exists()


# spec WS6
def test_a_link_in_place_of_a_guarded_directory_is_guarded(scene: Scene) -> None:
    scene.make()
    with scene.run() as top:
        write(top / "plain/workflows/x.yml")
        (top / ".github").symlink_to("plain")
    assert commit(scene).guarded == (b".github",)


# spec WS6, WS13
@of_root
def test_a_link_that_leads_out_since_its_directory_was_renamed_is_guarded(
    scene: Scene,
) -> None:
    write(scene.base / "a/b/file")
    (scene.base / "a/b/inside").symlink_to("file")
    (scene.base / "a/b/link").symlink_to("../../a")
    (scene.base / "a/b/out").symlink_to("/etc/passwd")
    scene.make()
    with scene.run() as top:
        (top / "a/b").rename(top / "b")
    assert commit(scene).guarded == (b"b/link",)


# spec WS13
def test_objects_that_can_do_harm_are_taken_only_if_they_are_allowed(
    scene: Scene,
) -> None:
    scene.make()
    with scene.run() as top:
        write(top / "plain")
        write(top / "setuid", mode=0o4755)
        (top / "out").symlink_to("../outside")
        (top / "absolute").symlink_to("/etc/passwd")
        (top / "inside").symlink_to(scene.base / "plain")
        os.mkfifo(top / "fifo")
    assert set(commit(scene).guarded) == {b"setuid", b"out", b"absolute", b"fifo"}
    result = commit(scene, but=["setuid", "out", "absolute", "fifo"])
    assert result.applied == (b"inside", b"plain")


# spec WS10
def test_a_pattern_that_names_nothing_is_told(edited: Scene) -> None:
    with pytest.raises(NoMatchError, match="'nowhere'"):
        commit(edited, only=["a", "nowhere"])


# spec WS10
def test_a_part_of_a_removed_directory_can_be_committed(scene: Scene) -> None:
    write(scene.base / "d/one")
    write(scene.base / "d/two")
    scene.make()
    with scene.run() as top:
        for name in ("one", "two"):
            (top / "d" / name).unlink()
        (top / "d").rmdir()
    assert commit(scene, only=["/d/one"]).applied == (b"d/one",)
    assert tree_of(scene.base).keys() == {b"d", b"d/two"}
    assert scene.rows() == [("d", "deleted")]


def _tick(scene: Scene) -> None:
    """Wait until the kernel's coarse clock has moved on from the last change."""
    probe = scene.top / "probe"
    probe.touch()
    first = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == first:
        probe.touch()
