"""What a forked child does to itself before it becomes its program.

What it is: the steps between fork and exec, in the forked child, and the report of the
one that failed. What it is not: nothing here runs in the launchpad's own process.

Rules:
 1. `STEPS` is the whole order. A sandbox layer is one row: those that need the file
    system or privileges before "rlimit", those that take rights away after it. A
    layer that was not asked for is passed over; one that fails ends the child, so
    what the report calls applied is all that was asked for.
 2. Exactly the named descriptors are open after the exec.
 3. Limits come late: a small RLIMIT_NOFILE or RLIMIT_AS must bind the program, not the
    steps that prepare it; what follows them opens nothing.
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

from supervisor import (
    launchpad_landlock,
    launchpad_mounts,
    launchpad_namespaces,
    launchpad_privileges,
    launchpad_seccomp,
)
from supervisor.launchpad_kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    close_at_exec,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

# The exit status of a child that never became its program; the report says why.
FAILED_STATUS = 127
# Room for all that one child reports; a detail is a path or a part of a "#!" line.
REPORT_BYTES = 16_384
# A single report is written whole, PIPE_BUF is 4096.
DETAIL_BYTES = 1024

# The file of a group that only version 2 would have written: a process can be forked
# into such a group. In version 1 it is ``tasks``, which moves a single thread, and that
# the kernel does at once.
GROUP_TO_FORK_INTO = b"cgroup.procs"

# What a report says first.
FORKING, BECAME, APPLIED, FAILED = range(4)


class Order:
    """What one child is to become: the SPAWN message and its descriptors."""

    __slots__ = (
        "applied",
        "argv",
        "cwd_fd",
        "env",
        "executable",
        "group",
        "init",
        "is_in_group",
        "layers",
        "owners",
        "report",
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
            dict[str, Any],
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
            self.layers,
        ) = body
        self.applied: list[tuple[str, str]] = []
        self.owners = -1
        self.group = -1  # the directory of its group of processes, version 2
        self.is_in_group = False  # it was forked into that
        self.init = -1  # of the pid namespace that it was forked into
        self.report = -1
        if len(fds) != 1 + len(self.targets):
            raise OSError(errno.EMFILE, "a descriptor was not received")
        self.cwd_fd, *self.sources = fds


def become(order: Order, launchpad: int, report: int) -> NoReturn:
    """Turn this forked process into what `order` says.

    Args:
        order: Its descriptors are those the launchpad received.
        launchpad: The pid of the process that forked.
        report: Where `reports` are written. It closes by the exec: end of file without
            a failure is success.
    """
    stage, number, detail = "fork", errno.ECANCELED, b""
    try:
        order.report = _above_targets(order, report)
        for stage, step in STEPS:  # noqa: B007 - read below when a step fails
            step(order, launchpad)
    except launchpad_mounts.OwnersError as error:
        stage = "uid"
        number, detail = error.args
    except launchpad_mounts.ProcError as error:
        stage = "pidns"
        number = error.args[0]
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
            _tell(order, FAILED, number, stage, detail[:DETAIL_BYTES])
        finally:
            os._exit(FAILED_STATUS)


def _tell(order: Order, *message: Any) -> None:
    os.write(order.report, frame(*message))


def frame(*message: Any) -> bytes:
    """Return a report as it stands in the pipe: two bytes of length, the message."""
    body = marshal.dumps(message)
    return len(body).to_bytes(2, "little") + body


def reports(heard: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield what a starting child reports, in order.

    ``(FORKING,)``: two processes are about to be forked that nobody knows yet.
    ``(BECAME, pid, init)``: this process ends, the child is `pid` now.
    ``(APPLIED, ((layer, detail), ...))``: what it runs in, if the exec succeeds.
    ``(FAILED, errno, stage, detail)``: it ends.
    """
    while len(heard) >= 2:
        size = int.from_bytes(heard[:2], "little")
        yield marshal.loads(heard[2 : 2 + size])  # noqa: S302 - our own fork wrote it
        heard = heard[2 + size :]


def _above_targets(order: Order, report: int) -> int:
    """Move every descriptor in use above the target numbers; gives the report's."""
    free = max(order.targets, default=-1) + 1

    def move(fd: int) -> int:
        return fd if fd >= free else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free)

    order.cwd_fd = move(order.cwd_fd)
    order.sources = [move(fd) for fd in order.sources]
    order.group = move(order.group) if order.group >= 0 else -1
    return move(report)


def _layer(
    name: str, apply: Callable[[Order, Any], str]
) -> tuple[str, Callable[[Order, int], None]]:
    """A row of `STEPS` that is passed over unless the order asks for it."""

    def step(order: Order, _launchpad: int) -> None:
        if name in order.layers:
            order.applied.append((name, apply(order, order.layers[name])))

    return name, step


def _enter_user(_order: Order, who: tuple[int, int]) -> str:
    return launchpad_namespaces.enter_user(*who)


def _namespace(name: str) -> tuple[str, Callable[[Order, int], None]]:
    return _layer(name, lambda _order, _nothing: launchpad_namespaces.enter(name))


def _enter_pids(order: Order, _nothing: None) -> str:
    if order.init >= 0:
        return "own"
    said = launchpad_namespaces.enter("pidns")
    _tell(order, FORKING)  # or the launchpad takes them for leftovers
    child, init, order.is_in_group = launchpad_namespaces.fork_into(order.group)
    if child != 0:
        _tell(order, BECAME, child, init)
        os._exit(0)
    return said


def _lead_a_session(order: Order, _launchpad: int) -> None:
    os.setsid()
    order.applied.append(("session", "own"))


def _adopt_orphans(_order: Order, _launchpad: int) -> None:
    # Kept over exec, not inherited by fork: what it daemonises stays beneath it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with_the_launchpad(order: Order, launchpad: int) -> None:
    # After the user has changed, which would undo it.
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    # In a pid namespace the launchpad has no number: if it died before the line above
    # took effect, the host, which then ends all beneath it, ends this too.
    if "pidns" not in order.layers and os.getppid() != launchpad:
        os._exit(FAILED_STATUS)


def _join_groups(order: Order, groups: tuple[tuple[bytes, bytes], ...]) -> str:
    for directory, name in groups:
        if name == GROUP_TO_FORK_INTO and order.is_in_group:
            continue
        fd = os.open(directory + b"/" + name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    return ", ".join(os.fsdecode(directory) for directory, _ in groups)


def _change_root(order: Order, view: tuple[Any, ...]) -> str:
    links, trees, cwd = view
    launchpad_namespaces.enter("mountns")
    fresh_proc = "pidns" in order.layers
    said = launchpad_mounts.build(links, trees, order.owners, fresh_proc=fresh_proc)
    # The directory of before is outside: whoever stays in it can walk out of the root.
    os.close(order.cwd_fd)
    order.cwd_fd = os.open(cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return said


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
    if "rlimits" in order.layers:
        order.applied.append(("rlimits", f"{len(order.rlimits)} set"))


def _forbid_new_privileges(_order: Order, _nothing: None) -> str:
    return launchpad_privileges.forbid_new_privileges()


def _restrict_files(_order: Order, rules: tuple[Any, bool]) -> str:
    paths, no_tcp = rules
    return launchpad_landlock.apply(paths, no_tcp=no_tcp)


def _drop_bounding_set(order: Order, _launchpad: int) -> None:
    if "capabilities" in order.layers:
        launchpad_privileges.drop_bounding_set()


def _become_user(_order: Order, uid: int) -> str:
    return launchpad_privileges.become_user(uid)


def _drop_capabilities(_order: Order, _nothing: None) -> str:
    return launchpad_privileges.drop_capabilities()


def _filter_calls(_order: Order, code: bytes) -> str:
    return launchpad_seccomp.apply(code)


def _report(order: Order, _launchpad: int) -> None:
    order.applied.append(("descriptors", f"exactly {sorted(order.targets)}"))
    _tell(order, APPLIED, tuple(order.applied))


def _execute(order: Order, _launchpad: int) -> None:
    os.execve(order.executable, order.argv, order.env)


STEPS: tuple[tuple[str, Callable[[Order, int], None]], ...] = (
    _layer("userns", _enter_user),
    _namespace("netns"),
    _namespace("ipcns"),
    _namespace("utsns"),
    _layer("pidns", _enter_pids),
    ("session", _lead_a_session),
    ("subreaper", _adopt_orphans),
    _layer("cgroup", _join_groups),
    _layer("mountns", _change_root),
    ("cwd", _enter_directory),
    ("umask", _set_umask),
    ("descriptors", _place_descriptors),
    _layer("no_new_privs", _forbid_new_privileges),
    _layer("landlock", _restrict_files),
    ("rlimit", _limit_resources),
    ("bounding", _drop_bounding_set),
    _layer("uid", _become_user),
    _layer("capabilities", _drop_capabilities),
    ("pdeathsig", _die_with_the_launchpad),
    _layer("seccomp", _filter_calls),
    ("report", _report),
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
