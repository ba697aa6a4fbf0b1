"""The host's own file systems, as directories that are held open.

Rules of this file.

1. A descriptor is opened without truncation, looked at, and only then truncated: an
   OPEN never harms what it then refuses, and never waits on a FIFO (spec O7).  What is
   opened to be written is not set-user-ID or set-group-ID any more.
2. Whether a name stays beneath the directory is the kernel's answer (``paths``); what
   leads out is ``AccessDeniedError``, whatever the errno was.
3. The last component of a name that is to be made, removed, renamed or replaced is
   never followed: its directory is resolved and held, then one system call names it.

Open files are in ``host_file``.
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
    OPEN_FLAGS,
    check_name,
    open_beneath,
    split_parent,
)
from vfs.backends.base import Backend, FileStatus, Mode, Removed
from vfs.backends.host_file import (
    HostHandle,
    StagedHandle,
    remove_stale,
    sync_directory,
    what_goes,
)
from vfs.errors import AccessDeniedError, about_the_target
from vfs.mounts import Mount, hold_device, let_go_of, mount_of

_SET_ID = stat.S_ISUID | stat.S_ISGID
_KIND_AND_SET_ID = 0o170000 | _SET_ID
_NO_ENTRY: Final = (b"", b".", b"..")
_MAX_LINKS = 40  # as the kernel's MAXSYMLINKS
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
            where absolute and relative names mean what they mean to the host.
        follow: follow a link in the last component; False where one entry is granted
            that was resolved before, and must not become a link to another one.
    """

    __slots__ = ("_beneath", "_flags", "_identity", "_mount", "dir_fd")

    def __init__(
        self, dir_fd: int, *, beneath: bool = True, follow: bool = True
    ) -> None:
        self.dir_fd = dir_fd
        self._beneath = beneath
        self._flags = 0 if follow else os.O_NOFOLLOW
        self._identity: tuple[int, int] | None = None  # which no open directory changes
        self._mount: Mount | None = None  # that is held

    def hold(self) -> Self:
        """Have it that files beside this directory need not ask where they are."""
        with suppress(OSError):  # they ask, then
            device = self.identity()[0]
            mount = hold_device(device, self.dir_fd)
            if self._mount is not None:  # another thread was first
                let_go_of(device)
            self._mount = mount
        return self

    def _open(self, name: bytes, flags: int) -> int:
        flags |= self._flags
        if not self._beneath:
            if b"\0" in name:
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
                _take_set_id(fd, status.st_mode, flags)
            if self._beneath:
                if self._mount is None:  # of the program before; not while it began
                    self.hold()
            elif not status.st_nlink:
                self._check_named(name, fd, status)
            return HostHandle(fd, status)
        except BaseException:
            os.close(fd)
            raise

    def _check_named(self, name: bytes, fd: int, found: os.stat_result) -> None:
        """Refuse a file without a name: what a process has open, and ``/proc`` leads to.

        The host has logs and staged files of other clients open so.  One that was
        removed or replaced since it was opened is let through, and so is one of a file
        system that counts no names (FUSE).
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
            return StagedHandle(self.dir_fd, dir_fd, last, mode)
        except BaseException:
            os.close(dir_fd)
            raise

    def _resolve_entry(self, name: bytes) -> tuple[int, bytes]:
        """Follow the links in a name; return its directory, opened, and its entry.

        Every step is resolved from the held directory again, so a link that is changed
        meanwhile leads at most to another entry beneath it.
        """
        for _ in range(_MAX_LINKS):
            check_name(name)
            directory, last = split_parent(name)
            if last in _NO_ENTRY or name.endswith(b"/"):
                raise _error(errno.EISDIR)
            dir_fd = self._open(directory, _DIRECTORY)
            try:
                target = os.readlink(last, dir_fd=dir_fd)
            except OSError as why:
                if why.errno in (errno.EINVAL, errno.ENOENT):  # no link, or nothing
                    return dir_fd, last
                os.close(dir_fd)
                raise
            os.close(dir_fd)
            if self._flags & os.O_NOFOLLOW:
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

    def remove(self, name: bytes) -> Removed:
        with self._entry(name) as (fd, last):
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            _check_slash(name, status.st_mode)
            goes = what_goes(fd, last) or Removed(0, (0, 0), was_last=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(last, dir_fd=fd)
            else:
                os.unlink(last, dir_fd=fd)
            return goes

    def rename(self, old: bytes, target: Backend, new: bytes) -> Removed | None:
        if not isinstance(target, HostDirectory):
            raise _error(errno.EXDEV)
        with (
            self._entry(old) as (old_fd, old_last),
            about_the_target(),
            target._entry(new) as (new_fd, new_last),  # noqa: SLF001 - same class
        ):
            status = os.stat(old_last, dir_fd=old_fd, follow_symlinks=False)
            _check_slash(old, status.st_mode)
            _check_slash(new, status.st_mode)
            replaced = what_goes(new_fd, new_last)
            os.rename(old_last, new_last, src_dir_fd=old_fd, dst_dir_fd=new_fd)
            if replaced and replaced.identity == (status.st_dev, status.st_ino):
                return None  # two names of one file: rename(2) leaves both
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
        """Return a directory of the same kind for one beneath it, which it owns."""
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
        """Return the directory's path as the host sees it now (proc(5))."""
        return os.readlink(b"/proc/self/fd/%d" % self.dir_fd)

    def remove_stale(self) -> None:
        """Remove staged files that a host which was killed has left (attack 39)."""
        remove_stale(self.dir_fd)

    def descriptors(self) -> tuple[int, ...]:
        return (self.dir_fd,) if self.dir_fd >= 0 else ()

    def close(self) -> None:
        if self.dir_fd >= 0:
            fd, self.dir_fd = self.dir_fd, -1
            if self._mount is not None:
                let_go_of(self.identity()[0])
            os.close(fd)


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    """Tell an entry's kind, from what the directory says where it says it."""
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
    """Raise ``ENOTDIR`` for ``name/`` where that is no directory."""
    if name.endswith(b"/") and not stat.S_ISDIR(mode):
        raise _error(errno.ENOTDIR)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EPERM)


def _take_set_id(fd: int, mode: int, flags: int) -> None:
    """Let what a client may write be nobody's program but the one's who runs it.

    The kernel does that at each write of who has no CAP_FSETID; a host that is root has.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY:
        with contextlib.suppress(PermissionError):  # another one's: the kernel does it
            os.fchmod(fd, stat.S_IMODE(mode) & ~_SET_ID)


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
        return stat.S_IMODE(status.st_mode) & ~_SET_ID
    finally:
        os.close(fd)
