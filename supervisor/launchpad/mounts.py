"""The layer "mountns": what there is of the file system, for a child.

What it is: a fresh root directory that holds copies of mounts of what a child may see,
and nothing else: no ``/run`` with its sockets, no other child's directories, no homes.
What it is not: the list; the host's side makes it (``supervisor/sandbox/paths.py``).

Rules:
 1. Called in a mount namespace of its own (``launchpad.namespaces``). What fails, fails
    before the root changes.
 2. What is copied is held by a descriptor before anything is covered (open_tree(2)),
    and is private before that: a copy of a shared mount, as systemd makes all of them,
    would show in the host's tree what is mounted in it, and here what the host mounts.
 3. Who owns what there is mapped where the child is another user than the host: what is
    root's is the child's own to read. Its mounts are read-only, so only to read.
 4. A child that stays user 0, which it does where owners cannot be mapped, owns the
    settings of the machine in ``/proc/sys``, without any capability. It gets a ``/proc``
    to read only: a program that the kernel is to run at a crash is run outside.
 5. A copy that is attached is somebody else's directory, the child's say, who may change
    it meanwhile: nothing is made in it, and no name is looked up through it that could
    lead out of it. A place in it is opened without any link, from the fresh root's top;
    what is not there, or not the same file, is passed over.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat

from supervisor.launchpad.kernel import NOT_THERE, caller, open_exactly

# <asm/unistd.h>: mount_setattr(2) and its like have one number everywhere.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_MOUNT = 165 if _IS_X86_64 else 40
_SYS_UMOUNT2 = 166 if _IS_X86_64 else 39
_SYS_PIVOT_ROOT = 155 if _IS_X86_64 else 41
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
# <linux/mount.h>, <fcntl.h>
_AT_FDCWD = -100 & 0xFFFFFFFFFFFFFFFF
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_OPEN_TREE = 1 | os.O_CLOEXEC | _AT_RECURSIVE  # OPEN_TREE_CLONE
_MOVE_EMPTY_PATHS = 0x44  # MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REC_PRIVATE = 0x4000 | (1 << 18)
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_IDMAP = 1, 2, 4, 1 << 20

_STAGE = b"/proc"
"""A directory that is there; it is covered until the root changes."""

_LINKS = (
    (b"/dev/fd", b"/proc/self/fd"),
    (b"/dev/stdin", b"/proc/self/fd/0"),
    (b"/dev/stdout", b"/proc/self/fd/1"),
    (b"/dev/stderr", b"/proc/self/fd/2"),
)


class OwnersError(Exception):
    """A file system cannot show its files as another user's: errno, path."""


class ProcError(Exception):
    """A fresh ``/proc`` cannot be mounted: errno."""


class _Attributes(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


_ATTRIBUTES_BYTES = ctypes.sizeof(_Attributes)

_call_mount = caller(_SYS_MOUNT, "tttnt")
_umount = caller(_SYS_UMOUNT2, "tn")
_pivot_root = caller(_SYS_PIVOT_ROOT, "tt")
_open_tree = caller(_SYS_OPEN_TREE, "ntn")
_move_mount = caller(_SYS_MOVE_MOUNT, "ntntn")
_mount_setattr = caller(_SYS_MOUNT_SETATTR, "ntnnn")


def build(
    links: tuple[tuple[bytes, bytes], ...],
    trees: tuple[tuple[bytes, str, bool], ...],
    owners: int,
    *,
    fresh_proc: bool,
) -> str:
    """Make the fresh root and move into it; the working directory is its top then.

    Args:
        links: (path, target) of symbolic links.
        trees: (path, "execute", "read", "write" or "device", whether owners are
            mapped), each before what lies in it.
        owners: a user namespace whose map says how owners are shown; -1 for none.
        fresh_proc: a ``/proc`` of this process's own pid namespace; else the old one.

    Returns:
        What was made, in a few words.

    Raises:
        OwnersError: owners cannot be mapped on one of the file systems.
        ProcError: the fresh ``/proc`` cannot be had.
        OSError: another thing that this machine does not let it do.
    """
    held: list[tuple[bytes, int, bool]] = []
    umask = os.umask(0o022)
    try:
        _mount(b"none", b"/", b"", _MS_REC_PRIVATE, b"")
        for path, kind, mapped in trees:
            tree = _copy(path, kind, owners if mapped else -1)
            if tree is not None:
                held.append((path, *tree))
        stays_root = owners < 0 and os.geteuid() == 0
        proc = -1 if fresh_proc else _hold_proc(to_read=stays_root)
        _mount(b"tmpfs", _STAGE, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=1m")
        top = os.open(_STAGE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _fill(top, links, held, proc, _MS_RDONLY if stays_root else 0)
        os.fchdir(top)
        _seal(top)
        os.close(top)
        _pivot_root(b".", b".")
        _umount(b".", _MNT_DETACH)
        os.chdir("/")
    finally:
        os.umask(umask)
    return f"{len(held)} places"


def is_made_here(path: bytes) -> bool:
    """Tell whether a directory is the fresh root's own, and no copy of another."""
    return path in {b"/", b"/proc"} or path.startswith(b"/proc/")


def _fill(
    top: int,
    links: tuple[tuple[bytes, bytes], ...],
    held: list[tuple[bytes, int, bool]],
    proc: int,
    flags: int,
) -> None:
    stage = _Stage(top)
    for name in (b"/proc", b"/dev", b"/dev/shm", b"/tmp"):
        stage.make_directory(name)
    for path, target in (*_LINKS, *links):
        stage.make_link(path, target)
    limits = b"mode=1777,size=64m,nr_inodes=16k"
    _mount(b"tmpfs", _STAGE + b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    for path, fd, is_directory in held:
        stage.attach(path, fd, is_directory=is_directory)
        os.close(fd)
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if proc < 0:
        try:
            _mount(b"proc", _STAGE + b"/proc", b"proc", flags, b"")
        except OSError as error:
            raise ProcError(error.errno or errno.EIO) from None
    else:
        stage.attach(b"/proc", proc, is_directory=True)
        os.close(proc)


class _Stage:
    """The fresh root while it is filled (rule 5).

    Args:
        top: a descriptor of its directory.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._made = {b""}  # directories
        self._links: set[bytes] = set()
        self._attached: tuple[bytes, ...] = ()  # tops of copies, with a slash

    def make_directory(self, path: bytes) -> bool:
        """Make a directory, and what it lies in; tell whether it is one of ours now."""
        if path in self._made:
            return True
        known = path
        missing = []
        while known not in self._made:
            if known in self._links:
                return False
            missing.append(known)
            known = known.rpartition(b"/")[0]
        for directory in reversed(missing):
            os.mkdir(directory[1:], dir_fd=self._top)
            self._made.add(directory)
        return True

    def make_link(self, path: bytes, target: bytes) -> None:
        """Make a symbolic link, if nothing else is there."""
        if path in self._made or path in self._links:
            return
        if self.make_directory(path.rpartition(b"/")[0]):
            os.symlink(target, path[1:], dir_fd=self._top)
            self._links.add(path)

    def attach(self, path: bytes, tree: int, *, is_directory: bool) -> None:
        """Mount a copy under its name; nothing happens where that cannot be."""
        if path == b"/":  # which is this one
            return
        is_inside = path.startswith(self._attached)
        if not is_inside and not self._make_place(path, is_directory=is_directory):
            return
        try:
            place = open_exactly(path[1:], self._top)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            return
        try:
            # What stands in a copy under that name may be the child's doing.
            if is_inside and not os.path.samestat(os.fstat(place), os.fstat(tree)):
                return
            _move_mount(tree, b"", place, b"", _MOVE_EMPTY_PATHS)
        finally:
            os.close(place)
        self._attached += (path + b"/",)

    def _make_place(self, path: bytes, *, is_directory: bool) -> bool:
        if is_directory:
            return self.make_directory(path)
        if path in self._links or not self.make_directory(path.rpartition(b"/")[0]):
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(path[1:], flags, 0o644, dir_fd=self._top))
        return True


def _copy(path: bytes, kind: str, owners: int) -> tuple[int, bool] | None:
    """Hold a copy of what is mounted at a path and beneath it; None: nothing there."""
    try:
        found = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return None
    try:
        fd = _open_tree(found, b"", _OPEN_TREE | _AT_EMPTY_PATH)
    finally:
        os.close(found)
    attributes = _Attributes(_ATTR_NOSUID)
    if kind != "device":
        attributes.set |= _ATTR_NODEV
    if kind != "write":
        attributes.set |= _ATTR_RDONLY
    _set(fd, attributes)
    if owners >= 0:
        try:
            _set(fd, _Attributes(_ATTR_IDMAP, 0, 0, owners))
        except OSError as error:
            raise OwnersError(error.errno or errno.EIO, path) from None
    return fd, stat.S_ISDIR(os.fstat(fd).st_mode)


def _hold_proc(*, to_read: bool) -> int:
    fd = _open_tree(_AT_FDCWD, b"/proc", _OPEN_TREE)
    if to_read:
        _set(fd, _Attributes(_ATTR_RDONLY))
    return fd


def _set(fd: int, attributes: _Attributes) -> None:
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _mount_setattr(fd, b"", flags, ctypes.addressof(attributes), _ATTRIBUTES_BYTES)


def _seal(top: int) -> None:
    """Make the fresh root itself read-only, but nothing that is mounted in it."""
    attributes = _Attributes(_ATTR_RDONLY)
    address = ctypes.addressof(attributes)
    _mount_setattr(top, b"", _AT_EMPTY_PATH, address, _ATTRIBUTES_BYTES)


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, how: bytes) -> None:
    _call_mount(source, target, kind, flags, how)
