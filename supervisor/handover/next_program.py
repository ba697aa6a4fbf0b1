"""exec(2) of the next program with the state in memory, and its first steps.

1. Descriptors become inheritable right before exec(2), and close-on-exec again right
   after it: no other process can start in between.
2. Signals stay blocked until the next program has its handlers; the kernel keeps them.
   None of them ends a host that is being replaced.
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

from hostlib.handover import HandoverError
from hostlib.linux.syscalls import close_at_exec
from supervisor.handover.state import HostState, decode
from supervisor.spawn.launchpad.start import LaunchpadProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VARIABLE = "SANDHOST_HANDOVER"
"""The variable with the descriptor of the state; removed at once."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""Signals that a host may get at any moment; it has handlers for them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can run a host.

    Attributes:
        path: the executable.
        head: its arguments before the words of a command of ``sandhost``.
        words: those words.
    """

    path: str
    head: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """All arguments."""
        return (*self.head, *self.words)


def own_program() -> Program:
    """Return the command line of this process; its file may be a newer one by now."""
    words = tuple(sys.argv[1:])
    argv = tuple(sys.orig_argv)
    head = argv[: len(argv) - len(words)]
    # A shell finds a name without a slash by PATH: use this interpreter.
    return Program(sys.executable, (sys.executable, *head[1:]), words)


def become(
    program: Program, state: bytes, fds: Iterable[int], env: Mapping[str, str]
) -> NoReturn:
    """Execute another program in this process.

    Args:
        program: the next one.
        state: its state.
        fds: the descriptors that it keeps, by number.
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


def take_inherited() -> LaunchpadProcess | None:
    """Return the launchpad of the program before, with its state; None without one.

    All descriptors but 0, 1 and 2 close at exec then. Signals stay blocked until
    ``hear_signals``.

    Raises:
        HandoverError: the state cannot be read.
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
    """Return the state of the program before; None without one."""
    state = launchpad.handed_over
    if state is not None and not isinstance(state, HostState):
        raise TypeError("a launchpad is handed over with the state of a host")
    return state


def hear_signals() -> None:
    """Unblock the signals that came meanwhile, once their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
