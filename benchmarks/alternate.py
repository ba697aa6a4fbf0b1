"""Times commands in turn: how long each takes from its start to its exit.

Also a program of its own (standard library only, starts fast), so that commands which
speak on FD 3 can be timed inside a child, where they belong:

    alternate.py ROUNDS COMMANDS

COMMANDS is JSON, a list of argument lists. Prints JSON: one list of milliseconds per
command. The first round only warms up and is not printed.
"""

import json
import os
import sys
import time

QUIET = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]


def time_command(argv: list[str]) -> float:
    """Return the milliseconds from the spawn of a command to its exit.

    It inherits every inheritable descriptor, FD 3 among them, and prints nothing.

    Raises:
        RuntimeError: it did not exit with 0.
        OSError: it cannot be started.
    """
    begun_ns = time.monotonic_ns()
    pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=QUIET)
    _, status = os.waitpid(pid, 0)
    taken_ns = time.monotonic_ns() - begun_ns
    if status:
        code = os.waitstatus_to_exitcode(status)
        name = " ".join([os.path.basename(argv[0]), *argv[1:2]])  # noqa: PTH119
        raise RuntimeError(f"{name} ended with status {code}")
    return taken_ns / 1e6


def alternate(rounds: int, commands: list[list[str]]) -> list[list[float]]:
    """Time every command once a round, odd rounds backwards; see `time_command`."""
    times: list[list[float]] = [[] for _ in commands]
    order = list(range(len(commands)))
    for number in range(rounds + 1):
        for i in order:
            taken_ms = time_command(commands[i])
            if number:
                times[i].append(taken_ms)
        order.reverse()
    return times


if __name__ == "__main__":
    try:
        print(json.dumps(alternate(int(sys.argv[1]), json.loads(sys.argv[2]))))
    except (RuntimeError, OSError) as problem:
        sys.exit(f"alternate: {problem}")
