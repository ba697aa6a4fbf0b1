"""The exchange itself: exec(2) with a state in memory, and its first moments after.

The last step of the program before and the first of the next.

Rules of this file.

1. Descriptors are made inheritable right before exec(2), and close at exec again first
   thing after it: in between nothing else can be started.
2. Signals wait: they are blocked from here until the next program has its handlers, and
   the kernel keeps them for it.  None of them ends a host that is being replaced.
3. If exec(2) fails, everything is as it was.

Sources: execve(2), signal(7), memfd_create(2).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from hostlib.linux.syscalls import close_at_exec
from supervisor.handover.state import HostState, decode
from supervisor.spawn.launchpad.start import LaunchpadProcess
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VARIABLE = "SANDHOST_HANDOVER"
"""Holds the descriptor of the state; gone from the environment at once."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""What somebody may send to a host at any moment; it has handlers for them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can be a host.

    Attributes:
        path: what is executed.
        head: its arguments up to the words of a command of ``sandhost``.
        words: those.
    """

    path: str
    head: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """All its arguments."""
        return (*self.head, *self.words)


def own_program() -> Program:
    """Return how this process's program was started: what now is in its place."""
    words = tuple(sys.argv[1:])
    argv = tuple(sys.orig_argv)
    head = argv[: len(argv) - len(words)]
    # A name without a slash is what the shell found by PATH: this interpreter.
    return Program(sys.executable, (sys.executable, *head[1:]), words)


def become(
    program: Program, state: bytes, fds: Iterable[int], env: Mapping[str, str]
) -> NoReturn:
    """Be another program from now on.

    Args:
        program: which.
        state: what it finds.
        fds: the descriptors that it keeps, by their numbers.
        env: its environment.

    Raises:
        HandoverError: it cannot be executed; nothing has changed.
    """
    memory = os.memfd_create("sandhost-handover", os.MFD_CLOEXEC)
    handed = [*fds, memory]
    try:
        _write_all(memory, state)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for fd in handed:
                os.set_inheritable(fd, True)
            os.execve(  # noqa: S606 - this is what it is for
                program.path, program.argv, {**env, VARIABLE: str(memory)}
            )
        finally:
            for fd in handed:
                os.set_inheritable(fd, False)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError as why:
        text = f"cannot execute {program.path!r}: {why.strerror}"
        raise HandoverError(text) from None
    finally:
        os.close(memory)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def inherited() -> LaunchpadProcess | None:
    """Return the launchpad of the program before, with its state; None if none was.

    Afterwards every descriptor but 0, 1 and 2 closes at exec.  Signals stay blocked
    until ``hear_signals``.

    Raises:
        HandoverError: what was handed over is not to be read.
    """
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return None
    close_at_exec(3)
    try:
        with open(int(number), "rb") as memory:  # noqa: PTH123 - a descriptor
            memory.seek(0)
            state = decode(memory.read())
        control = socket.socket(fileno=state.launchpad_fd)
    except (OSError, ValueError) as why:
        raise HandoverError(f"cannot take the host over: {why}") from None
    control.setblocking(False)
    return LaunchpadProcess(
        state.launchpad_pid, state.launchpad_pidfd, control, handed_over=state
    )


def state_of(launchpad: LaunchpadProcess) -> HostState | None:
    """Return the state of the program before; None if there was none."""
    state = launchpad.handed_over
    if state is not None and not isinstance(state, HostState):
        raise TypeError("a launchpad is handed over with the state of a host")
    return state


def hear_signals() -> None:
    """Let the signals in that came meanwhile; when their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
