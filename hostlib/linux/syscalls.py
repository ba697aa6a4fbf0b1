"""System calls that the standard library does not have, through `ctypes`.

Linux on 64-bit machines.  Importing `ctypes` takes 3 ms at the start.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc.syscall.argtypes = (ctypes.c_long, *[ctypes.c_ulong] * 6)
_libc.syscall.restype = ctypes.c_long

# <linux/prctl.h>, <linux/close_range.h>; the number of close_range(2)
# is the same on every architecture but alpha, and older C libraries have no name for it.
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
_SYS_CLOSE_RANGE = 436
_CLOSE_RANGE_CLOEXEC = 4
# <asm/unistd.h>: newer architectures share one number. struct sigaction of the kernel
# is 32 bytes at most: handler, flags, restorer, mask.
_SYS_RT_SIGACTION = {"x86_64": 13}
_SYS_RT_SIGACTION_GENERIC = 134
_SIGACTION_BYTES = 32
_SYS_SCHED_SETATTR = {"x86_64": 314}
_SYS_SCHED_SETATTR_GENERIC = 274  # sched_getattr(2) is the next one, everywhere
_SYS_SIGNALFD4 = {"x86_64": 289}
_SYS_SIGNALFD4_GENERIC = 74
# A set of signals, as the kernel takes it.
_SIGNAL_SET = struct.Struct("Q")
# <linux/sched.h>, <linux/sched/types.h>: size, policy, flags, nice, priority, runtime,
# deadline, period; as of the first version of the structure.
_SCHED_ATTRIBUTES = struct.Struct("IIQiIQQQ")
_SCHED_OTHER = 0
_SCHED_FLAG_RESET_ON_FORK = 1

# <linux/openat2.h>; one number everywhere. struct open_how: flags, mode, resolve.
_SYS_OPENAT2 = 437
_OPEN_HOW = struct.Struct("QQQ")
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = (
    1,
    2,
    4,
    8,
)
_RESOLVE_EXACTLY = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_AT_FDCWD = -100

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP})
"""Errors of `open_exactly` for a path that cannot be reached without following a link."""

SHORT_SLICE_NS = 100_000
"""The shortest slice that the scheduler takes; its default is some milliseconds."""


def system_call(number: int, *arguments: int) -> int:
    """Make a system call; structures and paths go as addresses (`ctypes.addressof`).

    Raises:
        OSError: the call failed, with the kernel's errno.
    """
    padding = (0,) * (6 - len(arguments))
    result: int = _libc.syscall(number, *arguments, *padding)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def ask_for_slices(length_ns: int) -> None:
    """Ask the scheduler for slices of a length for this thread; 0 for the default.

    A thread with short slices runs sooner after it wakes, for the same time in all
    (sched_setattr(2), Linux 6.12; older kernels ignore it).  Nothing is changed if the
    kernel refuses, or if the thread has a priority already (a policy or a negative nice
    value).  New threads and processes do not inherit it: SCHED_RESET_ON_FORK is set, and
    stays.
    """
    call = _SYS_SCHED_SETATTR.get(os.uname().machine, _SYS_SCHED_SETATTR_GENERIC)
    attributes = ctypes.create_string_buffer(_SCHED_ATTRIBUTES.size)
    where = ctypes.addressof(attributes)
    try:
        system_call(call + 1, 0, where, _SCHED_ATTRIBUTES.size, 0)
        size, policy, flags, nice, priority, *_ = _SCHED_ATTRIBUTES.unpack(attributes)
        if policy == _SCHED_OTHER and nice >= 0:
            flags |= _SCHED_FLAG_RESET_ON_FORK
            _SCHED_ATTRIBUTES.pack_into(
                attributes, 0, size, policy, flags, nice, priority, length_ns, 0, 0
            )
            system_call(call, 0, where, 0)
    except OSError:
        pass


def caller(number: int, kinds: str) -> Callable[..., int]:
    """Return a function that makes one system call, for frequent calls.

    Make it before a fork: its preparation by ctypes takes longer than the call, and each
    forked process would repeat it.

    Args:
        number: number of the system call.
        kinds: a letter for each argument: ``n`` a number or an address, ``t`` a text
            or None.

    Returns:
        A function that raises OSError as `system_call` does.
    """
    # Not `_libc.syscall`, which is one shared object: a subscript makes a new one.
    function = _libc["syscall"]
    arguments = (ctypes.c_ulong if kind == "n" else ctypes.c_char_p for kind in kinds)
    function.argtypes = (ctypes.c_long, *arguments)
    function.restype = ctypes.c_long

    def call(*arguments: int | bytes | None) -> int:
        result: int = function(number, *arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    return call


# Not through PyDLL: other threads run while a disk is slow.
_openat2 = ctypes.CDLL(None, use_errno=True)["syscall"]
_openat2.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)
_openat2.restype = ctypes.c_long


def openat2(dir_fd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    """Return a descriptor of a path, opened under rules for its resolution.

    Args:
        dir_fd: a descriptor of the directory that a relative path begins at.
        path: without NUL.
        flags: O_* flags.
        mode: of a file that it makes, else 0.
        resolve: RESOLVE_* flags.

    Raises:
        OSError: with the kernel's errno; ENOSYS or EPERM where the call is missing or
            filtered.
    """
    how = _OPEN_HOW.pack(flags, mode, resolve)
    fd: int = _openat2(_SYS_OPENAT2, dir_fd, path, how, _OPEN_HOW.size)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, one of PR_SET_*.

    Raises:
        OSError: the kernel does not know the option, or refuses the value.
    """
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def set_name(name: bytes) -> None:
    """Set the name of this process for ps(1), at most 15 bytes: PR_SET_NAME."""
    text = ctypes.create_string_buffer(name)
    prctl(_PR_SET_NAME, ctypes.addressof(text))


def open_exactly(path: bytes, top: int = -1, flags: int = os.O_PATH) -> int:
    """Open a path without following any symbolic link, and return a descriptor.

    Args:
        path: an absolute path; a relative one if ``top`` is given.
        top: a descriptor of the directory beneath which it must lie.
        flags: as for open(2), without those that make a file; close-on-exec is added.

    Raises:
        OSError: the path cannot be opened; ELOOP, ENOTDIR: it has a link; EXDEV: it leads
            out of the directory.
    """
    resolve, start = _RESOLVE_EXACTLY, _AT_FDCWD
    if top >= 0:
        resolve, start = resolve | RESOLVE_BENEATH, top
    try:
        return openat2(start, path, flags | os.O_CLOEXEC, 0, resolve)
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EPERM}:
            raise
    found = open_step_by_step(path, top)
    if flags & os.O_PATH:
        return found
    # The name in /proc is a link itself; those of the path were refused above.
    flags &= ~os.O_NOFOLLOW
    try:
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)


def open_step_by_step(path: bytes, top: int = -1) -> int:
    """Open as `open_exactly`, without openat2(2): Linux before 5.6, a filter."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    if top >= 0 and path.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    fd = os.open("/", flags) if top < 0 else os.dup(top)
    for part in path.split(b"/"):
        if not part:
            continue
        if top >= 0 and part == b"..":  # callers never need it
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        try:  # ENOTDIR if ``fd`` is a link
            following = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = following
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return fd


def default_reserved_signals() -> None:
    """Give signals 32 and 33 their default action, which no library call does.

    They belong to glibc; its posix_spawn(3) leaves them ignored in the new process, and
    its children inherit that.
    """
    number = _SYS_RT_SIGACTION.get(os.uname().machine, _SYS_RT_SIGACTION_GENERIC)
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)  # zeros: SIG_DFL, no flags
    for signal in (32, 33):
        system_call(number, signal, ctypes.addressof(action), 0, 8)


def signal_descriptor(signal: int) -> int:
    """Return a signalfd(2) for one signal, which the caller must block.

    Raises:
        OSError: there is no descriptor or memory left.
    """
    number = _SYS_SIGNALFD4.get(os.uname().machine, _SYS_SIGNALFD4_GENERIC)
    told = ctypes.create_string_buffer(_SIGNAL_SET.pack(1 << (signal - 1)))
    where, size = ctypes.addressof(told), _SIGNAL_SET.size
    return system_call(number, 0xFFFFFFFF, where, size, os.O_CLOEXEC | os.O_NONBLOCK)


def close_at_exec(first: int) -> None:
    """Mark every descriptor from `first` on as close-on-exec: close_range(2)."""
    last, flags = 0xFFFFFFFF, _CLOSE_RANGE_CLOEXEC
    try:
        system_call(_SYS_CLOSE_RANGE, first, last, flags)
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EINVAL, errno.EPERM}:
            raise
    else:
        return
    # Linux before 5.11, or a filter that does not know the call.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= first:
            try:
                os.set_inheritable(fd, False)
            except OSError as error:  # the descriptor that listed the directory
                if error.errno != errno.EBADF:
                    raise
