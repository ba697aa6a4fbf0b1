"""Open files of the host's own file systems: plain ones and staged ones.

Rules of this file.

1. Bytes that a failed write added beyond the old end are cut off again (spec W5), unless
   the file has grown since.
2. A staged file has no name until it is published (``O_TMPFILE``): if the host dies, the
   kernel frees it.  To replace another file it needs a hidden name for an instant, in the
   directory of its place.  Its lock ends with this process, so that a later process can
   find stale ones (``remove_stale``).

Sources: open(2), link(2), flock(2), write(2), proc(5).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from typing import NamedTuple, Self

from hostlib.large_files import close_file
from hostlib.linux.resolve import OPEN_FLAGS
from hostlib.unnamed_files import NO_TMPFILE
from vfs.backends.base import RemovedEntry, UnflushedError
from vfs.backends.fsuser import act_as
from vfs.mounts import MOUNTS, SLOW_WRITE_S, mount_of

STAGED_PREFIX = b".sandhost-"
"""The prefix of the hidden names of staged files."""

_NOT_THERE = frozenset({errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS})


class HostHandle:
    """An open file of the host; see ``base.Handle``."""

    __slots__ = ("_opened", "fd", "mount")

    def __init__(self, fd: int, opened: os.stat_result) -> None:
        self.fd = fd
        self._opened = opened
        mount = MOUNTS.get(opened.st_dev)
        if mount is None or mount.is_asked_about:
            mount = mount_of(opened.st_dev, fd)
        self.mount = mount

    def pread(self, size: int, offset: int) -> bytes | bytearray:
        return self.mount.read(self.fd, size, offset)

    def pread_wait(self, size: int, offset: int) -> bytes:
        data = os.pread(self.fd, size, offset)
        if len(data) == size or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < size:
            data = os.pread(self.fd, size - got, offset + got)
            if not data:
                break
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def pwrite(self, data: bytes | memoryview, offset: int) -> None:
        begun_s = time.monotonic()
        fd, size = self.fd, len(data)
        old_end = end_of(fd)
        done = 0
        try:
            while done < size:
                done += os.pwrite(fd, data[done:] if done else data, offset + done)
        except OSError:
            self.cut_off(offset + done, old_end)
            raise
        self._note_slow(begun_s)

    def append(self, data: bytes | memoryview) -> int:
        begun_s = time.monotonic()
        size = len(data)
        done = 0
        try:
            while done < size:
                done += os.write(self.fd, data[done:] if done else data)
        except OSError:
            end = os.lseek(self.fd, 0, os.SEEK_CUR)
            self.cut_off(end, end - done)
            raise
        self._note_slow(begun_s)
        return os.lseek(self.fd, 0, os.SEEK_CUR)

    def _note_slow(self, begun_s: float) -> None:
        """Tell the mount of a write that took long."""
        took_s = time.monotonic() - begun_s
        if took_s > SLOW_WRITE_S:
            self.mount.note(took_s)

    def cut_off(self, end: int, old_end: int) -> None:
        if end > old_end and os.fstat(self.fd).st_size == end:
            os.ftruncate(self.fd, old_end)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def publish(self, *, durable: bool) -> RemovedEntry | None:
        if durable:
            os.fsync(self.fd)
        return None

    def will_replace(self) -> bool:
        return True

    def identity(self) -> tuple[int, int]:
        return (self._opened.st_dev, self._opened.st_ino)

    def links(self) -> int:
        return os.fstat(self.fd).st_nlink

    def descriptors(self) -> tuple[int, ...]:
        return (self.fd,) if self.fd >= 0 else ()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)

    def drop(self) -> None:
        fd, self.fd = self.fd, -1
        if self.mount.is_distant:
            os.close(fd)  # may wait long, and the caller is in a thread already
        else:
            close_file(fd)


class StagedState(NamedTuple):
    """The state of a staged file beside its descriptor.

    Attributes:
        place_fd: the directory of its place; owned by the caller, and open for longer.
        dir_fd: the directory of its name; owned by the handle.
        last: its name there.
        temporary: its hidden name; empty if it has none.
        temporary_fd: the directory of that name.
    """

    place_fd: int
    dir_fd: int
    last: bytes
    temporary: bytes
    temporary_fd: int


class StagedHandle(HostHandle):
    """A file that gets its name only at ``publish`` (spec A3b).

    Args:
        fd: the file; owned from now on.
        state: the rest of its state.
        user: the user that publishes it; None for this process's user.

    Attributes:
        user: as above.
    """

    __slots__ = (
        "_dir_fd",
        "_last",
        "_place_fd",
        "_temporary",
        "_temporary_fd",
        "user",
    )

    def __init__(self, fd: int, state: StagedState, user: int | None = None) -> None:
        super().__init__(fd, os.fstat(fd))
        self.user = user
        self._place_fd = state.place_fd
        self._dir_fd = state.dir_fd
        self._last = state.last
        self._temporary = state.temporary
        self._temporary_fd = state.temporary_fd

    @classmethod
    def begin(cls, place_fd: int, dir_fd: int, last: bytes, mode: int | None) -> Self:
        """Return a new file; ``dir_fd`` is owned from now on.

        Args:
            place_fd: see ``StagedState``.
            dir_fd: see ``StagedState``.
            last: see ``StagedState``.
            mode: permission bits of the file that it will replace; None if there is none.
        """
        fd, temporary = _open_unnamed(dir_fd)
        try:
            # Lock it before it has a name: see `remove_stale`.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mode is not None:
                os.fchmod(fd, mode)
            return cls(fd, StagedState(place_fd, dir_fd, last, temporary, dir_fd))
        except BaseException:
            os.close(fd)
            raise

    def snapshot(self) -> StagedState:
        """Return the state beside the descriptor."""
        return StagedState(
            self._place_fd,
            self._dir_fd,
            self._last,
            self._temporary,
            self._temporary_fd,
        )

    def publish(self, *, durable: bool) -> RemovedEntry | None:
        if durable:
            os.fsync(self.fd)
        with act_as(self.user):
            if not self._temporary:
                self.give_name()
            replaced = entry_to_lose(self._dir_fd, self._last)
            os.rename(
                self._temporary,
                self._last,
                src_dir_fd=self._temporary_fd,
                dst_dir_fd=self._dir_fd,
            )
        self._temporary = b""
        if durable:
            try:
                sync_directory(self._dir_fd)
            except OSError as why:
                raise UnflushedError(why, replaced) from why
        return replaced

    def will_replace(self) -> bool:
        return entry_to_lose(self._dir_fd, self._last) is not None

    def give_name(self) -> None:
        """Give the file a hidden name, in the place's directory if possible."""
        try:
            self._link_into(self._place_fd)
        except OSError as why:
            if why.errno not in _NOT_THERE:
                raise
            self._link_into(self._dir_fd)

    def _link_into(self, dir_fd: int) -> None:
        name = _hidden_name()
        # Without the dir_fd arguments CPython would call link(2), which does not follow
        # /proc/self/fd.
        os.link(
            b"/proc/self/fd/%d" % self.fd,
            name,
            src_dir_fd=dir_fd,
            dst_dir_fd=dir_fd,
            follow_symlinks=True,
        )
        self._temporary = name
        self._temporary_fd = dir_fd

    def descriptors(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.fd, self._dir_fd) if fd >= 0)

    def close(self) -> None:
        try:
            self._remove_temporary()
        finally:
            super().close()

    def drop(self) -> None:
        try:
            self._remove_temporary()
        finally:
            super().drop()

    def _remove_temporary(self) -> None:
        dir_fd, self._dir_fd = self._dir_fd, -1
        try:
            if self._temporary:
                with act_as(self.user):
                    os.unlink(self._temporary, dir_fd=self._temporary_fd)
        finally:
            os.close(dir_fd)


def end_of(fd: int) -> int:
    """Return the size of a file, and move its position there.

    lseek(2) costs a third of fstat(2), but some files of procfs have no end for it.
    """
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return os.fstat(fd).st_size


def entry_to_lose(dir_fd: int, last: bytes) -> RemovedEntry | None:
    """Return facts of an entry that is about to be removed; None if it is missing."""
    try:
        status = os.stat(last, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    is_last = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    size = status.st_size if is_last else 0
    return RemovedEntry(size, (status.st_dev, status.st_ino), is_last)


def _hidden_name() -> bytes:
    return STAGED_PREFIX + secrets.token_hex(8).encode()


def sync_directory(dir_fd: int) -> None:
    """Sync the entries of a directory to the disk."""
    fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_unnamed(dir_fd: int) -> tuple[int, bytes]:
    """Open a new file for staging; return it and its name, if it needs one."""
    try:
        fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | OPEN_FLAGS, 0o666, dir_fd=dir_fd)
    except OSError as why:
        if why.errno not in NO_TMPFILE:
            raise
    else:
        return fd, b""
    name = _hidden_name()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
    return os.open(name, flags, 0o666, dir_fd=dir_fd), name


def remove_stale(dir_fd: int) -> None:
    """Remove staged files that a host left in a directory when it was killed.

    A staged file of a living host is locked; the lock of a dead one is gone.

    Raises:
        OSError: the directory cannot be read.
    """
    fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        with os.scandir(fd) as entries:
            hidden = [e.name for e in entries if is_staged(e.name)]
        for name in hidden:
            with contextlib.suppress(OSError):  # locked, gone, or not ours to remove
                _remove_if_unlocked(fd, name)
    finally:
        os.close(fd)


def is_staged(name: str) -> bool:
    """Return whether a name is one of ``_hidden_name``; users' names may begin alike."""
    rest = name.removeprefix(STAGED_PREFIX.decode())
    return len(rest) == 16 and rest != name and set(rest) <= set("0123456789abcdef")


def _remove_if_unlocked(dir_fd: int, name: str) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | OPEN_FLAGS, dir_fd=dir_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=dir_fd)
    finally:
        os.close(fd)
