"""Parentage as /proc tells it, and signals that reach exactly who is meant."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.linux import processes
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl

pytestmark = pytest.mark.slow

# argv: depth, width. A tree of processes that says its size when it stands.
TREE = """
import os, signal, sys
def grow(depth):
    os.write(1, b"x")
    if depth:
        for _ in range(int(sys.argv[2])):
            if os.fork() == 0:
                return grow(depth - 1)
    signal.pause()
grow(int(sys.argv[1]))
"""


@pytest.fixture
def reap_orphans() -> Iterator[None]:
    """Orphans come to the test process, which waits for them in the end.

    For those only that are dying: one that was not killed stops the test here.
    """
    before = processes.children_of(os.getpid())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    # A dead process gave its children away before it can be waited for.
    while left := set(processes.children_of(os.getpid())) - set(before):
        for pid in left:
            os.waitid(os.P_PID, pid, os.WEXITED)
    prctl(PR_SET_CHILD_SUBREAPER, 0)


def tree(depth: int, width: int) -> "subprocess.Popen[bytes]":
    """Start a `TREE` and wait until all of it is there."""
    size = sum(width**level for level in range(depth + 1))
    command = (sys.executable, "-I", "-S", "-c", TREE, str(depth), str(width))
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(size)) == size
    return process


def is_gone(process: "subprocess.Popen[bytes]") -> bool:
    """Whether nobody of a tree holds its output any more; waits for that."""
    assert process.stdout is not None
    with process, process.stdout as said:
        return said.read() == b""


@pytest.mark.usefixtures("reap_orphans")
def test_the_two_ways_to_list_children_agree() -> None:
    process = tree(1, 5)
    found = processes.children_of(process.pid)
    assert len(found) == 5
    assert sorted(found) == sorted(processes.children_by_scan(process.pid))
    processes.signal_trees(os.getpid(), [process.pid], signal.SIGKILL)
    assert is_gone(process)


@pytest.mark.parametrize("is_listed", [True, False], ids=["a list", "by scan"])
@pytest.mark.usefixtures("reap_orphans")
def test_a_list_that_is_open_tells_the_children_of_now(
    is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KERNEL_LISTS_CHILDREN", is_listed)
    with contextlib.closing(processes.OwnChildren()) as own:
        before = set(own.pids())
        # More than fit into one page, of which a single read of the list gives no more.
        words, count = ["sleep", "1000"], 1000 if is_listed else 50
        crowd = [os.posix_spawn("/bin/sleep", words, {}) for _ in range(count)]
        assert set(own.pids()) - before == set(crowd)
        processes.kill_children(crowd)
        for pid in crowd[1:]:
            os.waitpid(pid, 0)
        assert set(own.pids()) - before == {crowd[0]}  # not waited for, so still there


def test_processes_are_ended_by_signal_within_a_time() -> None:
    program = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
signal.pause()
"""
    words = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = processes.read_parent_and_start(process.pid)
        assert stat is not None
        assert processes.open_process((process.pid, stat[1] + 1)) is None
        pidfd = processes.open_process((process.pid, stat[1]))
        assert pidfd is not None
        assert not processes.end_processes([pidfd], signal.SIGTERM, 0.0)
        assert processes.end_processes([pidfd], signal.SIGKILL, 10.0)
        process.wait()
        assert not processes.signal_pidfd(pidfd, signal.SIGKILL)
        assert processes.end_processes([pidfd], 0, 0.0)
        os.close(pidfd)


def test_a_child_is_reaped_with_its_status_or_killed_in_time() -> None:
    for program, timeout_s, status in [
        ("raise SystemExit(3)", None, 3),
        ("raise SystemExit(3)", 60.0, 3),
        ("import signal; signal.pause()", 0.0, None),
    ]:
        argv = [sys.executable, "-I", "-S", "-c", program]
        pidfd = os.pidfd_open(os.posix_spawn(argv[0], argv, {}))
        assert processes.exit_status(pidfd, timeout_s) == status
        with pytest.raises(ChildProcessError):
            processes.exit_status(pidfd)
        os.close(pidfd)


def test_a_pidfd_is_closed_where_its_process_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks

    def refuse(_pid: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "read_parent_and_start", refuse)
    with pytest.raises(OSError, match="open files"):
        processes.open_process((os.getpid(), 1))


def test_children_of_nobody_are_none() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    assert processes.children_of(process.pid) == []
    assert processes.read_parent_and_start(process.pid) is None


def test_children_of_other_threads_are_children() -> None:
    program = """
import os, signal, threading
def fork():
    if os.fork():
        os.write(1, b"x")
        threading.Event().wait()
    signal.pause()
threading.Thread(target=fork, daemon=True).start()
signal.pause()
"""
    command = (sys.executable, "-I", "-S", "-c", program)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        (child,) = processes.children_of(process.pid)
        assert processes.children_by_scan(process.pid) == [child]
        processes.signal_trees(os.getpid(), [process.pid], signal.SIGKILL)


def test_a_name_with_brackets_and_blanks_hides_nothing(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "1000"]) as process:
        stat = processes.read_parent_and_start(process.pid)
        assert stat is not None
        assert stat[0] == os.getpid()
        process.kill()


# attack 27
def test_a_reused_pid_gets_no_signal() -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        stat = processes.read_parent_and_start(process.pid)
        assert stat is not None
        before = (process.pid, stat[1] - 1)
        assert processes.signal_process(before, signal.SIGKILL) is False
        assert process.poll() is None
        assert processes.signal_process((process.pid, stat[1]), signal.SIGKILL) is True
        assert process.wait() == -signal.SIGKILL
    assert processes.signal_process((process.pid, stat[1]), signal.SIGKILL) is False


# attack 27
@pytest.mark.usefixtures("reap_orphans")
def test_a_tree_is_only_what_stands_beneath_the_named_parent() -> None:
    process = tree(2, 2)
    found = processes.trees_beneath(os.getpid(), [process.pid])
    assert len(found) == 7
    assert found[0][0] == process.pid
    assert processes.trees_beneath(process.pid, [process.pid]) == []
    assert processes.trees_beneath(1, [process.pid]) == []
    processes.signal_trees(1, [process.pid], signal.SIGKILL)  # not its parent
    assert process.poll() is None
    processes.signal_trees(os.getpid(), [process.pid], signal.SIGKILL)
    assert is_gone(process)


@pytest.mark.usefixtures("reap_orphans")
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (8, 1), (1, 100), (6, 2)])
def test_a_signal_reaches_a_whole_tree(depth: int, width: int) -> None:
    process = tree(depth, width)
    processes.signal_trees(os.getpid(), [process.pid], signal.SIGKILL)
    assert is_gone(process)


def test_children_are_killed_and_the_dead_are_no_error() -> None:
    # The second is dead and not waited for, so that its pid is still its own.
    with (
        subprocess.Popen(["/bin/sleep", "1000"]) as living,
        subprocess.Popen(["/bin/true"]) as dead,
    ):
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        processes.kill_children([living.pid, dead.pid])
        assert living.wait() == -signal.SIGKILL
        assert dead.wait() == 0
