"""How an execution is ended: first asked, then told, then killed, with all beneath it.

Rules of this file.

1. A ladder is a table of (seconds, signal); its steps go to the whole tree.
2. A process that forks away from a step is ended when the tool itself is dead: the
   launchpad kills whatever stands beneath it then.
3. A tool that does not stand beneath the launchpad is told of signals by a line of its
   own.  SIGKILL goes to what stands here for it, and the end of the line tells it of that.
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
    from supervisor.spawn.process import ExitStatus, SpawnedProcess

Ladder = tuple[tuple[float, int], ...]

CLIENT_GONE: Ladder = (
    (0.0, signal.SIGINT),
    (0.25, signal.SIGTERM),
    (1.0, signal.SIGKILL),
)
"""No client waits any more: quick, but a tool may still put its files in order."""

TIME_IS_UP: Ladder = (
    (0.0, signal.SIGINT),
    (5.0, signal.SIGTERM),
    (10.0, signal.SIGKILL),
)
"""Somebody waits for what it has to say: it gets the time to say it."""

AT_ONCE: Ladder = ((0.0, signal.SIGKILL),)
"""Each moment that it has makes it worse."""

LADDERS = {"client gone": CLIENT_GONE, "time is up": TIME_IS_UP}
"""By names that mean the same to a program and the next; what was killed at once is killed
at once again."""

LATE_S = 0.2
"""A step that is no later than this is taken: a loop may have been held for a moment,
and to be asked to end twice changes nothing."""

_PIDFD_SIGNAL_PROCESS_GROUP = 4
"""Since Linux 6.9: pidfd_send_signal(2)."""


class SignalLine:
    """The writing end of a tool's input, where that takes the names of signals.

    Args:
        fd: of a pipe; owned.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)

    def tell(self, number: int) -> bool:
        """Tell of a signal; return whether somebody was there to be told.

        One more for somebody who has thousands to read is as one more that is pending.
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
        """Say that nobody is there any more; likewise a second time."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


async def signal_tree(
    process: SpawnedProcess, line: SignalLine | None, number: int
) -> None:
    """Signal a tool and all beneath it.

    Raises:
        LaunchpadLost: everything is ended anyhow.
    """
    if line is None or number == signal.SIGKILL or not line.tell(number):
        await process.signal_tree(number)


async def climb(
    process: SpawnedProcess, line: SignalLine | None, ladder: Ladder, begun_s: float
) -> None:
    """Send one signal after the other, each at its time; cancel it when it has ended.

    Args:
        process: is ended, with all beneath it.
        line: see rule 3; None for a tool that is beneath it.
        ladder: see rule 1.
        begun_s: when that was begun, by Trio's clock; a step whose time has passed long
            ago was taken by the program before.
    """
    late_s = trio.current_time() - begun_s - LATE_S
    for after_s, number in ladder:
        if after_s < late_s:
            continue
        await trio.sleep_until(begun_s + after_s)
        with contextlib.suppress(LaunchpadLost):  # then everything is ended anyhow
            await signal_tree(process, line, number)


async def signal_group(
    process: SpawnedProcess, line: SignalLine | None, number: int
) -> bool:
    """Signal the tool's process group; it has been delivered when this returns.

    Args:
        process: the tool.
        line: see rule 3: it is told then.
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


def exit_code(status: ExitStatus | None) -> int:
    """Return an exit code as a shell has it; 137 for an end that nobody saw."""
    if status is None or (status.code is None and status.signal is None):
        return 128 + 9
    if status.signal is not None:
        return 128 + status.signal
    return status.code or 0
