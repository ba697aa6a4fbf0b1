"""The layer "seccomp": the system calls that a child may not make."""

from __future__ import annotations

import ctypes
import os

from hostlib.linux.syscalls import caller

_SYS_SECCOMP = 317 if os.uname().machine == "x86_64" else 277
_seccomp = caller(_SYS_SECCOMP, "nnn")
_SET_MODE_FILTER = 1
_INSTRUCTION_BYTES = 8  # struct sock_filter


class _Program(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("length", ctypes.c_ushort),
        ("filter", ctypes.c_char_p),
    )


def apply(code: bytes) -> str:
    """Install a filter for this process and what it starts; needs no_new_privs.

    Args:
        code: instructions as struct sock_filter, in this machine's byte order.

    Returns:
        The applied filter, in a few words.

    Raises:
        OSError: ENOSYS, EINVAL: the kernel has no filters; EACCES: no no_new_privs.
    """
    count = len(code) // _INSTRUCTION_BYTES
    program = _Program(count, code)
    _seccomp(_SET_MODE_FILTER, 0, ctypes.addressof(program))
    return f"{count} instructions"
