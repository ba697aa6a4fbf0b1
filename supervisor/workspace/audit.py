"""An audit's events in the journal: files that a child opened and changed (WS20).

1. A child can open and change as many files as it likes: of either kind ``BURST``
   events are written at once, then ``PER_S`` a second, and of what is changed at its
   end ``MOST_CHANGES``. Events that are left out are counted and told.
2. Paths are relative to the base. The kernel has them from the opener's root, or from
   the mount's top when the mounts of a child that has ended are gone.
3. All clones of a workspace's mount are one superblock, and nothing else is: what fanotify
   marks is that, so neither the mounts of nested children nor those of tools are missed.
4. The kernel tells of an open once it was granted. It opens regular files alone anew for
   the reader, and not for this group, so no other event comes of that.

Sources: fanotify_init(2), fanotify_mark(2), fanotify(7).
"""

from __future__ import annotations

import errno
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.event_rate import EventRate
from hostlib.linux.files import closing_fd
from hostlib.linux.syscalls import caller
from hostlib.readiness import wait_readable
from hostlib.threads import in_thread
from supervisor.workspace.verbs import diff_row, path_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostlib.journal import Journal
    from supervisor.workspace.changes import Row
    from supervisor.workspace.use import WorkspaceUse

BURST = 1000
PER_S = 10.0
"""Most events of opens, and of written files: a day of them is 200 MB of journal."""

MOST_CHANGES = 10_000
"""Most rows that are written at a child's end: a tenth of a second of the host."""

PAUSE_S = 0.05
"""Time between two reads: they take 5,000 opens a second. Events beyond the kernel's
queue (16,384) are lost, and that is told."""

DRAIN_TIMEOUT_S = 5.0
"""Longest read of the queue after the child's end."""

_TOGETHER = 100
"""Events that are written between two checkpoints: about 1 ms."""


_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_FANOTIFY_INIT = 300 if _IS_X86_64 else 262
_SYS_FANOTIFY_MARK = 301 if _IS_X86_64 else 263

# <linux/fanotify.h>
_CLOEXEC, _NONBLOCK, _REPORT_FD_ERROR = 1, 2, 0x2000
_MARK_ADD, _MARK_FILESYSTEM = 1, 0x100
_CLOSE_WRITE, _OPEN, _OVERFLOW = 0x8, 0x20, 0x4000
_EVENT = struct.Struct("=IBBHQii")
"""Layout of an event: event_len, vers, reserved, metadata_len, mask, fd, pid."""

_LARGEFILE = 0o100000
_EVENT_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _LARGEFILE

MOST_EVENTS = 256
"""Most events of one read: each is a descriptor until its path is known."""

_DELETED = b" (deleted)"

_fanotify_init = caller(_SYS_FANOTIFY_INIT, "nn")
_fanotify_mark = caller(_SYS_FANOTIFY_MARK, "nnnnt")


def watch_word(index: int) -> str:
    """Return what the watch of a child's workspace is called among its descriptors."""
    return f"workspace opens {index}"


def watch_use(use: WorkspaceUse, mount: int) -> tuple[int, str]:
    """Watch what is opened in a workspace.

    Args:
        use: the workspace.
        mount: a descriptor of its mount; -1 where the child makes that.

    Returns:
        A descriptor of ``watch_mount`` and "", or -1 and what an operator is to be
        told.
    """
    if use.mode == "read-only":
        return -1, ""  # nothing is opened to be written
    if use.mode == "direct":
        text = f"cannot audit workspace {use.name}: mode 'direct' writes to the base"
        return -1, f"{text}; use the mode 'review'"
    why = "children share it"
    if mount < 0:
        why = "it takes a host that is root"
    elif not use.is_shared:
        try:
            return watch_mount(mount), ""
        except OSError as error:
            why = f"the kernel gives no fanotify ({error.strerror})"
    text = f"cannot tell each open in workspace {use.name}: {why}"
    return -1, f"{text}; the journal tells at the end what was changed"


class WorkspaceAudit:
    """Tells the journal which files of one workspace a child opens and has changed.

    Args:
        watch: a descriptor of ``watch_mount``, owned by the caller; -1 without one.
    """

    def __init__(
        self, journal: Journal, child_id: str, use: WorkspaceUse, watch: int = -1
    ) -> None:
        self._journal = journal
        self._about = {"child_id": child_id, "workspace": use.name}
        self._top = os.fsencode(use.base) + b"/"
        self._watch = watch
        self._opened = EventRate(BURST, PER_S)
        self._written = EventRate(BURST, PER_S)
        self._unknown = 0
        self._is_overflowed = False

    async def tell_opens(self) -> None:
        """Tell each open, until cancelled."""
        while self._watch >= 0:
            await wait_readable(self._watch)
            await self._tell_batch()
            await trio.sleep(PAUSE_S)

    async def finish_opens(self) -> None:
        """Write the last opens, after the child's processes have ended."""
        if self._watch < 0:
            return
        is_last = False
        with trio.move_on_after(DRAIN_TIMEOUT_S, shield=True):
            while not is_last:
                is_last = await self._tell_batch()
        self._is_overflowed |= not is_last
        self.report_omitted()

    async def _tell_batch(self) -> bool:
        """Tell what one read brings; return whether nothing more was there."""
        batch = await in_thread(read_opened, self._watch)
        self._unknown += batch.unknown
        self._is_overflowed |= batch.is_overflowed
        for file in batch.files:
            if file.is_open:
                self._tell("workspace.file_opened", file, self._opened)
            if file.is_written:
                self._tell("workspace.file_written", file, self._written)
        return batch.is_last

    def _tell(self, event: str, file: OpenedFile, rate: EventRate) -> None:
        if not rate.take(time.monotonic()):
            return
        self.report_omitted()
        path = path_fields("path", file.path.removeprefix(self._top).lstrip(b"/"))
        self._journal.write(event, **self._about, **path, pid=file.pid)

    def report_omitted(self) -> None:
        """Tell how many opens were left out so far, and count anew."""
        opened, written = self._opened.left_out, self._written.left_out
        if opened or written or self._unknown or self._is_overflowed:
            self._journal.write(
                "workspace.left_out",
                **self._about,
                opened=opened,
                written=written,
                unknown=self._unknown,
                overflowed=self._is_overflowed,
            )
        self._opened.left_out = self._written.left_out = self._unknown = 0
        self._is_overflowed = False

    async def tell_changes(self, rows: Sequence[Row]) -> None:
        """Tell what was changed, as ``workspace diff`` has it."""
        for number, row in enumerate(rows[:MOST_CHANGES], 1):
            self._journal.write("workspace.changed", **self._about, **diff_row(row))
            if number % _TOGETHER == 0:
                await trio.lowlevel.checkpoint()
        left_out = len(rows) - MOST_CHANGES
        if left_out > 0:
            self._journal.write("workspace.left_out", **self._about, changed=left_out)


class OpenedFile(NamedTuple):
    """A file that was opened, or closed after it was open to be written.

    Attributes:
        path: at the time of the look, from the root of its opener; from the mount's top
            if that is attached nowhere any more.
        pid: of the process.
        is_open: it was opened.
        is_written: it was open to be written, and was closed.
    """

    path: bytes
    pid: int
    is_open: bool
    is_written: bool


class Batch(NamedTuple):
    """The result of one read.

    Attributes:
        files: in the order of the events.
        unknown: events of which the path cannot be told.
        is_overflowed: the kernel's queue was full, and events are lost.
        is_last: nothing more was there.
    """

    files: tuple[OpenedFile, ...] = ()
    unknown: int = 0
    is_overflowed: bool = False
    is_last: bool = False


def watch_mount(mount: int) -> int:
    """Return a descriptor that tells of each open in the file system of a mount.

    Raises:
        OSError: EPERM: this process has no CAP_SYS_ADMIN; ENOSYS: no such call.
    """
    fd = _open_group()
    try:
        flags = _MARK_ADD | _MARK_FILESYSTEM
        _fanotify_mark(fd, flags, _OPEN | _CLOSE_WRITE, mount, b".")
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_group() -> int:
    flags = _CLOEXEC | _NONBLOCK
    try:
        return _fanotify_init(flags | _REPORT_FD_ERROR, _EVENT_FLAGS)
    except OSError as why:
        if why.errno != errno.EINVAL:  # Linux before 6.13
            raise
    return _fanotify_init(flags, _EVENT_FLAGS)


def read_opened(fd: int) -> Batch:
    """Return what was opened since the last read, ``MOST_EVENTS`` at most.

    Files that this process opened itself are left out: the door's files have events of
    their own.
    """
    try:
        data = os.read(fd, MOST_EVENTS * _EVENT.size)
    except BlockingIOError:
        return Batch(is_last=True)
    except OSError as why:
        if why.errno == errno.EBADF:
            raise
        return Batch(unknown=1)  # that event's file could not be opened anew
    found: list[OpenedFile] = []
    unknown, is_overflowed, position, own = 0, False, 0, os.getpid()
    while position < len(data):
        length, _, _, _, mask, file, pid = _EVENT.unpack_from(data, position)
        position += length
        is_overflowed |= bool(mask & _OVERFLOW)
        if file < 0:
            unknown += not mask & _OVERFLOW
            continue
        with closing_fd(file):
            try:
                if pid != own:
                    is_open, is_written = bool(mask & _OPEN), bool(mask & _CLOSE_WRITE)
                    found.append(OpenedFile(_path_of(file), pid, is_open, is_written))
            except OSError:  # longer than the kernel can say
                unknown += 1
    return Batch(tuple(found), unknown, is_overflowed)


def _path_of(file: int) -> bytes:
    path = os.readlink(b"/proc/self/fd/%d" % file)
    if path.endswith(_DELETED) and not os.fstat(file).st_nlink:
        return path[: -len(_DELETED)]
    return path
