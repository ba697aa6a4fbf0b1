"""How the launchpad forks: into a group of processes, and into a pid namespace.

The calls clone(2) and clone3(2) for a process of one thread.

Rules:
 1. Only a process without other threads calls this. The work of `os.fork` around the
    call is about threads, and costs as much as the call.
 2. A child that is cloned into a group of version 2 (CLONE_INTO_CGROUP) is never moved:
    to move a process, the kernel waits until no processor looks at any list of
    processes, 4 to 20 ms.
 3. A pid namespace that root makes is made by the launchpad itself: its init and the
    child are both forked from here, and then it forks into its own namespace again.
 4. All of these inits share one empty net namespace: /proc/1/net shows a child the
    sockets of its init's (proc_net(5)), which would be the host's.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import os

from hostlib.linux import namespaces
from hostlib.linux.syscalls import PR_SET_PDEATHSIG, prctl, set_name, system_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# <asm/unistd.h>; clone3(2) has one number everywhere.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_CLONE = 56 if _IS_X86_64 else 220
_SYS_CLONE3 = 435
# <linux/sched.h>
CLONE_PARENT = 0x00008000
_CLONE_INTO_CGROUP = 0x200000000
_SIGCHLD = int(_signal.SIGCHLD)

_INIT_NAME = b"sandhost-init"

# No other way of trying helps.
_NO_PROCESS = frozenset({errno.EAGAIN, errno.ENOMEM})


class _CloneArguments(ctypes.Structure):
    """struct clone_args of clone3(2), Linux 5.7; what is not named is 0."""

    _fields_ = tuple(  # type: ignore[mutable-override]
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack",
            "stack_size", "tls", "set_tid", "set_tid_size", "cgroup",
        )
    )  # fmt: skip


def fork(flags: int = 0) -> int:
    """Fork this process; `flags` as for clone(2), CLONE_PARENT say.

    Raises:
        OSError: no process to be had.
    """
    return system_call(_SYS_CLONE, flags | _SIGCHLD)


def fork_into(group: int, flags: int = 0) -> tuple[int, bool]:
    """Fork this process into a group of processes, if the kernel can.

    Args:
        group: a descriptor of the group's directory, version 2; -1 for none.
        flags: as for `fork`.

    Returns:
        The pid, 0 in the child, and whether the child is in the group.

    Raises:
        OSError: no process to be had.
    """
    if group >= 0:
        arguments = _CloneArguments(flags | _CLONE_INTO_CGROUP, cgroup=group)
        if not flags & CLONE_PARENT:  # which takes its parent's
            arguments.exit_signal = _SIGCHLD
        size = ctypes.sizeof(arguments)
        try:
            return system_call(_SYS_CLONE3, ctypes.addressof(arguments), size), True
        except OSError as error:
            if error.errno in _NO_PROCESS:
                raise
            # Linux before 5.7, a filter, a group that takes nobody: the child joins
            # it by itself, and if that fails, says why.
    return fork(flags), False


class PidNamespaces:
    """The pid namespaces that a launchpad of root makes for children.

    Its own is held by a descriptor, for the life of the launchpad.
    """

    def __init__(self) -> None:
        self._own = -1
        self._is_away = False  # forked children are not in our namespace
        self._own_net = self._empty_net = -1
        self._is_net_away = False

    def make(self) -> None:
        """Let what is forked next be in a fresh namespace, its init first.

        Raises:
            OSError: it cannot be made.
        """
        if self._own < 0:
            own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            try:  # before it is left: a process that may not do this cannot return
                namespaces.set_namespace(own, namespaces.NEW_PIDS)
            except OSError:
                os.close(own)
                raise
            self._own = own
        namespaces.unshare(namespaces.NEW_PIDS)
        self._is_away = True

    def come_back(self) -> None:
        """Let what is forked next be in the launchpad's own namespace.

        Raises:
            OSError: no memory for that; nothing may be forked.
        """
        self._leave_empty_net()  # should it have failed the last time
        if self._is_away:
            namespaces.set_namespace(self._own, namespaces.NEW_PIDS)
            self._is_away = False

    def fork_init(self) -> int:
        """Fork the init of a namespace that was made; -1 if none was.

        Raises:
            OSError: no process to be had.
        """
        if not self._is_away:
            return -1
        self._enter_empty_net()
        try:
            init = fork()
            if init == 0:
                be_init()
        finally:
            self._leave_empty_net()
        return init

    def _enter_empty_net(self) -> None:
        """Enter the net namespace of all inits, if this process could come back."""
        if self._empty_net < 0:
            if self._own_net < 0:
                self._own_net = _open_net()
            try:
                # Before it is left: root of a user namespace may have an outer one's.
                namespaces.set_namespace(self._own_net, namespaces.NEW_NET)
                namespaces.unshare(namespaces.NEW_NET)
            except OSError:
                return
            self._is_net_away = True
            self._empty_net = _open_net()
        else:
            namespaces.set_namespace(self._empty_net, namespaces.NEW_NET)
            self._is_net_away = True

    def _leave_empty_net(self) -> None:
        if self._is_net_away:
            namespaces.set_namespace(self._own_net, namespaces.NEW_NET)
            self._is_net_away = False


def _open_net() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def be_init() -> NoReturn:
    """Be the init of a pid namespace: do nothing, until the namespace is ended.

    The kernel keeps signals from an init that it does not handle, but for SIGKILL and
    SIGSTOP from above (pid_namespaces(7)).
    """
    try:
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        # All others have no handler here, and sixty calls would delay the child.
        for number in _signal.valid_signals():
            if callable(_signal.getsignal(number)):
                _signal.signal(number, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # which also reaps
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        set_name(_INIT_NAME)
        while True:
            _signal.pause()
    finally:
        os._exit(127)
