"""A host in its own process, for tests that kill it or trace its calls.

It has imported everything and forks for each line on stdin, a JSON object: `where` (a
directory; the root is `root` in it), `children` (a list of commands), and what differs
from the defaults of `ChildSpec`. The fork becomes the host of these children and says
on stdout, in lines:

    host PID LAUNCHPAD     before the first spawn
    up PID...              when all children run
    ended STATUS           the host is gone: its wait status; the next line may come
"""

import json
import os
import sys
from typing import Any

import trio

from hostlib.journal import open_journal
from hostlib.log import Log
from hostlib.threads import in_thread
from supervisor.host import open_host
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad
from supervisor.spec import ChildSpec, minimal_env


def say(text: str) -> None:
    """Say one line."""
    os.write(1, text.encode() + b"\n")


async def serve(order: dict[str, Any], launchpad: LaunchpadProcess) -> None:
    """Be a host until its children have ended."""
    where = order.pop("where")
    commands = order.pop("children")
    out = os.open(f"{where}/out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    spec: dict[str, Any] = {
        "cwd": where,
        "root": f"{where}/root",
        "env": {**minimal_env(where), **order.pop("env", {})},
        "stdio": (null, out, 2),
        **order,
    }
    journal = open_journal(f"{where}/journal", say)
    # Quiet: the first line of a log imports the logger, and its files may not open.
    log = Log("ERROR")
    async with open_host(launchpad, journal=journal, log=log) as host:
        await in_thread(os.getpid)  # from now on one worker thread is there, and waits
        children = [await host.spawn(ChildSpec(tuple(c), **spec)) for c in commands]
        pids = [child.process.pid for child in children if child.process is not None]
        say(f"up {' '.join(map(str, pids))}")
        for child in children:
            await child.wait_gone()


def main() -> None:
    """Fork a host for each order."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            launchpad = start_launchpad()
            say(f"host {os.getpid()} {launchpad.pid}")
            trio.run(serve, order, launchpad)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        say(f"ended {status}")


main()
