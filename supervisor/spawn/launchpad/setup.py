"""How a launchpad makes itself ready: its descriptors, its signals, its wake-ups.

Steps that a launchpad takes once, before it serves.
"""

from __future__ import annotations

# `signal` and `socket` import `enum` and `selectors`: 7 ms together.
import _signal  # type: ignore[import-not-found]
import _socket
import fcntl
import os
import select

from hostlib.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_CAUGHT_SIGNALS = frozenset(
    {
        _signal.SIGCHLD,
        _signal.SIGHUP,
        _signal.SIGINT,
        _signal.SIGQUIT,
        _signal.SIGTERM,
        _signal.SIGPIPE,
        _signal.SIGALRM,
        _signal.SIGXFSZ,
        _signal.SIGUSR1,
        _signal.SIGUSR2,
    }
)


def take_control_socket() -> _socket.socket:
    """Move the control socket away from descriptor 0, keep stderr, close the rest."""
    control = _socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != control.fileno():
            os.closerange(fd, fd + 1)  # the one that listed is gone: no error
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0, inheritable=False)
    os.dup2(null, 1, inheritable=False)
    os.close(null)
    os.set_inheritable(2, False)
    return control


def set_signals() -> None:
    """Survive what is sent to a whole service or session; ignore nothing.

    An ignored signal stays ignored over exec, so children would need it put back; a
    caught one is the default for them.
    """
    for number in _signal.valid_signals():
        if number in _CAUGHT_SIGNALS:
            _signal.signal(number, _do_nothing)
        elif number not in {_signal.SIGKILL, _signal.SIGSTOP}:
            _signal.signal(number, _signal.SIG_DFL)
    syscalls.default_reserved_signals()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Survive a signal."""


_TABLE = "/proc/self/mountinfo"

# struct signalfd_siginfo of signalfd(2). Of a signal that came again there is one.
_DEATH_BYTES = 128


class Deaths:
    """Hears that somebody may have died: signalfd(2) for SIGCHLD, which is blocked.

    A handler would cost each death the call of it, a byte in a pipe, and the call that it
    breaks off. A forked child unblocks the signal.

    Raises:
        OSError: there is no descriptor to be had.

    Attributes:
        fd: readable when somebody may have died.
    """

    def __init__(self) -> None:
        self.fd = syscalls.signal_descriptor(int(_signal.SIGCHLD))
        _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGCHLD})

    def take(self) -> None:
        """Record those that were heard of."""
        try:
            os.read(self.fd, _DEATH_BYTES)
        except BlockingIOError:  # heard of while all were ended
            return

    def wait(self) -> None:
        """Wait for one, and record it."""
        select.select([self.fd], (), ())
        self.take()


class MountChanges:
    """Hears that something was mounted or unmounted: proc_pid_mountinfo(5).

    The kernel tells each open file once, by any poll of it: there is one to be woken by,
    and one to ask.

    Attributes:
        fd: has EPOLLPRI when the mount table has changed; -1: there is no such table,
            or no descriptor for it.
    """

    def __init__(self) -> None:
        self.fd = -1
        self._poll = select.poll()
        try:
            asked = os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self.fd = os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(asked)
            return
        self._poll.register(asked, select.POLLPRI)

    def have_changed(self) -> bool:
        """Tell whether the table has changed since the last time that this was told."""
        return bool(self._poll.poll(0))
