"""Opening a name beneath a held directory, without leaving it.

1. The kernel resolves a name in one call, ``openat2`` with ``RESOLVE_BENEATH`` and
   ``RESOLVE_NO_MAGICLINKS``, from a held directory descriptor.  No string comparison
   decides, so there is no race (spec A4).
2. On a kernel without ``openat2`` (before Linux 5.6, or denied by a filter) a walk with
   ``O_NOFOLLOW`` does the same, one component at a time.
3. Leaving the directory, by ``..``, an absolute link or a magic link, is ``EXDEV`` or
   ``ELOOP``; both mean "access denied" to a client.

Sources: openat2(2), path_resolution(7).
"""

import errno
import os
import stat

from hostlib.linux.syscalls import (
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_XDEV,
    openat2,
)

MAX_LINKS = 40
"""Most symbolic links on the way to a file, as the kernel's MAXSYMLINKS."""

_BENEATH_NO_MAGIC = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS
_RETRIES = 64
_CREATE_MODE = 0o666
_PATH_MAX = 4096  # limits.h, the NUL at the end included

NUL = 0
"""The byte that no name holds; CPython finds a number sooner than ``b"\\0"``."""

OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags of every open: close-on-exec, no wait for a FIFO, no controlling terminal."""


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def open_beneath_kernel(
    dir_fd: int, name: bytes, flags: int, resolve: int = _BENEATH_NO_MAGIC
) -> int:
    """Open ``name`` beneath ``dir_fd`` with openat2.

    Args:
        dir_fd: a held directory.
        name: relative, without NUL.
        flags: O_* flags; ``O_CREAT`` makes the file with 0666 & ~umask (spec O6).
        resolve: RESOLVE_* flags.

    Returns:
        A new descriptor, which the caller owns.

    Raises:
        OSError: with the kernel's errno; ``ENOSYS`` or ``EPERM`` where the call is
            missing or filtered.
    """
    if NUL in name:
        raise _error(errno.EINVAL)
    # openat2 refuses flags that have no meaning with O_PATH; open(2) ignores them.
    flags |= os.O_CLOEXEC if flags & os.O_PATH else OPEN_FLAGS
    mode = _CREATE_MODE if flags & os.O_CREAT else 0
    for _ in range(_RETRIES):
        try:
            return openat2(dir_fd, name, flags, mode, resolve)
        except OSError as why:
            # EAGAIN: after a concurrent rename the kernel could not prove "beneath".
            if why.errno not in (errno.EAGAIN, errno.EINTR):
                raise
    raise _error(errno.EAGAIN)


def open_in_mount(dir_fd: int, name: bytes, flags: int) -> int:
    """Open ``name`` beneath ``dir_fd`` and on its mount; see ``open_beneath_kernel``.

    There is no fallback: a kernel that has such mounts has openat2.
    """
    check_name(name)
    return open_beneath_kernel(dir_fd, name, flags, _BENEATH_NO_MAGIC | RESOLVE_NO_XDEV)


def open_beneath_walk(dir_fd: int, name: bytes, flags: int) -> int:
    """Open ``name`` beneath ``dir_fd`` without openat2; see ``open_beneath_kernel``."""
    check_name(name)
    if name.startswith(b"/"):
        raise _error(errno.EXDEV)
    for _ in range(_RETRIES):
        walk = _Walk(dir_fd, name)
        try:
            return walk.open(flags)
        except BlockingIOError:
            continue  # EAGAIN, for the same reason as in the kernel
        finally:
            walk.close()
    raise _error(errno.EAGAIN)


class _Walk:
    """The state of one walk: its directory, the way to it, and the components left.

    It holds one directory at a time, at any depth.  To go up it opens ``..``, and checks
    that this is the directory it came from: after a move ``..`` may lead anywhere.
    """

    def __init__(self, dir_fd: int, name: bytes) -> None:
        self._base = dir_fd
        self._here = dir_fd
        self._trail: list[tuple[int, int]] = []
        self._left: list[bytes] = []
        self._directory_only = False
        self._links = 0
        self._put(name)

    def close(self) -> None:
        self._move(self._base)

    def open(self, flags: int) -> int:
        while self._left:
            part = self._left.pop()
            if part == b"..":
                self._leave()
            elif part != b".":
                fd = self._step(part, flags)
                if fd is not None:
                    return fd
        if flags & os.O_CREAT:
            raise _error(errno.EEXIST if flags & os.O_EXCL else errno.EISDIR)
        return os.open(b".", flags | OPEN_FLAGS, dir_fd=self._here)

    def _step(self, part: bytes, flags: int) -> int | None:
        """Enter one component; return the descriptor if it was the last one."""
        last = not self._left
        if last and not self._directory_only:
            return self._open_last(part, flags)
        if last and flags & os.O_CREAT:
            raise _error(errno.EISDIR)
        self._enter(part)
        return None

    def _put(self, text: bytes) -> None:
        """Put the components of a text before those that are left."""
        if not self._left:
            self._directory_only |= text.endswith(b"/")
        self._left.extend(part for part in text.split(b"/")[::-1] if part)

    def _move(self, fd: int) -> None:
        if self._here != self._base:
            os.close(self._here)
        self._here = fd

    def _leave(self) -> None:
        if not self._trail:
            raise _error(errno.EXDEV)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        self._move(os.open(b"..", flags, dir_fd=self._here))
        if _identity(self._here) != self._trail.pop():
            raise _error(errno.EAGAIN)

    def _enter(self, part: bytes) -> None:
        fd = self._look_at(part)
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind == stat.S_IFLNK:
            self._follow(fd)
        elif kind == stat.S_IFDIR:
            self._trail.append(_identity(self._here))
            self._move(fd)
        else:
            os.close(fd)
            raise _error(errno.ENOTDIR)

    def _look_at(self, part: bytes) -> int:
        """Open an entry, or a link itself, to identify it only (O_PATH)."""
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(part, flags, dir_fd=self._here)

    def _open_last(self, part: bytes, flags: int) -> int | None:
        """Open the last component; None if it was a link, which the walk follows."""
        try:
            fd = self._look_at(part)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        else:
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind == stat.S_IFLNK and not flags & (os.O_NOFOLLOW | os.O_EXCL):
                self._follow(fd)
                return None
            if flags & os.O_PATH:
                return _check_kind(fd, kind, flags)
            os.close(fd)
        flags |= OPEN_FLAGS | os.O_NOFOLLOW
        try:
            return os.open(part, flags, _CREATE_MODE, dir_fd=self._here)
        except OSError as why:
            if why.errno != errno.ELOOP or flags & os.O_EXCL:
                raise
        # It became a link after it was looked at: look again, a bounded number of times.
        self._count_link()
        self._left.append(part)
        return None

    def _count_link(self) -> None:
        self._links += 1
        if self._links > MAX_LINKS:
            raise _error(errno.ELOOP)

    def _follow(self, link_fd: int) -> None:
        try:
            target = os.readlink(b"", dir_fd=link_fd)
            size = os.fstat(link_fd).st_size
        finally:
            os.close(link_fd)
        self._count_link()
        # An absolute link leads out.  So does a magic one: its text ("socket:[12]") is no
        # path, and its length differs from the link's size.
        if target.startswith(b"/") or (b":" in target and len(target) != size):
            raise _error(errno.EXDEV)
        self._put(target)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino)


def _check_kind(fd: int, kind: int, flags: int) -> int:
    """Return an O_PATH descriptor if the flags allow its kind; else close and raise."""
    wrong = 0
    if kind == stat.S_IFLNK and flags & os.O_EXCL:
        wrong = errno.EEXIST
    elif kind != stat.S_IFDIR and flags & os.O_DIRECTORY:
        wrong = errno.ENOTDIR
    if wrong:
        os.close(fd)
        raise _error(wrong)
    return fd


def _has_openat2() -> bool:
    try:
        open_beneath_kernel(-1, b".", os.O_PATH)  # which takes no descriptor
    except OSError as why:
        if why.errno == errno.EBADF:
            return True
        # The kernel is too old, or a filter denies the call.
        if why.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return False


open_beneath = open_beneath_kernel if _has_openat2() else open_beneath_walk
"""``open_beneath_kernel`` if this kernel has openat2, else the walk; chosen at import."""

DENIED = frozenset({errno.EXDEV, errno.ELOOP})
"""Errors of ``open_beneath`` for a name that leads out of its directory."""


def check_name(name: bytes) -> None:
    """Raise the kernel's error for an invalid name (spec O8).

    To be called before a name is split; CPython raises ``ValueError`` for a NUL.

    Raises:
        OSError: ``EINVAL``: a NUL; ``ENAMETOOLONG``; ``ENOENT``: empty.
    """
    if NUL in name:
        raise _error(errno.EINVAL)
    if len(name) >= _PATH_MAX:
        raise _error(errno.ENAMETOOLONG)
    if not name:
        raise _error(errno.ENOENT)


def split_parent(name: bytes) -> tuple[bytes, bytes]:
    """Split a name into its directory and its last component.

    Returns:
        (directory, last); the directory is ``.`` for a single component.  The last
        component may be empty, ``.`` or ``..``: such an entry cannot be made.
    """
    head, slash, last = name.rstrip(b"/").rpartition(b"/")
    return (head or (slash or b"."), last)
