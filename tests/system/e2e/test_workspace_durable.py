"""A workspace that is not durable.

Its mount syncs nothing, and its end is seen to.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

CONFIG = """
[workspace.repo]
base = "{base}"
durable = {durable}
[policy.agent]
workspace = ["repo"]
[child.agent]
command = ["sh", "-c", "echo ran >> runs; echo ready; exec sleep 600"]
policy = "agent"
backoff = "50ms"
"""

OPTIONS = 'grep " $PWD " /proc/self/mountinfo'
VOLATILE = {"volatile", "fsync=volatile"}
"""How kernels name the option; newer ones as a kind of fsync."""


class Place:
    """A base, a configuration with a workspace of it, and a state directory."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.base = top / "base"
        self.base.mkdir()
        self.state = top / "state"
        self.set(durable=False)

    def set(self, *, durable: bool) -> str:
        """Write the configuration; return it."""
        text = CONFIG.format(base=self.base, durable=str(durable).lower())
        (self.top / "run.toml").write_text(text)
        return text

    def words(self, script: str) -> list[str]:
        """Return the command that runs a shell script in the workspace."""
        config = ["--config", str(self.top / "run.toml"), "--workspace-name", "repo"]
        return [
            "run",
            *config,
            "--state-dir",
            str(self.state),
            "--",
            "sh",
            "-c",
            script,
        ]

    def run(self, script: str) -> Outcome:
        """Run a script in the workspace to its end."""
        done = sandhost(*self.words(script))
        assert done.status == 0, done.err.decode()
        return done

    def cut_off(self, script: str) -> None:
        """Run a script, and kill its host while it runs."""
        process = subprocess.Popen(
            [SANDHOST, *self.words(f"{script}; echo ready; exec sleep 600")],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        until_s = time.monotonic() + 30
        while b"left behind" not in self.ask("list").out:
            assert time.monotonic() < until_s

    def ask(self, *words: str) -> Outcome:
        """Run ``sandhost workspace``."""
        return sandhost("workspace", *words, "--state-dir", str(self.state))

    def has_mark(self) -> bool:
        """Tell whether the kernel's mark is there, and leave all as it is."""
        work = self.state / "workspaces/repo/work/work"
        opened: list[Path] = []
        try:
            for path in (work, work / "incompat"):
                if not path.exists():
                    return False
                path.chmod(0o700)
                opened.append(path)
            return (work / "incompat/volatile").exists()
        finally:
            for path in reversed(opened):
                path.chmod(0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def is_volatile(done: Outcome) -> bool:
    """Tell whether a run that printed its mount's options had it so."""
    (line,) = [line for line in done.out.decode().splitlines() if " - overlay " in line]
    return not VOLATILE.isdisjoint(line.split()[-1].split(","))


def warnings(said: str) -> list[str]:
    """Return the lines of a host's that warn."""
    return [line for line in said.splitlines() if "WARNING" in line]


# spec WS2
@pytest.mark.nobody
@pytest.mark.parametrize("durable", [True, False])
def test_a_mount_is_volatile_where_that_is_asked_for(
    place: Place, *, durable: bool
) -> None:
    place.set(durable=durable)
    for _ in range(2):  # the first one ended well, and nothing is said
        done = place.run(f"echo more >> kept; sync kept; {OPTIONS}")
        assert is_volatile(done) != durable
        assert warnings(done.err.decode()) == []
        assert not place.has_mark()
    assert place.run("cat kept").out == b"more\nmore\n"
    assert place.ask("commit", "repo").status == 0
    assert (place.base / "kept").read_text() == "more\nmore\n"


# spec WS2, WS18
@pytest.mark.parametrize(
    "durable", [True, pytest.param(False, marks=pytest.mark.nobody)]
)
def test_what_was_cut_off_works_again_and_is_told_once(
    place: Place, *, durable: bool
) -> None:
    place.cut_off("echo before > kept")
    assert place.has_mark()
    words = ("diff", "repo", "--name-only"), ("commit", "repo", "--dry-run"), ("list",)
    for asked in words:  # spec WS18: who looks before the next start is told, too
        assert place.ask(*asked).said(
            "repo: its last run (durable = false) was cut off"
        )
    (row,) = json.loads(place.ask("list", "--json").out)
    assert row["cut_off"] is True
    place.set(durable=durable)
    done = place.run(f"cat kept; echo after >> kept; {OPTIONS}")
    (warning,) = warnings(done.err.decode())
    assert "workspace repo (durable = false) was cut off" in warning.lower()
    assert done.out.startswith(b"before\n")
    assert is_volatile(done) != durable
    assert not place.has_mark()
    assert warnings(place.run("true").err.decode()) == []
    assert json.loads(place.ask("list", "--json").out)[0]["cut_off"] is False
    done = place.ask("commit", "repo")
    assert (done.status, done.err) == (0, b"")
    assert (place.base / "kept").read_text() == "before\nafter\n"


# spec WS2: the mark of a mount that is in use is not cleared
def test_the_mark_of_another_child_s_mount_stays(place: Place) -> None:
    process = subprocess.Popen(
        [SANDHOST, *place.words("echo > made; echo ready; read line")],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    second = sandhost(*place.words("true"))
    assert second.status == 125
    assert b"child child-1 has it" in second.err
    assert warnings(second.err.decode()) == []
    assert place.has_mark()
    process.communicate(b"\n")
    assert process.returncode == 0
    assert not place.has_mark()


# spec WS4: a mode that has no layer cannot give up that it is synced
@pytest.mark.parametrize("mode", ["direct", "read-only"])
def test_it_is_refused_in_a_mode_without_a_layer(place: Place, mode: str) -> None:
    words = place.words("true")
    words.insert(-4, "--workspace")
    words.insert(-4, f"{place.base}:{mode}")
    done = sandhost(*words)
    assert (done.status, done.said(f"mode {mode!r} has no layer")) == (125, True)
    config = place.top / "run.toml"
    text = config.read_text().replace("durable", f'mode = "{mode}"\ndurable')
    config.write_text(text)
    done = sandhost("check-config", str(config))
    assert b"workspace.repo.durable: mode" in done.err


# spec WS2: a start that fails has told it all the same
def test_what_was_cut_off_is_told_where_the_start_fails(place: Place) -> None:
    place.cut_off("echo before > kept")
    (place.state / "workspaces/repo/upper").rename(place.state / "away")
    done = sandhost(*place.words("true"))
    assert done.status == 125
    assert len(warnings(done.err.decode())) == 1


# spec WS2, WS18
def test_a_daemon_tells_it_when_its_child_starts_again(place: Place) -> None:
    config = place.set(durable=False)
    told = []
    for end in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with daemon(place.top, config) as host:
            host.wait(lambda: host.log("agent").endswith(b"ready\n"))
            # A child that is killed ends its mount well.
            os.kill(host.row("agent").pid or 0, signal.SIGKILL)
            host.wait(lambda: host.row("agent").state == "ended")
            host.client.spawn(name="agent")
            host.wait(lambda: host.row("agent").pid is not None)
            assert place.has_mark()
            host.end(end)
            told.append([w for w in warnings(host.said()) if "was cut off" in w])
    # All of them write to one file: the second and the third have found one each.
    assert [len(some) for some in told] == [0, 1, 2, 2]
    assert all("Workspace repo " in line for line in told[-1])
    assert not place.has_mark()
