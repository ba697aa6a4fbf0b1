"""Snapshots, forks and exports by the command line, with real children."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from supervisor.workspace.attributes import TRUSTED_MARKS, USER_MARKS
from supervisor.workspace.directory import make_workspace
from supervisor.workspace.settings import WorkspaceSettings
from tests.helpers.command import small_disk
from tests.system.e2e.test_workspace import Place, of_root
from tests.system.e2e.test_workspace_freeze import at_work

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def run_in(place: Place, name: str, script: str) -> bytes:
    """Run a script in a workspace; return what it prints."""
    done = place.run(script, "--workspace-name", name)
    assert done.status == 0, done.err
    return done.out


def labels(place: Place, name: str = "w") -> object:
    """Return the snapshots that the list shows."""
    (row,) = [row for row in place.rows("list") if row["name"] == name]
    return row["snapshots"]


# spec WS15
@pytest.mark.nobody
def test_a_child_goes_on_above_a_snapshot_and_a_restore_goes_back(place: Place) -> None:
    run_in(place, "w", "echo one > a.txt; mkdir d; echo new > d/b.txt")
    assert place.ask("snapshot", "w").out == b"1\n"
    assert run_in(place, "w", "cat a.txt d/b.txt; echo two > a.txt; rm -r d") == (
        b"one\nnew\n"
    )
    assert place.ask("snapshot", "w", "second").out == b"second\n"
    assert labels(place) == ["1", "second"]
    assert run_in(place, "w", "cat a.txt; ls; echo three > c") == b"two\na.txt\n"
    done = place.ask("restore", "w", "1")
    assert (done.status, done.out) == (0, b"")
    assert done.err == b"sandhost workspace: w: 3 changes since 1 were dropped\n"
    assert run_in(place, "w", "cat a.txt d/b.txt") == b"one\nnew\n"
    assert place.ask("restore", "w", "second").status == 0
    assert run_in(place, "w", "cat a.txt; ls") == b"two\na.txt\n"
    assert place.ask("discard", "w").status == 0
    assert os.listdir(place.state / "layers") == []


# spec WS15
def test_what_cannot_be_restored_or_named_is_refused(place: Place) -> None:
    run_in(place, "w", "echo one > a.txt")
    place.ask("snapshot", "w", "one")
    for words, text in (
        (("restore", "w", "two"), "it has one"),
        (("snapshot", "w", "one"), "there is a snapshot of it"),
        (("snapshot", "w", "a/b"), "cannot use the label 'a/b'"),
        (("export", "w", "file"), "end it in .patch or .tar"),
    ):
        done = place.ask(*words)
        assert done.status == 2
        assert text in done.err.decode()
    assert labels(place) == ["one"]


# spec WS15
def test_forks_work_apart_are_compared_and_one_is_committed(place: Place) -> None:
    run_in(place, "w", "echo shared > b.txt")
    names = json.loads(place.ask("fork", "w", "-n", "2", "--json").out)
    assert names == ["w-1", "w-2"]
    assert run_in(place, "w-1", "cat b.txt; echo first > c.txt") == b"shared\n"
    assert run_in(place, "w-2", "echo second > c.txt; echo more >> a.txt") == b""
    assert place.ask("diff", "w-1", "w-2", "--name-only").out == b"a.txt\nc.txt\n"
    patch = place.ask("diff", "w-1", "w-2").out.splitlines()
    assert b"-first" in patch
    assert b"+second" in patch
    assert place.ask("commit", "w-2").status == 0
    assert sorted(os.listdir(place.base)) == ["a.txt", "b.txt", "c.txt"]
    assert (
        run_in(place, "w-1", "cat b.txt c.txt a.txt") == b"shared\nfirst\nhello\nmore\n"
    )
    done = place.ask("commit", "w-1")
    assert done.status == 1
    assert b"conflict   c.txt" in done.out


# spec WS15
def test_the_oldest_snapshots_go_when_there_are_more_than_are_kept(
    place: Place,
) -> None:
    for number in range(12):
        if number < 3:
            run_in(place, "w", f"echo {number} > a.txt")
        assert place.ask("snapshot", "w").status == 0
    assert labels(place) == [str(number) for number in range(3, 13)]
    assert place.ask("restore", "w", "3").status == 0
    assert run_in(place, "w", "cat a.txt") == b"2\n"


# spec WS15
@pytest.mark.nobody
def test_a_child_stands_still_while_a_snapshot_is_taken_and_goes_on(
    place: Place,
) -> None:
    script = "echo one > b; echo ready; read line; rm b; echo two > c; read line"
    with at_work(place, script) as process:
        journal = place.base.parent / "journal"
        done = place.ask("snapshot", "w", "mid", "--journal", str(journal))
        assert (done.status, done.out) == (0, b"mid\n")
        event = json.loads(journal.read_text())
        assert (event["event"], event["label"]) == ("workspace.snapshot", "mid")
        assert event["copied_bytes"] == 4
        assert event["stopped_ns"] > 0  # spec WS20: for how long it was stopped
        assert b"the child stopped for " in done.err
        assert b"4 bytes copied" in done.err
        names = json.loads(place.ask("fork", "w", "--json").out)
        assert place.ask("restore", "w", "mid").status == 2  # a child has it
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        while not (place.state / "workspaces/w/upper/c").exists():
            pass
    assert place.ask("diff", "w", "--name-only").out == b"c\n"
    assert run_in(place, names[0], "cat b; ls") == b"one\na.txt\nb\n"
    assert place.ask("restore", "w", "mid").status == 0
    assert run_in(place, "w", "cat b; ls") == b"one\na.txt\nb\n"


def run_with_fds(place: Place, script: str) -> list[str]:
    """Run a script in a child that may use LLM fds; return what it prints, in lines."""
    config = place.base.parent / "fds.toml"
    names = ("checkpoint_process", "restore_process", "list_checkpoints")
    config.write_text(
        f"[host]\nstate_dir = '{place.base.parent}/h'\n[tools]\nenabled = {list(names)}\n"
    )
    done = place.named(script, "--config", str(config))
    assert done.status == 0, done.err
    return done.out.decode().splitlines()


# spec WS16: at the end of `run`, before anything is looked at or committed
@pytest.mark.nobody
def test_a_program_s_checkpoint_has_its_files_and_run_goes_back_to_them(
    place: Place,
) -> None:
    script = """
echo one >> a.txt; sandhost fd checkpoint >/dev/null; echo two >> a.txt
id=$(sandhost fd checkpoints | grep -o 'ckpt:[0-9a-f]*')
sandhost fd restore $id --files >/dev/null && cat a.txt"""
    assert run_with_fds(place, script) == ["hello", "one", "two"]
    made = labels(place)
    assert isinstance(made, list)
    assert len(made) == 1
    assert run_in(place, "w", "cat a.txt") == b"hello\none\n"


# spec WS16: a nested client that was left less has none made and none restored
@of_root  # the imports of a relay are hidden from the user without rights
def test_a_client_with_less_rights_has_checkpoints_without_files(place: Place) -> None:
    script = """
sandhost fd checkpoint | grep -c '<snapshot'
id=$(sandhost fd checkpoints | grep -o 'ckpt:[0-9a-f]*')
sandhost relay --read a.txt -- sandhost fd checkpoint | grep -c '<snapshot'
sandhost relay --read a.txt -- sandhost fd restore $id --files | grep -o 'type="[a-z_]*"'"""
    assert run_with_fds(place, script) == ["1", "0", 'type="file_operation"']


# spec WS16, WS17: a copy leaves the operator's disk its reserve
@of_root
def test_files_for_which_there_is_no_room_are_not_kept(place: Place) -> None:
    script = """
head -c 5M /dev/zero > big
sandhost fd checkpoint | grep -o 'its disk is nearly full'
sandhost fd checkpoint --no-files | grep -c '<checkpoint '
rm big; sandhost fd checkpoint | grep -c '<snapshot'"""
    with small_disk(place.base.parent, "8m") as disk:
        place.state = disk / "state"
        said = run_with_fds(place, script)
    assert said == ["its disk is nearly full", "1", "1"]


# spec WS6, WS12a
@pytest.mark.nobody
def test_a_snapshot_of_a_renamed_directory_shows_nothing_that_is_hidden(
    place: Place,
) -> None:
    (place.base / "d").mkdir()
    (place.base / "d/.env").write_text("secret")
    (place.base / "d/file").write_text("open")
    marks = TRUSTED_MARKS if os.geteuid() == 0 else USER_MARKS
    settings = WorkspaceSettings(hide=(".env",))
    make_workspace(str(place.state), "w", os.fsencode(place.base), marks, settings)
    assert run_in(place, "w", "mv d e; echo new > e/new") == b""
    assert place.ask("snapshot", "w").status == 0
    (name,) = json.loads(place.ask("fork", "w", "--json").out)
    for one in ("w", name):
        assert run_in(place, one, "ls -A e; ls -A d 2>&1 | head -1").startswith(
            b"file\nnew\n"
        )
        assert b".env" not in run_in(place, one, "find . -name '.env*'")
    assert b"secret" not in place.ask("diff", "w").out
    assert b"conflict" not in place.ask("commit", name, "--dry-run").out


# spec WS14
@pytest.mark.nobody
def test_an_export_is_a_patch_that_git_applies_or_a_layer_that_tar_reads(
    place: Place, tmp_path: Path
) -> None:
    run_in(place, "w", "echo more >> a.txt; mkdir d; printf 'x\\0' > d/b; ln -s b d/l")
    patch, layer = tmp_path / "w.patch", tmp_path / "w.tar"
    for file in (patch, layer):
        assert place.ask("export", "w", str(file)).status == 0
        assert place.ask("export", "w", str(file)).status == 2
        assert place.ask("export", "w", str(file), "--force").status == 0
    first = layer.read_bytes()
    assert place.ask("export", "w", str(layer), "--force").status == 0
    assert layer.read_bytes() == first
    listed = subprocess.run(
        ["tar", "tf", layer], capture_output=True, text=True, check=True
    )
    assert listed.stdout == "a.txt\nd/\nd/b\nd/l\n"
    subprocess.run(
        ["git", "apply", str(patch)], cwd=place.base, check=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )  # fmt: skip
    assert (place.base / "d/b").read_bytes() == b"x\0"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".w.")]


# spec WS3c, WS12a
@of_root
def test_a_start_shows_no_directory_that_took_a_renamed_one_s_place(
    place: Place,
) -> None:
    (place.base / "d").mkdir()
    (place.base / "d/one").write_text("one\n")
    run_in(place, "w", "mv d e")
    (place.base / "d").rename(place.base / "aside")
    (place.base / "d").mkdir()
    (place.base / "d/two").write_text("the operator's\n")
    assert b"two" not in run_in(place, "w", "ls e")
