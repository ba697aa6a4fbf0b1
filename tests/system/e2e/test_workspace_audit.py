"""`run --audit`: files that a child opens, at once, and files that it changed."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, sandhost
from tests.helpers.daemon import daemon
from tests.system.e2e.test_workspace import Place, of_root

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def events(*journals: Path) -> list[dict[str, Any]]:
    """Return the events of journals, each file's in its order."""
    lines = [line for path in journals for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines]


def paths(rows: list[dict[str, Any]], event: str) -> list[bytes]:
    """Return the paths that events of one name tell, in order."""
    return [
        row["path"].encode() if "path" in row else base64.b64decode(row["path_b64"])
        for row in rows
        if row["event"] == event
    ]


# spec WS20
@of_root
def test_each_open_is_told_while_the_child_runs(place: Place) -> None:
    journal = place.base.parent / "journal"
    (place.base / "d").mkdir()
    (place.base / "d/only-read").write_text("read\n")
    script = """
import os, subprocess
open('d/only-read').read()
open('a.txt', 'a').write('more')
open(b'\\xff', 'w').write('x')
open('gone', 'w').close(); os.unlink('gone')
subprocess.run(['sandhost', 'fs', 'cat', 'd/only-read'], check=True)
print('ready', flush=True)
input()
"""
    place_words = ("--state-dir", place.state, "--workspace", place.base)
    words = (*place_words, "--workspace-name", "w", "--journal", journal, "--audit")
    with subprocess.Popen(
        [SANDHOST, "run", *words, "--", "python3", "-c", script],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            pass
        written: list[bytes] = []
        while b"gone" not in written:
            written = paths(events(journal), "workspace.file_written")
            assert process.poll() is None
        opened = paths(events(journal), "workspace.file_opened")
        assert process.poll() is None
        process.communicate(b"\n")
    assert written == [b"a.txt", b"\xff", b"gone"]
    # A file opened by FD 3 has an event of its own, and is none of these.
    assert opened == [b"d/only-read", b"a.txt", b"\xff", b"gone"]
    rows = events(journal)
    (by_door,) = [row for row in rows if row["event"] == "file.opened"]
    assert by_door["filename"] == "d/only-read"
    assert paths(rows, "workspace.changed") == [b"a.txt", b"\xff"]
    assert [row for row in rows if row["event"] == "workspace.left_out"] == []


# spec WS20: bounded, and what is left out is counted
@of_root
def test_what_a_child_opens_too_often_is_counted(place: Place) -> None:
    journal = place.base.parent / "journal"
    script = "for i in range(3000): open(f'f{i}', 'w').close()"
    place_words = ("--state-dir", place.state, "--workspace", place.base)
    words = (*place_words, "--journal", journal, "--audit", "--commit", "never")
    done = sandhost("run", *words, "--", "python3", "-c", script)
    assert done.status == 0
    rows = events(journal)
    left_out = [row for row in rows if row["event"] == "workspace.left_out"]
    assert not any(row["overflowed"] or row["unknown"] for row in left_out)
    for kind in ("opened", "written"):
        told = len(paths(rows, f"workspace.file_{kind}"))
        assert 1000 <= told < 3000
        assert told + sum(row[kind] for row in left_out) == 3000
    assert len(paths(rows, "workspace.changed")) == 3000


# spec WS20: an audit goes on in the host's next program
@of_root
def test_a_daemon_s_child_is_audited_also_after_a_hand_over(place: Place) -> None:
    top = place.base.parent
    config = f"""
[workspace.repo]
base = "{place.base}"
[policy.agent]
workspace = ["repo"]
audit = true
[child.agent]
command = ["sh", "-c", "trap 'echo y > c; exit' TERM; echo x > b; echo ready; while :; do sleep 0.02; done"]
policy = "agent"
"""
    with daemon(top, config) as host:
        host.wait(lambda: host.log("agent") == b"ready\n")
        assert host.client.replace() == 1
        host.client.stop_child("agent")
        assert host.end() == 0
    rows = events(*sorted((top / "state/journal").glob("*")))
    assert paths(rows, "workspace.file_written") == [b"b", b"c"]
    assert paths(rows, "workspace.changed") == [b"b", b"c"]


# spec WS20: what cannot be audited is said
def test_an_audit_without_a_journal_or_a_layer_is_refused_or_warned_of(
    place: Place,
) -> None:
    done = sandhost("run", "--audit", "--journal", "j", "--", "true")
    assert done.said("--audit: there is no --workspace; name one")
    words = ("--workspace", str(place.base), "--audit", "--", "true")
    assert sandhost("run", *words).said("--audit: there is no --journal to write to")
    config = place.base.parent / "c.toml"
    config.write_text("[policy.run]\naudit = true\n[policy.other]\naudit = true\n")
    done = sandhost("run", "--config", str(config), *words[:2], "--", "true")
    assert b"policy.run.audit: there is no --journal to write to" in done.err
    done = sandhost("check-config", str(config))
    assert (
        b"policy.other.audit: warning: has no effect: there is no workspace" in done.err
    )
    journal = ("--journal", str(place.base.parent / "journal"), "--audit")
    done = place.run("true", *journal, mode=":direct")
    assert done.status == 0
    assert done.said("mode 'direct' writes to the base; use the mode 'review'")
