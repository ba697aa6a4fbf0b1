"""Overlay mounts, made detached from held descriptors: what a child sees of a workspace.

The host makes one where it is root; else the child does, in its user namespace.

Sources: Documentation/filesystems/overlayfs.rst, fsopen(2), open_tree(2),
proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os

from supervisor.launchpad.kernel import caller, open_exactly
from supervisor.launchpad.stage import (
    ATTR_IDMAP,
    ATTR_NODEV,
    ATTR_NOEXEC,
    ATTR_NOSUID,
    ATTR_RDONLY,
    set_attributes,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# <asm/unistd.h>: these have one number everywhere. <linux/mount.h>, <fcntl.h>
_SYS_OPEN_TREE, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 430, 431, 432
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _SET_FD, _CMD_CREATE = 0, 1, 5, 6
_FIND = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

SEALED_FILE = "sealed"
"""Where an overlay's directory names its sealed layers, newest first, a NUL after each."""

VOLATILE_FILE = "volatile"
"""Where an overlay's directory says, by being there, that its mount syncs nothing."""

USER_XATTR = b"userxattr"
"""The option by which overlayfs keeps its attributes as a user's."""

_OPTIONS = ((b"index", b"off"), (b"metacopy", b"off"), (b"xino", b"auto"))

_open_tree = caller(_SYS_OPEN_TREE, "ntn")
_fsopen = caller(_SYS_FSOPEN, "tn")
_fsconfig = caller(_SYS_FSCONFIG, "nnttn")
_fsmount = caller(_SYS_FSMOUNT, "nnn")


def clone_mount(fd: int) -> int:
    """Return a descriptor of a copy of a mount from one directory on, attached nowhere.

    What is mounted beneath is not copied.

    Raises:
        OSError: EPERM: this process has no CAP_SYS_ADMIN; EINVAL: a mount of another
            namespace, or one that cannot be copied.
    """
    return _open_tree(fd, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)


def copy_mount(fd: int, *, is_writable: bool) -> int:
    """Return a descriptor of a copy of a mount as a child is to see it."""
    copy = clone_mount(fd)
    try:
        attributes = ATTR_NOSUID | ATTR_NODEV
        attributes |= 0 if is_writable else ATTR_RDONLY
        set_attributes(copy, attributes)
    except OSError:
        os.close(copy)
        raise
    return copy


def mount_overlay(
    base: int,
    own: int,
    owners: int = -1,
    *,
    sealed: Sequence[int] = (),
    has_user_marks: bool = False,
    is_volatile: bool = False,
) -> int:
    """Make the overlay of a workspace; return a descriptor of the mount.

    Args:
        base: a descriptor of the base's top.
        own: of the directory that has ``upper`` and ``work``; ``hidden``, if it is there,
            lies between upper and base.
        owners: a user namespace in which the operator and the child change places; -1 to
            show everybody as they are.
        sealed: of the tops of the layers between upper and base, newest first.
        has_user_marks: overlayfs keeps its attributes as a user's; root keeps its own.
        is_volatile: nothing is synced, neither when it is asked for nor at the end. The
            kernel marks the work directory, and makes no other mount with that mark.

    Raises:
        OSError: with the kernel's own reason where it gives one.
    """
    held: list[int] = []
    try:
        # Upper and work are reached through one copy of one mount, or it is EINVAL.
        mine = _copy(held, own, owners)
        lowers = [_copy(held, layer, owners) for layer in sealed]
        lowers += [*_hiding(held, mine), _copy(held, base, owners)]
        upper, work = (_open(held, name, mine) for name in ("upper", "work"))
        held.append(_fsopen(b"overlay", _FSOPEN_CLOEXEC))
        if is_volatile:
            _set(held[-1], _SET_FLAG, b"volatile")
        _configure(held[-1], lowers, upper, work, has_user_marks=has_user_marks)
        attributes = ATTR_NOSUID | ATTR_NODEV
        # overlayfs does not look at the flags of its layers' mounts.
        if os.fstatvfs(base).f_flag & os.ST_NOEXEC:
            attributes |= ATTR_NOEXEC
        return _fsmount(held[-1], _FSMOUNT_CLOEXEC, attributes)
    finally:
        for fd in held:
            os.close(fd)


def mount_overlay_by_path(base: bytes, own: bytes) -> int:
    """Make an overlay in a user namespace, from paths without links; as above.

    The paths of its sealed layers stand in the file ``sealed`` beside the upper; a file
    ``volatile`` there makes it so.
    """
    held = [open_exactly(path) for path in (base, own)]
    try:
        held += [open_exactly(path) for path in _sealed_paths(held[1])]
        sealed, is_volatile = held[2:], _has_file(held[1], VOLATILE_FILE)
        return mount_overlay(
            *held[:2], sealed=sealed, has_user_marks=True, is_volatile=is_volatile
        )
    finally:
        for fd in held:
            os.close(fd)


def read_mount_number(fd: int) -> bytes:
    """Return the number that the table of mounts has for the mount of a descriptor."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return file.read().partition(b"mnt_id:")[2].split()[0]


def options_in(table: bytes, number: bytes) -> list[bytes] | None:
    """Return the options that a file system was really mounted with.

    Args:
        table: the content of ``/proc/self/mountinfo``.
        number: of the mount.

    Returns:
        None if the mount is attached nowhere: the table does not have it then.
    """
    for line in table.splitlines():
        found, _, rest = line.partition(b" ")
        if found == number:
            return rest.rpartition(b" ")[2].split(b",")
    return None


def mount_base(base: int, owners: int = -1) -> int:
    """Make a copy of the base's own mount; return a descriptor of it.

    Args:
        base: a descriptor of the base's top.
        owners: as of ``mount_overlay``.
    """
    held: list[int] = []
    try:
        return os.dup(_copy(held, base, owners))
    finally:
        for fd in held:
            os.close(fd)


def _sealed_paths(own: int) -> list[bytes]:
    try:
        fd = os.open(SEALED_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=own)
    except FileNotFoundError:
        return []
    with open(fd, "rb") as file:
        return file.read().split(b"\0")[:-1]


def _has_file(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _copy(held: list[int], directory: int, owners: int) -> int:
    fd = clone_mount(directory)
    held.append(fd)
    if owners >= 0:
        set_attributes(fd, ATTR_IDMAP, owners)
    return fd


def _hiding(held: list[int], own: int) -> list[int]:
    """Return the layer that hides names of the base, if there is one."""
    try:
        return [_open(held, "hidden", own)]
    except FileNotFoundError:
        return []


def _open(held: list[int], name: str, directory: int) -> int:
    fd = os.open(name, _FIND, dir_fd=directory)
    held.append(fd)
    return fd


def _configure(
    options: int, lowers: list[int], upper: int, work: int, *, has_user_marks: bool
) -> None:
    if has_user_marks:
        # Taken first, or what follows is refused.
        _set(options, _SET_FLAG, USER_XATTR)
    else:
        _set(options, _SET_STRING, b"redirect_dir", b"on")
    for key, value in _OPTIONS:
        _set(options, _SET_STRING, key, value)
    for fd in lowers:
        _set(options, _SET_FD, b"lowerdir+", None, fd)
    for key, fd in ((b"upperdir", upper), (b"workdir", work)):
        _set(options, _SET_FD, key, None, fd)
    _set(options, _CMD_CREATE, None)


def _set(
    options: int,
    command: int,
    key: bytes | None,
    value: bytes | None = None,
    fd: int = 0,
) -> None:
    try:
        _fsconfig(options, command, key, value, fd)
    except OSError as why:
        raise OSError(why.errno, _reason(options) or why.strerror) from None


def _reason(options: int) -> str:
    """Return what the kernel says of the last failure; "" for nothing."""
    try:
        text = os.read(options, 1024).decode(errors="replace")
    except OSError:
        return ""
    return text[2:].strip()  # "e ", "w ", "i ": how bad it is
