"""The stop of all processes that see a workspace, for a look at its layer.

1. A cgroup without other processes is frozen unnoticed. Others get SIGSTOP; a process that
   was stopped before stays so.
2. All in a pid namespace get it at once, from inside: kill(2) lets no fork escape. A child
   with neither is not stopped: one of its processes could hide the mount and escape.
3. A forked guard does it for a command, and lets all go on when the command ends, even by
   a kill. It is not dumpable, since it forks into the child's namespace.
4. The guard holds the command's lock, too: the next command finds a running child.
Sources: cgroup-v2.rst ("cgroup.freeze"), setns(2), kill(2), ioctl_nsfs(2), signal(7).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd
from hostlib.linux.namespaces import NEW_PIDS, NEW_USER, set_namespace
from hostlib.linux.net_namespace import (
    is_own_user_namespace,
    open_user_namespace,
)
from hostlib.linux.processes import (
    exit_status,
    read_parent_and_start,
    signal_process,
)
from hostlib.linux.syscalls import PR_SET_DUMPABLE, prctl
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.processes import (
    find_processes,
    is_at_rest,
    is_stopped,
    pid_space,
    sees_mount,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hostlib.linux.processes import ProcessIdentity
    from supervisor.workspace.processes import Sighting

STOP_TIMEOUT_S = 5.0
"""Longest wait for all processes to stop; one may wait for a disk before."""

_LOOK_AGAIN_MS = 1
_INSIDE_S = 0.2
"""How long a fork may take in a child's pid namespace, where the child may stop it."""

_QUIET_LOOKS = 2
"""Looks without a running process: in one, a process may fork and then stop itself."""

_GUARD_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_ANSWER_BYTES = 4096


class FreezeError(WorkspaceError):
    """The processes of a child cannot be stopped; those that were stopped go on."""


class StoppedProcesses:
    """The processes that see a mount, stopped until ``resume``; for a forked guard.

    Args:
        device: of the mount, as in ``/proc/PID/mountinfo``: ``MAJOR:MINOR``.
        firsts: the first process of each child that has it.
        end: can be read when the command has ended: the stop is given up then.

    Raises:
        FreezeError: one does not stop, or there is none, or the command has ended.
    """

    def __init__(
        self, device: bytes, firsts: Collection[ProcessIdentity], end: int
    ) -> None:
        self._device = device
        self._end = end
        self._firsts = frozenset(firsts)
        self._own_space = pid_space(os.getpid())
        self._groups: set[str] = set()
        self._spaces: set[str] = set()
        self._signalled: set[ProcessIdentity] = set()
        self._top = _groups_top()
        first = self._look()
        if not first.starts:
            text = "cannot stop the child: its processes are not to be seen from here"
            raise FreezeError(
                f"{text}; run the command beside the child's host, as its user"
            )
        self._asleep = {one for one in first.identities() if is_stopped(one[0])}
        try:
            self._stop_all()
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        """Let them go on, but those that were stopped before."""
        for path in self._groups:
            with contextlib.suppress(OSError):  # gone with its processes
                Path(path, "cgroup.freeze").write_text("0", encoding="ascii")
        self._groups.clear()
        seen = self._look()
        for process in seen.identities():
            is_inside = seen.spaces[process[0]] in self._spaces
            if is_inside and process not in self._asleep:
                self._signalled.add(process)
        while self._signalled:
            signal_process(self._signalled.pop(), signal.SIGCONT)

    def _look(self) -> Sighting:
        return find_processes(self._device, self._firsts)

    def _stop_all(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        quiet = 0
        while quiet < _QUIET_LOOKS:
            seen = self._look()
            self._check_kept(seen)
            restless = [pid for pid in seen.starts if not self._is_at_rest(pid)]
            is_sure = seen.is_whole or not self._has_outside(seen)
            quiet = quiet + 1 if is_sure and not restless else 0
            if not quiet and time.monotonic() > deadline:
                what = "its processes come and go"
                if restless:
                    what = f"process {restless[0]} does not rest"
                text = f"cannot stop the child: {what}"
                raise FreezeError(f"{text}; try again, or wait for its end")
            self._stop(restless, seen)
            if _is_readable(self._end, 0 if quiet else _LOOK_AGAIN_MS):
                raise FreezeError("cannot stop the child: the command has ended")

    def _stop(self, restless: Collection[int], seen: Sighting) -> None:
        inside: dict[str, int] = {}
        for pid in restless:
            group = self._group_of(pid)
            if group in self._groups:
                continue
            if group and self._is_own_group(group, seen) and _freeze(group):
                self._groups.add(group)
                continue
            process = pid, seen.starts[pid]
            if process not in self._signalled:
                self._signalled.add(process)
                signal_process(process, signal.SIGSTOP)
            if seen.spaces[pid] not in {self._own_space, ""}:
                inside[seen.spaces[pid]] = pid
        for space, pid in inside.items():
            if _stop_inside(pid, space):
                self._spaces.add(space)

    def _check_kept(self, seen: Sighting) -> None:
        """Refuse a child of which a process could go where no look finds it."""
        for pid, space in seen.spaces.items():
            group = self._group_of(pid)
            is_grouped = group in self._groups or self._is_own_group(group, seen)
            if space == self._own_space and not (group and is_grouped):
                text = (
                    "cannot stop the child: a process of it could hide, for its profile"
                )
                how = "give it one, or wait for the child's end"
                raise FreezeError(f"{text} has neither 'pidns' nor 'cgroup'; {how}")

    def _has_outside(self, seen: Sighting) -> bool:
        """Tell whether a process of a look could have forked while it was taken."""
        return any(
            space not in self._spaces and self._group_of(pid) not in self._groups
            for pid, space in seen.spaces.items()
        )

    def _is_own_group(self, group: str, seen: Sighting) -> bool:
        """Tell whether a cgroup has no process that is none of these."""
        for pid in _members(group) - seen.starts.keys():  # forked since the look
            found = read_parent_and_start(pid)
            is_new = found is not None and found[0] in seen.starts
            if found is not None and not is_new and not sees_mount(pid, self._device):
                return False
        return True

    def _is_at_rest(self, pid: int) -> bool:
        group = self._group_of(pid)
        return bool(group and _is_frozen(group)) or is_at_rest(pid)

    def _group_of(self, pid: int) -> str:
        """Return the directory of a process's cgroup; "" if it cannot be frozen."""
        if not self._top:
            return ""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_bytes().splitlines()
        except OSError:
            return ""
        for line in lines:
            path = os.fsdecode(line[3:]) if line.startswith(b"0::/") else "/"
            if path != "/" and os.access(f"{self._top}{path}/cgroup.freeze", os.W_OK):
                return f"{self._top}{path}"
        return ""


def _stop_inside(pid: int, space: str) -> bool:
    """Send SIGSTOP to all in another pid namespace at once.

    Returns:
        Whether that was done; its first process is not among them.
    """
    helper = os.fork()  # noqa: TID251 - the guard's, of one thread
    if helper == 0:
        try:
            os._exit(0 if _enter_and_stop(pid, space) else 1)
        finally:
            os._exit(1)
    with closing_fd(os.pidfd_open(helper)) as process:
        return exit_status(process) == 0


def _enter_and_stop(pid: int, space: str) -> bool:
    _enter_space_of(pid)
    inner = os.fork()  # noqa: TID251 - only what is forked now is inside
    if inner == 0:
        try:
            if os.readlink("/proc/self/ns/pid") == space:  # else it would stop all
                with contextlib.suppress(ProcessLookupError):  # there is nobody else
                    os.kill(-1, signal.SIGSTOP)  # noqa: TID251 - no single process
                os._exit(0)
        finally:
            os._exit(1)
    with closing_fd(os.pidfd_open(inner)) as process:
        return exit_status(process, _INSIDE_S) == 0


def _enter_space_of(pid: int) -> None:
    """Have what this process forks next in the pid namespace of another."""
    space = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    users = open_user_namespace(space)
    if not is_own_user_namespace(users):
        set_namespace(users, NEW_USER)
    set_namespace(space, NEW_PIDS)


def _is_readable(fd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


@contextlib.contextmanager
def guarded_stop(
    device: bytes, firsts: Collection[ProcessIdentity] = ()
) -> Iterator[None]:
    """Stop the processes that see a mount, until the block or this process ends.

    For a process of one thread: it forks. Arguments are those of ``StoppedProcesses``.

    Raises:
        FreezeError: one does not stop.
    """
    answer_out, answer_in = os.pipe2(os.O_CLOEXEC)
    end_out, end_in = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()  # noqa: TID251 - no host: a command of one thread
    if pid == 0:
        try:
            os.close(end_in)
            os.close(answer_out)
            _guard(device, firsts, answer_in, end_out)
        finally:
            os._exit(0)
    os.close(answer_in)
    os.close(end_out)
    guard = os.pidfd_open(pid)
    try:
        with open(answer_out, "rb") as answer:
            why = answer.read(_ANSWER_BYTES)
        if why:
            raise FreezeError(why.decode(errors="replace"))
        yield
    finally:
        os.close(end_in)
        exit_status(guard)
        os.close(guard)


def _guard(
    device: bytes, firsts: Collection[ProcessIdentity], answer: int, end: int
) -> None:
    prctl(PR_SET_DUMPABLE, 0)
    os.setsid()  # a terminal's signals are not for it
    for number in _GUARD_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    try:
        stopped = StoppedProcesses(device, firsts, end)
    except (FreezeError, OSError) as why:
        os.write(answer, str(why).encode()[:_ANSWER_BYTES])
        return
    try:
        os.close(answer)
        os.read(end, 1)
    finally:
        stopped.resume()


def _groups_top() -> str:
    """Return where cgroups of version 2 are mounted; "" if they are not."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields, _, rest = line.partition(b" - ")
        if rest.startswith(b"cgroup2 ") and fields.split()[3] == b"/":
            return os.fsdecode(fields.split()[4])
    return ""


def _members(group: str) -> set[int]:
    """Return the processes of a cgroup and of those beneath it."""
    found: set[int] = set()
    for directory, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            text = Path(directory, "cgroup.procs").read_text(encoding="ascii")
            found.update(map(int, text.split()))
    return found


def _freeze(group: str) -> bool:
    """Freeze a cgroup; tell whether that was not done before and could be."""
    file = Path(group, "cgroup.freeze")
    try:
        if file.read_text(encoding="ascii").strip() == "1":
            return False
        file.write_text("1", encoding="ascii")
    except OSError:
        return False
    return True


def _is_frozen(group: str) -> bool:
    try:
        return "frozen 1" in Path(group, "cgroup.events").read_text(encoding="ascii")
    except OSError:
        return False
