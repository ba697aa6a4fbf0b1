"""One host with many children, as a program of its own, to be measured.

    python -m benchmarks.crowd run COUNT ROOT -- COMMAND [ARG]...
    python -m benchmarks.crowd hold COUNT ROOT -- COMMAND [ARG]...

`run` starts COUNT children, waits until all are gone and exits 0 if each ended with 0.
`hold` prints "empty", waits for a line on standard input, starts the children, and
keeps them until its standard input ends. Standard output is the children's too.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from benchmarks.hosts import HostedChild, open_host, run_trio
from benchmarks.measure import MeasureError


def crowd_command(mode: str, count: int, root: Path, child: Sequence[str]) -> list[str]:
    """Return the command line of this program."""
    words = [mode, str(count), str(root), "--", *child]
    return [sys.executable, "-m", "benchmarks.crowd", *words]


async def run_crowd(count: int, root: Path, child: Sequence[str]) -> int:
    """Start the children and wait for all; return 1 if one of them failed."""
    statuses: list[int] = []

    async def attend(one: HostedChild) -> None:
        statuses.append(await one.wait_gone())

    async with open_host(root) as host, trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(attend, await host.spawn(child))
    return int(any(statuses))


async def hold_crowd(count: int, root: Path, child: Sequence[str]) -> int:
    """Start the children when told to and keep them until standard input ends."""
    async with open_host(root) as host, trio.lowlevel.FdStream(os.dup(0)) as orders:
        print("empty", flush=True)
        if await orders.receive_some():
            for _ in range(count):
                await host.spawn(child)
            await orders.receive_some()
    return 0


def main(argv: Sequence[str]) -> int:
    """Run one of the two modes; a host that cannot be started is one line."""
    if len(argv) < 5 or argv[0] not in {"run", "hold"} or argv[3] != "--":
        print((__doc__ or "").split("\n\n")[1], file=sys.stderr)
        return 2
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()  # as a daemon does
    mode = run_crowd if argv[0] == "run" else hold_crowd
    try:
        return run_trio(mode, int(argv[1]), Path(argv[2]), argv[4:])
    except MeasureError as error:
        print(f"crowd: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
