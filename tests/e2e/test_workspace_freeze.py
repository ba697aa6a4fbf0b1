"""``--freeze``: a child stands still while a command looks, and goes on in any case."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.proctree import stat_fields
from supervisor.workspace.freeze import FreezeError, device_of, guarded_stop
from supervisor.workspace.workspace import Workspace
from tests.attacks.test_unprivileged import file_passed_by_nobody
from tests.e2e.test_workspace import Place, of_root
from tests.helpers.command import ENVIRONMENT, SANDHOST

pytestmark = pytest.mark.slow

COUNT = "i=0; while :; do i=$((i+1)); echo $i > one; echo $i > two; done"
"""What never stops writing: both files have one content, but between two writes."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def at_work(place: Place, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in the workspace ``w`` until the block ends."""
    words = ("--state-dir", place.state, "--workspace", place.base)
    process = subprocess.Popen(
        [SANDHOST, "run", *words, "--workspace-name", "w", "--", "sh", "-c", script],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    lock = place.state / "workspaces/w/lock"
    until_s = time.monotonic() + 30
    while lock.read_bytes().count(b"\n") < 2:  # its exec is told of after it
        assert time.monotonic() < until_s
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def counted(place: Place) -> int:
    """Return how far the child has counted; -1 while it writes that."""
    file = place.state / "workspaces/w/upper/one"
    return int(file.read_bytes() or b"-1") if file.exists() else -1


def wait_until_counted(place: Place, more_than: int) -> None:
    """Wait until the child has counted on."""
    until_s = time.monotonic() + 30
    while counted(place) <= more_than:
        assert time.monotonic() < until_s


def device(place: Place) -> bytes:
    """Return the device of the mount that the child has."""
    with Workspace(str(place.state), "w") as workspace:
        return device_of(workspace.directory.processes(), workspace.state.base)


# spec WS8
def test_nothing_is_written_while_a_child_is_stopped_and_it_goes_on(
    place: Place,
) -> None:
    # One that has left its parent, and what forks again and again.
    script = f"echo ready; (sh -c '{COUNT}' &); while :; do true; (true); done"
    with at_work(place, script):
        wait_until_counted(place, 0)
        with guarded_stop(device(place)):
            first = counted(place)
            for _ in range(1000):
                assert counted(place) == first
        wait_until_counted(place, first)
        done = place.ask("diff", "w", "--freeze", "--name-only")
        assert (done.status, done.out, done.err) == (1, b"one\ntwo\n", b"")
        wait_until_counted(place, counted(place))
        done = place.ask("diff", "w", "--name-only")
        assert (
            b"child child-1 is at work, so this may be torn; see --freeze" in done.err
        )


# spec WS8
def test_a_killed_command_leaves_no_child_stopped(place: Place) -> None:
    hold = (
        "import sys\n"
        "from supervisor.workspace.freeze import guarded_stop\n"
        "with guarded_stop(sys.argv[1].encode()):\n"
        "    print('stopped', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with at_work(place, f"echo ready; {COUNT}"):
        wait_until_counted(place, 0)
        command = subprocess.Popen(
            [sys.executable, "-c", hold, device(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert command.stdout is not None
        assert command.stdout.readline() == b"stopped\n"
        first = counted(place)
        command.send_signal(signal.SIGKILL)
        command.communicate()
        wait_until_counted(place, first)


# spec WS10
def test_a_commit_of_a_running_child_is_frozen_or_refused(place: Place) -> None:
    (place.base / "gone").mkdir()
    (place.base / "gone/x").write_text("x\n")
    script = (
        "echo more >> a.txt; mkdir -p d/e; echo 1 > d/one; echo 2 > d/e/one; rm -r gone; echo ready; read go;"
        " cat a.txt d/one; ls; rm d/one d/e/one; echo two > d/two; echo again >> a.txt"
    )
    with at_work(place, script) as process:
        done = place.ask("commit", "w")
        assert done.status == 2
        assert b"or see --freeze" in done.err
        done = place.ask("commit", "w", "--freeze", "--mine", "a.txt")
        assert (done.status, b"cannot drop 'a.txt'" in done.err) == (2, True)
        done = place.ask("commit", "w", "--freeze")
        assert (done.status, done.err) == (0, b"")
        assert (place.base / "a.txt").read_text() == "hello\nmore\n"
        assert (place.base / "d/one").read_text() == "1\n"
        assert not (place.base / "gone").exists()
        assert place.ask("diff", "w", "--name-only").out == b""
        out, _ = process.communicate(b"go\n")
        assert out == b"hello\nmore\n1\na.txt\nd\n"
    # What it changed afterwards is a change of what was committed, and no conflict.
    done = place.ask("diff", "w", "--name-only")
    assert done.out == b"a.txt\nd/e/one\nd/one\nd/two\n"
    assert not (place.state / "workspaces/w/committed-in-use").exists()
    assert place.ask("commit", "w", "a.txt", "d/*").status == 0
    assert (place.base / "a.txt").read_text() == "hello\nmore\nagain\n"
    assert sorted(os.listdir(place.base / "d")) == ["e", "two"]
    assert os.listdir(place.base / "d/e") == []


def test_a_process_that_was_stopped_before_stays_so(place: Place) -> None:
    script = "echo ready; sh -c 'kill -STOP $$'; echo on > on; sleep 1000"
    with at_work(place, script):
        until_s = time.monotonic() + 30
        while not (asleep := stopped_processes(place)):
            assert time.monotonic() < until_s
        with guarded_stop(device(place)):
            pass
        assert stopped_processes(place) == asleep


def stopped_processes(place: Place) -> list[int]:
    """Return which processes of the child are stopped by a signal."""
    with Workspace(str(place.state), "w") as workspace:
        ((pid, _),) = workspace.directory.processes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states = {int(child): stat_fields(int(child)) for child in children}
    return [pid for pid, found in states.items() if found and found[0] == b"T"]


def test_processes_that_cannot_be_seen_are_told_of(place: Place) -> None:
    with pytest.raises(FreezeError, match="are not to be seen from here"):
        device_of([(os.getpid(), 1)], b"/")


# spec WS8
@of_root
def test_a_host_that_is_not_root_stops_its_child_too(
    request: pytest.FixtureRequest,
) -> None:
    passed = file_passed_by_nobody(request)
    assert len(passed) > 3
