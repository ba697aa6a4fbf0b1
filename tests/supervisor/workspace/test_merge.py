"""A commit with --merge: text that both sides changed gets the changes of both."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_settlement as settlement_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace import settings as settings_module
from supervisor.workspace import texts as texts_module
from supervisor.workspace.commit import CommitResult, Committer
from supervisor.workspace.commit_staging import Staging
from supervisor.workspace.directory import InUseError
from supervisor.workspace.git import NoGitError
from supervisor.workspace.linux import sync_file_system
from supervisor.workspace.merge import CannotMergeError, merge_text
from supervisor.workspace.run import mount_for_child, prepare_use
from supervisor.workspace.texts import MAX_TEXT_BYTES, is_text
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.killed import is_killed_at
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write

pytestmark = pytest.mark.slow

LINES = [f"line {number}\n" for number in range(9)]
BEGUN = "".join(LINES)
OURS = BEGUN.replace("line 0", "operator's")
THEIRS = BEGUN.replace("line 8", "child's")
BOTH = OURS.replace("line 8", "child's")


def commit(scene: Scene, **patterns: list[str] | bool) -> CommitResult:
    with scene.open() as workspace:
        return workspace.commit(selection(merges=True, **patterns))


def reason(result: CommitResult) -> str:
    (found,) = result.conflicts
    return found.reason


def texts(scene: Scene) -> list[str]:
    """Return the kept texts."""
    with scene.open() as workspace:
        if not workspace.state.texts:
            return []
        return os.listdir(scene.state / "layers" / workspace.state.texts)


@pytest.fixture
def edited(scene: Scene) -> Scene:
    """Return a workspace in which ``a`` was edited at its end and ``b`` was made."""
    prepare(scene)
    return scene


def prepare(scene: Scene) -> None:
    write(scene.base / "a", BEGUN)
    scene.make()
    with scene.run() as top:
        write(top / "a", THEIRS)
        write(top / "b")
    scene.end_run()


# spec WS11a
@pytest.mark.parametrize("way", ["in place", "by a rename"])
def test_a_text_that_both_changed_gets_both_changes(edited: Scene, way: str) -> None:
    saved = edited.base / ("a" if way == "in place" else "new")
    write(saved, OURS)
    saved.rename(edited.base / "a")
    result = commit(edited)
    assert (result.applied, result.merged) == ((b"a", b"b"), (b"a",))
    assert (result.conflicts, result.left) == ((), ())
    assert (edited.base / "a").read_text() == BOTH
    assert edited.rows() == []
    assert edited.seen() == tree_of(edited.base)
    assert texts(edited) == []


# spec WS11a
def test_a_merge_that_is_asked_for_only_in_words_changes_nothing(edited: Scene) -> None:
    write(edited.base / "a", OURS)
    before, seen = tree_of(edited.base), edited.seen()
    with edited.open() as workspace:
        result = workspace.commit(selection(merges=True), is_dry=True)
    assert (result.applied, result.merged) == ((b"a", b"b"), (b"a",))
    assert tree_of(edited.base) == before
    assert edited.seen() == seen
    assert commit(edited).merged == (b"a",)


# spec WS11a
def test_the_same_lines_stay_a_conflict_without_markers(edited: Scene) -> None:
    mine = BEGUN.replace("line 8", "operator's")
    write(edited.base / "a", mine)
    result = commit(edited)
    wanted = "it was changed in the base; both sides changed the same lines"
    assert reason(result) == wanted
    assert (result.applied, result.merged) == ((), ())
    assert (edited.base / "a").read_text() == mine
    assert commit(edited, skips_conflicts=True).applied == (b"b",)
    assert (edited.base / "a").read_text() == mine


# spec WS11a
def test_a_side_that_is_named_wins_over_a_merge(edited: Scene) -> None:
    write(edited.base / "a", OURS)
    with edited.open() as workspace:
        (name,) = workspace.fork()
    result = commit(edited, theirs=["a"])
    assert (result.applied, result.merged) == ((b"a", b"b"), ())
    assert (edited.base / "a").read_text() == THEIRS
    write(edited.base / "a", OURS)
    result = commit(Scene(edited.top, name), mine=["a"], skips_conflicts=True)
    assert result.merged == ()
    assert (edited.base / "a").read_text() == OURS


def _by_another_owner(scene: Scene) -> None:
    os.chown(scene.base / "a", 1234, 1234)


def _with_attribute(scene: Scene) -> None:
    os.setxattr(scene.base / "a", "user.note", b"operator's")


def _with_access_list(scene: Scene) -> None:
    # Version 2; the owner rw, user 1234 r, the group r, the mask r, others r.
    entries = ((1, 6, -1), (2, 4, 1234), (4, 4, -1), (16, 4, -1), (32, 4, -1))
    value = (2).to_bytes(4, "little")
    for tag, rights, number in entries:
        value += tag.to_bytes(2, "little") + rights.to_bytes(2, "little")
        value += number.to_bytes(4, "little", signed=number < 0)
    os.setxattr(scene.base / "a", "system.posix_acl_access", value)


def _set_user_id(scene: Scene) -> None:
    (scene.base / "a").chmod(0o4755)


def _binary(scene: Scene) -> None:
    (scene.base / "a").write_bytes(b"a\0b")


def _large(scene: Scene) -> None:
    (scene.base / "a").write_text(OURS + "x" * MAX_TEXT_BYTES)


def _removed(scene: Scene) -> None:
    (scene.base / "a").unlink()


def _link(scene: Scene) -> None:
    _removed(scene)
    (scene.base / "a").symlink_to("b")


# spec WS11a
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_by_another_owner, "two owners"),
        (_with_attribute, "other attributes"),
        (_with_access_list, "other attributes"),
        (_set_user_id, "set-user-ID"),
        (_binary, "only text"),
        (_large, "only text"),
        (_removed, "it was removed in the base"),
        (_link, "it was changed in the base"),
    ],
)
def test_what_cannot_be_merged_for_certain_stays_a_conflict(
    edited: Scene, change: Callable[[Scene], None], why: str
) -> None:
    write(edited.base / "a", OURS)
    change(edited)
    before = tree_of(edited.base)
    result = commit(edited)
    assert why in reason(result)
    assert result.applied == ()
    assert tree_of(edited.base) == before


# spec WS11a
@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [(0o644, 0o755, 0o755), (0o600, 0o644, 0o600), (0o600, 0o755, None)],
)
def test_modes_are_merged_as_texts_are(
    scene: Scene, ours: int, theirs: int, both: int | None
) -> None:
    write(scene.base / "a", BEGUN, 0o644)
    scene.make()
    with scene.run() as top:
        write(top / "a", THEIRS, theirs)
    scene.end_run()
    write(scene.base / "a", OURS, ours)
    result = commit(scene)
    if both is None:
        assert "both sides changed its mode" in reason(result)
    else:
        assert result.merged == (b"a",)
        assert tree_of(scene.base) == {b"a": ("file", both, BOTH.encode())}


# spec WS11a
def test_a_change_of_the_mode_alone_is_merged_too(scene: Scene) -> None:
    write(scene.base / "a", BEGUN)
    scene.make()
    with scene.run() as top:
        (top / "a").chmod(0o755)
    scene.end_run()
    write(scene.base / "a", OURS)
    assert commit(scene).merged == (b"a",)
    assert tree_of(scene.base) == {b"a": ("file", 0o755, OURS.encode())}


# spec WS11a
def test_attributes_that_both_have_come_along(scene: Scene) -> None:
    write(scene.base / "a", BEGUN)
    os.setxattr(scene.base / "a", "user.note", b"of both")
    scene.make()
    with scene.run() as top:
        write(top / "a", THEIRS)
    scene.end_run()
    write(scene.base / "a", OURS)
    _with_attribute(scene)
    os.setxattr(scene.base / "a", "user.note", b"of both")
    assert commit(scene).merged == (b"a",)
    assert os.getxattr(scene.base / "a", "user.note") == b"of both"


# spec WS11a
def test_a_text_that_was_changed_before_a_record_was_made_is_not_kept(
    scene: Scene,
) -> None:
    write(scene.base / "a", BEGUN)
    scene.make()
    with scene.run() as top:
        write(top / "a", THEIRS)
        write(scene.base / "a", OURS)
    scene.end_run()
    assert texts(scene) == []
    assert "no text that both began from is kept" in reason(commit(scene))


# spec WS11a, WS17
def test_no_text_is_kept_where_the_disk_has_only_its_reserve(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "RESERVE", 1.0)
    prepare(scene)
    assert texts(scene) == []
    write(scene.base / "a", OURS)
    assert "no text that both began from is kept" in reason(commit(scene))


# spec WS11a
def test_a_text_that_is_damaged_counts_as_not_kept(edited: Scene) -> None:
    (name,) = texts(edited)
    with edited.open() as workspace:
        kept = edited.state / "layers" / workspace.state.texts / name
    kept.write_bytes(b"\n" * kept.stat().st_size)
    write(edited.base / "a", OURS)
    assert "no text that both began from is kept" in reason(commit(edited))


# spec WS11a
def test_a_file_with_two_names_in_the_workspace_stays_a_conflict(edited: Scene) -> None:
    with edited.run() as top:
        os.link(top / "a", top / "other")
    edited.end_run()
    write(edited.base / "a", OURS)
    assert "under another name" in reason(commit(edited))


# spec WS11a
def test_what_was_merged_once_is_merged_again_after_another_run(edited: Scene) -> None:
    write(edited.base / "a", OURS)
    assert commit(edited).merged == (b"a",)
    with edited.run() as top:
        write(top / "a", BOTH.replace("line 4", "child's again"))
    edited.end_run()
    write(edited.base / "a", BOTH.replace("operator's", "operator's again"))
    assert commit(edited).merged == (b"a",)
    text = (edited.base / "a").read_text()
    assert text.splitlines()[::4] == ["operator's again", "child's again", "child's"]


# spec WS11a, WS15
def test_forks_and_snapshots_have_the_texts_too(edited: Scene) -> None:
    with edited.open() as workspace:
        workspace.snapshot("one")
        first, second = workspace.fork(2)
    write(edited.base / "a", OURS)
    assert commit(edited).merged == (b"a",)
    write(edited.base / "a", OURS)
    with edited.open() as workspace:
        workspace.discard()
    assert commit(Scene(edited.top, first), only=["a"]).merged == (b"a",)
    assert (edited.base / "a").read_text() == BOTH
    fork = Scene(edited.top, second)
    with fork.open() as workspace:
        workspace.restore("one")
    write(edited.base / "a", OURS)
    assert commit(fork, only=["a"]).merged == (b"a",)
    assert (edited.base / "a").read_text() == BOTH
    for name in (first, second):
        with Scene(edited.top, name).open() as workspace:
            workspace.discard()
    assert os.listdir(edited.state / "layers") == []


# spec WS11a, WS15
def test_a_merge_over_snapshots_leaves_nothing_that_would_undo_it(
    edited: Scene,
) -> None:
    with edited.open() as workspace:
        workspace.snapshot("one")
    with edited.run() as top:
        write(top / "a", THEIRS.replace("line 4", "child's too"))
    edited.end_run()
    write(edited.base / "a", OURS)
    assert commit(edited).merged == (b"a",)
    wanted = BOTH.replace("line 4", "child's too")
    assert (edited.base / "a").read_text() == wanted
    assert edited.rows() == []
    assert len(texts(edited)) == 1  # the snapshot's
    with edited.open() as workspace:
        workspace.restore("one")
    assert commit(edited, only=["a"]).merged == (b"a",)
    assert (edited.base / "a").read_text() == wanted


# spec WS11a
def test_a_workspace_that_a_child_has_gets_no_merge(edited: Scene) -> None:
    write(edited.base / "a", OURS)
    before = tree_of(edited.base)
    with edited.open() as workspace:
        lock = workspace.directory.lock_for("child")
        try:
            with pytest.raises(InUseError, match="cannot merge 'a': a child has"):
                workspace.commit(selection(merges=True), is_frozen=True)
        finally:
            os.close(lock)
    assert tree_of(edited.base) == before
    assert commit(edited).merged == (b"a",)


def _save(base: Path) -> None:
    write(base / "new", OURS.replace("line 4", "at last"))
    (base / "new").rename(base / "a")


def _write_in_place(base: Path) -> None:
    write(base / "a", OURS.replace("line 4", "at last"))


def _write_as_long(base: Path) -> None:
    """Write as much as there was, and set the time of writing back."""
    status = (base / "a").stat()
    (base / "a").write_text(OURS.replace("line 4", "LINE 4"))
    os.utime(base / "a", ns=(status.st_atime_ns, status.st_mtime_ns))


# spec WS11a, WS12
@pytest.mark.parametrize("edit", [_save, _write_in_place, _write_as_long])
@pytest.mark.parametrize("when", ["before the staging", "before the last judgement"])
def test_an_editor_that_is_quicker_than_a_merge_makes_a_conflict(
    edited: Scene,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Path], None],
    when: str,
) -> None:
    write(edited.base / "a", OURS)
    name = "commit" if when == "before the staging" else "prepare"
    owner = Committer if name == "commit" else Staging
    real = getattr(owner, name)

    def act(self: object, *args: object) -> object:
        if name == "commit":
            edit(edited.base)
        found = real(self, *args)
        if name == "prepare":
            edit(edited.base)
        return found

    monkeypatch.setattr(owner, name, act)
    result = commit(edited)
    assert [found.path for found in result.conflicts] == [b"a"]
    assert (result.applied, result.merged) == ((), ())
    text = (edited.base / "a").read_text()
    assert text != BOTH
    monkeypatch.undo()
    assert commit(edited).merged == (b"a",)
    assert (edited.base / "a").read_text() == text.replace("line 8", "child's")


# spec WS11a, WS12
def test_an_editor_that_is_quicker_than_the_step_of_a_merge_undoes_the_commit(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(edited.base / "a", OURS)
    real = sync_file_system

    def edit_then_sync(fd: int) -> None:
        monkeypatch.setattr(commit_module, "sync_file_system", real)
        _save(edited.base)
        real(fd)

    monkeypatch.setattr(commit_module, "sync_file_system", edit_then_sync)
    result = commit(edited)
    assert (result.applied, result.merged) == ((), ())
    text = (edited.base / "a").read_text()
    assert "at last" in text
    assert commit(edited).merged == (b"a",)
    assert (edited.base / "a").read_text() == text.replace("line 8", "child's")


# spec WS11a, WS12, WS18
@pytest.mark.chaos
@pytest.mark.parametrize(("has_snapshot", "pace"), [(False, 13), (True, 29)])
def test_a_killed_merge_is_done_or_not_when_the_next_child_starts(
    scene: Scene, *, has_snapshot: bool, pace: int
) -> None:
    number, bases = 0, []
    while True:
        prepare(scene)
        if has_snapshot:
            with scene.open() as workspace:
                workspace.snapshot()
        write(scene.base / "a", OURS)
        calls = ((steps_module, "rename"), (commit_module, "sync_file_system"))
        if not is_killed_at(number, lambda: commit(scene), calls):
            break
        start_child(scene)
        bases.append((scene.base / "a").read_text())
        assert bases[-1] in (OURS, BOTH), number
        assert commit(scene).conflicts == ()
        assert (scene.base / "a").read_text() == BOTH, number
        assert scene.rows() == [], number
        scene.clear()
        number += 1 if LONG else pace
    assert {OURS, BOTH} == set(bases)
    assert number > 50


def cut_before_settling(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit, and end when the base is changed and the layer is not."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt  # as a kill: nothing that follows is done

    write(scene.base / "a", OURS)
    monkeypatch.setattr(settlement_module, "remove_merged", end)
    with pytest.raises(KeyboardInterrupt):
        commit(scene)
    monkeypatch.undo()


def start_child(scene: Scene) -> None:
    """Take the workspace as for a child, and give it back."""
    use = prepare_use(str(scene.base), "review", str(scene.state), "w")
    mount_for_child(use, "child").close()


# spec WS11a, WS12, WS18
def test_a_child_that_starts_before_a_merge_has_left_the_layer_does_not_revert_it(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_before_settling(edited, monkeypatch)
    start_child(edited)
    assert (edited.base / "a").read_text() == BOTH
    assert edited.rows() == []


# spec WS11a, WS12, WS18
def test_a_merge_that_is_settled_while_a_child_has_the_layer_stays_in_conflict(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_before_settling(edited, monkeypatch)
    with edited.open() as workspace:
        lock = workspace.directory.lock_for("child")
        assert workspace.finish_commit()
        os.close(lock)
        assert reason(workspace.commit(selection())) == "it was changed in the base"
    assert (edited.base / "a").read_text() == BOTH


# spec WS11a
def test_a_file_that_was_only_written_anew_gets_the_workspace_s_side(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(edited.base / "a", BEGUN)
    monkeypatch.setattr(shutil, "which", lambda _: None)  # git has no part in it
    assert commit(edited).merged == (b"a",)
    assert (edited.base / "a").read_text() == THEIRS


# spec WS6, WS11a
def test_a_guarded_file_is_merged_only_if_it_is_allowed(scene: Scene) -> None:
    write(scene.base / ".envrc", BEGUN)
    scene.make()
    with scene.run() as top:
        write(top / ".envrc", THEIRS)
    scene.end_run()
    write(scene.base / ".envrc", OURS)
    result = commit(scene)
    assert (result.guarded, result.merged) == ((b".envrc",), ())
    assert (scene.base / ".envrc").read_text() == OURS
    assert commit(scene, allow=[".envrc"]).merged == (b".envrc",)
    assert (scene.base / ".envrc").read_text() == BOTH


# spec WS11a
def test_a_file_in_a_directory_that_is_another_one_stays_a_conflict(
    scene: Scene,
) -> None:
    write(scene.base / "d/a", BEGUN)
    scene.make()
    with scene.run() as top:
        write(top / "d/a", THEIRS)
    scene.end_run()
    (scene.base / "d").rename(scene.base / "aside")
    write(scene.base / "d/a", OURS)
    assert [one.path for one in commit(scene).conflicts] == [b"d/a"]
    assert (scene.base / "d/a").read_text() == OURS


# spec WS11a
def test_a_file_in_a_directory_that_was_made_anew_stays_a_conflict(
    scene: Scene,
) -> None:
    write(scene.base / "d/a", BEGUN)
    scene.make()
    for text in (BEGUN + "more\n", THEIRS):
        with scene.run() as top:
            if text == THEIRS:
                shutil.rmtree(top / "d")
            write(top / "d/a", text)
        scene.end_run()
    write(scene.base / "d/a", OURS)
    # The layer hides all that the base has there, so the merged file would not show.
    assert [one.path for one in commit(scene).conflicts] == [b"d/a"]
    assert (scene.base / "d/a").read_text() == OURS


# spec WS11a
def test_a_text_that_is_changed_while_it_is_read_is_not_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(content: bytes) -> bool:
        write(scene.base / "a", OURS)
        return is_text(content)

    write(scene.base / "a", BEGUN)
    scene.make()
    with scene.run() as top:
        write(top / "a", THEIRS)
    monkeypatch.setattr(texts_module, "is_text", edit)
    scene.end_run()
    assert texts(scene) == []


# spec WS11a, WS15
def test_texts_that_a_fork_has_too_are_not_dropped(edited: Scene) -> None:
    with edited.open() as workspace:
        (name,) = workspace.fork()
    assert commit(edited).applied == (b"a", b"b")
    with edited.open() as workspace:
        workspace.discard()
    write(edited.base / "a", OURS)
    assert commit(Scene(edited.top, name), only=["a"]).merged == (b"a",)


# spec WS11a
def test_without_git_a_merge_says_what_to_do(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(edited.base / "a", OURS)
    before = tree_of(edited.base)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    text = "cannot merge text: git is not installed; install it, or leave out --merge"
    with pytest.raises(NoGitError, match=text):
        commit(edited)
    assert tree_of(edited.base) == before


# spec WS11a
def test_what_both_sides_have_alike_is_merged_to_that() -> None:
    assert merge_text(b"x\n", b"a\n", b"x\n") == b"x\n"
    with pytest.raises(CannotMergeError, match="the same lines"):
        merge_text(b"x\n", b"a\n", b"y\n")


# spec WS11a
def test_a_record_of_an_older_program_is_read(edited: Scene) -> None:
    record = edited.upper.parent / "record"
    older = {
        path: seen[:6]
        for path, seen in msgspec.msgpack.decode(record.read_bytes()).items()
    }
    record.write_bytes(msgspec.msgpack.encode(older))
    assert edited.rows() == [("a", "modified"), ("b", "added")]
    write(edited.base / "a", OURS)
    assert commit(edited).merged == (b"a",)
