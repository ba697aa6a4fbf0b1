"""How a host starts its launchpad, before it imports anything heavy.

The host's first steps, in the order that keeps descriptors and orphans in hand.

Rules:
 1. Called first of all, once per process: a descriptor that is opened before it may get
    the number 0, 1 or 2, if a host was started with these closed.
 2. The launchpad gets its control socket, stderr and nothing else; neither descriptors
    nor environment of the host, for a child of the same user could read the latter.
"""

from __future__ import annotations

# `signal` imports `enum`, which a host needs anyhow, but not before its launchpad starts.
import _signal  # type: ignore[import-not-found]
import os
import socket
import sys

from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, close_at_exec, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Imported and not run by path: an import is compiled once, a script at every start.
# The directory comes last, so nothing beside the package can pose as the library.
_BOOT = "import sys; sys.path.append(sys.argv[1]);"

_LAUNCHPAD = "supervisor.spawn.launchpad.main"


class LaunchpadProcess:
    """A launchpad that was started: three things that its owner closes or hands on.

    Attributes:
        pid: A child of this process until it is waited for.
        pidfd: Readable when it has ended.
        control: The host's end of the control socket, non-blocking; closing it ends
            the launchpad and everything beneath it.
        handed_over: the state of the program before, for ``handover.next_program``;
            None if it is new.
    """

    __slots__ = ("control", "handed_over", "pid", "pidfd")

    def __init__(
        self,
        pid: int,
        pidfd: int,
        control: socket.socket,
        handed_over: object = None,
    ) -> None:
        self.handed_over = handed_over
        self.pid = pid
        self.pidfd = pidfd
        self.control = control


def start_launchpad() -> LaunchpadProcess:
    """Prepare this process to be a host, and start its launchpad.

    Afterwards the descriptors 0, 1 and 2 are open, all others of this process close at
    exec (attack 6), orphans of this process's descendants become its children, and each
    of them can be waited for, also where SIGCHLD was ignored.
    Does not wait until the launchpad runs: requests wait in the socket.

    Raises:
        OSError: No process, descriptor or memory to be had.
    """
    _open_standard_descriptors()
    close_at_exec(3)
    if _signal.getsignal(_signal.SIGCHLD) == _signal.SIG_IGN:
        # Else the kernel reaps, and the exit statuses are lost (waitid(2)).
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return add_launchpad()


def add_launchpad() -> LaunchpadProcess:
    """Start a launchpad beneath a process that is a host already.

    Raises:
        OSError: No process, descriptor or memory to be had.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        files = (
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        )
        # The last word says whose it is, when its parent changed.
        pid = start_program(_LAUNCHPAD, [str(os.getpid())], files, has_session=True)
    ours.setblocking(False)
    return LaunchpadProcess(pid, _open_pidfd(pid, ours), ours)


def start_program(
    module: str,
    words: Sequence[str],
    files: Sequence[tuple[int, ...] | tuple[int, int, str, int, int]],
    *,
    has_session: bool = False,
) -> int:
    """Start the ``main`` of a module in an interpreter of its own; return its pid.

    It gets no environment of this process, and no descriptor that is closed at exec.

    Args:
        module: it imports light parts of the standard library alone.
        words: its arguments, from ``sys.argv[2]`` on.
        files: its descriptors, as ``file_actions`` of ``os.posix_spawn``.
        has_session: it gets a kernel session of its own; else a group alone, which gets
            no signal of a terminal either.
    """
    apart = {"setsid": True} if has_session else {"setpgroup": 0}
    root = os.path.abspath(__file__).rpartition("/supervisor/")[0]
    boot = f"{_BOOT} from {module} import main; main()"
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", boot, root, *words],
        _environment(),
        file_actions=files,
        **apart,
    )


def _open_pidfd(pid: int, control: socket.socket) -> int:
    """Return what tells of its end, and could end it: without, children would live on.

    Raises:
        OSError: a kernel, or a filter, that refuses one of both; it has ended.
    """
    try:
        pidfd = os.pidfd_open(pid)
        _signal.pidfd_send_signal(pidfd, 0)
    except OSError as why:
        control.close()
        raise OSError(why.errno, f"no pidfds: {why.strerror}") from None
    return pidfd


def _open_standard_descriptors() -> None:
    """Open what is closed of 0, 1, 2 on /dev/null: else the next socket becomes it."""
    for fd in range(3):
        try:
            os.set_inheritable(fd, True)
        except OSError:  # EBADF; the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _environment() -> dict[str, str]:
    """Variables that an interpreter may need to find its own library, and no others."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {} if path is None else {"LD_LIBRARY_PATH": path}
