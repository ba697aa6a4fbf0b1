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
 5. What is copied is attached beneath the fresh root, and some of it hidden again, as
    the rules of ``launchpad.stage`` say.
"""

from __future__ import annotations

import errno
import os

from supervisor.launchpad.kernel import NOT_THERE, caller, open_exactly
from supervisor.launchpad.stage import (
    AT_EMPTY_PATH,
    AT_RECURSIVE,
    ATTR_IDMAP,
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    HIDE,
    Held,
    PartError,
    Stage,
    moved,
    set_attributes,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from supervisor.launchpad.stage import Tree

# <asm/unistd.h>: mount_setattr(2) and its like have one number everywhere.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_MOUNT = 165 if _IS_X86_64 else 40
_SYS_UMOUNT2 = 166 if _IS_X86_64 else 39
_SYS_PIVOT_ROOT = 155 if _IS_X86_64 else 41
_SYS_OPEN_TREE = 428
# <linux/mount.h>, <fcntl.h>
_AT_FDCWD = -100 & 0xFFFFFFFFFFFFFFFF
_OPEN_TREE = 1 | os.O_CLOEXEC | AT_RECURSIVE  # OPEN_TREE_CLONE
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REC_PRIVATE = 0x4000 | (1 << 18)
_MNT_DETACH = 2

_STAGE = b"/proc"
"""A directory that is there; it is covered until the root changes."""

_LINKS = (
    (b"/dev/fd", b"/proc/self/fd"),
    (b"/dev/stdin", b"/proc/self/fd/0"),
    (b"/dev/stdout", b"/proc/self/fd/1"),
    (b"/dev/stderr", b"/proc/self/fd/2"),
)


_call_mount = caller(_SYS_MOUNT, "tttnt")
_umount = caller(_SYS_UMOUNT2, "tn")
_pivot_root = caller(_SYS_PIVOT_ROOT, "tt")
_open_tree = caller(_SYS_OPEN_TREE, "ntn")


def build(
    links: tuple[tuple[bytes, bytes], ...],
    trees: tuple[Tree, ...],
    owners: int,
    *,
    fresh_proc: bool,
) -> str:
    """Make the fresh root and move into it; the working directory is its top then.

    Args:
        links: (path, target) of symbolic links.
        trees: (path, "execute", "read", "write" or "device", whether owners are
            mapped), or (path, "hide", (device, inode)); each before what lies in it.
        owners: a user namespace whose map says how owners are shown; -1 for none.
        fresh_proc: a ``/proc`` of this process's own pid namespace; else the old one.

    Returns:
        What was made, in a few words.

    Raises:
        PartError: owners cannot be mapped on one of the file systems, the fresh
            ``/proc`` cannot be had, or what is to be hidden is not where it was.
        OSError: another thing that this machine does not let it do.
    """
    held: list[Held] = []
    umask = os.umask(0o022)
    try:
        _mount(b"none", b"/", b"", _MS_REC_PRIVATE, b"")
        for path, kind, what in trees:
            if kind == HIDE:
                held.append(_hold_hidden(path, what))
            elif (fd := _copy(path, kind, owners if what else -1)) >= 0:
                held.append(Held(path, fd))
        stays_root = owners < 0 and os.geteuid() == 0
        proc = -1 if fresh_proc else _hold_proc(to_read=stays_root)
        _mount(b"tmpfs", _STAGE, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=1m")
        top = os.open(_STAGE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _fill(top, links, held, proc, _MS_RDONLY if stays_root else 0)
        os.fchdir(top)
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
    held: list[Held],
    proc: int,
    flags: int,
) -> None:
    stage = Stage(top, (*_LINKS, *links))
    stage.make_places(b"/proc", b"/dev", b"/dev/shm", b"/tmp")
    limits = b"mode=1777,size=64m,nr_inodes=16k"
    _mount(b"tmpfs", _STAGE + b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    for tree in held:
        if tree.is_hidden:
            stage.hide(tree)
        else:
            stage.attach(tree)
        os.close(tree.fd)
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if proc < 0:
        try:
            _mount(b"proc", _STAGE + b"/proc", b"proc", flags, b"")
        except OSError as error:
            raise PartError("pidns", error.errno or errno.EIO, b"") from None
    else:
        stage.attach(Held(b"/proc", proc))
        os.close(proc)
    stage.seal()


def _hold_hidden(path: bytes, identity: object) -> Held:
    """Hold what is to be hidden.

    Raises:
        PartError: it is not there, but somewhere.
    """
    try:
        fd = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        raise moved(path) from None
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != identity:
        raise moved(path)
    return Held(path, fd, is_hidden=True)


def _copy(path: bytes, kind: str, owners: int) -> int:
    """Copy what is mounted at a path and beneath it; return -1 if nothing is there."""
    try:
        found = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return -1
    try:
        fd = _open_tree(found, b"", _OPEN_TREE | AT_EMPTY_PATH)
    finally:
        os.close(found)
    attributes = ATTR_NOSUID
    if kind != "device":
        attributes |= ATTR_NODEV
    if kind != "write":
        attributes |= ATTR_RDONLY
    set_attributes(fd, attributes, beneath=True)
    if owners >= 0:
        try:
            set_attributes(fd, ATTR_IDMAP, owners, beneath=True)
        except OSError as error:
            raise PartError("uid", error.errno or errno.EIO, path) from None
    return fd


def _hold_proc(*, to_read: bool) -> int:
    fd = _open_tree(_AT_FDCWD, b"/proc", _OPEN_TREE)
    if to_read:
        set_attributes(fd, ATTR_RDONLY, beneath=True)
    return fd


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, how: bytes) -> None:
    _call_mount(source, target, kind, flags, how)
