"""Children that are started without copying the launchpad: by a list of system calls.

What it is: for a child that needs no decision between its start and its exec, all that
it does as a list of system calls, and the start of a process that shares this one's
memory and does nothing but make them. What it is not: a child that puts walls on itself
is forked (``launchpad.child``).

Rules:
 1. Whoever shares memory runs no Python and uses no stack. Its code is `LISTING`; it
    reads the list, and writes beside each call what that returned.
 2. No signal is handled in it (CLONE_CLEAR_SIGHAND); descriptors, working directory and
    umask are its own, as after fork(2).
 3. The launchpad goes on meanwhile, so an exec that hangs hangs alone; a list is kept
    until its child has become its program, or has ended.
 4. A call that fails ends the list and the child; the list says which. A byte in the
    child's pipe says that there is one: the host hears that pipe end, and not the list.
 5. Where this cannot be done (another processor, Linux before 5.11, a filter), and
    where a descriptor would be in another's way, a child is forked.

Why so: ADR 61.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import os
import struct

from supervisor.launchpad import life
from supervisor.launchpad.family import Child
from supervisor.launchpad.fork import NO_PROCESS, SIGCHLD, CloneArguments
from supervisor.launchpad.kernel import (
    CLOSE_RANGE_CLOEXEC,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    SIGNAL_SET,
    SYS_CLOSE_RANGE,
    system_call,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from supervisor.launchpad.order import Order

    Call = tuple[int, ...]

LISTING = (
    # start(clone_args, size, list) -> pid, or below 0 an errno: as clone3(2) itself.
    ("b8 b3 01 00 00", "mov eax, 435"),  # clone3; its arguments are where they must be
    ("0f 05", "syscall"),
    ("48 85 c0", "test rax, rax"),
    ("74 01", "je child"),
    ("c3", "ret"),
    # A call is 64 bytes: its number, six arguments, and room for what it returns.
    ("48 89 d3", "child: mov rbx, rdx"),
    ("49 89 d4", "mov r12, rdx"),
    ("48 8b 03", "next: mov rax, [rbx]"),
    ("48 8b 7b 08", "mov rdi, [rbx+8]"),
    ("48 8b 73 10", "mov rsi, [rbx+16]"),
    ("48 8b 53 18", "mov rdx, [rbx+24]"),
    ("4c 8b 53 20", "mov r10, [rbx+32]"),
    ("4c 8b 43 28", "mov r8, [rbx+40]"),
    ("4c 8b 4b 30", "mov r9, [rbx+48]"),
    ("0f 05", "syscall"),
    ("48 89 43 38", "mov [rbx+56], rax"),
    ("48 83 c3 40", "add rbx, 64"),
    ("48 3d 01 f0 ff ff", "cmp rax, -4095"),
    ("72 d3", "jb next"),  # unsigned: what is not below is an errno
    # One byte, whichever, into the pipe whose number stands before the list.
    ("49 8b 7c 24 f8", "mov rdi, [r12-8]"),
    ("4c 89 e6", "mov rsi, r12"),
    ("ba 01 00 00 00", "mov edx, 1"),
    ("b8 01 00 00 00", "mov eax, 1"),  # write
    ("0f 05", "syscall"),
    ("bf 7f 00 00 00", "end: mov edi, 127"),
    ("b8 e7 00 00 00", "mov eax, 231"),  # exit_group
    ("0f 05", "syscall"),
    ("eb f2", "jmp end"),
)
"""The whole program, x86-64: its bytes, and what they say in the syntax of Intel."""

PLAIN_LAYERS = frozenset({"rlimits"})
"""The layers that need nothing but system calls which are known beforehand."""

# <asm/unistd.h> of x86-64.
_MMAP, _RT_SIGPROCMASK, _DUP2, _EXECVE, _FCHDIR, _UMASK = 9, 14, 33, 59, 81, 95
_SETSID, _PRCTL, _PRLIMIT64 = 112, 157, 302
_LAST_FD = 0xFFFFFFFF
# <linux/sched.h>
_CLONE_VM, _CLONE_PIDFD, _CLONE_CLEAR_SIGHAND = 0x100, 0x1000, 0x100000000
# <linux/mman.h>
_PROT_READ, _PROT_EXEC, _MAP_PRIVATE = 1, 4, 2
_PAGE_BYTES = 4096

_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})  # left for a pidfd

# Without a stack the child is where its parent is, and stays there.
_FLAGS = _CLONE_VM | _CLONE_PIDFD | _CLONE_CLEAR_SIGHAND
_NO_SIGNALS = ctypes.create_string_buffer(SIGNAL_SET.pack(0))
_CALL = struct.Struct("7Qq")
_RLIMIT = struct.Struct("2Q")
_POINTER = struct.Struct("Q")
_CALL_WORDS = 8
_UNSIGNED = 0xFFFFFFFFFFFFFFFF


class Steps:
    """All calls but the exec: they are the same for every order of one shape.

    Args:
        order: complete, and of `PLAIN_LAYERS` at most.

    Attributes:
        applied: (layer, detail) of what the program runs in, if every call goes well.
        calls: as bytes, each `_CALL`.
        results: unpacks what those and the exec have returned.
        stages: of those and of the exec, each a row of ``launchpad.child.STEPS``.
    """

    __slots__ = ("_limits", "applied", "calls", "results", "stages")

    def __init__(self, order: Order) -> None:
        self._limits = ctypes.create_string_buffer(
            b"".join(
                _RLIMIT.pack(soft & _UNSIGNED, hard & _UNSIGNED)
                for _, soft, hard in order.rlimits
            )
        )
        calls = tuple(self._of(order))
        self.stages = (*(stage for stage, _ in calls), "exec")
        self.calls = b"".join(_packed(call) for _, call in calls)
        self.results = struct.Struct(f"{_CALL.size - 8}xq" * len(self.stages))
        self.applied = (("session", "own"), *order.limits_said(), order.fds_said())

    def _of(self, order: Order) -> Iterator[tuple[str, Call]]:
        nobody = ctypes.addressof(_NO_SIGNALS)
        mask = (_RT_SIGPROCMASK, _signal.SIG_SETMASK, nobody, 0, SIGNAL_SET.size)
        yield "signals", mask
        yield "session", (_SETSID,)
        yield "subreaper", (_PRCTL, PR_SET_CHILD_SUBREAPER, 1)
        yield "cwd", (_FCHDIR, order.cwd_fd)
        if order.umask is not None:
            yield "umask", (_UMASK, order.umask)
        yield "descriptors", (SYS_CLOSE_RANGE, 0, _LAST_FD, CLOSE_RANGE_CLOEXEC)
        for source, target in zip(order.sources, order.targets, strict=True):
            yield "descriptors", (_DUP2, source, target)
        at = ctypes.addressof(self._limits)
        for which, _, _ in order.rlimits:
            yield "rlimit", (_PRLIMIT64, 0, which, at)
            at += _RLIMIT.size
        # If the launchpad died before this, the host ends what is left beneath it.
        yield "pdeathsig", (_PRCTL, PR_SET_PDEATHSIG, int(_signal.SIGKILL))


_KNOWN = 64
"""Shapes that are remembered. Received descriptors have the same numbers each time, but
for those who start beside others."""


class CallList:
    """What one child does until it is its program, in memory that it shares.

    Args:
        order: complete.
        steps: those of its shape.

    Attributes:
        address: of the first call; the number of its pipe stands before that.
        applied: see `Steps`.
    """

    __slots__ = ("_calls", "_steps", "_texts", "address", "applied")

    def __init__(self, order: Order, steps: Steps) -> None:
        self._steps = steps
        env = [name + b"=" + value for name, value in order.env.items()]
        texts = (order.executable, *order.argv, None, *env, None)
        # Pointers to these texts, which it keeps: execve(2) takes them as they are.
        self._texts = (ctypes.c_char_p * len(texts))(*texts)
        (executable,) = _POINTER.unpack_from(self._texts)
        at = ctypes.addressof(self._texts) + _POINTER.size
        environ = at + _POINTER.size * (len(order.argv) + 1)
        execve = _packed((_EXECVE, executable, at, environ))
        report = _POINTER.pack(order.report)
        self._calls = ctypes.create_string_buffer(report + steps.calls + execve)
        self.address = ctypes.addressof(self._calls) + _POINTER.size
        self.applied = steps.applied

    def fault(self) -> tuple[int, str] | None:
        """Return the errno and the stage of the call that failed; None if none did.

        Precondition: its child has become its program, or has ended.
        """
        results = self._steps.results.unpack_from(self._calls, _POINTER.size)
        worst = min(results)  # the list ends with the first that fails
        if worst >= 0:
            return None
        return -worst, self._steps.stages[results.index(worst)]


def _packed(call: Call) -> bytes:
    return _CALL.pack(*call, *(0,) * (_CALL_WORDS - len(call)))


class Starter:
    """The code that children begin with, in this process's memory."""

    def __init__(self) -> None:
        self._unheard: list[CallList] = []
        self._known: dict[tuple[object, ...], Steps] = {}
        self._start: Callable[[int, int, int], int] | None = None
        self._pidfd = ctypes.c_int(-1)  # of the one that was started last
        self._arguments = CloneArguments(
            _FLAGS, pidfd=ctypes.addressof(self._pidfd), exit_signal=SIGCHLD
        )
        if os.uname().machine != "x86_64":
            return
        try:
            # Whether it is known; no descriptor has that number.
            system_call(SYS_CLOSE_RANGE, _LAST_FD, _LAST_FD, CLOSE_RANGE_CLOEXEC)
            self._start = _loaded(bytes.fromhex("".join(code for code, _ in LISTING)))
        except OSError:
            return

    def can(self, order: Order) -> bool:
        """Whether what an order says can be done so, by this machine."""
        return self._start is not None and order.layers.keys() <= PLAIN_LAYERS

    def start(self, order: Order) -> Child | None:
        """Start a child that makes its calls until it is its program.

        Precondition: `can`.

        Returns:
            None if it has to be forked.

        Raises:
            OSError: there is no process or descriptor to be had.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        order.report = theirs
        child, exec_end = None, -1
        try:
            exec_end = os.dup(ours)
            child = self._started(order, ours)
            if child is not None:
                child.exec_end = exec_end
        finally:
            os.close(theirs)
            if child is None:
                os.close(ours)
                if exec_end >= 0:
                    os.close(exec_end)
        return child

    def _started(self, order: Order, report: int) -> Child | None:
        # What is put in its place must not take the place of what is to follow.
        lowest = min(order.cwd_fd, order.report, *order.sources)
        if self._start is None or lowest <= max(order.targets, default=-1):
            return None
        calls = CallList(order, self._steps_of(order))
        size = ctypes.sizeof(self._arguments)
        pid = self._start(ctypes.addressof(self._arguments), size, calls.address)
        if -pid in NO_PROCESS or -pid in _NO_DESCRIPTOR:
            raise OSError(-pid, os.strerror(-pid))
        if pid < 0:  # a filter, or a kernel that does not know the flag
            self._start = None
            return None
        # Here for good if nobody can take note of it, and hear when it was read.
        self._unheard.append(calls)
        try:
            child = Child(life.STARTING, pid, report, self._pidfd.value)
        except OSError:
            os.close(self._pidfd.value)
            raise
        child.calls = self._unheard.pop()
        child.applied = child.calls.applied
        return child

    def _steps_of(self, order: Order) -> Steps:
        """Return the steps of an order, which most often another one has had."""
        shape = (
            order.cwd_fd,
            order.umask,
            order.targets,
            order.rlimits,
            "rlimits" in order.layers,
            *order.sources,
        )
        steps = self._known.get(shape)
        if steps is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            steps = self._known[shape] = Steps(order)
        return steps


def _loaded(code: bytes) -> Callable[[int, int, int], int]:
    """Return a function that is machine code; nothing here is ever writable.

    Raises:
        OSError: this machine, or a filter, lets nobody make one.
    """
    fd = os.memfd_create("sandhost-start")
    try:
        os.write(fd, code)
        protection = _PROT_READ | _PROT_EXEC
        address = system_call(_MMAP, 0, _PAGE_BYTES, protection, _MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    # With the interpreter's lock held, as in a process of one thread there is no other.
    kind = ctypes.PYFUNCTYPE(
        ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    )
    return kind(address)
