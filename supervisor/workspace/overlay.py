"""What a child sees of a workspace: one mount, made detached from held descriptors.

Of mode ``review`` it is an overlay, of the others a copy of the base's own mount. The
operator's files are shown as the child's, where the child has a user of its own.

Sources: Documentation/filesystems/overlayfs.rst, mount_setattr(2); spec WS2 to WS4.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from supervisor.launchpad.stage import (
    ATTR_IDMAP,
    ATTR_NODEV,
    ATTR_NOSUID,
    set_attributes,
)
from supervisor.workspace.linux import MountOptions, clone_mount

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPTIONS = (
    (b"redirect_dir", b"on"),
    (b"index", b"off"),
    (b"metacopy", b"off"),
    (b"xino", b"auto"),
)
_FIND = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def mount_overlay(
    base: int,
    own: int,
    owners: int = -1,
    *,
    sealed: Sequence[int] = (),
    durable: bool = True,
) -> int:
    """Make the overlay of a workspace, as root; return a descriptor of the mount.

    Args:
        base: a descriptor of the base's top.
        own: of the directory that has ``upper`` and ``work``.
        owners: a user namespace in which the operator and the child change places; -1 to
            show everybody as they are.
        sealed: descriptors of older layers, newest first.
        durable: whether the child's fsync(2) reaches the disk.

    Raises:
        OSError: with the kernel's own reason where it gives one.
    """
    with ExitStack() as stack:
        # Upper and work are reached through one copy of one mount, or it is EINVAL.
        mine = _copy(stack, own, owners)
        upper = _open(stack, "upper", mine)
        work = _open(stack, "work", mine)
        lowers = [_copy(stack, layer, owners) for layer in (*sealed, base)]
        with MountOptions(b"overlay") as options:
            for fd in lowers:
                options.set_descriptor(b"lowerdir+", fd)
            options.set_descriptor(b"upperdir", upper)
            options.set_descriptor(b"workdir", work)
            for key, value in _OPTIONS:
                options.set_string(key, value)
            if not durable:
                options.set_flag(b"volatile")
            return options.make(ATTR_NOSUID | ATTR_NODEV)


def mount_base(base: int, owners: int = -1) -> int:
    """Make a copy of the base's own mount; return a descriptor of it.

    Args:
        base: a descriptor of the base's top.
        owners: as of ``mount_overlay``.
    """
    with ExitStack() as stack:
        return os.dup(_copy(stack, base, owners))


def _copy(stack: ExitStack, directory: int, owners: int) -> int:
    fd = clone_mount(directory)
    stack.callback(os.close, fd)
    if owners >= 0:
        set_attributes(fd, ATTR_IDMAP, owners)
    return fd


def _open(stack: ExitStack, name: str, directory: int) -> int:
    fd = os.open(name, _FIND, dir_fd=directory)
    stack.callback(os.close, fd)
    return fd
