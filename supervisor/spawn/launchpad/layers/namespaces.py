"""The layers of namespaces: userns, netns, ipcns, utsns, mountns and pidns.

1. Root makes namespaces directly; other users make a user namespace first, in which they
   keep their number only.
2. A pid namespace begins with the next process. Root's launchpad forks into it
   (``launchpad.fork``). In a user namespace, this process forks two: the init and the
   child, both as children of the launchpad (CLONE_PARENT), and ends.
3. The init only exists: an ignored SIGCHLD reaps. It holds no descriptor, no program of
   the namespace can end it, and with the launchpad the kernel ends all in it.
"""

from __future__ import annotations

import os

from hostlib.linux import namespaces
from hostlib.linux.syscalls import PR_SET_DUMPABLE, prctl
from supervisor.spawn.launchpad import fork
from supervisor.spawn.launchpad.layers import loopback


def enter_user(uid: int, gid: int) -> str:
    """Enter a user namespace in which this user is who it was.

    Raises:
        OSError: this machine lets nobody, or not this user, make one.
    """
    namespaces.unshare(namespaces.NEW_USER)
    # The launchpad may not be looked at, so its fork's files in /proc are root's: for
    # the three writes it may be. A process that could look is of the same user and not yet
    # in a sandbox, for Landlock refuses it to those who are.
    prctl(PR_SET_DUMPABLE, 1)
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    finally:
        prctl(PR_SET_DUMPABLE, 0)
    return f"user {uid} and nobody else"


def join_user(fd: int) -> str:
    """Enter the user namespace of a child that this user has started.

    Raises:
        OSError: it is another one's.
    """
    namespaces.set_namespace(fd, namespaces.NEW_USER)
    return "its child's"


def join_net(fd: int) -> str:
    """Enter the net namespace of the child whose tool this is.

    Raises:
        OSError: this process has no rights there.
    """
    namespaces.set_namespace(fd, namespaces.NEW_NET)
    return "its child's"


def enter(kind: str) -> str:
    """Enter a fresh namespace of a kind; of pids, for what is forked next.

    Raises:
        OSError: it cannot be made.
    """
    namespaces.unshare(namespaces.KINDS[kind][0])
    if kind == "netns":
        loopback.raise_loopback()
        return "own loopback, nothing else"
    return "own"


def fork_into(group: int) -> tuple[int, int, bool]:
    """Fork the init and the child of the pid namespace that was entered.

    Args:
        group: of the child, as for ``launchpad.fork.fork_into``.

    Returns:
        The pid of the child, 0 in it; of the init; whether the child is in the group.

    Raises:
        OSError: no process to be had.
    """
    # The child waits until this process has told of it, and ended: without a report, a
    # dead child would be taken for a leftover.
    told, tell = os.pipe2(os.O_CLOEXEC)
    init = fork.fork(fork.CLONE_PARENT)
    if init == 0:
        fork.be_init()
    child, is_in_group = fork.fork_into(group, fork.CLONE_PARENT)
    if child != 0:
        return child, init, is_in_group
    os.close(tell)
    os.read(told, 1)
    os.close(told)
    return 0, init, is_in_group
