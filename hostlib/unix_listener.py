"""The file of a control socket: putting it at a path, and removing it.

Rules of this file.

1. The file has mode 0600 from its creation, and the host listens before the file has its
   name: another host cannot take the socket of a starting host for a stale one.
2. A socket without a listener is replaced; one with a listener is refused, and so is a
   file that is no socket (attack 39).
3. At the end a host removes its own file only.
4. A caller that holds the directory passes it (``Hold``), and its name is not used.

Sources: unix(7), link(2), flock(2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from typing import TYPE_CHECKING

import trio

from hostlib.unix_names import is_deaf

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    Hold = Callable[[], contextlib.AbstractContextManager[int]]
    """Opens the directory of a socket for reading, for the length of a block."""

LOCK_TIMEOUT_S = 1.0
"""Longest wait for the lock; each host that starts in the directory holds it for 1 ms."""

BACKLOG = 64
"""Connections that may wait in the kernel while the host is busy for a moment."""

MAX_NAME_BYTES = 107 - len("/proc/self/fd/1048576/")
"""Longest file name: if the path is too long for sun_path, clients and the check for a
stale socket go through a descriptor of the directory."""

_MODE = 0o600
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.asynccontextmanager
async def listen_at(
    path: str, hold: Hold | None = None, backlog: int = BACKLOG
) -> AsyncIterator[trio.SocketListener]:
    """Listen at a path for the length of the block; then remove the file.

    Args:
        path: path of the socket; its directory must exist.
        hold: opens that directory; None to open it by its name.
        backlog: connections that may wait.

    Raises:
        OSError: no socket can be put there; ``filename`` is the path, ``strerror`` says
            why and what to do.
    """
    parent, name = os.path.split(path)
    if name in {"", ".", ".."}:
        raise OSError(errno.EISDIR, "it names a directory; add a name", path)
    size = len(os.fsencode(name))
    if size > MAX_NAME_BYTES:
        text = f"its name has {size} bytes, {MAX_NAME_BYTES} are the most; shorten it"
        raise OSError(errno.ENAMETOOLONG, text, path)
    hold = hold or _by_name(parent)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        with _add_path(path):
            # The kernel takes the file's mode from the socket: the umask, which belongs
            # to all threads, need not be touched.
            os.fchmod(sock.fileno(), _MODE)
            async with _lock(hold) as dir_fd:
                _check_free(dir_fd, name)
                identity = await _bind(sock, dir_fd, name, backlog)
        try:
            yield trio.SocketListener(sock)
        finally:
            with contextlib.suppress(OSError):
                _remove(hold, name, identity)


@contextlib.asynccontextmanager
async def listen_on(
    sock: socket.socket,
    path: str,
    identity: tuple[int, int] | None,
    hold: Hold | None = None,
) -> AsyncIterator[trio.SocketListener]:
    """Use a socket that listens already, for the length of the block.

    Args:
        sock: owned from now on.
        path: path of the socket.
        identity: identity of its file (``identity_of``), which is removed at the end;
            None to leave the file to its maker.
        hold: as for ``listen_at``.
    """
    parent, name = os.path.split(path)
    with trio.socket.from_stdlib_socket(sock) as taken:
        try:
            yield trio.SocketListener(taken)
        finally:
            if identity is not None:
                with contextlib.suppress(OSError):
                    _remove(hold or _by_name(parent), name, identity)


def identity_of(path: str) -> tuple[int, int]:
    """Return the device and inode of a socket's file."""
    parent, name = os.path.split(path)
    with _by_name(parent)() as dir_fd:
        return identity_in(dir_fd, name)


def identity_in(dir_fd: int, name: str) -> tuple[int, int]:
    """Return the device and inode of a file in a directory."""
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _add_path(path: str) -> Iterator[None]:
    """Add a path to each ``OSError`` of a block."""
    try:
        yield
    except OSError as why:
        reason = why.strerror or str(why)
        raise OSError(why.errno or errno.EIO, reason, path) from None


@contextlib.asynccontextmanager
async def _lock(hold: Hold) -> AsyncIterator[int]:
    """Hold the directory under a lock: one host at a time replaces a stale socket."""
    with hold() as dir_fd:
        with trio.move_on_after(LOCK_TIMEOUT_S) as patience:
            # The kernel has no event for a lock that became free.
            while not _try_lock(dir_fd):  # noqa: ASYNC110
                await trio.sleep(0.01)
        if patience.cancelled_caught:
            raise OSError(errno.EAGAIN, "its directory is locked; use another one")
        yield dir_fd


def _by_name(parent: str) -> Hold:
    """Return a function that opens a directory by its name."""

    @contextlib.contextmanager
    def held() -> Iterator[int]:
        try:
            dir_fd = os.open(parent or ".", _DIRECTORY)
        except FileNotFoundError:
            text = "its directory does not exist; make it"
            raise OSError(errno.ENOENT, text) from None
        try:
            yield dir_fd
        finally:
            os.close(dir_fd)

    return held


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_free(dir_fd: int, name: str) -> None:
    """Remove a stale socket; raise if another file is there."""
    try:
        mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "it is there and not a socket; use another path")
    # Without a descriptor for the try a stale socket would count as a living one.
    socket.socket(socket.AF_UNIX).close()
    if not is_deaf(f"/proc/self/fd/{dir_fd}/{name}"):
        raise OSError(errno.EADDRINUSE, "a living host listens there; use another path")
    os.unlink(name, dir_fd=dir_fd)


async def _bind(
    sock: trio.socket.SocketType, dir_fd: int, name: str, backlog: int
) -> tuple[int, int]:
    """Listen, then give the socket its name; return the identity of its file.

    The file is made under another name and linked: link(2) fails if the name exists, and
    the name never leads to a socket that does not listen.
    """
    fresh = f".sandhost-{os.urandom(8).hex()}"
    # Through the directory's descriptor: sun_path has room for 107 bytes only.
    await sock.bind(f"/proc/self/fd/{dir_fd}/{fresh}")
    try:
        status = os.stat(fresh, dir_fd=dir_fd, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if mode & ~_MODE:
            raise OSError(errno.EPERM, f"its mode would be {mode:o}; use another path")
        os.chmod(fresh, _MODE, dir_fd=dir_fd)  # the umask may have removed bits
        sock.listen(backlog)
        os.link(fresh, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    finally:
        os.unlink(fresh, dir_fd=dir_fd)
    return status.st_dev, status.st_ino


def _remove(hold: Hold, name: str, identity: tuple[int, int]) -> None:
    with hold() as dir_fd:
        if identity_in(dir_fd, name) == identity:
            os.unlink(name, dir_fd=dir_fd)
