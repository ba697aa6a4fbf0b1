"""Opened files of a workspace, as the kernel tells them to root: fanotify(7).

Rules:
 1. All clones of a workspace's mount are one superblock, and nothing else is: what is
    marked is that, so neither the mounts of nested children nor those of tools are missed.
 2. The kernel tells of an open once it was granted. It opens the file anew for the reader,
    regular files alone, and not for this group: so neither a FIFO's other end nor another
    event comes of that.

Sources: fanotify_init(2), fanotify_mark(2), fanotify(7).
"""

from __future__ import annotations

import errno
import os
import struct
from typing import NamedTuple

from hostlib.linux.files import closing_fd
from hostlib.linux.syscalls import caller

_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_FANOTIFY_INIT = 300 if _IS_X86_64 else 262
_SYS_FANOTIFY_MARK = 301 if _IS_X86_64 else 263

# <linux/fanotify.h>
_CLOEXEC, _NONBLOCK, _REPORT_FD_ERROR = 1, 2, 0x2000
_MARK_ADD, _MARK_FILESYSTEM = 1, 0x100
_CLOSE_WRITE, _OPEN, _OVERFLOW = 0x8, 0x20, 0x4000
_EVENT = struct.Struct("=IBBHQii")
"""event_len, vers, reserved, metadata_len, mask, fd, pid."""

_LARGEFILE = 0o100000
_EVENT_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _LARGEFILE

MOST_EVENTS = 256
"""Of one read: each is a descriptor of this process until its path is known."""

_DELETED = b" (deleted)"

_fanotify_init = caller(_SYS_FANOTIFY_INIT, "nn")
_fanotify_mark = caller(_SYS_FANOTIFY_MARK, "nnnnt")


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

    Args:
        mount: a descriptor of the mount.

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

    Args:
        fd: of ``watch_mount``.
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
