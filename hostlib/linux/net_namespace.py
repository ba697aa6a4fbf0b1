"""Net namespaces of sockets, and the user namespaces of namespaces: ioctl_nsfs(2)."""

from __future__ import annotations

import fcntl
import os

_SIOCGSKNS = 0x894C  # <linux/sockios.h>
_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


def open_net_namespace(fd: int) -> int:
    """Return a descriptor of a socket's net namespace; the caller's.

    Raises:
        OSError: the kernel cannot tell (before 4.10, or gVisor), or this user may not
            know.
    """
    return fcntl.ioctl(fd, _SIOCGSKNS)


def open_user_namespace(namespace: int) -> int:
    """Return a descriptor of a namespace's user namespace; the caller's.

    Raises:
        OSError: as above.
    """
    return fcntl.ioctl(namespace, _NS_GET_USERNS)


def is_own_user_namespace(fd: int) -> bool:
    """Tell whether a descriptor is of the user namespace of this process."""
    return os.path.samestat(os.fstat(fd), os.stat("/proc/self/ns/user"))
