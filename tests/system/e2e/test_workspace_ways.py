"""Each way to make a workspace's mount gives the same; missing ones are named.

This kernel has all of them, so what an older one refuses is refused here
(`tests.helpers.older_mounts`).
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.sandbox import held_mount
from supervisor.spawn.launchpad.layers import overlay
from tests.helpers.command import SANDHOST, Outcome, running, sandhost
from tests.helpers.older_mounts import linux_6
from tests.helpers.rounds import LONG
from tests.system.e2e.older import without

pytestmark = pytest.mark.slow

E2E = Path(__file__).parent
FSCONFIG, SET_FD = 431, 5
OPERATOR = 1234
IS_ROOT = os.geteuid() == 0
of_root = pytest.mark.skipif(not IS_ROOT, reason="it takes a host that is root")

OLDER = {"attached": 14, "named": 12} if IS_ROOT else {"named": 12}
"""The newest kernel that has no newer way; a host that is not root needs no 6.15."""


class Place:
    """A base of another user, if the host is root, on a kernel that gives some ways."""

    def __init__(self, top: Path, *, minor: int, maps_owners: bool = True) -> None:
        self.top = top
        self.base = top / "repo"
        self.base.mkdir()
        (self.base / "old").mkdir()
        for name in ("a.txt", "secret", "old/b.txt"):
            (self.base / name).write_text("hello\n")
        if IS_ROOT:
            for path in (self.base, *self.base.rglob("*")):
                os.chown(path, OPERATOR, OPERATOR)
        self.wrapper = linux_6(minor, maps_owners=maps_owners)
        self.state = ("--state-dir", str(top / "state"))

    def words(self, script: str, *options: str, mode: str = "") -> list[str]:
        """Return the words of a run of a Python script, which has the door as ``door``."""
        where = f"{self.base}{mode}"
        head = "import os; from vfs.client import *; door = Client()\n"
        words = ["run", *self.state, "--workspace", where, *options, "--"]
        return [*words, sys.executable, "-c", head + script]

    def run(self, script: str, *options: str, mode: str = "") -> Outcome:
        """Run it."""
        return sandhost(*self.words(script, *options, mode=mode), wrapper=self.wrapper)

    def named(self, script: str, name: str = "w", *options: str) -> Outcome:
        """Run it in the workspace of a name."""
        return self.run(script, "--workspace-name", name, *options)

    def ask(self, *words: str) -> Outcome:
        """Run ``sandhost workspace``."""
        return sandhost("workspace", *words, *self.state, wrapper=self.wrapper)


BOTH_DOORS = """
assert sorted(os.listdir()) == ['a.txt', 'old'], os.listdir()
def by_door(name):
    with door.open_file(name) as file: return file.read().decode()
open('calls', 'w').write('calls'); assert by_door('calls') == 'calls'
with door.open_file('door', 'w') as file: file.write(b'door')
assert open('door').read() == 'door' == by_door('door')
open('a.txt', 'a').write('more'); assert by_door('a.txt') == 'hello\\nmore'
assert all(os.stat(name).st_uid == os.getuid() for name in os.listdir())
os.remove('old/b.txt'); os.rmdir('old'); os.mkdir('old'); assert os.listdir('old') == []
from vfs.client.tools import ToolClient
done = ToolClient().run('go', 'calls', cwd=os.getcwd())
assert done.output == b'calls', done.output
assert open('tool').read() == 'tool\\n' == by_door('tool')
print('ok')
"""


# spec WS2a, WS2, WS3, WS6, WS15: a run, its tools, a snapshot, a fork, a commit.
@pytest.mark.nobody
@pytest.mark.parametrize("way", OLDER)
def test_each_way_gives_the_same(tmp_path: Path, way: str) -> None:
    place = Place(tmp_path, minor=OLDER[way])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/go").write_text('#!/bin/sh\ncat "$1"; echo tool > tool\n')
    (tmp_path / "bin/go").chmod(0o755)
    (tmp_path / "config.toml").write_text(
        "[toolexec]\nlisten = ['unix']\n"
        f"[sidecar.my-go]\nkind = 'go'\npath = ['{tmp_path}/bin']\n"
    )
    config = ("--config", str(tmp_path / "config.toml"), "--hide", "/secret")
    done = place.named(BOTH_DOORS, "w", *config)
    assert (done.out, done.status) == (b"ok\n", 0), done.err
    assert place.ask("snapshot", "w", "one").status == 0
    assert place.named("open('calls', 'a').write(' more')").status == 0
    assert place.ask("fork", "w", "-n", "1").status == 0
    done = place.named("print(open('calls').read(), os.listdir('old'))", "w-1")
    assert done.out == b"calls more []\n", done.err
    names = b"a.txt\ncalls\ndoor\nold/b.txt\ntool\n"
    assert place.ask("diff", "w-1", "--name-only").out == names
    assert place.ask("commit", "w").status == 0
    assert (place.base / "calls").read_text() == "calls more"
    assert (place.base / "calls").stat().st_uid == place.base.stat().st_uid


# spec WS2a, WS4
@of_root
def test_the_other_modes_need_no_newer_kernel(tmp_path: Path) -> None:
    place = Place(tmp_path, minor=12)
    script = "print(door.read_all(door.open('a.txt')))\ntry: open('new', 'w')\n"
    script += "except OSError as why: print(why.strerror)"
    done = place.run(script, mode=":read-only")
    assert done.out == b"b'hello\\n'\nRead-only file system\n", done.err
    assert place.run("open('new', 'w')", mode=":direct").status == 0
    assert (place.base / "new").stat().st_uid == place.base.stat().st_uid


# spec WS2a, WS18: the kernel refuses a second mount that keeps an index while one is there.
@of_root
def test_a_host_that_is_killed_leaves_no_mount(tmp_path: Path) -> None:
    place = Place(tmp_path, minor=12)
    script = "open('x', 'w').write('x'); print('ready', flush=True); input()"
    words = place.words(script, "--workspace-name", "w")
    upper = place.top / "state/workspaces/w"
    with running(*words, wrapper=place.wrapper, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert not can_be_mounted(place.base, upper)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert place.ask("diff", "w", "--name-only").out == b"x\n"
    assert can_be_mounted(place.base, upper)


def can_be_mounted(base: Path, own: Path) -> bool:
    """Tell whether no mount has a layer."""
    options = f"index=on,lowerdir={base},upperdir={own}/upper,workdir={own}/work"
    done = subprocess.run(
        ["unshare", "-m", "mount", "-t", "overlay", "-o", options, "a-look", str(base)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 or "busy" in done.stderr, done.stderr
    return done.returncode == 0


NO_UID = """
[sandbox.mine]
layers = ["mountns", "pidns", "seccomp"]
"""


# spec WS3, WS4: where no layer maps owners, a child with a user of its own has none.
@of_root
def test_where_owners_are_not_mapped_the_operator_s_child_works(tmp_path: Path) -> None:
    place = Place(tmp_path, minor=15, maps_owners=False)
    done = place.named("")
    assert done.status == 125
    assert done.said("shows no files as another user's")
    assert done.said("a profile without 'uid' (--sandbox) as its owner")
    (tmp_path / "config.toml").write_text(NO_UID)
    config = ("--config", str(tmp_path / "config.toml"), "--sandbox", "mine")
    assert place.named("", "w", *config).said("shows no files as another user's")
    for path in (place.base, *place.base.rglob("*")):
        os.chown(path, 0, 0)
    done = place.named("open('a.txt', 'w'); print('ok')", "w", *config)
    assert done.out == b"ok\n", done.err


# spec WS3: what it makes belongs to the operator on the disk.
@of_root
def test_a_child_without_a_user_of_its_own_owns_what_the_operator_owns(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, minor=15)
    (tmp_path / "config.toml").write_text(NO_UID)
    config = ("--config", str(tmp_path / "config.toml"), "--sandbox", "mine")
    script = "open('a.txt', 'a').write('more'); open('new', 'w').write('new')"
    for mode in ("", ":direct"):
        done = place.run(f"{script}; print('ok')", *config, mode=mode)
        assert done.out == b"ok\n", done.err
    owners = {path.stat().st_uid for path in place.base.rglob("*")}
    assert owners == {OPERATOR}


def doctor(*wrapper: str) -> dict[str, tuple[str, str]]:
    """Return (state, detail) of what it tries of layers, and of the mode ``review``."""
    done = subprocess.run(
        [*wrapper, SANDHOST, "doctor", "--json"], capture_output=True, check=False
    )
    report = json.loads(done.stdout)
    rows = {row["what"]: row for row in report["probes"] if "layers" in row["what"]}
    rows |= {row["mode"]: row for row in report["workspaces"]}
    return {what: (row["state"], row["detail"]) for what, row in rows.items()}


# spec WS2a, WS4: a filter refuses layers by descriptor, as before Linux 6.13.
@pytest.mark.nobody
def test_doctor_tells_which_way_is_used() -> None:
    found = doctor(*without(FSCONFIG, errno.EINVAL, SET_FD, argument=1))
    why = f"refused: {os.strerror(errno.EINVAL)}"
    assert found["layers by descriptor"] == ("missing", why)
    assert found["layers by name"][0] == found["review"][0] == "present"
    assert " of layers by name" in found["review"][1]


# spec WS2a: never judged by a version.
@of_root
@pytest.mark.parametrize("way", overlay.WAYS)
def test_a_way_is_tried_and_leaves_nothing(way: str) -> None:
    before = os.listdir("/proc/self/fd"), os.readlink("/proc/self/ns/mnt")
    with contextlib.suppress(OSError):
        held_mount.try_way(way)
    assert (os.listdir("/proc/self/fd"), os.readlink("/proc/self/ns/mnt")) == before


OF_WORKSPACES = sorted(
    str(path)
    for path in (
        *E2E.glob("test_workspace*.py"),
        E2E.parent / "upgrade/test_workspace.py",
    )
    if path.name not in {Path(__file__).name, "test_workspace_page.py"}
)


# spec WS2a: all that is tested of workspaces, on a kernel that takes no descriptors.
@of_root
@pytest.mark.chaos
@pytest.mark.skipif(
    not LONG, reason="each way's own test is the short form; see make chaos"
)
def test_all_workspaces_are_the_same_where_layers_are_named() -> None:
    older = without(FSCONFIG, errno.EINVAL, SET_FD, argument=1)
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "CHAOS_ROUNDS": "400"}
    done = subprocess.run(
        [*older, *pytest_words, *OF_WORKSPACES], env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
