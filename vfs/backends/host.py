"""The host's own file systems.

Rules of this file.

1. A descriptor is opened without truncation, looked at, and only then truncated: an
   OPEN never harms what it then refuses, and never waits on a FIFO (spec O7).
2. A staged file has no name until it is published (``O_TMPFILE``): if the host dies,
   the kernel frees it.
3. What a failed write added beyond the old end is cut off again (spec W5).
"""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable

from vfs.backends.base import Backend, FileStatus, Mode
from vfs.hostio import Mount, mount_of
from vfs.paths import OPEN_FLAGS, open_beneath, split_parent

STAGED_PREFIX = b".sandhost-"
"""How names of staged files begin, for the instant in which they have one."""

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_PAGE_MASK = _PAGE_BYTES - 1

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def kind_of(mode: int) -> str:
    """Return the word for a file type in ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "other")


class HostHandle:
    """An open file of the host; see ``base.Handle``."""

    __slots__ = ("fd", "mount", "pread")

    def __init__(self, fd: int, device: int) -> None:
        self.fd = fd
        self.mount: Mount = mount_of(device)
        self.pread: Callable[[int, int], bytes] = self.mount.reader(fd)

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
        mount = self.mount
        if mount.in_memory:
            size = len(data)
            # What lies in one page is written or not: there is nothing to cut off.
            if (offset & _PAGE_MASK) + size > _PAGE_BYTES or size != os.pwrite(
                self.fd, data, offset
            ):
                self._pwrite_all(data, offset)
            return
        start = time.monotonic()
        self._pwrite_all(data, offset)
        mount.note(time.monotonic() - start)

    def _pwrite_all(self, data: bytes | memoryview, offset: int) -> None:
        size = len(data)
        old_size = os.fstat(self.fd).st_size
        done = 0
        try:
            while done < size:
                done += os.pwrite(self.fd, data[done:] if done else data, offset + done)
        except OSError:
            if done and offset + done > old_size:
                os.ftruncate(self.fd, old_size)
            raise

    def append(self, data: bytes | memoryview) -> int:
        size = len(data)
        done = 0
        try:
            while done < size:
                done += os.write(self.fd, data[done:] if done else data)
        except OSError:
            end = os.lseek(self.fd, 0, os.SEEK_CUR)
            if done and os.fstat(self.fd).st_size == end:
                os.ftruncate(self.fd, end - done)
            raise
        return os.lseek(self.fd, 0, os.SEEK_CUR)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def publish(self, *, durable: bool) -> None:
        if durable:
            os.fsync(self.fd)

    def descriptors(self) -> tuple[int, ...]:
        return (self.fd,) if self.fd >= 0 else ()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


class StagedHandle(HostHandle):
    """A file that appears under its name only at ``publish`` (spec A3b)."""

    __slots__ = ("_dir_fd", "_last", "_temporary")

    def __init__(self, fd: int, dir_fd: int, last: bytes, temporary: bytes) -> None:
        super().__init__(fd, os.fstat(fd).st_dev)
        self._dir_fd = dir_fd
        self._last = last
        self._temporary = temporary

    def publish(self, *, durable: bool) -> None:
        if durable:
            os.fsync(self.fd)
        if not self._temporary:
            name = STAGED_PREFIX + secrets.token_hex(8).encode()
            # Without dst_dir_fd and src_dir_fd CPython would call link(2), which does
            # not follow /proc/self/fd.
            os.link(
                b"/proc/self/fd/%d" % self.fd,
                name,
                src_dir_fd=self._dir_fd,
                dst_dir_fd=self._dir_fd,
                follow_symlinks=True,
            )
            self._temporary = name
        os.rename(
            self._temporary,
            self._last,
            src_dir_fd=self._dir_fd,
            dst_dir_fd=self._dir_fd,
        )
        self._temporary = b""
        if durable:
            _sync_directory(self._dir_fd)

    def descriptors(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.fd, self._dir_fd) if fd >= 0)

    def close(self) -> None:
        dir_fd, self._dir_fd = self._dir_fd, -1
        try:
            if self._temporary:
                os.unlink(self._temporary, dir_fd=dir_fd)
        finally:
            os.close(dir_fd)
            super().close()


def _sync_directory(dir_fd: int) -> None:
    fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HostDirectory:
    """A held directory of the host; see ``base.Backend``.

    Args:
        dir_fd: the directory; owned from now on, -1 for the whole file system.
        beneath: resolve names beneath it; False gives the top-level view (spec A2),
            where absolute and relative names mean what they mean to the host.
    """

    __slots__ = ("_beneath", "dir_fd")

    def __init__(self, dir_fd: int, *, beneath: bool = True) -> None:
        self.dir_fd = dir_fd
        self._beneath = beneath

    def _open(self, name: bytes, flags: int) -> int:
        if self._beneath:
            return open_beneath(self.dir_fd, name, flags)
        try:
            return os.open(name, flags | OPEN_FLAGS, 0o666, dir_fd=self.dir_fd)
        except ValueError:  # NUL in the name
            raise _error(errno.EINVAL) from None

    def open(
        self, name: bytes, mode: Mode, *, create: bool, exclusive: bool, staged: bool
    ) -> HostHandle:
        if staged:
            return self._open_staged(name)
        flags = mode.flags
        if create:
            flags |= os.O_CREAT | os.O_EXCL if exclusive else os.O_CREAT
        fd = self._open(name, flags)
        try:
            status = os.fstat(fd)
            _check_regular(status.st_mode)
            return HostHandle(fd, status.st_dev)
        except BaseException:
            os.close(fd)
            raise

    def _open_staged(self, name: bytes) -> StagedHandle:
        directory, last = split_parent(name)
        if last in (b"", b".", b".."):
            raise _error(errno.EISDIR)
        dir_fd = self._open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            mode = _mode_to_replace(dir_fd, last)
            fd, temporary = _open_unnamed(dir_fd)
            try:
                if mode is not None:
                    os.fchmod(fd, mode)
                return StagedHandle(fd, dir_fd, last, temporary)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            os.close(dir_fd)
            raise

    def stat(self, name: bytes) -> FileStatus:
        fd = self._open(name, os.O_PATH)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return FileStatus(status.st_size, status.st_mtime_ns, kind_of(status.st_mode))

    def list(self, name: bytes) -> list[tuple[bytes, str]]:
        fd = self._open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                found = []
                for entry in entries:
                    mode = 0
                    with contextlib.suppress(FileNotFoundError):
                        mode = entry.stat(follow_symlinks=False).st_mode
                    found.append((os.fsencode(entry.name), kind_of(mode)))
        finally:
            os.close(fd)
        return sorted(found)

    @contextlib.contextmanager
    def _parent(self, name: bytes):  # type: ignore[no-untyped-def] # noqa: ANN202
        directory, last = split_parent(name)
        if last in (b"", b".", b".."):
            raise _error(errno.EINVAL)
        fd = self._open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            yield fd, last
        finally:
            os.close(fd)

    def make_directory(self, name: bytes) -> None:
        with self._parent(name) as (fd, last):
            os.mkdir(last, dir_fd=fd)

    def remove(self, name: bytes) -> int:
        with self._parent(name) as (fd, last):
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(last, dir_fd=fd)
                return 0
            os.unlink(last, dir_fd=fd)
            last_link = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            return status.st_size if last_link else 0

    def rename(self, old: bytes, target: Backend, new: bytes) -> None:
        if not isinstance(target, HostDirectory):
            raise _error(errno.EXDEV)
        with (
            self._parent(old) as (old_fd, old_last),
            target._parent(new) as (new_fd, new_last),  # noqa: SLF001 - same class
        ):
            os.rename(old_last, new_last, src_dir_fd=old_fd, dst_dir_fd=new_fd)

    def narrow(self, name: bytes) -> "HostDirectory":
        return HostDirectory(self._open(name, os.O_PATH | os.O_DIRECTORY))

    def identity(self) -> tuple[int, int]:
        status = os.fstat(self.dir_fd)
        return (status.st_dev, status.st_ino)

    def descriptors(self) -> tuple[int, ...]:
        return (self.dir_fd,) if self.dir_fd >= 0 else ()

    def close(self) -> None:
        if self.dir_fd >= 0:
            fd, self.dir_fd = self.dir_fd, -1
            os.close(fd)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EPERM)


def _mode_to_replace(dir_fd: int, last: bytes) -> int | None:
    """Return the permission bits of the file that will be replaced, None if none is.

    Raises:
        OSError: it is no regular file, or may not be written.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | OPEN_FLAGS
    try:
        fd = os.open(last, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        _check_regular(status.st_mode)
        return stat.S_IMODE(status.st_mode)
    finally:
        os.close(fd)


def _open_unnamed(dir_fd: int) -> tuple[int, bytes]:
    """Open a new file for staging; return it and the name it has, if it needs one."""
    try:
        fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | OPEN_FLAGS, 0o666, dir_fd=dir_fd)
    except OSError as why:
        if why.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    else:
        return fd, b""
    name = STAGED_PREFIX + secrets.token_hex(8).encode()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
    return os.open(name, flags, 0o666, dir_fd=dir_fd), name
