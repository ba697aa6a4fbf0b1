"""A machine that gives fewer namespaces: sysctls of a user namespace, and a command in it.

A wrapper for `tests.helpers.command.sandhost`, for a user who may make a user namespace.
"""

import sys

FEWER = """
import ctypes, os, sys
uid, gid = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
inner, sysctls, *command = sys.argv[1:]
for name, text in (
    ("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")
):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
for pair in sysctls.split():
    name, _, most = pair.partition("=")
    with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
        file.write(most)
os.execv(command[0], command)
"""


def allowing(sysctls: str, *, uid: int = 0) -> tuple[str, ...]:
    """Return what runs a command where so many namespaces are allowed.

    Args:
        sysctls: `user=0 net=3`: kind, and the most.
        uid: who the command is there; any but 0 has no right.
    """
    return sys.executable, "-c", FEWER, str(uid), sysctls
