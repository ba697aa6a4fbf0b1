"""Steps that a process takes before it is a command.

A filter, a namespace, a limit.

    sandhost("run", "--", "true", wrapper=steps_before("os.nice(int(args[0]))", "5"))

A wrapper is words before a command. That of steps is an interpreter that takes them and
becomes the command; where commands are forked (`forkserver`), the fork takes them.
"""

import sys

STARTED = """
import os, sys
number = int(sys.argv[1])
args, command = sys.argv[2:2 + number], sys.argv[2 + number:]
"""


class Steps(tuple[str, ...]):  # noqa: SLOT001 - a tuple takes none
    """The words of an interpreter that takes steps; made by `steps_before`.

    Attributes:
        code: the steps, in Python, which find `args`, `os` and `sys`.
        args: theirs.
    """

    code: str
    args: tuple[str, ...]


def steps_before(code: str, *args: str) -> Steps:
    """Return what takes steps before a command.

    Args:
        code: statements; they end the process by `sys.exit` where they fail.
        args: the code finds them under this name.
    """
    whole = f"{STARTED}{code}\nos.execv(command[0], command)\n"
    words = Steps((sys.executable, "-c", whole, str(len(args)), *args))
    words.code, words.args = code, args
    return words


def ending(steps: Steps | None, code: str) -> Steps:
    """Return steps that are all there is to run: no command follows them.

    Args:
        steps: the first ones; None for none.
        code: runs then, with the same names; its output is the command's.
    """
    first, args = (steps.code, steps.args) if steps is not None else ("", ())
    return steps_before(f"{first}{code}\nsys.stdout.flush()\nos._exit(0)\n", *args)
