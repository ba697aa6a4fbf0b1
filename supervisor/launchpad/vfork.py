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

import ctypes
import errno
import os
import struct

from supervisor.launchpad import calls, life
from supervisor.launchpad.family import Child
from supervisor.launchpad.fork import NO_PROCESS, SIGCHLD, CloneArguments
from supervisor.launchpad.kernel import (
    CLOSE_RANGE_CLOEXEC,
    SYS_CLOSE_RANGE,
    system_call,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.launchpad.order import Order

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

# <asm/unistd.h> of x86-64.
_MMAP = 9
# <linux/sched.h>
_CLONE_VM, _CLONE_PIDFD, _CLONE_CLEAR_SIGHAND = 0x100, 0x1000, 0x100000000
# <linux/mman.h>
_PROT_READ, _PROT_EXEC, _MAP_PRIVATE = 1, 4, 2
_PAGE_BYTES = 4096

_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})  # left for a pidfd

# Without a stack the child is where its parent is, and stays there.
_FLAGS = _CLONE_VM | _CLONE_PIDFD | _CLONE_CLEAR_SIGHAND
_POINTER = struct.Struct("Q")

ROOM_BYTES = 32_768
"""Of a list, where its order is no longer; some are kept for the next ones."""
_LIST_BYTES = _POINTER.size + ROOM_BYTES
_KEPT = 4


class CallList:
    """What one child does until it is its program, in memory that it shares.

    Attributes:
        address: of the first call; the number of the descriptor that is told if a call
            fails stands before that.
        memory: free again when the child is its program, or has ended.
    """

    __slots__ = ("address", "memory")

    def __init__(self, memory: ctypes.Array[ctypes.c_char], report: int) -> None:
        self.memory = memory
        self.address = ctypes.addressof(memory) + _POINTER.size
        _POINTER.pack_into(memory, 0, report)

    def write(self, offset: int, made: bytes) -> None:
        """Put calls, or what they point at, so many bytes behind the first call."""
        ctypes.memmove(self.address + offset, made, len(made))

    def fault(self) -> tuple[int, str] | None:
        """Return the errno and the stage of the call that failed; None if none did.

        Precondition: its child has become its program, or has ended.
        """
        return calls.fault(self.memory, _POINTER.size)


class Starter:
    """The code that children begin with, in this process's memory."""

    def __init__(self) -> None:
        self._unheard: list[CallList] = []
        self._free: list[ctypes.Array[ctypes.c_char]] = []
        self._shapes = calls.Shapes()
        self._start: Callable[[int, int, int], int] | None = None
        self._pidfd = ctypes.c_int(-1)  # of the one that was started last
        self._arguments = CloneArguments(
            _FLAGS, pidfd=ctypes.addressof(self._pidfd), exit_signal=SIGCHLD
        )
        if os.uname().machine != "x86_64":
            return
        try:
            # Whether it is known; no descriptor has that number.
            system_call(
                SYS_CLOSE_RANGE, calls.LAST_FD, calls.LAST_FD, CLOSE_RANGE_CLOEXEC
            )
            self._start = _loaded(bytes.fromhex("".join(code for code, _ in LISTING)))
        except OSError:
            return

    def can(self, order: Order) -> bool:
        """Whether what an order says can be done so, by this machine."""
        return self._start is not None and order.layers.keys() <= calls.PLAIN_LAYERS

    def start(self, order: Order) -> Child | None:
        """Start a child that makes its calls until it is its program.

        Precondition: `can`.

        Returns:
            None if it has to be forked.

        Raises:
            OSError: there is no process or descriptor to be had.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        child, exec_end = None, -1
        try:
            exec_end = os.dup(ours)
            # What is put in its place must not take the place of what is to follow.
            lowest = min(order.cwd_fd, theirs, *order.sources)
            if lowest > max(order.targets, default=-1):
                child = self.begin(life.STARTING, self._list_of(order, theirs), ours)
            if child is not None:
                child.exec_end = exec_end
                child.applied = calls.applied(order)
        finally:
            os.close(theirs)
            if child is None:
                os.close(ours)
                if exec_end >= 0:
                    os.close(exec_end)
        return child

    def _list_of(self, order: Order, report: int) -> CallList:
        found = self.new_list(report)
        shape, first = self._shapes.of(order), len(calls.FIRST)
        made = shape.calls(order, found.address + first)
        size = first + len(made)
        if size > ROOM_BYTES:
            self.is_over(found)
            memory = ctypes.create_string_buffer(_POINTER.size + size)
            found = CallList(memory, report)
            made = shape.calls(order, found.address + first)
        found.write(0, calls.FIRST + made)
        return found

    def begin(self, state: int, made: CallList, report: int) -> Child | None:
        """Start a child that makes calls.

        Args:
            state: of ``launchpad.life``.
            made: its calls.
            report: a pipe that ends with its exec, or with it.

        Returns:
            None if it has to be forked; `report` is nobody's then.

        Raises:
            OSError: as `start`; likewise.
        """
        if self._start is None:
            return None
        size = ctypes.sizeof(self._arguments)
        pid = self._start(ctypes.addressof(self._arguments), size, made.address)
        if -pid in NO_PROCESS or -pid in _NO_DESCRIPTOR:
            raise OSError(-pid, os.strerror(-pid))
        if pid < 0:  # a filter, or a kernel that does not know the flag
            self._start = None
            return None
        # Here for good if nobody can take note of it, and hear when it was read.
        self._unheard.append(made)
        try:
            child = Child(state, pid, report, self._pidfd.value)
        except OSError:
            os.close(self._pidfd.value)
            raise
        child.calls = self._unheard.pop()
        return child

    def new_list(self, report: int) -> CallList:
        """Return a list that has no calls yet, and room for `ROOM_BYTES`."""
        memory = self._free.pop() if self._free else None
        return CallList(memory or ctypes.create_string_buffer(_LIST_BYTES), report)

    def is_over(self, done: CallList) -> None:
        """Take a list back whose child is its program, or has ended."""
        if len(self._free) < _KEPT and len(done.memory) == _LIST_BYTES:
            self._free.append(done.memory)


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
