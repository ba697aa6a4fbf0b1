"""Directories of the host, held open; ``host_file`` has their files.

Rules of this file.

1. A file is opened without truncation, checked, and only then truncated: an OPEN does not
   harm a file that it refuses, and never waits on a FIFO (spec O7).  A file that is opened
   for writing loses its set-user-ID and set-group-ID bits.
2. The kernel decides whether a name stays beneath the directory
   (``hostlib.linux.resolve``); a name that leads out is ``AccessDeniedError``.
3. To make, remove, rename or replace a name, its directory is resolved and held, and one
   system call names the last component, which is never followed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Self

from hostlib.linux.resolve import (
    DENIED,
    MAX_LINKS,
    NUL,
    OPEN_FLAGS,
    check_name,
    open_beneath,
    split_parent,
)
from vfs.backends.base import Backend, FileStatus, Mode, RemovedEntry
from vfs.backends.host_file import (
    HostHandle,
    StagedHandle,
    entry_to_lose,
    remove_stale,
    sync_directory,
)
from vfs.errors import AccessDeniedError, deny_as_target
from vfs.mounts import Mount, hold_device, mount_of, release_device

_SET_ID = stat.S_ISUID | stat.S_ISGID
_KIND_AND_SET_ID = 0o170000 | _SET_ID
_NO_ENTRY: Final = (b"", b".", b"..")
_DIRECTORY = os.O_PATH | os.O_DIRECTORY

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


class HostDirectory:
    """A held directory of the host; see ``base.Backend``.

    Args:
        dir_fd: the directory; owned from now on, -1 for the whole file system.
        beneath: resolve names beneath it; False gives the top-level view (spec A2),
            where names have the same meaning as for the host.
        follow: follow a link in the last component; False for one granted entry, which
            was resolved before and must not become a link to another one.

    Attributes:
        dir_fd: as above.
        beneath: as above.
        flags: O_* flags of every open.
    """

    __slots__ = ("_identity", "_mount", "beneath", "dir_fd", "flags")

    def __init__(
        self, dir_fd: int, *, beneath: bool = True, follow: bool = True
    ) -> None:
        self.dir_fd = dir_fd
        self.beneath = beneath
        self.flags = 0 if follow else os.O_NOFOLLOW
        self._identity: tuple[int, int] | None = None  # constant for an open directory
        self._mount: Mount | None = None  # the held mount

    def hold(self) -> Self:
        """Hold the directory's device, so that its files need not look up their mount."""
        with suppress(OSError):  # then each file looks it up
            device = self.identity()[0]
            mount = hold_device(device, self.dir_fd)
            if self._mount is not None:  # another thread was faster
                release_device(device)
            self._mount = mount
        return self

    def _open(self, name: bytes, flags: int) -> int:
        flags |= self.flags
        if not self.beneath:
            if NUL in name:
                raise _error(errno.EINVAL)
            return os.open(name, flags | OPEN_FLAGS, 0o666, dir_fd=self.dir_fd)
        try:
            return open_beneath(self.dir_fd, name, flags)
        except OSError as why:
            if why.errno in DENIED:
                raise AccessDeniedError from why
            raise

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
            if status.st_mode & _KIND_AND_SET_ID != stat.S_IFREG:
                _check_regular(status.st_mode)
                _clear_set_id(fd, status.st_mode, flags)
            if self.beneath:
                if self._mount is None:  # a directory of a hand-over
                    self.hold()
            elif not status.st_nlink:
                self._check_named(name, fd, status)
            return HostHandle(fd, status)
        except BaseException:
            os.close(fd)
            raise

    def _check_named(self, name: bytes, fd: int, found: os.stat_result) -> None:
        """Refuse a file without a name that was opened by a link in ``/proc``.

        The host has such logs and staged files of other clients open.  A file that was
        removed or replaced since it was opened here is allowed, and so is one on a file
        system that does not count names (FUSE).
        """
        if not os.readlink(b"/proc/self/fd/%d" % fd).endswith(b" (deleted)"):
            return
        try:
            now = os.stat(name, dir_fd=self.dir_fd)
        except OSError:
            return
        if os.path.samestat(now, found):
            raise AccessDeniedError

    def _open_staged(self, name: bytes) -> StagedHandle:
        dir_fd, last = self._resolve_entry(name)
        try:
            mode = _mode_to_replace(dir_fd, last)
            return StagedHandle.begin(self.dir_fd, dir_fd, last, mode)
        except BaseException:
            os.close(dir_fd)
            raise

    def _resolve_entry(self, name: bytes) -> tuple[int, bytes]:
        """Follow the links in a name; return its opened directory, and its entry.

        Each step starts from the held directory again, so a link that changes meanwhile
        leads at most to another entry beneath it.
        """
        for _ in range(MAX_LINKS):
            check_name(name)
            directory, last = split_parent(name)
            if last in _NO_ENTRY or name.endswith(b"/"):
                raise _error(errno.EISDIR)
            dir_fd = self._open(directory, _DIRECTORY)
            try:
                target = os.readlink(last, dir_fd=dir_fd)
            except OSError as why:
                if why.errno in (errno.EINVAL, errno.ENOENT):  # no link, or no entry
                    return dir_fd, last
                os.close(dir_fd)
                raise
            os.close(dir_fd)
            if self.flags & os.O_NOFOLLOW:
                raise AccessDeniedError
            name = target if target.startswith(b"/") else directory + b"/" + target
        raise AccessDeniedError

    def stat(self, name: bytes) -> FileStatus:
        fd = self._open(name, os.O_PATH)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return FileStatus(status.st_size, status.st_mtime_ns, kind_of(status.st_mode))

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        fd = self._open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = []
            with os.scandir(fd) as entries:
                for entry in entries:
                    found.append((os.fsencode(entry.name), _kind_of_entry(entry)))
                    if len(found) > limit:
                        raise _error(errno.EOVERFLOW)
        finally:
            os.close(fd)
        return sorted(found)

    @contextlib.contextmanager
    def _entry(self, name: bytes) -> Iterator[tuple[int, bytes]]:
        """Hold the directory of a name; yield it with the name's last component."""
        check_name(name)
        directory, last = split_parent(name)
        if last in _NO_ENTRY:
            raise _error(errno.EINVAL)
        fd = self._open(directory, _DIRECTORY)
        try:
            yield fd, last
        finally:
            os.close(fd)

    def make_directory(self, name: bytes) -> None:
        with self._entry(name) as (fd, last):
            os.mkdir(last, dir_fd=fd)

    def remove(self, name: bytes) -> RemovedEntry:
        with self._entry(name) as (fd, last):
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            _check_slash(name, status.st_mode)
            removed = entry_to_lose(fd, last) or RemovedEntry(0, (0, 0), was_last=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(last, dir_fd=fd)
            else:
                os.unlink(last, dir_fd=fd)
            return removed

    def rename(self, old: bytes, target: Backend, new: bytes) -> RemovedEntry | None:
        if not isinstance(target, HostDirectory):
            raise _error(errno.EXDEV)
        with (
            self._entry(old) as (old_fd, old_last),
            deny_as_target(),
            target._entry(new) as (new_fd, new_last),  # noqa: SLF001 - same class
        ):
            status = os.stat(old_last, dir_fd=old_fd, follow_symlinks=False)
            _check_slash(old, status.st_mode)
            _check_slash(new, status.st_mode)
            replaced = entry_to_lose(new_fd, new_last)
            os.rename(old_last, new_last, src_dir_fd=old_fd, dst_dir_fd=new_fd)
            if replaced and replaced.identity == (status.st_dev, status.st_ino):
                return None  # two names of one file: rename(2) keeps both
            return replaced

    def sync_entry(self, name: bytes) -> None:
        dir_fd, _ = self._resolve_entry(name)
        try:
            sync_directory(dir_fd)
        finally:
            os.close(dir_fd)

    def narrow(
        self, name: bytes, *, create: bool
    ) -> tuple["HostDirectory", bytes | None]:
        try:
            return self._part(self._open(name, _DIRECTORY), follow=True).hold(), None
        except NotADirectoryError:
            create = False
        except FileNotFoundError:
            if not create:
                raise
        dir_fd, last = self._resolve_entry(name)
        try:
            if not create:
                os.stat(last, dir_fd=dir_fd, follow_symlinks=False)
            return self._part(dir_fd, follow=False).hold(), last
        except BaseException:
            os.close(dir_fd)
            raise

    def _part(self, dir_fd: int, *, follow: bool) -> "HostDirectory":
        """Return a directory of the same class that owns a descriptor beneath it."""
        return HostDirectory(dir_fd, follow=follow)

    @property
    def is_lasting(self) -> bool:
        return False

    def identity(self) -> tuple[int, int]:
        if self._identity is None:
            status = os.fstat(self.dir_fd)
            self._identity = status.st_dev, status.st_ino
        return self._identity

    @property
    def is_distant(self) -> bool:
        if self._mount is not None:
            return self._mount.is_distant
        if self.dir_fd < 0:
            return False
        return mount_of(self.identity()[0], self.dir_fd).is_distant

    def path(self) -> bytes:
        """Return the directory's present path on the host (proc(5))."""
        return os.readlink(b"/proc/self/fd/%d" % self.dir_fd)

    def remove_stale(self) -> None:
        """Remove staged files that a killed host has left (attack 39)."""
        remove_stale(self.dir_fd)

    def descriptors(self) -> tuple[int, ...]:
        return (self.dir_fd,) if self.dir_fd >= 0 else ()

    def close(self) -> None:
        if self.dir_fd >= 0:
            fd, self.dir_fd = self.dir_fd, -1
            if self._mount is not None:
                release_device(self.identity()[0])
            os.close(fd)


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    """Return an entry's kind, from the directory itself if it has it."""
    if entry.is_symlink():
        return "link"
    if entry.is_file(follow_symlinks=False):
        return "file"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    try:
        return kind_of(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return kind_of(0)


def _check_slash(name: bytes, mode: int) -> None:
    """Raise ``ENOTDIR`` for ``name/`` if that is no directory."""
    if name.endswith(b"/") and not stat.S_ISDIR(mode):
        raise _error(errno.ENOTDIR)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EPERM)


def _clear_set_id(fd: int, mode: int, flags: int) -> None:
    """Clear the set-user-ID and set-group-ID bits of a file that a client may write.

    The kernel clears them at a write without CAP_FSETID, but a host that is root has it.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY:
        with contextlib.suppress(PermissionError):  # not the owner: the kernel does it
            os.fchmod(fd, stat.S_IMODE(mode) & ~_SET_ID)


def _mode_to_replace(dir_fd: int, last: bytes) -> int | None:
    """Return the permission bits of the file that will be replaced; None without one.

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
        return stat.S_IMODE(status.st_mode) & ~_SET_ID
    finally:
        os.close(fd)
