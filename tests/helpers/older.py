"""An older kernel: a filter that answers one call in another way, and a command in it."""

import sys

from supervisor.sandbox import seccomp_filter

OLDER = """
import ctypes, os, sys
from supervisor.spawn.launchpad.layers import seccomp
from supervisor.sandbox import seccomp_filter
from supervisor.spawn.launchpad.layers.privileges import forbid_new_privileges
if os.geteuid():
    forbid_new_privileges()
seccomp.apply(bytes.fromhex(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


def without(
    number: int, answer: int, value: int | None = None, *, argument: int = 0
) -> tuple[str, ...]:
    """Return what runs a command on a kernel that answers a call with an error.

    Args:
        number: of the call.
        answer: errno.
        value: only if one of its arguments is this.
        argument: which, 0 for the first.
    """
    step = seccomp_filter.Instruction
    code = [step(0x20, 0), step(0x15, number, no="allow")]
    if value is not None:
        code += [step(0x20, 16 + 8 * argument), step(0x15, value, no="allow")]
    code += [step(0x06, 0x00050000 | answer), step(0x06, 0x7FFF0000, label="allow")]
    program = seccomp_filter.assemble(code)
    return sys.executable, "-c", OLDER, program.hex()
