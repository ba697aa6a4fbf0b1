"""Ends an execution in steps: a polite signal, a stronger one, SIGKILL.

Rules of this file.

1. A ladder is a table of (seconds, signal); its steps go to the whole tree.
2. A process that forks away from a step is ended after the tool: the launchpad kills
   all that is beneath it then.
3. A tool outside of the launchpad reads signals from a line. SIGKILL goes to the
   process that stands for it here, and the end of the line tells the tool.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from typing import TYPE_CHECKING

import trio

from supervisor.spawn.process import LaunchpadLost

if TYPE_CHECKING:
    from supervisor.spawn.process import SpawnedProcess

Ladder = tuple[tuple[float, int], ...]

CLIENT_GONE: Ladder = (
    (0.0, signal.SIGINT),
    (0.25, signal.SIGTERM),
    (1.0, signal.SIGKILL),
)
"""No client waits: quick, but a tool may still put its files in order."""

TIME_IS_UP: Ladder = (
    (0.0, signal.SIGINT),
    (5.0, signal.SIGTERM),
    (10.0, signal.SIGKILL),
)
"""A client waits for the output: the tool gets time to print it."""

AT_ONCE: Ladder = ((0.0, signal.SIGKILL),)
"""Each moment makes it worse."""

LADDERS = {"client gone": CLIENT_GONE, "time is up": TIME_IS_UP}
"""Ladders by names that are stable for the next program; a tool that was killed at once
is killed at once again."""

LATE_S = 0.2
"""A step that is no later than this is done: the loop may have been held, and a second
polite signal changes nothing."""

_PIDFD_SIGNAL_PROCESS_GROUP = 4
"""Since Linux 6.9: pidfd_send_signal(2)."""


class SignalLine:
    """The writing end of a tool's input, where that takes the names of signals.

    Args:
        fd: the writing end of a pipe; owned.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)

    def tell(self, number: int) -> bool:
        """Write a signal's name; return whether the tool has the other end open.

        A signal that does not fit is dropped: thousands are pending already.
        """
        if self.fd < 0:
            return False
        try:
            os.write(self.fd, b"%b\n" % signal.Signals(number).name[3:].encode())
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        """Close the line, so that the tool ends; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


async def signal_tree(
    process: SpawnedProcess, line: SignalLine | None, number: int
) -> None:
    """Signal a tool and all beneath it.

    Raises:
        LaunchpadLost: everything ends anyhow.
    """
    if line is None or number == signal.SIGKILL or not line.tell(number):
        await process.signal_tree(number)


async def climb(
    process: SpawnedProcess, line: SignalLine | None, ladder: Ladder, begun_s: float
) -> None:
    """Send one signal after another, each at its time, until cancelled.

    Args:
        process: is ended, with all beneath it.
        line: see rule 3; None for a tool that is beneath it.
        ladder: see rule 1.
        begun_s: time of its beginning, by Trio's clock; the program before has done
            steps that are long past.
    """
    late_s = trio.current_time() - begun_s - LATE_S
    for after_s, number in ladder:
        if after_s < late_s:
            continue
        await trio.sleep_until(begun_s + after_s)
        with contextlib.suppress(LaunchpadLost):  # then everything ends anyhow
            await signal_tree(process, line, number)


async def signal_group(
    process: SpawnedProcess, line: SignalLine | None, number: int
) -> bool:
    """Signal the tool's process group; return after the delivery.

    Args:
        process: the tool.
        line: see rule 3: it gets the name then.
        number: of the signal.

    Returns:
        False if the tool has ended.
    """
    if line is not None and number != signal.SIGKILL:
        return line.tell(number)
    for pidfd in process.descriptors():
        try:
            signal.pidfd_send_signal(pidfd, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            return False
        except OSError as why:
            if why.errno != errno.EINVAL:
                raise
            await process.signal_tree(number)  # an older kernel
        return True
    return False
