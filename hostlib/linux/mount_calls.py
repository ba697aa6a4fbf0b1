"""The kernel's calls about mounts, their numbers and flags (Linux 5.12).

Callers name this module with the call: ``mount_calls.open_tree``.  Prepared before any
fork: by ctypes that takes longer than a call.
"""

from __future__ import annotations

import ctypes
import os

from hostlib.linux.syscalls import caller

# <asm/unistd.h>: from 424 on, one number everywhere.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_MOUNT, _SYS_UMOUNT2 = (165, 166) if _IS_X86_64 else (40, 39)
_SYS_PIVOT_ROOT = 155 if _IS_X86_64 else 41
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN = 428, 429, 430
_SYS_FSCONFIG, _SYS_FSMOUNT, _SYS_MOUNT_SETATTR = 431, 432, 442

# <linux/mount.h>, <fcntl.h>
AT_FDCWD = -100 & 0xFFFFFFFFFFFFFFFF
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
OPEN_ONE = 1 | os.O_CLOEXEC
"""OPEN_TREE_CLONE: a copy of one mount."""
OPEN_TREE = OPEN_ONE | AT_RECURSIVE
"""A copy of a mount and of all beneath it."""
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC, ATTR_IDMAP = 1, 2, 4, 8, 1 << 20
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC_PRIVATE = 0x4000 | (1 << 18)
MNT_DETACH = 2
MOVE_FROM_EMPTY_PATH, MOVE_EMPTY_PATHS = 0x4, 0x44
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
SET_FLAG, SET_STRING, SET_FD, CMD_CREATE = 0, 1, 5, 6
"""Commands of fsconfig(2)."""

mount = caller(_SYS_MOUNT, "tttnt")
"""mount(2): source, target, kind, flags, options."""
unmount = caller(_SYS_UMOUNT2, "tn")
"""umount2(2): path, flags."""
pivot_root = caller(_SYS_PIVOT_ROOT, "tt")
"""pivot_root(2): the new root, the place of the old one."""
open_tree = caller(_SYS_OPEN_TREE, "ntn")
"""open_tree(2): directory, path, flags; returns a descriptor."""
move_mount = caller(_SYS_MOVE_MOUNT, "ntntn")
"""move_mount(2): directory and path, from and to, flags."""
fsopen = caller(_SYS_FSOPEN, "tn")
"""fsopen(2): kind, flags; returns a descriptor of options."""
fsconfig = caller(_SYS_FSCONFIG, "nnttn")
"""fsconfig(2): options, command, key, value, descriptor."""
fsmount = caller(_SYS_FSMOUNT, "nnn")
"""fsmount(2): options, flags, attributes; returns a descriptor of the mount."""

_mount_setattr = caller(_SYS_MOUNT_SETATTR, "ntnnn")


class _Attributes(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


_ATTRIBUTES_BYTES = ctypes.sizeof(_Attributes)


def set_attributes(
    fd: int, attributes: int, owners: int = 0, *, beneath: bool = False
) -> None:
    """Set attributes of a mount: mount_setattr(2).

    Args:
        fd: the top of it.
        attributes: ATTR_*.
        owners: the user namespace for ATTR_IDMAP.
        beneath: of what is mounted beneath it as well.

    Raises:
        OSError: the kernel does not know one, or refuses it.
    """
    asked = _Attributes(attributes, 0, 0, owners)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if beneath else 0)
    _mount_setattr(fd, b"", flags, ctypes.addressof(asked), _ATTRIBUTES_BYTES)


def make_tmpfs(settings: tuple[tuple[bytes, bytes], ...], attributes: int) -> int:
    """Make an empty tmpfs that is attached nowhere; return a descriptor of its top.

    Args:
        settings: of tmpfs(5).
        attributes: ATTR_*.
    """
    options = fsopen(b"tmpfs", FSOPEN_CLOEXEC)
    try:
        for key, value in settings:
            fsconfig(options, SET_STRING, key, value, 0)
        fsconfig(options, CMD_CREATE, None, None, 0)
        return fsmount(options, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(options)
