"""A child's private directories: root, TMPDIR and HOME.

They are made at the spawn, 0700, and removed in the background after its end (spec S4).

1. The host holds a shared lock (flock) on the directory; an unlocked one was left by a
   dead host (``doctor --leaks``, attack 39).
2. A root that is kept has a name of its own, so that it is no leftover.
3. Removal trusts no name and no depth: a child may have made links, deep or closed
   directories. Only held directories are removed.
4. Their paths have no links when they are made; later ones are never followed
   (``sandbox.ownership``, ``spec``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hostlib.messages import shown_path
from hostlib.paths import temporary_directory
from supervisor.sandbox import ownership

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    Removing = Generator[None, None, OSError | None]
    """A removal, one entry of a directory after another; returns what went wrong first."""

PREFIX = "sandhost-"
"""Prefix of the names of scratch directories."""

KEPT_PREFIX = "sandhost-kept-"
"""How they begin where the root in it is to be kept; tempfile never puts a dash after
``PREFIX``."""

REMOVE_TIMEOUT_S = 30.0
"""Longest wait for a worker thread to begin a removal while everything is cancelled, and
longest removal for which no thread can be started."""

SLICE_S = 0.001
"""The longest wait of others while a removal has no thread: a directory of any size is
removed in turns with them."""

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchState(msgspec.Struct):
    """See ``Scratch``; paths as bytes: base, root, tmp, run."""

    fd: int
    keep: bool
    paths: list[bytes]


class Scratch:
    """The directories of one child.

    Args:
        root: a root that is there already; None for a fresh one.
        keep: leave a fresh root where it is.
        where: the directory to make them in; None for the system's temporary one.
        has_user: the child is to have a user of its own, where it can be given one.

    Attributes:
        root: the child's private root.
        tmp: its TMPDIR.
        run: for the sockets that services offer it.

    Raises:
        OSError: they cannot be made, or not be locked.
    """

    def __init__(
        self,
        root: str | None,
        *,
        keep: bool = False,
        where: str | None = None,
        has_user: bool = True,
    ) -> None:
        self._keep = keep and root is None
        prefix = KEPT_PREFIX if self._keep else PREFIX
        self._base = Path(
            tempfile.mkdtemp(prefix=prefix, dir=where or temporary_directory())
        )
        self._fd = -1
        try:
            self._fd = os.open(self._base, os.O_RDONLY | _DIRECTORY)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if has_user:
                ownership.give_to_keeper(self._fd)
            if os.fstat(self._fd).st_mode & stat.S_ISGID:  # as what it lies in
                os.fchmod(self._fd, 0o700)
            self._base = Path(os.readlink(f"/proc/self/fd/{self._fd}"))  # noqa: PTH115
            os.mkdir("tmp", 0o700, dir_fd=self._fd)
            os.mkdir("run", 0o700, dir_fd=self._fd)
            os.mkdir("home", 0o700, dir_fd=self._fd)
            if root is None:
                os.mkdir("root", 0o700, dir_fd=self._fd)
        except BaseException:
            remove_tree(self._base)
            self.unlock()
            raise
        self.tmp = str(self._base / "tmp")
        self.run = str(self._base / "run")
        self.root = str(self._base / "root") if root is None else root

    @classmethod
    def restore(cls, state: ScratchState) -> Scratch:
        """Return the directories of the program before."""
        scratch = cls.__new__(cls)  # a call would make new ones
        scratch._take(state)  # noqa: SLF001 - its own
        return scratch

    def _take(self, state: ScratchState) -> None:
        base, self.root, self.tmp, self.run = map(os.fsdecode, state.paths)
        self._base, self._fd, self._keep = Path(base), state.fd, state.keep

    def snapshot(self) -> ScratchState:
        """Return it as ``restore`` takes it."""
        paths = (self._base, self.root, self.tmp, self.run)
        return ScratchState(self._fd, self._keep, [os.fsencode(path) for path in paths])

    @property
    def home(self) -> str:
        """The child's HOME, where no other is given to it."""
        return str(self._base / "home")

    @property
    def fd(self) -> int:
        """The directory around them, held until they are removed; -1 then."""
        return self._fd

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return what this holds of the host's descriptors: the lock, until removed."""
        return ((self._fd, "scratch directory"),) if self._fd >= 0 else ()

    async def remove(self) -> str | None:
        """Remove what was made, but a root that is to be kept.

        Returns:
            The rest that could not be removed and why, in one line; None if nothing is
            left.

        Cancellation: it is removed all the same.
        """
        if self._fd < 0:  # removed, or given up: it is not held any more
            return None
        # Here, because a look at whose a directory is needs no Trio.
        import trio  # noqa: PLC0415

        from hostlib.threads import in_thread  # noqa: PLC0415

        with trio.move_on_after(REMOVE_TIMEOUT_S, shield=True):
            try:
                why = await in_thread(_remove_at_once, self._removing())
            except BlockingIOError:  # the host's user has as many as it may
                why = await _remove_in_turns(self._removing())
            finally:
                self.unlock()
            return None if why is None else _line(self._base, why)
        why_not = "no thread was free for it, and it is long; end processes"
        return f"cannot remove {str(self._base)!r}: {why_not}, and remove it by hand"

    def _removing(self) -> Removing:
        if self._keep:
            ownership.take_from_keeper(self._fd)  # for the owner of what it holds
            tmp = yield from _tree_removing(Path("tmp"), self._fd)
            run = yield from _tree_removing(Path("run"), self._fd)
            home = yield from _tree_removing(Path("home"), self._fd)
            return tmp or run or home
        return (yield from _emptying(self._fd, self._base, None))

    def unlock(self) -> None:
        """Close the directory, and so let its lock go; it stays on the disk."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def make_kept(prefix: str) -> str:
    """Make a temporary directory that only its host looks into; return its path.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=prefix, dir=temporary_directory())
    fd = os.open(path, os.O_RDONLY | _DIRECTORY)
    try:
        ownership.give_to_keeper(fd)
    finally:
        os.close(fd)
    return path


def is_abandoned(path: Path) -> bool:
    """Tell whether no living host holds a scratch directory.

    Raises:
        OSError: it is gone, not a directory, or not this user's to open.
    """
    fd = os.open(path, os.O_RDONLY | _DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def remove_tree(top: Path, dir_fd: int | None = None) -> OSError | None:
    """Remove a directory and everything in it, however deep, following no link.

    Args:
        top: the directory.
        dir_fd: the directory of a relative name; None for an absolute one.

    Returns:
        The first thing that went wrong; as much as possible is removed all the same.
    """
    return _remove_at_once(_tree_removing(top, dir_fd))


def _remove_at_once(removing: Removing) -> OSError | None:
    """Go through with a removal."""
    while True:
        try:
            next(removing)
        except StopIteration as done:
            why: OSError | None = done.value
            return why


async def _remove_in_turns(removing: Removing) -> OSError | None:
    """Go through with a removal in the host's own thread, in turns with all others."""
    import trio  # noqa: PLC0415 - as above

    with contextlib.closing(removing):
        until_s = time.monotonic() + SLICE_S
        while True:
            try:
                next(removing)
            except StopIteration as done:
                why: OSError | None = done.value
                return why
            if time.monotonic() > until_s:
                await trio.lowlevel.checkpoint()
                until_s = time.monotonic() + SLICE_S


def _tree_removing(top: Path, dir_fd: int | None) -> Removing:
    """Remove a directory, as ``remove_tree``."""
    try:
        top_fd = os.open(top, os.O_RDONLY | _DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as why:
        return why
    try:
        return (yield from _emptying(top_fd, top, dir_fd))
    finally:
        os.close(top_fd)


def _emptying(top_fd: int, top: Path, dir_fd: int | None) -> Removing:
    """Remove what a held directory holds, and then its name."""
    removal = _Removal(top_fd)
    yield from removal.run()
    try:
        os.rmdir(top, dir_fd=dir_fd)
    except OSError as why:
        return removal.failure or why
    return removal.failure


class _Removal:
    """One removal.  Directories are moved up to the top before they are entered.

    So each is opened by one name from a held descriptor, no path grows too long, no
    recursion too deep, and a mount point, which cannot be renamed, is not entered.
    """

    def __init__(self, top_fd: int) -> None:
        self.failure: OSError | None = None
        self._top_fd = top_fd
        self._mark = f".{os.urandom(8).hex()}-"
        self._numbers = count()
        self._moved: list[str] = []

    def run(self) -> Iterator[None]:
        yield from self._empty(self._top_fd)
        while self._moved:
            name = self._moved.pop()
            try:
                fd = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=self._top_fd)
            except OSError as why:
                self._note(why)
                continue
            try:
                yield from self._empty(fd)
            finally:
                os.close(fd)
            try:
                os.rmdir(name, dir_fd=self._top_fd)
            except OSError as why:
                self._note(why)

    def _empty(self, fd: int) -> Iterator[None]:
        """Remove what a directory holds; pass over it until nothing more can be."""
        progress = True
        while progress:
            progress = False
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if not entry.name.startswith(self._mark):
                            progress = self._remove(fd, entry.name) or progress
                            yield
            except OSError as why:  # no descriptor for it
                self._note(why)

    def _remove(self, fd: int, name: str) -> bool:
        try:
            try:
                os.unlink(name, dir_fd=fd)
            except IsADirectoryError:
                if not _is_removed_empty(fd, name):
                    self._move_up(fd, name)
        except OSError as why:
            self._note(why)
            return False
        return True

    def _move_up(self, fd: int, name: str) -> None:
        _open_up(fd, name)
        fresh = f"{self._mark}{next(self._numbers)}"
        os.rename(name, fresh, src_dir_fd=fd, dst_dir_fd=self._top_fd)
        self._moved.append(fresh)

    def _note(self, why: OSError) -> None:
        if self.failure is None:
            self.failure = why


def _is_removed_empty(dir_fd: int, name: str) -> bool:
    """Remove a directory, if it is empty: that takes no descriptor."""
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError:  # it holds something, most likely; else who enters it is told
        return False
    return True


def _open_up(dir_fd: int, name: str) -> None:
    """Let the owner of a directory enter, list and move it."""
    fd = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=dir_fd)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            # fchmod(2) refuses an O_PATH descriptor; its entry in /proc is no link.
            with contextlib.suppress(PermissionError):  # then the rename says why
                os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)  # noqa: PTH101
    finally:
        os.close(fd)


def _line(path: Path, why: OSError) -> str:
    name = shown_path(why)
    inside = f" ({name})" if name else ""
    return f"cannot remove {str(path)!r}: {why.strerror}{inside}; remove it by hand"
