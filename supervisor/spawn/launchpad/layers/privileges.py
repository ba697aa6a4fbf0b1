"""The layers "no_new_privs", "capabilities", "uid" and "seccomp".

They bound the users and rights that a child can have, and its system calls.

Rule: afterwards nothing that is executed gives anything back, not a set-user-id
program, not a file capability, not being user 0.
"""

from __future__ import annotations

import ctypes
import errno
import os

from hostlib.linux.syscalls import caller, prctl

# <linux/prctl.h>, <linux/capability.h>.
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_CAPSET = 126 if _IS_X86_64 else 91
_SYS_SECCOMP = 317 if _IS_X86_64 else 277
_SET_MODE_FILTER = 1
_INSTRUCTION_BYTES = 8  # struct sock_filter

# Made before any fork: a type of ctypes takes longer than the call.
_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_NO_SETS = (ctypes.c_uint32 * 6)()
_capset = caller(_SYS_CAPSET, "nn")
_seccomp = caller(_SYS_SECCOMP, "nnn")


class _Program(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("length", ctypes.c_ushort),
        ("filter", ctypes.c_char_p),
    )


def forbid_new_privileges() -> str:
    """Let no exec give privileges: PR_SET_NO_NEW_PRIVS."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return "set"


def become_user(uid: int) -> str:
    """Become a user and group of its own; needs CAP_SETUID and CAP_SETGID.

    Raises:
        OSError: EPERM: no such right; EINVAL: no such user in this user namespace.
    """
    for number in range(3):
        _hand_over(number, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    return str(uid)


def _hand_over(number: int, uid: int) -> None:
    """Let a standard descriptor that is a nameless pipe be opened again by its user.

    Shells do that for ``> /dev/stderr``. Other holders of the pipe need no owner for
    it; files and terminals have names, and are left alone.
    """
    try:
        if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
            os.fchown(number, uid, uid)
    except OSError:
        return  # closed, or no /proc: it is used as it is open


def drop_bounding_set() -> bool:
    """Take every capability from what may ever be had again, where that is allowed.

    Returns:
        Whether it was; else nothing comes of what is left, for no exec gives privileges.
    """
    for number in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:  # one more than the kernel knows
                break
            # EPERM: it has no capability, and with no_new_privs it gets none either.
            if error.errno != errno.EPERM:
                raise
            return False
    return True


def drop_capabilities() -> None:
    """Empty the effective, permitted, inheritable and ambient sets.

    Raises:
        OSError: the kernel refuses it.
    """
    _capset(ctypes.addressof(_HEADER), ctypes.addressof(_NO_SETS))
    try:
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 4.3 has no such set
            raise


def install_filter(code: bytes) -> str:
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
