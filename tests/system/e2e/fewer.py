"""A machine that gives fewer namespaces.

Sysctls of a user namespace, and a command in it.

A wrapper for `tests.helpers.command.sandhost`, for a user who may make a user namespace.
"""

from tests.helpers.steps import Steps, steps_before

FEWER = """
import ctypes
uid, gid = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
inner, sysctls = args
for name, text in (
    ("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")
):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
for pair in sysctls.split():
    name, _, most = pair.partition("=")
    with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
        file.write(most)
# As an exec has it, for there is none where the command is forked (capabilities(7)).
if int(inner) != 0:
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(head, (ctypes.c_uint32 * 6)()) == 0
assert libc.prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE
"""


def allowing(sysctls: str, *, uid: int = 0) -> Steps:
    """Return what runs a command where so many namespaces are allowed.

    Args:
        sysctls: `user=0 net=3`: kind, and the most.
        uid: of the command there; any but 0 has no right.
    """
    return steps_before(FEWER, str(uid), sysctls)
