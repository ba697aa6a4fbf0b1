"""The stop of all processes that see a workspace, for a look at its layer.

A guard does it, a process of its own (``freeze_guard``): it lets all go on when the command
ends, even by a kill. Where the guard was killed, the command does that.

Rules:
 1. The guard is another program and no fork: of the descriptors of a host, whose sockets
    and locks end when they are closed, it has its two pipes and the lock of the workspace.
 2. By that lock the next command finds a child that runs.
 3. It is in the kernel session of its host, so the end of a fleet session spares it; and in
    a group of its own, so it gets no signal of a terminal.
"""

from __future__ import annotations

import contextlib
import os
from typing import IO, TYPE_CHECKING

from hostlib.linux.files import closing_fd
from hostlib.linux.processes import exit_status
from supervisor.spawn.launchpad.start import start_program
from supervisor.workspace import freeze_guard
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.freeze_guard import (
    ANSWERS,
    END,
    REFUSED,
    STOPPED,
    StoppedProcesses,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hostlib.linux.processes import ProcessIdentity

STOP_TIMEOUT_S = 5.0
"""Longest wait for all processes to stop; one may wait for a disk before."""


class FreezeError(WorkspaceError):
    """The processes of a child cannot be stopped; those that were stopped go on."""


@contextlib.contextmanager
def guarded_stop(
    device: bytes, firsts: Collection[ProcessIdentity], lock: int
) -> Iterator[None]:
    """Stop the processes that see a mount, until the block or this process ends.

    Args:
        device: of the mount, as in ``/proc/PID/mountinfo``: ``MAJOR:MINOR``.
        firsts: the first process of each child that has it.
        lock: a descriptor, whose lock lasts until they go on.

    Raises:
        FreezeError: one does not stop, or there is none.
        OSError: the guard cannot be started.
    """
    stopped = StoppedProcesses(device, firsts)
    guard, answers, end = _start_guard(device, firsts, lock)
    with closing_fd(guard):
        try:
            with open(answers, "rb") as lines:
                _wait_stopped(lines, stopped)
            yield
        finally:
            os.close(end)
            if not _has_ended_well(guard):
                stopped.resume()


def _start_guard(
    device: bytes, firsts: Collection[ProcessIdentity], lock: int
) -> tuple[int, int, int]:
    """Return the pidfd of a new guard, where it answers, and what ends it if closed."""
    words = [os.fsdecode(device), str(STOP_TIMEOUT_S)]
    words += [f"{pid}:{start}" for pid, start in firsts]
    with contextlib.ExitStack() as its, contextlib.ExitStack() as undoing:
        answers, answers_in = os.pipe2(os.O_CLOEXEC)
        its.callback(os.close, answers_in)
        undoing.callback(os.close, answers)
        end_out, end = os.pipe2(os.O_CLOEXEC)
        its.callback(os.close, end_out)
        undoing.callback(os.close, end)
        free = max(2, answers_in, end_out, lock) + 1
        files = (
            (os.POSIX_SPAWN_DUP2, lock, free),
            (os.POSIX_SPAWN_DUP2, end_out, END),
            (os.POSIX_SPAWN_DUP2, answers_in, ANSWERS),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        )
        pid = start_program(freeze_guard.__name__, words, files)
        try:
            guard = os.pidfd_open(pid)
        except OSError:
            undoing.close()  # so it ends, and lets all go on
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED)
            raise
        undoing.pop_all()
    return guard, answers, end


def _has_ended_well(guard: int) -> bool:
    """Wait for a guard's end; tell whether it has let all go on."""
    try:
        return exit_status(guard) == 0
    except ChildProcessError:  # its host has reaped it, when its launchpad ended
        return False


def _wait_stopped(lines: IO[bytes], stopped: StoppedProcesses) -> None:
    """Wait until all are stopped; add what the guard does for that."""
    for line in lines:
        word, _, rest = line.rstrip(b"\n").partition(b" ")
        if word == STOPPED:
            return
        if word == REFUSED:
            raise FreezeError(rest.decode(errors="replace"))
        stopped.add(word, rest)
    raise FreezeError("cannot stop the child: its guard has ended; try again")
