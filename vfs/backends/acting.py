"""Calls that this thread makes as another user: setfsuid(2), setfsgid(2), setgroups(2).

A host that is root opens and makes files of a child as that child's user, so the kernel
checks what the child may do, and what is made is the child's.

Rules of this file.

1. These are a thread's own. Nothing is awaited meanwhile, and no thread is started.
2. Once the user is not root, the thread's capabilities for files are off.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# <asm/unistd.h>: of the C library setgroups(3) changes all threads.
_IS_X86_64 = os.uname().machine == "x86_64"
_SETGROUPS, _SETFSUID, _SETFSGID = (116, 122, 123) if _IS_X86_64 else (159, 151, 152)
_UNCHANGED = 0xFFFFFFFF  # asks for the number in use

_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p)
_syscall.restype = ctypes.c_long


@contextmanager
def acting_as(user: int | None) -> Iterator[None]:
    """Use files as a user, and as the group of the same number, for one block.

    Args:
        user: its number; None for this process's own.

    Raises:
        PermissionError: this process may not.
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
    """Set the supplementary groups of this thread alone.

    Raises:
        PermissionError: this process may not.
    """
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _syscall(_SETGROUPS, len(groups), numbers) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
