"""A command on a workspace that is killed at one of its calls."""

import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

EVENTS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
     "os.chmod", "os.chown", "os.utime", "os.removexattr", "os.setxattr", "shutil.rmtree"}
)  # fmt: skip


def is_killed_at(
    number: int,
    command: Callable[[], object],
    calls: tuple[tuple[ModuleType, str], ...] = (),
) -> bool:
    """Run a command in a process that ends at one of its calls; tell whether it did.

    Args:
        number: of the call, from 0.
        command: the function that is run.
        calls: functions that count as well: module, name.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _count_down(number, calls)
            command()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _count_down(number: int, calls: tuple[tuple[ModuleType, str], ...]) -> None:
    left = number

    def call() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, _: object) -> None:
        if event in EVENTS:
            call()

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            call()
            return function(*arguments)

        return wrapped

    for module, name in calls:  # of which the interpreter does not tell
        setattr(module, name, counted(getattr(module, name)))
    sys.addaudithook(audit)
