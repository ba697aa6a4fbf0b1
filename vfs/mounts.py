"""Mounted file systems; whether each is used inline or in a thread.

Rules of this file.

1. A call that does not wait runs inline: one hop to a thread costs 100 us, a cached
   4 KiB read 1 us.  A read with ``RWF_NOWAIT`` returns data that is in memory, and raises
   ``BlockingIOError`` for other data.
2. A mount whose inline writes become slow is written through threads for a while, then
   tried again (``Mount.note``).  Only a write that waits for the disk counts as slow, not
   one that waits for a processor.

Sources: preadv2(2); ``hostlib.linux.mount_table`` for the mounts.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from hostlib.linux.mount_table import UNKNOWN, MountTable, is_passing
from hostlib.threads import count_sleeps

if TYPE_CHECKING:
    from collections.abc import Callable

INLINE_WRITE_BYTES = 1024 * 1024
"""Longest write that runs inline: about 200 us into the page cache."""

SLOW_WRITE_S = 0.02
"""An inline write that takes longer marks its mount as slow: other clients waited."""

SLOW_MOUNT_S = 5.0
"""How long a slow mount is written through threads."""

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_NOWAIT_FILE_SYSTEMS = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs"})
"""File systems on which RWF_NOWAIT works; on others (network and user-space file systems)
every read goes to a thread."""

_EXACT_FILE_SYSTEMS = (_NOWAIT_FILE_SYSTEMS - {"xfs"}) | _MEMORY_FILE_SYSTEMS
"""File systems that do not allocate ahead; xfs does, and so do file systems on top of it."""

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *_MEMORY_FILE_SYSTEMS,
        *_NOWAIT_FILE_SYSTEMS,
        *("overlay", "aufs", "squashfs", "erofs", "iso9660", "udf", "vfat", "exfat"),
        *("ntfs3", "zfs", "bcachefs", "jfs", "nilfs2", "reiserfs", "proc", "sysfs"),
    }
)
"""File systems that need no other machine or process.  Calls on others may wait for one
that is gone, so even an OPEN or a CLOSE there does not run in the Trio thread."""


def _pread_nowait(fd: int, size: int, offset: int) -> bytes | bytearray:
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
        # The file system has the flag, this file does not: let a thread read.
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    return buffer if got == size else buffer[:got]


def _pread_never(fd: int, size: int, offset: int) -> bytes:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Mount:
    """One mounted file system, and how it is read and written.

    Attributes:
        kind: its kind in the mount table; ``unknown`` if the table does not have it.
        is_proc: it shows processes, or may do so.
        in_memory: calls on it never wait for a disk.
        allocates_ahead: while a file is written, it may allocate twice as much again.
        inline: small writes may run in the Trio thread now.
        is_sure: no mount has changed since its kind was looked up.
        is_asked_about: its device number may have been reused, so callers must call
            ``mount_of`` each time.
        is_distant: any call may wait for another machine or process.
        read: ``pread(fd, size, offset)`` that never waits: it raises
            ``BlockingIOError`` if the data is not in memory, and returns less only at
            the end of the file.
    """

    __slots__ = (
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
        "takes_nowait",
    )

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_sure = True
        self.is_asked_about = False
        self.is_proc = kind in {"proc", UNKNOWN}
        self.takes_nowait = kind in _NOWAIT_FILE_SYSTEMS
        self.in_memory = kind in _MEMORY_FILE_SYSTEMS
        self.inline = self.in_memory or self.takes_nowait
        self.is_distant = kind not in _LOCAL_FILE_SYSTEMS
        self.allocates_ahead = kind not in _EXACT_FILE_SYSTEMS
        self._slow_until = 0.0
        self.read: Callable[[int, int, int], bytes | bytearray]
        if self.in_memory:
            self.read = os.pread
        else:
            self.read = _pread_nowait if self.takes_nowait else _pread_never

    def note(self, seconds: float, slept: int = -1) -> None:
        """Record how long an inline write took.

        Args:
            seconds: duration of the write.
            slept: ``count_sleeps`` at its beginning; -1 if unknown.
        """
        if seconds > SLOW_WRITE_S and not self.in_memory and count_sleeps() != slept:
            self.inline = False
            self._slow_until = time.monotonic() + SLOW_MOUNT_S

    def try_again(self) -> None:
        """Let writes run inline again, if the mount was slow long enough ago."""
        if self.takes_nowait and time.monotonic() > self._slow_until:
            self.inline = True


MOUNTS: dict[int, Mount] = {}
"""Mounts by device number (``st_dev``); filled by ``mount_of``."""

held_devices: dict[int, int] = {}
"""Device number -> number of its holders (``hold_device``)."""

mount_table = MountTable()


def mount_of(device: int, fd: int = -1) -> Mount:
    """Return the mount of a device number, looked up again if mounts have changed.

    Args:
        device: ``st_dev``.
        fd: a descriptor on it: some file systems (overlay, the subvolumes of btrfs) give
            their files devices that the mount table does not have.
    """
    with mount_table.lock:
        return _look_up(device, fd)


def _look_up(device: int, fd: int) -> Mount:
    _notice_changes()
    mount = MOUNTS.get(device)
    if mount is None or not mount.is_sure:
        kind = mount_table.kind_of(device, fd)
        if mount is None or mount.kind != kind:
            mount = MOUNTS[device] = Mount(kind)
        mount.is_sure = True
        mount.is_asked_about = kind == UNKNOWN or (
            is_passing(device) and device not in held_devices
        )
    return mount


def hold_device(device: int, fd: int) -> Mount:
    """Record that a descriptor on a device stays open, and return the device's mount.

    The number cannot be reused while it is held, so an OPEN there does not check it, which
    would take a twentieth of its time.

    Args:
        device: its number, for ``release_device``.
        fd: the descriptor that stays open.
    """
    with mount_table.lock:
        # Look up before it counts as held: the cached mount may be one that had the number.
        mount = _look_up(device, fd)
        held_devices[device] = held_devices.get(device, 0) + 1
        mount.is_asked_about = mount.kind == UNKNOWN
    return mount


def release_device(device: int) -> None:
    """Record that a holder of a device is about to close its descriptor."""
    with mount_table.lock:
        held_devices[device] -= 1
        if not held_devices[device]:
            del held_devices[device]
            if device in MOUNTS:
                _invalidate(MOUNTS[device])


def other_names(path: str) -> frozenset[str]:
    """Return the other paths of a directory; see ``MountTable.other_names``."""
    with mount_table.lock:
        _notice_changes()
        return mount_table.other_names(path)


def has_mounts_within(path: str) -> bool:
    """Return whether there are mounts in a directory (a path without links)."""
    with mount_table.lock:
        _notice_changes()
        return mount_table.has_mounts_within(path)


def _notice_changes() -> None:
    if mount_table.has_changed():
        for device, mount in MOUNTS.items():
            if device not in held_devices or mount.kind == UNKNOWN:
                _invalidate(mount)


def _invalidate(mount: Mount) -> None:
    mount.is_asked_about, mount.is_sure = True, False


def mount_table_descriptors() -> tuple[int, ...]:
    """Return the descriptor of the mount table, if this process holds it."""
    return mount_table.descriptors()
