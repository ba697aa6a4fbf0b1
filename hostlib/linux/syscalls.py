"""System calls that the standard library does not offer: any, prctl, close_range.

Linux on 64-bit machines. `ctypes` costs 3 ms at the start and is the one way to them.
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

# <linux/openat2.h>: flags, mode, resolve; one number everywhere.
_SYS_OPENAT2 = 437
_OPEN_HOW = struct.Struct("QQQ")
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 2, 4, 8
_RESOLVE_EXACTLY = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
_AT_FDCWD = -100 & 0xFFFFFFFFFFFFFFFF

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP})
"""What `open_exactly` says of what nobody can reach under that very name."""

SHORT_SLICE_NS = 100_000
"""The shortest that the scheduler takes; its own is some milliseconds."""


def system_call(number: int, *arguments: int) -> int:
    """Make a system call; structures and paths go as addresses (`ctypes.addressof`).

    Raises:
        OSError: It failed; the errno is the kernel's.
    """
    padding = (0,) * (6 - len(arguments))
    result: int = _libc.syscall(number, *arguments, *padding)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def ask_for_slices(length_ns: int) -> None:
    """Ask the scheduler for slices of that length for this thread; 0 for its own.

    Who asks for short ones goes before others when it wakes, for no more time in all
    (sched_setattr(2), Linux 6.12; older ones give nothing for it). It is a request:
    a thread that may not make it goes on without, and so does one that has a policy or a
    negative nice value that goes before others already. Threads and processes that are
    made from here do not inherit it: SCHED_RESET_ON_FORK is set, and stays.
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
    """Return a function that makes one system call, for what is called often.

    To be made before the fork that calls it: what ctypes needs for that costs more than
    the call, and a forked process would pay for it each time.

    Args:
        number: of the call.
        kinds: a letter for each argument: ``n`` a number or an address, ``t`` a text
            or None.

    Returns:
        It raises OSError as `system_call` does.
    """
    # Not `_libc.syscall`, which is one object: each subscript makes another.
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


_openat2 = caller(_SYS_OPENAT2, "ntnn")


def prctl(option: int, value: int) -> None:
    """Set one of the numbers that the kernel keeps for a process: PR_SET_*.

    Raises:
        OSError: The kernel does not know the option, or refuses the value.
    """
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def set_name(name: bytes) -> None:
    """Name this process, 15 bytes at most, for ps(1): PR_SET_NAME."""
    text = ctypes.create_string_buffer(name)
    prctl(_PR_SET_NAME, ctypes.addressof(text))


def open_exactly(path: bytes, top: int = -1, flags: int = os.O_PATH) -> int:
    """Open what a path names, without following a single symbolic link.

    Args:
        path: an absolute one; relative, where a directory is given.
        top: a descriptor of the directory that it lies beneath.
        flags: as for open(2); close-on-exec is added. None that makes a file.

    Returns:
        A descriptor.

    Raises:
        OSError: it cannot be reached; ELOOP, ENOTDIR: there is a link on the way; EXDEV:
            it leads out of the directory.
    """
    resolve, start = _RESOLVE_EXACTLY, _AT_FDCWD
    if top >= 0:
        resolve, start = resolve | _RESOLVE_BENEATH, top
    how = _OPEN_HOW.pack(flags | os.O_CLOEXEC, 0, resolve)
    text = ctypes.create_string_buffer(how, len(how))
    try:
        return _openat2(start, path, ctypes.addressof(text), len(how))
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EPERM}:
            raise
    found = _open_step_by_step(path, top)
    if flags & os.O_PATH:
        return found
    try:
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)


def _open_step_by_step(path: bytes, top: int = -1) -> int:
    """Do as `open_exactly` where there is no openat2(2): Linux before 5.6, a filter."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    if top >= 0 and path.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    fd = os.open("/", flags) if top < 0 else os.dup(top)
    for part in path.split(b"/"):
        if not part:
            continue
        if top >= 0 and part == b"..":  # nobody has a reason to ask for that
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        try:  # beneath a link: ENOTDIR
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

    They are glibc's own; its posix_spawn(3) leaves them ignored in what it starts, and
    what is ignored is inherited.
    """
    number = _SYS_RT_SIGACTION.get(os.uname().machine, _SYS_RT_SIGACTION_GENERIC)
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)  # zeros: SIG_DFL, no flags
    for signal in (32, 33):
        system_call(number, signal, ctypes.addressof(action), 0, 8)


def signal_descriptor(signal: int) -> int:
    """Return a descriptor that tells of a signal, which is to be blocked: signalfd(2).

    Raises:
        OSError: no descriptor or memory to be had.
    """
    number = _SYS_SIGNALFD4.get(os.uname().machine, _SYS_SIGNALFD4_GENERIC)
    told = ctypes.create_string_buffer(_SIGNAL_SET.pack(1 << (signal - 1)))
    where, size = ctypes.addressof(told), _SIGNAL_SET.size
    return system_call(number, 0xFFFFFFFF, where, size, os.O_CLOEXEC | os.O_NONBLOCK)


def close_at_exec(first: int) -> None:
    """Mark every descriptor from `first` on close-on-exec: close_range(2)."""
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
