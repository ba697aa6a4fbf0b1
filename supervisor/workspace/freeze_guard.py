"""The program that stops all processes that see a mount, for one command.

1. A cgroup without other processes is frozen unnoticed. Others get SIGSTOP; a process that
   was stopped before stays so.
2. All in a pid namespace get it at once, from inside: kill(2) lets no fork escape. A child
   with neither is not stopped: one of its processes could hide the mount and escape.
3. The guard tells its command each step before it does it. If the guard is killed, the
   command resumes the processes.
4. It is not dumpable, since it forks into the child's namespace. It imports light parts of
   the standard library alone: it starts in the time of a bare interpreter plus 10 ms.
Sources: cgroup-v2.rst ("cgroup.freeze"), setns(2), kill(2), ioctl_nsfs(2), signal(7).
"""

from __future__ import annotations

# `signal` imports `enum`.
import _signal  # type: ignore[import-not-found]
import os
import select
import sys
import time

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
from supervisor.workspace.processes import (
    find_processes,
    is_at_rest,
    is_stopped,
    pid_space,
    read_file,
    sees_mount,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from hostlib.linux.processes import ProcessIdentity
    from supervisor.workspace.processes import Sighting

END, ANSWERS = 0, 1
"""Descriptors: one that can be read when the command has ended, one to tell it."""

ASLEEP, GROUP, SPACE, PROCESS = b"asleep", b"group", b"space", b"process"
STOPPED, REFUSED = b"stopped", b"refused"
"""First words of what the command is told; of the rest ``StoppedProcesses`` is made."""

_LOOK_AGAIN_MS = 1
_INSIDE_S = 0.2
"""How long a fork may take in a child's pid namespace, where the child may stop it."""

_QUIET_LOOKS = 2
"""Looks without a running process: in one, a process may fork and then stop itself."""

_IGNORED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE)


class NotStoppedError(Exception):
    """A process does not stop, or there is none, or the command has ended."""


class StoppedProcesses:
    """Processes that see a mount and are stopped; ``resume`` lets them go on.

    Args:
        device: of the mount, as in ``/proc/PID/mountinfo``: ``MAJOR:MINOR``.
        firsts: the first process of each child that has it.

    Attributes:
        device: as above.
        signalled: processes that get SIGCONT.
    """

    def __init__(self, device: bytes, firsts: Collection[ProcessIdentity]) -> None:
        self.device = device
        self._firsts = frozenset(firsts)
        self._asleep: set[ProcessIdentity] = set()
        self._groups: set[str] = set()
        self._spaces: set[str] = set()
        self.signalled: set[ProcessIdentity] = set()

    def add(self, word: bytes, rest: bytes) -> None:
        """Add what is being stopped, or was asleep before, as the command is told."""
        if word == GROUP:
            self._groups.add(os.fsdecode(rest))
        elif word == SPACE:
            self._spaces.add(os.fsdecode(rest))
        else:
            pid, start = rest.split()
            known = self._asleep if word == ASLEEP else self.signalled
            known.add((int(pid), int(start)))

    def look(self) -> Sighting:
        """Return the processes that see the mount now."""
        return find_processes(self.device, self._firsts)

    def resume(self) -> None:
        """Let all go on, but those that were stopped before."""
        for path in self._groups:
            try:
                _write(f"{path}/cgroup.freeze", b"0")
            except OSError:  # gone with its processes
                continue
        seen = self.look()
        for process in seen.identities():
            is_inside = seen.spaces[process[0]] in self._spaces
            if is_inside and process not in self._asleep:
                self.signalled.add(process)
        while self.signalled:
            signal_process(self.signalled.pop(), _signal.SIGCONT)


class _Stopper:
    """Stops all processes that see a mount.

    Args:
        stopped: is filled; the command is told the same.
        timeout_s: longest wait for all to stop.
    """

    def __init__(self, stopped: StoppedProcesses, timeout_s: float) -> None:
        self._stopped = stopped
        self._timeout_s = timeout_s
        self._own_space = pid_space(os.getpid())
        self._groups: set[str] = set()  # that are frozen
        self._spaces: set[str] = set()  # in which all were stopped
        self._top = _groups_top()

    def stop(self) -> None:
        """Stop them.

        Raises:
            NotStoppedError: that cannot be.
        """
        first = self._stopped.look()
        if not first.starts:
            text = "cannot stop the child: its processes are not to be seen from here"
            raise NotStoppedError(
                f"{text}; run the command beside the child's host, as its user"
            )
        for one in first.identities():
            if is_stopped(one[0]):
                self._tell(ASLEEP, b"%d %d" % one)
        deadline = time.monotonic() + self._timeout_s
        quiet = 0
        while quiet < _QUIET_LOOKS:
            seen = self._stopped.look()
            self._check_kept(seen)
            restless = [pid for pid in seen.starts if not self._is_at_rest(pid)]
            is_sure = seen.is_whole or not self._has_outside(seen)
            quiet = quiet + 1 if is_sure and not restless else 0
            if not quiet and time.monotonic() > deadline:
                what = "its processes come and go"
                if restless:
                    what = f"process {restless[0]} does not rest"
                text = f"cannot stop the child: {what}"
                raise NotStoppedError(f"{text}; try again, or wait for its end")
            self._stop(restless, seen)
            if _has_ended(0 if quiet else _LOOK_AGAIN_MS):
                raise NotStoppedError("cannot stop the child: the command has ended")

    def _stop(self, restless: Collection[int], seen: Sighting) -> None:
        inside: dict[str, int] = {}
        for pid in restless:
            group = self._group_of(pid)
            if group in self._groups:
                continue
            if group and self._is_own_group(group, seen) and self._freeze(group):
                continue
            process = pid, seen.starts[pid]
            if process not in self._stopped.signalled:
                self._tell(PROCESS, b"%d %d" % process)
                signal_process(process, _signal.SIGSTOP)
            if seen.spaces[pid] not in {self._own_space, ""}:
                inside[seen.spaces[pid]] = pid
        for space, pid in inside.items():
            self._tell(SPACE, os.fsencode(space))
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
                raise NotStoppedError(f"{text} has neither 'pidns' nor 'cgroup'; {how}")

    def _has_outside(self, seen: Sighting) -> bool:
        """Tell whether a process of a look could have forked while it was taken."""
        return any(
            space not in self._spaces and self._group_of(pid) not in self._groups
            for pid, space in seen.spaces.items()
        )

    def _is_own_group(self, group: str, seen: Sighting) -> bool:
        """Tell whether a cgroup has no process that is none of these."""
        device = self._stopped.device
        for pid in _members(group) - seen.starts.keys():  # forked since the look
            found = read_parent_and_start(pid)
            is_new = found is not None and found[0] in seen.starts
            if found is not None and not is_new and not sees_mount(pid, device):
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
            lines = read_file(f"/proc/{pid}/cgroup").splitlines()
        except OSError:
            return ""
        for line in lines:
            path = os.fsdecode(line[3:]) if line.startswith(b"0::/") else "/"
            if path != "/" and os.access(f"{self._top}{path}/cgroup.freeze", os.W_OK):
                return f"{self._top}{path}"
        return ""

    def _freeze(self, group: str) -> bool:
        """Freeze a cgroup; tell whether that was not done before and could be."""
        file = f"{group}/cgroup.freeze"
        try:
            if read_file(file).strip() == b"1":
                return False
            self._tell(GROUP, os.fsencode(group))
            _write(file, b"1")
        except OSError:
            return False
        self._groups.add(group)
        return True

    def _tell(self, word: bytes, rest: bytes) -> None:
        """Tell the command what is to be stopped, which it may have to undo."""
        self._stopped.add(word, rest)
        os.write(ANSWERS, b"%s %s\n" % (word, rest))


def _stop_inside(pid: int, space: str) -> bool:
    """Send SIGSTOP to all in another pid namespace at once.

    Returns:
        Whether that was done; its first process is not among them.
    """
    helper = os.fork()  # noqa: TID251 - of one thread
    if helper == 0:
        try:
            os._exit(0 if _enter_and_stop(pid, space) else 1)
        finally:
            os._exit(1)
    return _reap(helper) == 0


def _enter_and_stop(pid: int, space: str) -> bool:
    _enter_space_of(pid)
    inner = os.fork()  # noqa: TID251 - only what is forked now is inside
    if inner == 0:
        try:
            if os.readlink("/proc/self/ns/pid") == space:  # else it would stop all
                os.kill(-1, _signal.SIGSTOP)  # noqa: TID251 - no single process
                os._exit(0)
        except ProcessLookupError:  # there is no other
            os._exit(0)
        finally:
            os._exit(1)
    return _reap(inner, _INSIDE_S) == 0


def _reap(pid: int, timeout_s: float | None = None) -> int | None:
    process = os.pidfd_open(pid)
    try:
        return exit_status(process, timeout_s)
    finally:
        os.close(process)


def _enter_space_of(pid: int) -> None:
    """Have what this process forks next in the pid namespace of another."""
    space = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    users = open_user_namespace(space)
    if not is_own_user_namespace(users):
        set_namespace(users, NEW_USER)
    set_namespace(space, NEW_PIDS)


def _groups_top() -> str:
    """Return where cgroups of version 2 are mounted; "" if they are not."""
    for line in read_file("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(b" - ")
        if rest.startswith(b"cgroup2 ") and fields.split()[3] == b"/":
            return os.fsdecode(fields.split()[4])
    return ""


def _members(group: str) -> set[int]:
    """Return the processes of a cgroup and of those beneath it."""
    found: set[int] = set()
    for directory, _, _ in os.walk(group):
        try:
            found.update(map(int, read_file(f"{directory}/cgroup.procs").split()))
        except OSError:  # it is gone
            continue
    return found


def _is_frozen(group: str) -> bool:
    try:
        return b"frozen 1" in read_file(f"{group}/cgroup.events")
    except OSError:
        return False


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _has_ended(timeout_ms: int) -> bool:
    """Tell whether the command has ended."""
    poll = select.poll()
    poll.register(END, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def main() -> None:
    """Stop the processes that see a mount, until the command ends."""
    prctl(PR_SET_DUMPABLE, 0)
    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_IGN)
    device, timeout_s, *firsts = sys.argv[2:]
    pairs = [one.split(":") for one in firsts]
    stopped = StoppedProcesses(
        device.encode(), [(int(pid), int(start)) for pid, start in pairs]
    )
    answer = STOPPED
    try:
        try:
            _Stopper(stopped, float(timeout_s)).stop()
        except (NotStoppedError, OSError) as why:
            answer = b"%s %s" % (REFUSED, str(why).encode(errors="replace"))
        os.write(ANSWERS, answer + b"\n")
        if answer == STOPPED:
            os.read(END, 1)
    finally:
        stopped.resume()
