"""System calls for layers and commits: renameat2, statx, syncfs.

Sources: rename(2), statx(2), syncfs(2), open_by_handle_at(2), ioctl_ficlone(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd
from hostlib.linux.syscalls import caller

if TYPE_CHECKING:
    from collections.abc import Iterator

_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_RENAMEAT2 = 316 if _IS_X86_64 else 276
_SYS_STATX = 332 if _IS_X86_64 else 291
_SYS_SYNCFS = 306 if _IS_X86_64 else 267
_SYS_NAME_TO_HANDLE_AT = 303 if _IS_X86_64 else 264
_SYS_OPEN_BY_HANDLE_AT = 304 if _IS_X86_64 else 265

# <linux/fs.h>, <linux/stat.h>, <fcntl.h>
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_STATX_BTIME, _STATX_MNT_ID = 0x800, 0x1000
_STATX_BYTES, _STATX_BTIME_OFFSET, _STATX_MNT_ID_OFFSET = 256, 80, 144
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
FICLONE = 0x40049409
_MAX_HANDLE_BYTES = 128
NO_REFLINK = frozenset(
    {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}
)
_NO_RANGE_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
)
_COPY_BYTES = 1 << 20

_renameat2 = caller(_SYS_RENAMEAT2, "ntntn")
_statx = caller(_SYS_STATX, "ntnnn")
_syncfs = caller(_SYS_SYNCFS, "n")
_open_by_handle_at = caller(_SYS_OPEN_BY_HANDLE_AT, "nnn")
_name_to_handle_at = caller(_SYS_NAME_TO_HANDLE_AT, "ntnnn")


def rename(
    from_fd: int, from_name: bytes, to_fd: int, to_name: bytes, flags: int = 0
) -> None:
    """Rename an entry of a directory: renameat2(2).

    Raises:
        OSError: EEXIST with NOREPLACE: there is one; ENOENT with EXCHANGE: there is none.
    """
    _renameat2(from_fd, from_name, to_fd, to_name, flags)


@contextlib.contextmanager
def held_entry(directory: int, name: bytes) -> Iterator[int]:
    """Hold an entry of a directory, a link itself: another one may get its name.

    Args:
        directory: a descriptor of the directory.
        name: of the entry; b"" for the directory.

    Raises:
        OSError: there is none.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(name or b".", flags, dir_fd=directory)) as fd:
        yield fd


def has_entry(directory: int, name: bytes | str) -> bool:
    """Tell whether a directory has an entry, which may be a link."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# By its path in /proc a link itself is changed, and what is held by O_PATH.


def set_owner(held: int, user: int, group: int) -> None:
    """Set the user and group of what a descriptor holds."""
    now = os.fstat(held)
    if (now.st_uid, now.st_gid) != (user, group):
        os.chown(f"/proc/self/fd/{held}", user, group)


def set_mode(held: int, mode: int) -> None:
    """Set the permission bits of what a descriptor holds; a link has none."""
    os.chmod(f"/proc/self/fd/{held}", mode)


def set_times(held: int, times_ns: tuple[int, int]) -> None:
    """Set when what a descriptor holds was last read and last written."""
    os.utime(f"/proc/self/fd/{held}", ns=times_ns)


def read_birth_time_ns(fd: int) -> int | None:
    """Return when an inode was made, in nanoseconds; None where that is not kept."""
    found = _read_statx(fd, _STATX_BTIME)
    if found is None:
        return None
    seconds, nanoseconds = struct.unpack_from("qI", found, _STATX_BTIME_OFFSET)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def is_on_overlay(path: str) -> bool:
    """Tell whether a directory lies on an overlay, as the mount table says."""
    device = os.stat(path).st_dev
    mark = b" %d:%d " % (os.major(device), os.minor(device))
    with open("/proc/self/mountinfo", "rb") as table:
        return any(mark in line and b" - overlay " in line for line in table)


def read_mount_id(fd: int) -> int | None:
    """Return the number of the mount that a descriptor is in; None before Linux 5.8."""
    found = _read_statx(fd, _STATX_MNT_ID)
    if found is None:
        return None
    (number,) = struct.unpack_from("Q", found, _STATX_MNT_ID_OFFSET)
    return int(number)


def _read_statx(fd: int, what: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return struct statx with one field; None if that is not known."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_SYMLINK_NOFOLLOW
    _statx(fd, b"", flags, what, ctypes.addressof(found))
    (mask,) = struct.unpack_from("I", found)
    return found if mask & what else None


def read_file_handle(fd: int) -> bytes | None:
    """Return what names an inode of its file system for good; None where nothing does.

    Returns:
        The type of the handle in one byte, and its bytes: what overlayfs keeps in
        ``overlay.origin``.
    """
    size = 8 + _MAX_HANDLE_BYTES
    found = ctypes.create_string_buffer(struct.pack("Ii", _MAX_HANDLE_BYTES, 0), size)
    mount = ctypes.c_int()
    where = ctypes.addressof(found)
    try:
        _name_to_handle_at(fd, b"", where, ctypes.addressof(mount), _AT_EMPTY_PATH)
    except OSError as why:
        if why.errno not in {errno.EOPNOTSUPP, errno.EOVERFLOW, errno.ENOSYS}:
            raise
        return None
    length, kind = struct.unpack_from("Ii", found)
    return bytes((kind & 0xFF,)) + found.raw[8 : 8 + length]


def has_inode(mount_fd: int, handle: bytes) -> bool | None:
    """Tell whether a file system has the inode that a handle names.

    Args:
        mount_fd: a descriptor of anything in that file system.
        handle: as ``read_file_handle`` returns it.

    Returns:
        None if this process may not ask: it takes CAP_DAC_READ_SEARCH.
    """
    head = struct.pack("Ii", len(handle) - 1, handle[0])
    given = ctypes.create_string_buffer(head + handle[1:])
    try:
        fd = _open_by_handle_at(mount_fd, ctypes.addressof(given), os.O_PATH)
    except OSError as why:
        if why.errno == errno.ESTALE:
            return False
        if why.errno in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
            return None
        raise
    os.close(fd)
    return True


def sync_file_system(fd: int) -> None:
    """Write all of the file system of a descriptor to its disk: syncfs(2).

    Raises:
        OSError: something could not be written, since Linux 5.8.
    """
    _syncfs(fd)


def copy_content(source: int, target: int) -> None:
    """Copy a file's content into an empty one: by reference if possible, else by data.

    Holes stay holes.
    """
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as why:
        if why.errno not in NO_REFLINK:
            raise
    else:
        return
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in data_ranges(source, size):
        _copy_range(source, target, start, end)


def data_ranges(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file that are no holes, in bytes: [start, end)."""
    ranges = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as why:
            if why.errno != errno.ENXIO:  # nothing but a hole follows
                raise
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        ranges.append((start, end))
    return ranges


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        size = min(end - start, _COPY_BYTES)
        try:
            done = os.copy_file_range(source, target, size, start, start)
        except OSError as why:
            if why.errno not in _NO_RANGE_COPY:
                raise
            done = os.pwrite(target, os.pread(source, size, start), start)
        if done == 0:  # the file has become shorter meanwhile
            return
        start += done


def is_whiteout(status: os.stat_result) -> bool:
    """Tell whether an entry of a layer says that there is nothing: a device 0/0."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
