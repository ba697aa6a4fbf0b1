"""What a forked child does to itself before it becomes its program.

What it is: the steps between fork and exec, in the forked child, and the report of the
one that failed. What it is not: nothing here runs in the launchpad's own process.

Rules:
 1. `STEPS` is the whole order. A sandbox layer is one more row: those that need the
    file system or privileges before "rlimit", those that take rights away after it.
 2. Exactly the named descriptors are open after the exec.
 3. Limits come last: a small RLIMIT_NOFILE or RLIMIT_AS must bind the program, not the
    steps that prepare it.
 4. Signals need no step: the launchpad blocks and ignores none, and what it catches
    is the default again after exec (execve(2)).
 5. This ends in exec or in `os._exit`; it never returns into the launchpad's loop.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import errno
import fcntl
import marshal
import os
import resource

from supervisor.launchpad_kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    close_at_exec,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# The exit status of a child that never became its program; the report says why.
FAILED_STATUS = 127
# Room for one report; its detail is a part of a "#!" line, PIPE_BUF is 4096.
REPORT_BYTES = 4096


class Order:
    """What one child is to become: the SPAWN message and its descriptors."""

    __slots__ = (
        "argv",
        "cwd_fd",
        "env",
        "executable",
        "rlimits",
        "sources",
        "targets",
        "umask",
    )

    def __init__(
        self,
        body: tuple[
            bytes,
            tuple[bytes, ...],
            dict[bytes, bytes],
            tuple[int, ...],
            tuple[tuple[int, int, int], ...],
            int | None,
        ],
        fds: list[int],
    ) -> None:
        """Take the message apart.

        Raises:
            ValueError: It has too few or too many fields.
            OSError: Descriptors are missing: this process may open no more.
        """
        (
            self.executable,
            self.argv,
            self.env,
            self.targets,
            self.rlimits,
            self.umask,
        ) = body
        if len(fds) != 1 + len(self.targets):
            raise OSError(errno.EMFILE, "a descriptor was not received")
        self.cwd_fd, *self.sources = fds


def become(order: Order, launchpad: int, report: int) -> NoReturn:
    """Turn this forked process into what `order` says.

    Args:
        order: Its descriptors are those the launchpad received.
        launchpad: The pid of the process that forked.
        report: Where (errno, stage, detail) is written if a step fails. It closes by
            the exec: end of file without a report is success.
    """
    stage, number, detail = "fork", errno.ECANCELED, b""
    try:
        report = _above_targets(order, report)
        for stage, step in STEPS:  # noqa: B007 - read below when a step fails
            step(order, launchpad)
    except OSError as error:
        number = error.errno or errno.EIO
        if stage == "exec":
            detail = _missing_interpreter(order.executable, number)
    except ValueError:  # resource.prlimit: soft limit above the hard one
        number = errno.EINVAL
    except MemoryError:
        number = errno.ENOMEM
    finally:
        # Also after what nobody expected: a second launchpad must never run on.
        try:
            os.write(report, marshal.dumps((number, stage, detail)))
        finally:
            os._exit(FAILED_STATUS)


def _above_targets(order: Order, report: int) -> int:
    """Move every descriptor in use above the target numbers; gives the report's."""
    free = max(order.targets, default=-1) + 1

    def move(fd: int) -> int:
        return fd if fd >= free else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free)

    order.cwd_fd = move(order.cwd_fd)
    order.sources = [move(fd) for fd in order.sources]
    return move(report)


def _lead_a_session(_order: Order, _launchpad: int) -> None:
    os.setsid()


def _adopt_orphans(_order: Order, _launchpad: int) -> None:
    # Kept over exec, not inherited by fork: what it daemonises stays beneath it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with_the_launchpad(_order: Order, launchpad: int) -> None:
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != launchpad:  # it died before the line above took effect
        os._exit(FAILED_STATUS)


def _enter_directory(order: Order, _launchpad: int) -> None:
    os.fchdir(order.cwd_fd)


def _set_umask(order: Order, _launchpad: int) -> None:
    if order.umask is not None:
        os.umask(order.umask)


def _place_descriptors(order: Order, _launchpad: int) -> None:
    close_at_exec(0)
    for source, target in zip(order.sources, order.targets, strict=True):
        os.dup2(source, target, inheritable=True)


def _limit_resources(order: Order, _launchpad: int) -> None:
    for which, soft, hard in order.rlimits:
        # Not setrlimit: it turns EPERM into a ValueError.
        resource.prlimit(0, which, (soft, hard))


def _execute(order: Order, _launchpad: int) -> None:
    os.execve(order.executable, order.argv, order.env)


STEPS: tuple[tuple[str, Callable[[Order, int], None]], ...] = (
    ("session", _lead_a_session),
    ("subreaper", _adopt_orphans),
    ("pdeathsig", _die_with_the_launchpad),
    ("cwd", _enter_directory),
    ("umask", _set_umask),
    ("descriptors", _place_descriptors),
    ("rlimit", _limit_resources),
    ("exec", _execute),
)


def _missing_interpreter(executable: bytes, number: int) -> bytes:
    """What execve(2) did not find, if the file itself is there; b"" if it is not.

    ENOENT names the file, the interpreter of its "#!" line or the loader of an ELF
    program alike. Asked here, in a process that may block.
    """
    if number != errno.ENOENT:
        return b""
    try:
        with open(executable, "rb") as program:
            start = program.readline(256)
    except OSError:
        return b""
    words = start[2:].split() if start.startswith(b"#!") else []
    return words[0] if words else b"its loader"
