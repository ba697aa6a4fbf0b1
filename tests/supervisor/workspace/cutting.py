"""A process that is killed, or fails for want of room, at one of its system calls.

A filter (seccomp_unotify(2)) has the kernel ask this process about each call that writes,
makes, moves or removes something. Calls of processes that it starts are asked about as
well.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hostlib.linux.syscalls import caller
from supervisor.sandbox.seccomp_filter import Instruction, assemble
from supervisor.spawn.launchpad.layers.privileges import forbid_new_privileges

# <asm/unistd.h>: numbers on x86_64 and on aarch64; None where there is no such call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "write": (1, 64),
    "pwrite64": (18, 68),
    "writev": (20, 66),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "fallocate": (285, 47),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "syncfs": (306, 267),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "rmdir": (84, None),
    "unlinkat": (263, 35),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_OPENAT = (257, 56)
_IOCTL = (16, 29)
_SECCOMP = (317, 277)

# <linux/seccomp.h>
_SET_FILTER, _NEW_LISTENER = 1, 8
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_NOTICE = struct.Struct("=QII i I Q 6Q")
_REPLY = struct.Struct("=QqiI")
_GO_ON = 1
_FICLONE = 0x40049409
_LOAD, _IS, _HAS, _RETURN = 0x20, 0x15, 0x45, 0x06

KILL = 0
"""In the place of an errno: the process is killed."""

_NEED_ROOM = frozenset(
    {"write", "pwrite64", "writev", "sendfile", "copy_file_range", "fallocate",
     "mkdir", "mkdirat", "mknod", "mknodat", "link", "linkat", "symlink", "symlinkat",
     "setxattr", "lsetxattr", "fsetxattr"}
)  # fmt: skip
"""Calls that fail on a full disk, beside an open that makes a file."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a process.

    Attributes:
        calls: so many it made, of those that can be cut.
        said: its result, or how it failed; None if it was killed before.
    """

    calls: int
    said: bytes | None


def run_cut(
    work: Callable[[], bytes],
    number: int = -1,
    error: int = KILL,
    *,
    lasts: bool = False,
) -> Cut:
    """Do something in a process that is cut at one of its calls.

    Args:
        work: the work; a few bytes that it returns are given back.
        number: of the call, from 0; -1 for none.
        error: the errno of that call, or ``KILL``.
        lasts: from that call on those fail that need room, and no others.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            try:
                socket.send_fds(theirs, [b"."], [_listen()])
                theirs.send(work())
            except Exception:  # noqa: BLE001 - its text is sent
                theirs.send(traceback.format_exc().encode())
            finally:
                os._exit(0)
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        if not fds:
            os.waitpid(pid, 0)
            pytest.skip("the kernel does not ask about calls")
        try:
            calls = _answer(fds[0], pid, number, error, lasts=lasts)
        finally:
            os.close(fds[0])
            os.waitpid(pid, 0)
        return Cut(calls, ours.recv(1 << 16) or None)


def _answer(listener: int, pid: int, number: int, error: int, *, lasts: bool) -> int:
    """Answer until the process ends; return how many of its calls there were."""
    calls = 0
    column = _column()
    room = {_CALLS[name][column] for name in _NEED_ROOM} | {_OPENAT[column]}
    ended = os.pidfd_open(pid)
    try:
        while ended not in select.select([listener, ended], [], [])[0]:
            notice = bytearray(_NOTICE.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, notice)
            except FileNotFoundError:  # it was killed meanwhile
                continue
            key, caller_pid, _, call, *_ = _NOTICE.unpack(notice)
            is_cut = caller_pid == pid and calls == number
            if lasts:
                is_cut = caller_pid == pid and 0 <= number <= calls and call in room
            calls += caller_pid == pid
            if is_cut and error == KILL:
                os.kill(pid, signal.SIGKILL)
                continue
            reply = (0, -error, 0) if is_cut else (0, 0, _GO_ON)
            try:
                fcntl.ioctl(listener, _ANSWER, _REPLY.pack(key, *reply))
            except FileNotFoundError:
                continue
    finally:
        os.close(ended)
    return calls


def _listen() -> int:
    """Have the kernel ask about this process's calls; return where it asks."""
    column = _column()
    numbers = [pair[column] for pair in _CALLS.values()]
    step = Instruction
    code = [
        step(_LOAD, 0),
        *(step(_IS, number, yes="ask") for number in numbers if number is not None),
        step(_IS, _OPENAT[column], yes="open"),
        step(_IS, _IOCTL[column], yes="clone", no="allow"),
        step(_LOAD, 32, label="open"),
        step(_HAS, os.O_CREAT, yes="ask", no="allow"),
        step(_LOAD, 24, label="clone"),
        step(_IS, _FICLONE, no="allow"),
        step(_RETURN, _ASK, label="ask"),
        step(_RETURN, _ALLOW, label="allow"),
    ]
    if os.geteuid():
        forbid_new_privileges()
    instructions = ctypes.create_string_buffer(assemble(code))
    words = struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions))
    program = ctypes.create_string_buffer(words)
    install = caller(_SECCOMP[column], "nnn")
    return install(_SET_FILTER, _NEW_LISTENER, ctypes.addressof(program))


def _column() -> int:
    return 0 if os.uname().machine == "x86_64" else 1
