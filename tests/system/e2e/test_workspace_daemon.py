"""Workspaces of a daemon's children.

Configured, found again, looked at, committed.
"""

import json
import os
import re
import select
import signal
from pathlib import Path

import pytest

from supervisor.client import ControlError
from supervisor.control.client import call
from tests.helpers.command import TIMEOUT_S, Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.scrape import curl, parsed

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes a host that is root")

CONFIG = """
[workspace.repo]
base = "{base}"
[policy.agent]
workspace = ["repo"]
[child.agent]
command = ["sh", "-c", "{script}"]
policy = "agent"
backoff = "50ms"
"""


class Place:
    """A base with a file, beside the directories of a daemon."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.base = top / "repo"
        self.base.mkdir()
        (self.base / "a.txt").write_text("hello\n")

    def config(self, script: str, more: str = "") -> str:
        """Return a configuration whose child runs a shell script."""
        return CONFIG.format(base=self.base, script=script) + more

    def ask(self, *words: str) -> Outcome:
        """Run ``sandhost workspace`` on the state directory."""
        return sandhost("workspace", *words, "--state-dir", str(self.top / "state"))

    def changed(self) -> list[str]:
        """Return the paths that were changed in the workspace."""
        return self.ask("diff", "repo", "--name-only").out.decode().split()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def ended(host: Daemon, name: str = "agent") -> None:
    """Wait until a child has ended, and its workspace's record is there."""
    host.wait(lambda: host.row(name).pid is None, "its end")


def names(host: Daemon) -> set[str | None]:
    """Return the names of the children that a daemon keeps."""
    return {row.name for row in host.client.ps()}


def events(place: Place, name: str) -> list[dict[str, object]]:
    """Return the journal's events of one name."""
    found = []
    for path in sorted((place.top / "state" / "journal").glob("*")):
        for line in path.read_bytes().splitlines():
            row = json.loads(line)
            if row["event"] == name:
                found.append(row)
    return found


def wait_for_starts(host: Daemon, count: int) -> None:
    """Wait until a child that says so has written in its workspace in so many starts."""
    # Its log is kept from one host to the next.
    host.wait(lambda: host.log("agent").count(b"written\n") == count)


# spec WS5
def test_a_child_finds_its_workspace_again_after_each_restart(place: Place) -> None:
    write = "echo $SANDHOST_WORKSPACE >> a.txt; echo written"
    script = f"pwd; cat a.txt; {write}; exec sleep 600"
    for starts in (1, 3):  # before each host's restart of the child
        with daemon(place.top, place.config(script)) as host:
            wait_for_starts(host, starts)
            host.client.stop_child("agent")
            host.client.spawn(name="agent")
            wait_for_starts(host, starts + 1)
            assert host.end() == 0
    assert (place.base / "a.txt").read_text() == "hello\n"
    assert place.changed() == ["a.txt"]
    (row,) = json.loads(place.ask("list", "--json").out)
    assert (row["name"], row["state"], row["changed"]) == ("repo", "idle", 1)
    assert place.ask("commit", "repo").status == 0
    found = (place.base / "a.txt").read_text().split()
    assert found == ["hello", *["repo"] * (len(found) - 1)]
    assert len(found) >= 3


# spec WS5, WS20
def test_a_workspace_of_the_configuration_stays_where_nothing_was_changed(
    place: Place,
) -> None:
    with daemon(place.top, place.config("cat a.txt")) as host:
        ended(host)
        assert host.end() == 0
    assert [row["name"] for row in json.loads(place.ask("list", "--json").out)] == [
        "repo"
    ]
    (opened,) = events(place, "workspace.opened")
    assert (opened["workspace"], opened["mode"]) == ("repo", "review")
    (closed,) = events(place, "workspace.closed")
    assert (closed["changed"], closed["bytes"]) == (0, 0)


# spec WS19
def test_a_second_child_is_refused_with_the_reason(place: Place) -> None:
    config = place.config("exec sleep 600")
    with daemon(place.top, config) as host:
        with pytest.raises(Exception, match="child child-1 has it"):
            host.client.spawn(["sleep", "600"], policy="agent", name="two")
        assert host.row("agent").pid is not None
        assert host.end() == 0


# spec WS5
def test_a_reload_changes_settings_at_the_next_start_and_discards_nothing(
    place: Place,
) -> None:
    script = "echo x >> a.txt; exec sleep 600"
    config = place.config(script)
    with daemon(place.top, config) as host:
        pid = host.row("agent").pid
        file = place.top / "c.toml"
        text = file.read_text()
        guarded = text.replace("[policy.agent]", 'guard = ["a.txt"]\n[policy.agent]')
        file.write_text(guarded)
        assert host.client.reload().unchanged == ["agent"]
        assert host.row("agent").pid == pid
        host.client.stop_child("agent")
        host.client.spawn(name="agent")
        host.client.stop_child("agent")
        assert b"guarded    a.txt" in place.ask("commit", "repo").out
        alone = text.replace('workspace = ["repo"]', "").replace(
            f'[workspace.repo]\nbase = "{place.base}"', ""
        )
        file.write_text(alone)
        host.client.reload()
        assert place.changed() == ["a.txt"]
        assert host.end() == 0


# spec WS5
def test_run_takes_the_workspaces_of_its_policy_and_of_a_name(place: Place) -> None:
    config = place.top / "run.toml"
    config.write_text(
        f'[workspace.repo]\nbase = "{place.base}"\nguard = ["b.txt"]\n'
        '[policy.run]\nworkspace = ["repo"]\n'
    )
    words = ("--config", str(config), "--state-dir", str(place.top / "state"))
    done = sandhost("run", *words, "--", "sh", "-c", "pwd; echo b > b.txt")
    assert done.out.decode() == f"{place.base}\n"
    assert b"guarded    b.txt" in place.ask("commit", "repo").out
    config.write_text(config.read_text().replace('workspace = ["repo"]', ""))
    named = ("--workspace-name", "repo", "--", "cat", "b.txt")
    assert sandhost("run", *words, *named).out == b"b\n"
    other = place.top / "other"
    other.mkdir()
    done = sandhost("run", *words, "--workspace", str(other), *named)
    assert done.status == 125
    assert b"[workspace.repo] has the base" in done.err


# spec WS19
def test_every_fault_of_a_workspace_is_told_at_once(place: Place) -> None:
    config = place.top / "c.toml"
    (place.base / "inner").mkdir()
    (place.top / "state").mkdir()
    config.write_text(f"""
[host]
state_dir = "{place.top}/state"
[workspace.repo]
base = "{place.base}"
[workspace.BAD]
base = "/"
mode = "odd"
[workspace.inner]
base = "{place.base}/inner"
limits = {{ bytes = "1X", files = 0 }}
[workspace.relative]
base = "repo"
[workspace.gone]
base = "{place.top}/gone"
[workspace.file]
base = "{place.base}/a.txt"
[workspace.state]
base = "{place.top}/state"
[policy.p]
workspace = ["nope"]
""")
    done = sandhost("check-config", str(config))
    told = {line.split(": ")[2] for line in done.err.decode().splitlines()}
    assert told >= {
        "workspace.BAD",
        "workspace.BAD.mode",
        "workspace.BAD.base",
        "workspace.inner.base",
        "workspace.inner.limits.bytes",
        "workspace.inner.limits.files",
        "workspace.relative.base",
        "workspace.gone.base",
        "workspace.file.base",
        "workspace.state.base",
        "policy.p.workspace",
    }
    assert done.status != 0


def sizes(host: Daemon) -> list[tuple[str, int, int]]:
    """Return what ``ps`` tells of the agent's workspaces."""
    (row,) = call(host.client.path, "ps")
    return [(one["name"], one["changed"], one["bytes"]) for one in row["workspaces"]]


# spec WS7, WS11a, WS20
@pytest.mark.nobody
def test_a_daemon_does_what_is_asked_of_its_workspaces(place: Place) -> None:
    script = "echo child >> a.txt; echo b > b.txt; cat a.txt; exec sleep 600"
    with daemon(place.top, place.config(script)) as host:
        client = host.client
        host.wait(lambda: host.log("agent"), "its word")
        (row,) = client.workspaces()
        assert (row.name, row.state, row.child) == ("repo", "in use", "child-1")
        assert [(one.path, one.change) for one in client.workspace_diff("repo")] == [
            ("a.txt", "modified"),
            ("b.txt", "added"),
        ]
        host.wait(lambda: sizes(host) == [("repo", 2, 14)], "its sizes")
        patch = b"".join(client.workspace_patch("repo"))
        assert patch == place.ask("diff", "repo").out
        made = client.workspace("snapshot", name="repo", label="mid")
        for refused in (client.workspace_commit, client.workspace_discard):
            with pytest.raises(ControlError, match="child child-1 has it"):
                refused("repo")
        with pytest.raises(ControlError, match="cannot find workspace 'none'"):
            client.workspace_diff("none")
        with pytest.raises(ControlError, match="there is no verb 'dance'"):
            client.workspace("dance")
        client.stop_child("agent")
        (place.base / "a.txt").write_text("operator\n")
        refused_commit = client.workspace_commit("repo")
        assert [one["path"] for one in refused_commit.conflicts] == ["a.txt"]
        assert client.workspace_commit("repo", only=["b.txt"]).applied == ["b.txt"]
        assert (place.base / "b.txt").read_text() == "b\n"
        (place.base / "a.txt").write_text("operator\nhello\n")
        would = client.workspace_commit("repo", merge=True, dry_run=True)
        assert would.merged == ["a.txt"]
        client.workspace_discard("repo")
        assert client.workspaces() == []
        (conflict,) = events(place, "workspace.conflict")
        assert (conflict["workspace"], conflict["conflicts"]) == ("repo", 1)
        (committed,) = events(place, "workspace.committed")
        assert (committed["applied"], committed["left"]) == (1, 1)
        (discarded,) = events(place, "workspace.discarded")
        assert discarded["changed"] == 1
        (snapshot,) = events(place, "workspace.snapshot")
        assert snapshot["workspace"] == "repo"
        assert (snapshot["label"], snapshot["copied_bytes"]) == ("mid", 14)
        # For how long the child was stopped.
        assert made == {key: snapshot[key] for key in made}
        assert made["stopped_ns"] > 0
        assert host.end() == 0


def check_exports(host: Daemon, place: Place, *control: str) -> None:
    """Export by a daemon what is exported without one."""
    for form in ("patch", "tar"):
        file = place.top / f"there.{form}"
        asked = ("workspace", "export", "repo", str(file), *control)
        assert sandhost(*asked).status == 0
        here = place.top / f"here.{form}"
        assert place.ask("export", "repo", str(here)).status == 0
        assert file.read_bytes() == here.read_bytes() != b""
        piece = b"".join(host.client.workspace_export("repo", form))
        assert piece == here.read_bytes()
        done = sandhost(*asked)
        assert (done.status, b"it is there already" in done.err) == (2, True)
    gone = str(place.top / "none.tar")
    done = sandhost("workspace", "export", "none", gone, *control)
    assert (done.status, b"cannot find workspace 'none'" in done.err) == (2, True)
    assert not [name for name in os.listdir(place.top) if "none" in name]


def check_merge(place: Place, *control: str) -> None:
    """Commit a fork whose text the base has changed as well."""
    (place.base / "a.txt").write_text("operator\nhello\n")
    fork = sandhost("workspace", "fork", "repo", *control).out.decode().strip()
    done = sandhost("workspace", "commit", fork, "--merge", *control)
    assert (done.status, done.out) == (0, b"merged     a.txt\n")
    assert (place.base / "a.txt").read_text() == "operator\nhello\nchild\n"
    assert events(place, "workspace.committed")[-1]["merged"] == 1


# spec WS7, WS11a
def test_the_command_asks_a_daemon_that_is_named(place: Place) -> None:
    script = "echo child >> a.txt; echo b > b.txt; cat a.txt"
    with daemon(place.top, place.config(script)) as host:
        ended(host)
        control = ("--control", str(host.client.path))
        done = sandhost("workspace", "list", *control)
        head, row = done.out.decode().splitlines()
        assert head.split()[:4] == ["WORKSPACE", "STATE", "MODE", "CHANGED"]
        assert row.split()[:4] == ["repo", "idle", "review", "2"]
        there = sandhost("workspace", "diff", "repo", *control)
        assert (there.status, there.out) == (1, place.ask("diff", "repo").out)
        named = sandhost("workspace", "diff", "repo", "--name-only", *control)
        assert named.out == b"a.txt\nb.txt\n"
        check_exports(host, place, *control)
        journal = ("--journal", str(place.top / "j"))
        done = sandhost("workspace", "commit", "repo", "b.txt", *control, *journal)
        assert (done.status, done.said("leave it out")) == (2, True)
        done = sandhost("workspace", "commit", "repo", "b.txt", *control)
        assert (done.status, done.out) == (0, b"committed  b.txt\n")
        (committed,) = events(place, "workspace.committed")
        assert committed["applied"] == 1
        check_merge(place, *control)
        done = sandhost("workspace", "snapshot", "repo", "one", *control)
        assert done.out == b"one\n", done.err
        done = sandhost("workspace", "fork", "repo", *control)
        fork = done.out.decode().strip()
        other = sandhost("workspace", "diff", "repo", fork, "--stat", *control)
        assert (other.status, other.out) == (0, b"")
        assert sandhost("workspace", "restore", "repo", "one", *control).status == 0
        assert sandhost("workspace", "discard", fork, "--yes", *control).status == 0
        done = sandhost("workspace", "diff", "none", *control)
        assert done.status == 2
        assert b"cannot find workspace 'none'" in done.err
        both = sandhost("workspace", "list", *control, "--state-dir", "/x")
        assert b"--control: --state-dir is for" in both.err
        assert sandhost("workspace", "discard", "repo", "--yes", *control).status == 0
        assert sandhost("workspace", "list", *control, "--json").out == b"[]\n"
        assert host.end() == 0


SHARED = """
[child.other]
command = ["sh", "-c", "sleep 600"]
policy = "agent"
"""


# spec WS19
@of_root
def test_children_share_a_workspace_that_says_so(place: Place) -> None:
    script = "cat a.txt; while :; do read x < in; echo $x >> a.txt; echo $x; done"
    os.mkfifo(place.base / "in")
    config = place.config(script, SHARED).replace(
        "[policy.agent]", "shared = true\n[policy.agent]"
    )
    with daemon(place.top, config) as host:
        script = "echo one > in; until grep one a.txt; do :; done"
        host.client.spawn(["sh", "-c", script], policy="agent", name="third")
        host.wait(lambda: b"one" in host.log("third"), "the other's word")
        assert host.client.replace() == 1
        host.client.stop_child("agent")  # it made the mount
        script = "cat a.txt; echo two >> a.txt; cat a.txt"
        host.client.spawn(["sh", "-c", script], policy="agent", name="fourth")
        host.wait(lambda: b"two" in host.log("fourth"), "its own word")
        assert host.log("fourth") == b"hello\none\nhello\none\ntwo\n"
        host.wait(lambda: names(host) == {"agent", "other"}, "their ends")
        (row,) = json.loads(place.ask("list", "--json").out)
        assert row["state"] == "in use"
        host.client.stop_child("other")
        ended(host, "other")
        (row,) = json.loads(place.ask("list", "--json").out)
        assert (row["state"], row["changed"]) == ("idle", 1)
        assert host.end() == 0


# spec WS19
@pytest.mark.nobody
def test_an_ordinary_user_s_host_shares_none(place: Place) -> None:
    if os.geteuid() == 0:
        pytest.skip("it takes a host that is not root")
    text = place.config("true").replace(
        "[policy.agent]", "shared = true\n[policy.agent]"
    )
    (place.top / "c.toml").write_text(text)
    done = sandhost("check-config", str(place.top / "c.toml"))
    assert b"workspace.repo.shared: it takes a host that is root" in done.err


def beneath(pid: int) -> list[int]:
    """Return the pids of the processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


# spec WS18
@pytest.mark.nobody
def test_a_lock_lasts_as_long_as_the_mount_when_the_host_is_killed(
    place: Place,
) -> None:
    script = "echo x > b.txt; sync; echo done; exec sleep 600"
    with daemon(place.top, place.config(script)) as host:
        host.wait(lambda: host.log("agent"), "its word")
        child = host.row("agent").pid
        assert child is not None
        (launchpad,) = beneath(host.process.pid)
        os.kill(launchpad, signal.SIGSTOP)  # it ends nobody now
        try:
            host.process.kill()
            host.process.wait()
            assert Path(f"/proc/{child}").exists()
            (row,) = json.loads(place.ask("list", "--json").out)
            assert (row["state"], row["child"]) == ("in use", "child-1")
            assert place.ask("discard", "repo", "--yes").status == 2
        finally:
            os.kill(launchpad, signal.SIGCONT)
        until_gone(launchpad)
        (row,) = json.loads(place.ask("list", "--json").out)
        assert (row["state"], row["changed"]) == ("left behind", 1)
        assert not Path(f"/proc/{child}").exists()
        assert place.ask("commit", "repo").status == 0
        assert (place.base / "b.txt").read_text() == "x\n"


def until_gone(pid: int) -> None:
    """Wait for the end of a process that may be nobody's child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], TIMEOUT_S)[0]
    finally:
        os.close(pidfd)


# spec WS18
@pytest.mark.nobody
def test_a_workspace_is_handed_over_to_the_next_program(place: Place) -> None:
    script = "echo x >> a.txt; echo done; exec sleep 600"
    with daemon(place.top, place.config(script)) as host:
        host.wait(lambda: host.log("agent"), "its word")
        pid = host.row("agent").pid
        assert host.client.replace() == 1
        assert host.row("agent").pid == pid
        (row,) = json.loads(place.ask("list", "--json").out)
        assert (row["state"], row["child"]) == ("in use", "child-1")
        assert place.ask("commit", "repo").status == 2
        host.client.stop_child("agent")
        (closed,) = events(place, "workspace.closed")
        assert closed["changed"] == 1
        (row,) = json.loads(place.ask("list", "--json").out)
        assert row["state"] == "idle"
        assert host.end() == 0


# spec WS7, WS20
def test_figures_and_page_tell_what_is_changed(place: Place) -> None:
    script = "echo more >> a.txt; echo new > b.txt; exec sleep 600"
    more = '[metrics]\nlisten = "tcp://127.0.0.1:0"\npage = true\n'
    with daemon(place.top, place.config(script, more)) as host:
        (url,) = re.findall(r"(http://[^\"\s]+/)metrics", host.said())

        def figures() -> dict[str, float]:
            found = parsed(curl(f"{url}metrics").body)
            return {name: n for name, n in found.items() if "_workspace" in name}

        host.wait(
            lambda: figures()["sandhost_workspace_changed_files"] == 2, "2 changed"
        )
        assert figures() == {
            "sandhost_workspaces{state=in_use}": 1,
            "sandhost_workspaces{state=idle}": 0,
            "sandhost_workspaces{state=left_behind}": 0,
            "sandhost_workspace_changed_files": 2,
            "sandhost_workspace_bytes": len("hello\nmore\nnew\n"),
            "sandhost_workspace_commits_total": 0,
            "sandhost_workspace_conflicts_total": 0,
        }
        page = curl(url).body
        heads = re.findall(r"<th[^>]*>(?:<[^>]*>)*([^<]*)", page)
        [row] = re.findall(
            r"<tr[^>]*>(?:(?!</tr>).)*<b>agent</b>.*?</tr>", page, re.DOTALL
        )
        cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall("<td.*?</td>", row)]
        shown = dict(zip(heads, cells, strict=False))
        assert [shown[head] for head in ("Workspace", "Changed", "Changed bytes")] == [
            "repo", "2", "15 B",
        ]  # fmt: skip
        (place.base / "a.txt").write_text("operator's\n")
        client = host.client
        assert client.workspace_commit("repo", freeze=True).conflicts
        assert client.workspace_commit("repo", only=["b.txt"], freeze=True).applied
        assert figures()["sandhost_workspace_commits_total"] == 1
        assert figures()["sandhost_workspace_conflicts_total"] == 1
