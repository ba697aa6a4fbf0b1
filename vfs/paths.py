"""Opening a name beneath a held directory, whatever stands in the way.

Rules of this file.

1. A name is resolved by the kernel in one call, ``openat2`` with ``RESOLVE_BENEATH``
   and ``RESOLVE_NO_MAGICLINKS``, from a directory descriptor that is held: no string
   comparison decides what is beneath, so nothing can change in between (spec A4).
2. Where the kernel lacks ``openat2`` (before Linux 5.6, or denied by a filter) a walk
   with ``O_NOFOLLOW`` does the same, one component at a time.
3. Leaving the directory, by ``..``, an absolute link or a magic link, is ``EXDEV`` or
   ``ELOOP``; both mean "access denied" to a client.

Sources: openat2(2), path_resolution(7).
"""

import ctypes
import errno
import os

_OPENAT2 = 437  # the same number on every architecture that has the call
_BENEATH_NO_MAGIC = 0x08 | 0x02
_RETRIES = 64
_MAX_LINKS = 40  # as the kernel's MAXSYMLINKS
_CREATE_MODE = 0o666

OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Added to every open: nothing inherits it, waits for a FIFO or gains a terminal."""


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
_syscall.restype = ctypes.c_long
_HOW_SIZE = ctypes.sizeof(_OpenHow)
_byref = ctypes.byref


def open_beneath_kernel(dir_fd: int, name: bytes, flags: int) -> int:
    """Open ``name`` beneath ``dir_fd`` with openat2.

    Args:
        dir_fd: a held directory.
        name: relative, without NUL.
        flags: O_* flags; ``O_CREAT`` makes the file with 0666 & ~umask (spec O6).

    Returns:
        A new descriptor, which the caller owns.

    Raises:
        OSError: with the kernel's errno; ``ENOSYS`` or ``EPERM`` where the call is
            missing or filtered.
    """
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    how = _OpenHow(
        flags | OPEN_FLAGS,
        _CREATE_MODE if flags & os.O_CREAT else 0,
        _BENEATH_NO_MAGIC,
    )
    for _ in range(_RETRIES):
        fd: int = _syscall(_OPENAT2, dir_fd, name, _byref(how), _HOW_SIZE)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        # EAGAIN: a rename happened meanwhile and "beneath" could not be proved.
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code))
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def open_beneath_walk(dir_fd: int, name: bytes, flags: int) -> int:
    """Open ``name`` beneath ``dir_fd`` without openat2; see ``open_beneath_kernel``."""
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if len(name) >= 4096:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    if name.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    walk = _Walk(dir_fd, name)
    try:
        return walk.open(flags)
    finally:
        walk.close()


class _Walk:
    """The state of one walk: the directories on the way down, and what is left."""

    def __init__(self, dir_fd: int, name: bytes) -> None:
        self._base = dir_fd
        self._stack: list[int] = []
        self._left = name.split(b"/")[::-1]
        self._links = 0

    def close(self) -> None:
        while self._stack:
            os.close(self._stack.pop())

    def open(self, flags: int) -> int:
        if self._left == [b""]:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        while True:
            part = self._left.pop()
            last = not self._left
            if part in (b"", b"."):
                if last:
                    return self._reopen(flags)
            elif part == b"..":
                if not self._stack:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                os.close(self._stack.pop())
                if last:
                    return self._reopen(flags)
            elif last:
                fd = self._open_last(part, flags)
                if fd is not None:
                    return fd
            else:
                self._enter(part)

    @property
    def _here(self) -> int:
        return self._stack[-1] if self._stack else self._base

    def _reopen(self, flags: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return os.open(b".", flags | OPEN_FLAGS, dir_fd=self._here)

    def _enter(self, part: bytes) -> None:
        fd = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._here)
        mode = os.fstat(fd).st_mode & 0o170000
        if mode == 0o120000:
            self._follow(fd)
        elif mode == 0o040000:
            self._stack.append(fd)
        else:
            os.close(fd)
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def _open_last(self, part: bytes, flags: int) -> int | None:
        # O_PATH opens the link itself where O_NOFOLLOW alone would refuse it.
        try:
            fd = os.open(
                part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._here
            )
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        else:
            if os.fstat(fd).st_mode & 0o170000 == 0o120000:
                if flags & os.O_NOFOLLOW or flags & os.O_EXCL:
                    if flags & os.O_PATH:
                        return fd
                    os.close(fd)
                    code = errno.EEXIST if flags & os.O_EXCL else errno.ELOOP
                    raise OSError(code, os.strerror(code))
                self._follow(fd)
                return None
            os.close(fd)
        return os.open(
            part,
            flags | OPEN_FLAGS | os.O_NOFOLLOW,
            _CREATE_MODE,
            dir_fd=self._here,
        )

    def _follow(self, link_fd: int) -> None:
        try:
            target = os.readlink(b"", dir_fd=link_fd)
        finally:
            os.close(link_fd)
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        # A magic link's text is no path to walk, an absolute one leads out: both
        # would be refused by RESOLVE_BENEATH.
        if target.startswith(b"/"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        self._left.extend(target.split(b"/")[::-1])


def _has_openat2() -> bool:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(open_beneath_kernel(fd, b".", os.O_PATH))
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


open_beneath = open_beneath_kernel if _has_openat2() else open_beneath_walk
"""The one of the two that this kernel gives; the choice is made once, at import."""

DENIED = frozenset({errno.EXDEV, errno.ELOOP})
"""What ``open_beneath`` raises when a name leads out of its directory."""


def split_parent(name: bytes) -> tuple[bytes, bytes]:
    """Split a relative name into its directory and its last component.

    Returns:
        (directory, last); the directory is ``.`` for a single component.  The last
        component is empty, ``.`` or ``..`` where the name ends so: no entry to make.
    """
    head, _, last = name.rstrip(b"/").rpartition(b"/")
    return (head or b".", last)
