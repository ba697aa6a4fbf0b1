"""The user of this thread for files: setfsuid(2), setfsgid(2), setgroups(2).

A host that is root opens and makes files of a child as that child's user, so that the
kernel checks the child's rights, and new files belong to the child.

Rules of this file.

1. The ids belong to the thread: meanwhile it must not await or start a thread.
2. A user other than root has no capabilities for files.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# <asm/unistd.h>; not setgroups(3), which changes all threads.
_IS_X86_64 = os.uname().machine == "x86_64"
_SETGROUPS, _SETFSUID, _SETFSGID = (116, 122, 123) if _IS_X86_64 else (159, 151, 152)
_UNCHANGED = 0xFFFFFFFF  # sets nothing, and returns the present id

_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p)
_syscall.restype = ctypes.c_long


@contextmanager
def act_as(user: int | None) -> Iterator[None]:
    """Use files as a user, and as the group of the same id, for one block.

    Args:
        user: the user's id; None for this process's own.

    Raises:
        PermissionError: this process may not change its user.
    """
    if user is None or _syscall(_SETFSUID, _UNCHANGED, None) == user:
        yield
        return
    groups = os.getgroups()
    if groups:
        _set_groups([])
    group_before = _syscall(_SETFSGID, user, None)
    user_before = _syscall(_SETFSUID, user, None)
    try:
        if _syscall(_SETFSUID, _UNCHANGED, None) != user:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        yield
    finally:
        _syscall(_SETFSUID, user_before, None)
        _syscall(_SETFSGID, group_before, None)
        if groups:
            _set_groups(groups)


def _set_groups(groups: list[int]) -> None:
    """Set the supplementary groups of this thread only.

    Raises:
        PermissionError: this process may not.
    """
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _syscall(_SETGROUPS, len(groups), numbers) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
