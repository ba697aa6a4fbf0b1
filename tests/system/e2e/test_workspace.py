"""`run --workspace` and `sandhost workspace`.

An ordinary program edits, a person decides.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes a host that is root")


class Place:
    """A base with a file, and a state directory."""

    def __init__(self, top: Path) -> None:
        self.base = top / "repo"
        self.state = top / "state"
        self.base.mkdir()
        (self.base / "a.txt").write_text("hello\n")

    def run(self, script: str, *options: str, mode: str = "") -> Outcome:
        """Run a shell script in the workspace ``w``."""
        where = f"{self.base}{mode}"
        words = ("--state-dir", str(self.state), "--workspace", where, *options)
        return sandhost("run", *words, "--", "sh", "-c", script)

    def named(self, script: str, *options: str) -> Outcome:
        """Run it in the workspace of that name."""
        return self.run(script, "--workspace-name", "w", *options)

    def ask(self, *words: str) -> Outcome:
        """Run ``sandhost workspace``."""
        return sandhost("workspace", *words, "--state-dir", str(self.state))

    def rows(self, *words: str) -> list[dict[str, object]]:
        """Return what ``--json`` prints."""
        found: list[dict[str, object]] = json.loads(self.ask(*words, "--json").out)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# spec WS1, WS5
@pytest.mark.nobody
def test_a_program_works_in_the_base_s_own_path_and_the_base_stays(
    place: Place,
) -> None:
    script = 'pwd; cat a.txt; echo more >> a.txt; echo new > b.txt; echo "$SANDHOST_WORKSPACE"'
    done = place.named(script)
    assert done.out.decode() == f"{place.base}\nhello\nw\n"
    hint = "'sandhost workspace diff w'"
    assert done.err.decode() == f"sandhost: workspace w: 2 changed; {hint}\n"
    assert done.status == 0
    assert (place.base / "a.txt").read_text() == "hello\n"
    assert os.listdir(place.base) == ["a.txt"]


# spec WS3
@of_root
def test_the_operator_s_files_are_the_child_s_and_the_child_s_the_operator_s(
    place: Place,
) -> None:
    os.chown(place.base, 1234, 1234)
    os.chown(place.base / "a.txt", 1234, 1234)
    script = "stat -c %u a.txt > owner; id -u >> owner; stat -c %u . >> owner"
    assert place.named(script).status == 0
    assert place.ask("commit", "w").status == 0
    first, *others = (place.base / "owner").read_text().split()
    assert others == [first, first]
    assert (place.base / "owner").stat().st_uid == 1234


# spec WS7, WS8
@pytest.mark.nobody
def test_a_diff_tells_what_was_changed(place: Place) -> None:
    place.named("echo more >> a.txt; mkdir d; echo new > d/b.txt")
    done = place.ask("diff", "w")
    assert done.status == 1
    assert done.out.decode().splitlines()[2:6] == [
        "--- a/a.txt",
        "+++ b/a.txt",
        "@@ -1 +1,2 @@",
        " hello",
    ]
    assert place.ask("diff", "w", "--name-only").out == b"a.txt\nd\nd/b.txt\n"
    assert place.ask("diff", "w", "--name-only", "-z", "d/").out == b"d\0d/b.txt\0"
    first, *_ = place.rows("diff", "w")
    assert first == {
        "path": "a.txt",
        "change": "modified",
        "kind": "file",
        "size": 11,
        "old_size": 6,
        "mode": 0o644,
    }
    (row,) = place.rows("list")
    shown = {key: row[key] for key in ("name", "base", "mode", "state", "changed")}
    assert shown == {
        "name": "w",
        "base": str(place.base),
        "mode": "review",
        "state": "idle",
        "changed": 3,
    }


# spec WS10
@pytest.mark.nobody
def test_a_commit_brings_what_is_chosen_and_leaves_the_rest(place: Place) -> None:
    place.named("echo more >> a.txt; echo new > b.txt")
    done = place.ask("commit", "w", "b.txt", "--json")
    assert json.loads(done.out) == {
        "applied": ["b.txt"],
        "conflicts": [],
        "guarded": [],
        "left": ["a.txt"],
        "merged": [],
    }
    assert (place.base / "a.txt").read_text() == "hello\n"
    assert (place.base / "b.txt").read_text() == "new\n"
    assert place.ask("commit", "w").status == 0
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"
    assert place.rows("list") == []


# spec WS11
@pytest.mark.nobody
def test_a_conflict_is_told_and_nothing_is_overwritten(place: Place) -> None:
    place.named("echo child >> a.txt; echo new > b.txt")
    (place.base / "a.txt").write_text("operator\n")
    done = place.ask("commit", "w")
    assert done.status == 1
    assert b"conflict   a.txt: it was changed in the base" in done.out
    assert (place.base / "a.txt").read_text() == "operator\n"


# spec WS11a
@pytest.mark.nobody
def test_a_text_that_both_changed_is_merged_if_that_is_asked(place: Place) -> None:
    place.named("echo child >> a.txt; echo new > b.txt")
    (place.base / "a.txt").write_text("operator\nhello\n")
    done = place.ask("commit", "w", "--merge", "--dry-run", "--json")
    row = {"applied": ["a.txt", "b.txt"], "conflicts": [], "guarded": [], "left": []}
    assert json.loads(done.out) == {**row, "merged": ["a.txt"]}
    assert (place.base / "a.txt").read_text() == "operator\nhello\n"
    done = place.ask("commit", "w", "--merge")
    assert (done.status, done.out) == (0, b"merged     a.txt\ncommitted  b.txt\n")
    assert (place.base / "a.txt").read_text() == "operator\nhello\nchild\n"
    assert place.rows("list") == []


# spec WS5
def test_a_named_workspace_is_taken_up_again(place: Place) -> None:
    place.named("echo one > b.txt")
    assert place.named("cat b.txt; rm a.txt").out == b"one\n"
    assert place.ask("diff", "w", "--name-only").out == b"a.txt\nb.txt\n"


# spec WS5
def test_changes_are_committed_where_the_command_succeeds(place: Place) -> None:
    done = place.named("echo more >> a.txt; exit 3", "--commit", "on-success")
    assert done.status == 3
    assert (place.base / "a.txt").read_text() == "hello\n"
    done = place.named("true", "--commit", "on-success")
    assert done.err == b"sandhost: workspace w: 1 of 1 committed\n"
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"


# spec WS5
def test_a_conflict_leaves_the_status_to_the_command(place: Place) -> None:
    place.named("echo child >> a.txt")
    (place.base / "a.txt").write_text("operator\n")
    done = place.named("true", "--commit", "on-success")
    assert done.status == 0
    assert b"nothing committed: 'a.txt': it was changed in the base" in done.err


def test_a_run_that_changes_nothing_leaves_no_workspace(place: Place) -> None:
    done = place.named("cat a.txt")
    assert (done.out, done.err) == (b"hello\n", b"")
    assert place.rows("list") == []


# spec WS4
@pytest.mark.nobody
def test_mode_direct_writes_to_the_base_and_read_only_to_nothing(place: Place) -> None:
    done = place.run("echo more >> a.txt; id -u > b; stat -c %u b", mode=":direct")
    assert (done.status, done.err) == (0, b"")
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"
    assert (place.base / "b").stat().st_uid == os.geteuid()
    assert (int(done.out) == 0) is False
    done = place.run("cat a.txt; echo x >> a.txt", mode=":read-only")
    assert done.out == b"hello\nmore\n"
    assert b"Read-only file system" in done.err
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"


@pytest.mark.nobody
def test_what_a_first_run_made_is_a_program_of_the_next(place: Place) -> None:
    place.named("printf '#!/bin/sh\\necho made here\\n' > tool; chmod +x tool")
    words = ("--state-dir", place.state, "--workspace", place.base)
    done = sandhost("run", *words, "--workspace-name", "w", "--", "./tool")
    assert done.out == b"made here\n"


# spec WS3a
@pytest.mark.nobody
def test_a_directory_that_was_removed_and_made_anew_is_the_new_one(
    place: Place,
) -> None:
    (place.base / "d").mkdir()
    (place.base / "d/old").write_text("old\n")
    done = place.named("rm -r d && mkdir d && echo new > d/new && ls d")
    assert (done.status, done.out) == (0, b"new\n")
    assert place.ask("diff", "w", "--name-only").out == b"d/new\nd/old\n"
    assert place.ask("commit", "w").status == 0
    assert os.listdir(place.base / "d") == ["new"]


# spec WS2
@pytest.mark.nobody
def test_the_mount_has_the_options_of_its_host(place: Place) -> None:
    done = place.named('grep " $PWD " /proc/self/mountinfo')
    options = done.out.decode().split()[-1].split(",")
    assert ("userxattr" in options) == (os.geteuid() != 0)
    assert ("redirect_dir=on" in options) == (os.geteuid() == 0)


# spec WS18
@pytest.mark.nobody
def test_a_killed_host_leaves_a_workspace_that_can_be_looked_at(place: Place) -> None:
    words = ("--state-dir", place.state, "--workspace", place.base)
    script = "echo more >> a.txt; sync; echo ready; exec sleep 1000"
    process = subprocess.Popen(
        [SANDHOST, "run", *words, "--workspace-name", "w", "--", "sh", "-c", script],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (row,) = place.rows("list")
    assert row["state"] == "in use"
    assert place.ask("commit", "w").status == 2
    assert place.ask("diff", "w", "--name-only").out == b"a.txt\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until_s = time.monotonic() + 30
    while place.rows("list")[0]["state"] != "left behind":
        assert time.monotonic() < until_s
    assert place.ask("commit", "w").status == 0
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("missing", b"No such file or directory"),
        ("repo/a.txt", b"it is no directory"),
        ("/", b"it is the top of the file system"),
        ("repo:wrong", b"'wrong' is none of review, direct, read-only"),
        ("state/inside", b"it lies in the state directory"),
        (".", b"lies in it"),
    ],
)
def test_what_cannot_be_a_workspace_is_refused(
    place: Place, tmp_path: Path, where: str, reason: bytes
) -> None:
    (place.state / "inside").mkdir(parents=True)
    words = ("run", "--state-dir", str(place.state), "--workspace", where)
    done = sandhost(*words, "--", "true", cwd=tmp_path)
    assert done.status == 125
    assert reason in done.err
    assert done.err.count(b"\n") == 1


# spec WS19
@pytest.mark.parametrize("name", ["link", "link/state", "link/new/state"])
def test_a_state_directory_that_a_link_leads_into_the_base_is_refused(
    place: Place, tmp_path: Path, name: str
) -> None:
    (place.base / "deep/state").mkdir(parents=True)
    (tmp_path / "link").symlink_to("repo/deep")
    words = ("--state-dir", str(tmp_path / name), "--workspace", str(place.base))
    done = sandhost("run", *words, "--", "true")
    assert done.status == 125
    assert done.said(f"the state directory '{tmp_path / name}' lies in it")


# spec WS19
@pytest.mark.nobody
def test_two_children_cannot_have_one_workspace(place: Place) -> None:
    inner = [
        SANDHOST, "run", "--state-dir", str(place.state),
        "--workspace", str(place.base), "--workspace-name", "w", "--", "true",
    ]  # fmt: skip
    words = ("--state-dir", place.state, "--workspace", place.base)
    process = subprocess.Popen(
        [SANDHOST, "run", *words, "--workspace-name", "w", "--", "sh", "-c",
         "echo > made; echo ready; read line"],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    second = subprocess.run(inner, env=ENVIRONMENT, capture_output=True, check=False)
    assert second.returncode == 125
    assert b"cannot use workspace 'w': child child-1 has it" in second.stderr
    assert second.stderr.count(b"\n") == 1
    # Nor does the second one record an end of the first one's run.
    process.kill()
    process.communicate()
    until_s = time.monotonic() + 30
    while (found := place.rows("list")[0]["state"]) == "in use":
        assert time.monotonic() < until_s
    assert found == "left behind"


def test_a_profile_without_the_layer_mountns_is_refused(place: Place) -> None:
    done = place.named("true", "--sandbox", "none")
    assert done.status == 125
    assert b"its profile has no layer 'mountns'" in done.err


def test_a_base_that_holds_the_host_s_own_directories_is_refused(place: Place) -> None:
    environment = {**ENVIRONMENT, "TMPDIR": str(place.base)}
    words = ("--state-dir", place.state, "--workspace", place.base)
    done = sandhost("run", *words, "--", "true", env=environment)
    assert done.status == 125
    assert b"which no child may see" in done.err


def test_a_name_that_is_none_and_a_pattern_that_names_nothing(place: Place) -> None:
    done = place.run("true", "--workspace-name", "../x")
    assert (done.status, done.err.count(b"\n")) == (125, 1)
    place.named("echo > b")
    done = place.ask("diff", "w", "nothing")
    assert done.status == 2
    assert b"no changed path is named so" in done.err
    assert place.ask("diff", "none").status == 2
    done = place.ask("commit", "w", "--allow", "nothing")
    assert done.status == 2
    assert b"cannot allow 'nothing': no changed path is named so" in done.err
    assert place.ask("commit", "w", "--allow", "b").status == 0


def events(journal: Path) -> list[dict[str, Any]]:
    """Return a journal's events about workspaces."""
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    return [row for row in rows if row["event"].startswith("workspace.")]


# spec WS20
@pytest.mark.nobody
def test_an_audit_tells_at_the_end_what_was_changed(place: Place) -> None:
    journal = place.base.parent / "journal"
    script = "rm a.txt; mkdir d; echo b > d/b; cat a.txt"
    done = place.named(script, "--journal", str(journal), "--audit")
    is_root = os.geteuid() == 0
    assert (b"cannot tell each open in workspace w" in done.err) != is_root
    changed = [row for row in events(journal) if row["event"] == "workspace.changed"]
    assert [(row["path"], row["change"], row["workspace"]) for row in changed] == [
        ("a.txt", "deleted", "w"),
        ("d", "added", "w"),
        ("d/b", "added", "w"),
    ]
    closed = events(journal)[-1]
    assert (closed["event"], closed["changed"]) == ("workspace.closed", 3)


# spec WS20: the journal tells, too, that what was changed is not known
def test_a_workspace_whose_changes_cannot_be_recorded_is_closed_with_the_reason(
    place: Place,
) -> None:
    journal = place.base.parent / "journal"
    place_words = ("--state-dir", place.state, "--workspace", place.base)
    words = (*place_words, "--workspace-name", "w", "--journal", journal)
    with subprocess.Popen(
        [SANDHOST, "run", *words, "--", "sh", "-c", "echo > b; echo ready; read line"],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (place.state / "workspaces/w").rename(place.state / "away")
        process.communicate(b"\n")
    closed = events(journal)[-1]
    assert (closed["event"], closed["changed"]) == ("workspace.closed", None)
    assert "cannot find workspace 'w'" in str(closed["reason"])


# spec WS20
def test_commands_without_a_daemon_tell_the_journal_that_is_named(place: Place) -> None:
    journal = place.base.parent / "journal"
    named = ("--journal", str(journal))
    place.named("echo b > b; echo c > .envrc")
    done = place.ask("commit", "w", "--journal", str(place.base / "none/journal"))
    assert (done.status, done.said("nothing changed: name another")) == (2, True)
    for words in (
        ("commit", "w", "--dry-run"),
        ("commit", "w"),
        ("commit", "w", "b"),
        ("snapshot", "w"),
    ):
        place.ask(*words, *named)
    place.ask("discard", "w", "--yes", *named)
    place.named("echo more >> a.txt", "--commit", "on-success", *named)
    told = [row for row in events(journal) if "child_id" not in row]
    assert [row["event"].removeprefix("workspace.") for row in told] == [
        "conflict", "committed", "snapshot", "discarded", "committed",
    ]  # fmt: skip
    assert {row["workspace"] for row in told} == {"w"}
    refused, committed, snapshot, discarded, _ = told
    assert (refused["guarded"], refused["conflicts"]) == (1, 0)
    assert (committed["applied"], committed["left"]) == (1, 1)
    assert (snapshot["label"], snapshot["stopped_ns"]) == ("1", 0)
    assert discarded["changed"] == 1


@pytest.mark.nobody
def test_a_workspace_is_discarded(place: Place) -> None:
    place.named("echo > b")
    assert place.ask("discard", "w", "--yes").status == 0
    assert place.rows("list") == []
    assert os.listdir(place.base) == ["a.txt"]
