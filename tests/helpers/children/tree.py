"""A child that grows a tree which is hard to find, as `tree.sh` does, faster.

argv: a unique number of seconds, which every process of the tree carries in its
arguments. Daemons by double fork, each with a session of its own and FD 3; some ignore
what can be ignored, some fork on.
"""

import os
import signal
import sys

SLEEP = ["sleep", sys.argv[1]]


def daemon(environment: dict[str, str]) -> None:
    """Double fork; the grandchild sleeps in a session of its own."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", SLEEP, environment)  # noqa: S606 - no shell is wanted


def main() -> None:
    """Grow, and go on growing slowly while writing."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(3):
        daemon({})
        daemon(dict(os.environ))
    os.write(3, b"OPEN grown-py a false\n")
    fileno = os.read(3, 64).split()[-1]
    for _ in range(30):
        try:
            os.write(3, b"WRITE %b 4\nabcd" % fileno)
            os.read(3, 64)
        except ConnectionError:  # the host is gone
            break
        daemon({})
    os.execve("/bin/sleep", SLEEP, {})  # noqa: S606 - no shell is wanted


main()
