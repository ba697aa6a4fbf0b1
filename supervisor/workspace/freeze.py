"""The stop of all processes that see a workspace, for a look at its layer.

Rules:
 1. A process sees a workspace if its mount table has that mount: the child, what it
    started, its tools.
 2. A cgroup in which there is no other process is frozen, and its processes do not notice.
    Other processes get SIGSTOP; one that was stopped before stays so.
 3. A forked guard does it for a command, and lets all go on when the command ends, even if
    it is killed. The host needs none: its children end with it.

Sources: cgroup-v2.rst ("cgroup.freeze"), proc_pid_mountinfo(5), signal(7).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.proctree import read_parent_and_start, signal_process, stat_fields
from supervisor.workspace.store import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from supervisor.proctree import ProcessIdentity

STOP_TIMEOUT_S = 5.0
"""A process that waits for a disk stops when that has answered."""

_LOOK_AGAIN_MS = 1
_AT_REST = frozenset({b"T", b"t", b"Z", b"X"})
_GUARD_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_ANSWER_BYTES = 4096


class FreezeError(WorkspaceError):
    """The processes of a child cannot be stopped; those that were stopped go on."""


class StoppedProcesses:
    """The processes that see a mount, stopped until ``resume``.

    Args:
        device: of the mount, as in ``/proc/PID/mountinfo``: ``MAJOR:MINOR``.

    Raises:
        FreezeError: one does not stop.
    """

    def __init__(self, device: bytes) -> None:
        self._device = device
        self._groups: set[str] = set()
        self._signalled: list[ProcessIdentity] = []
        self._top = _groups_top()
        try:
            self._stop_all()
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        """Let them go on."""
        for path in self._groups:
            with contextlib.suppress(OSError):  # gone with its processes
                Path(path, "cgroup.freeze").write_text("0", encoding="ascii")
        self._groups.clear()
        while self._signalled:
            signal_process(self._signalled.pop(), signal.SIGCONT)

    def _stop_all(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        quiet = 0
        # A process may have forked while the first look went on, and rests by now.
        while quiet < 2:
            pids = pids_with_mount(self._device)
            restless = [pid for pid in pids if not self._is_at_rest(pid)]
            quiet = 0 if restless else quiet + 1
            if restless and time.monotonic() > deadline:
                text = f"cannot stop process {restless[0]}: it does not rest"
                raise FreezeError(f"{text}; try again, or wait for the child's end")
            for pid in restless:
                self._stop(pid, pids)
            if restless:
                select.poll().poll(_LOOK_AGAIN_MS)  # of nothing: a wait

    def _stop(self, pid: int, pids: Collection[int]) -> None:
        group = self._group_of(pid)
        if group in self._groups:
            return
        if group and _members(group) <= set(pids) and _freeze(group):
            self._groups.add(group)
            return
        found = read_parent_and_start(pid)
        if found is not None and (pid, found[1]) not in self._signalled:
            self._signalled.append((pid, found[1]))
            signal_process((pid, found[1]), signal.SIGSTOP)

    def _is_at_rest(self, pid: int) -> bool:
        group = self._group_of(pid)
        if group and _is_frozen(group):
            return True
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except FileNotFoundError:
            return True
        states = [stat_fields(int(thread)) for thread in threads]
        return all(fields is None or fields[0] in _AT_REST for fields in states)

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


def pids_with_mount(device: bytes) -> list[int]:
    """Return the processes whose mount tables have a mount of that device."""
    mark = b" " + device + b" "
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            table = Path(f"/proc/{name}/mountinfo").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in table:
            found.append(int(name))
    return found


def device_of(processes: Collection[ProcessIdentity], path: bytes) -> bytes:
    """Return the device of the mount that some processes have at a path.

    Args:
        processes: of a child; one of them that lives is enough.
        path: of the base.

    Raises:
        FreezeError: none of them can be seen from here.
    """
    for pid, start in processes:
        found = read_parent_and_start(pid)
        if found is None or found[1] != start:
            continue
        try:
            number = os.stat(f"/proc/{pid}/root{os.fsdecode(path)}").st_dev
        except OSError:
            continue
        return b"%d:%d" % (os.major(number), os.minor(number))
    if not processes:
        raise FreezeError("cannot stop the child: it is being started; try again")
    text = "cannot stop the child: its processes are not to be seen from here"
    raise FreezeError(f"{text}; run the command beside the child's host, as its user")


@contextlib.contextmanager
def guarded_stop(device: bytes) -> Iterator[None]:
    """Stop the processes that see a mount, until the block or this process ends.

    For a process of one thread: it forks.

    Args:
        device: as of ``StoppedProcesses``.

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
            _guard(device, answer_in, end_out)
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
        os.waitid(os.P_PIDFD, guard, os.WEXITED)
        os.close(guard)


def _guard(device: bytes, answer: int, end: int) -> None:
    os.setsid()  # a terminal's signals are not for it
    for number in _GUARD_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    try:
        stopped = StoppedProcesses(device)
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
