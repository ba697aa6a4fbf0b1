"""An older kernel: a filter that changes one call, and a command in it."""

from supervisor.sandbox import seccomp_filter
from tests.helpers.steps import Steps, steps_before

OLDER = """
from supervisor.spawn.launchpad.layers import privileges
from supervisor.spawn.launchpad.layers.privileges import forbid_new_privileges
if os.geteuid():
    forbid_new_privileges()
privileges.install_filter(bytes.fromhex(args[0]))
"""


def without(
    number: int, answer: int, value: int | None = None, *, argument: int = 0
) -> Steps:
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
    return steps_before(OLDER, program.hex())
