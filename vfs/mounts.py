"""How each mounted file system is read and written: inline, or by a worker thread.

Rules of this file.

1. A call that does not wait runs inline: one hop to a thread costs 100 us, a cached
   4 KiB read 1 us.  ``RWF_NOWAIT`` tells the two apart for reads: data in memory comes
   at once, anything else raises ``BlockingIOError``.
2. A mount whose inline writes turn slow is written through threads for a while, then
   tried again (``Mount.note``).  A write is slow that waits for the disk, and not one
   that waits for a processor.

Sources: preadv2(2); ``hostlib.linux.mount_table`` for what is mounted.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from hostlib.linux.mount_table import UNKNOWN, MountTable, is_passing
from hostlib.threads import times_slept

if TYPE_CHECKING:
    from collections.abc import Callable

INLINE_WRITE_BYTES = 1024 * 1024
"""Longest write that runs inline: about 200 us into the page cache."""

SLOW_WRITE_S = 0.02
"""An inline write that takes longer marks its mount: other clients have waited."""

SLOW_MOUNT_S = 5.0
"""How long a marked mount is written through threads."""

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_NOWAIT_FILE_SYSTEMS = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs"})
"""Where RWF_NOWAIT tells data in memory from data on the disk; elsewhere (network and
user-space file systems) every read goes to a thread."""

_EXACT_FILE_SYSTEMS = (_NOWAIT_FILE_SYSTEMS - {"xfs"}) | _MEMORY_FILE_SYSTEMS
"""Where room that nobody asked for is not allocated; xfs does, and so what lies on it."""

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *_MEMORY_FILE_SYSTEMS,
        *_NOWAIT_FILE_SYSTEMS,
        *("overlay", "aufs", "squashfs", "erofs", "iso9660", "udf", "vfat", "exfat"),
        *("ntfs3", "zfs", "bcachefs", "jfs", "nilfs2", "reiserfs", "proc", "sysfs"),
    }
)
"""What answers by itself.  Any other may wait for a machine or a process that is gone:
there even an OPEN or a CLOSE is no business of the Trio thread."""


def _pread_nowait(fd: int, size: int, offset: int) -> bytes:
    buffer = bytearray(size)
    got = 0
    try:
        while got < size:
            rest = memoryview(buffer)[got:] if got else buffer
            more = os.preadv(fd, [rest], offset + got, os.RWF_NOWAIT)
            if not more:
                break
            got += more
    except OSError as why:
        if why.errno != errno.EOPNOTSUPP:
            raise
        # This file system knows the flag, this file does not: let a thread read.
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    return bytes(buffer) if got == size else bytes(buffer[:got])


def _pread_never(fd: int, size: int, offset: int) -> bytes:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Mount:
    """How one mounted file system is to be read and written.

    Attributes:
        kind: of file system, as the table of mounts calls it; ``unknown`` for one that is
            not in there.
        is_proc: it shows processes, or nobody knows whether it does.
        in_memory: nothing on it ever waits for a disk.
        allocates_ahead: while a file is written, it may allocate twice as much again, for
            what may follow.
        inline: small writes may run in the Trio thread now.
        is_sure: nothing was mounted or unmounted since its kind was looked up.
        is_asked_about: its device number may be another one's by now: ``mount_of`` is to
            be asked each time.
        is_distant: any call may wait for another machine or process.
        read: ``pread(fd, size, offset)`` that never waits: it raises
            ``BlockingIOError`` where the data is not in memory, may answer less than
            there is, and answers nothing only at the end of the file.
    """

    __slots__ = (
        "_nowait",
        "_slow_until",
        "allocates_ahead",
        "in_memory",
        "inline",
        "is_asked_about",
        "is_distant",
        "is_proc",
        "is_sure",
        "kind",
        "read",
    )

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_sure = True
        self.is_asked_about = False
        self.is_proc = kind in {"proc", UNKNOWN}
        self._nowait = kind in _NOWAIT_FILE_SYSTEMS
        self.in_memory = kind in _MEMORY_FILE_SYSTEMS
        self.inline = self.in_memory or self._nowait
        self.is_distant = kind not in _LOCAL_FILE_SYSTEMS
        self.allocates_ahead = kind not in _EXACT_FILE_SYSTEMS
        self._slow_until = 0.0
        self.read: Callable[[int, int, int], bytes]
        if self.in_memory:
            self.read = os.pread
        else:
            self.read = _pread_nowait if self._nowait else _pread_never

    def note(self, seconds: float, slept: int = -1) -> None:
        """Record how long an inline write took.

        Args:
            seconds: that long.
            slept: ``times_slept`` at its beginning; -1 where nobody asked.
        """
        if seconds > SLOW_WRITE_S and not self.in_memory and times_slept() != slept:
            self.inline = False
            self._slow_until = time.monotonic() + SLOW_MOUNT_S

    def try_again(self) -> None:
        """Let writes run inline again, if the mount was slow long enough ago."""
        if self._nowait and time.monotonic() > self._slow_until:
            self.inline = True


MOUNTS: dict[int, Mount] = {}
"""Mounts by device number (``st_dev``), as ``mount_of`` found them."""

_held: dict[int, int] = {}
"""How often a device number is held (``hold_device``)."""

_table = MountTable()


def mount_of(device: int, fd: int = -1) -> Mount:
    """Return the mount of a device number; it is looked up anew when mounts have changed.

    Args:
        device: ``st_dev``.
        fd: something on it: some file systems (overlay, the subvolumes of btrfs) give
            their files devices that the table of mounts does not name.
    """
    with _table.lock:
        return _look_up(device, fd)


def _look_up(device: int, fd: int) -> Mount:
    _notice_changes()
    mount = MOUNTS.get(device)
    if mount is None or not mount.is_sure:
        kind = _table.kind_of(device, fd)
        if mount is None or mount.kind != kind:
            mount = MOUNTS[device] = Mount(kind)
        mount.is_sure = True
        mount.is_asked_about = kind == UNKNOWN or (
            is_passing(device) and device not in _held
        )
    return mount


def hold_device(device: int, fd: int) -> Mount:
    """Record that something of a file system stays open: its number stays its own.

    What is opened there need not ask about it, which would be a twentieth of an OPEN.

    Args:
        device: its number, for ``let_go_of``.
        fd: what stays open.

    Returns:
        What ``mount_of`` would.
    """
    with _table.lock:
        # Before it counts as held: what was believed may be of one that had the number.
        mount = _look_up(device, fd)
        _held[device] = _held.get(device, 0) + 1
        mount.is_asked_about = mount.kind == UNKNOWN
    return mount


def let_go_of(device: int) -> None:
    """Record that what was held is about to be closed."""
    with _table.lock:
        _held[device] -= 1
        if not _held[device]:
            del _held[device]
            if device in MOUNTS:
                _doubt(MOUNTS[device])


def other_names(path: str) -> frozenset[str]:
    """Return what else a directory without links is called; ``MountTable.other_names``."""
    with _table.lock:
        _notice_changes()
        return _table.other_names(path)


def has_mounts_within(path: str) -> bool:
    """Tell whether something is mounted in a directory without links."""
    with _table.lock:
        _notice_changes()
        return _table.has_mounts_within(path)


def _notice_changes() -> None:
    if _table.has_changed():
        for device, mount in MOUNTS.items():
            if device not in _held or mount.kind == UNKNOWN:
                _doubt(mount)


def _doubt(mount: Mount) -> None:
    mount.is_asked_about, mount.is_sure = True, False


def table_of_mounts() -> tuple[int, ...]:
    """Return the descriptor by which this process hears of mounts, if it has one."""
    return _table.descriptors()
