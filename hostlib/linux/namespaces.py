"""The kernel's calls that enter namespaces: unshare(2), setns(2)."""

from __future__ import annotations

import os

from hostlib.linux.syscalls import system_call

# <asm/unistd.h>, <linux/sched.h>
_SYS_UNSHARE, _SYS_SETNS = (272, 308) if os.uname().machine == "x86_64" else (97, 268)
FILE_SYSTEM = 0x00000200
"""No namespace: root and working directory that a thread shares with others."""
NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000

KINDS = {
    "userns": (NEW_USER, "user"),
    "mountns": (NEW_MOUNTS, "mnt"),
    "pidns": (NEW_PIDS, "pid"),
    "netns": (NEW_NET, "net"),
    "ipcns": (NEW_IPC, "ipc"),
    "utsns": (NEW_UTS, "uts"),
}
"""Layer of a sandbox -> the flag, and the kernel's name, of its namespace."""


def unshare(kinds: int) -> None:
    """Enter fresh namespaces; of pids, for what is forked next.

    Raises:
        OSError: they cannot be made.
    """
    system_call(_SYS_UNSHARE, kinds)


def set_namespace(fd: int, kind: int) -> None:
    """Enter a namespace that is there; of pids, for what is forked next.

    Raises:
        OSError: this process has no rights there.
    """
    system_call(_SYS_SETNS, fd, kind)
