"""`make soak`: a daemon whose children come and go, and that may not grow.

Each round spawns children that end in every way (by themselves, by SIGKILL with a file
open, with a grandchild left behind, with tools running and contents kept, stopped on
request), follows a log and leaves, and reloads. When all are gone the daemon's descriptors, tasks, threads' memory and rows are
taken. After the warm-up the first two must be what they were, in every round, and the
memory's slope must be zero: what it says at the end is compared with what it said when a
quarter of the time was over.

Exit status: 0 nothing grows, 1 something does.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.daemon import daemon
from benchmarks.measure import MeasureError, workplace
from benchmarks.options import add_sandhost
from supervisor.client import HostClient
from supervisor.sandbox.groups import PREFIX, hierarchies

WARM_UP_ROUNDS = 5
"""Imports, worker threads and the allocator's pools are there after these."""

MEMORY_BYTES = 2 << 20
"""Memory that the allocator may keep at the end: its arenas are 1 MiB each."""

SETTLE_S = 30.0
"""Longest wait until what a round started is gone."""

CHILDREN = (
    "echo hello; exec true",
    'printf "OPEN a w false\\n" >&3; read -r r <&3; kill -9 $$',
    "setsid sleep 1000 & exit 3",
    "head -c 200000 /dev/zero; exec sleep 1000",
)
"""Scripts; the last one has to be stopped."""

SERVICES = """
[toolexec]
[tools]
enabled = ["read_fd", "search_fd"]
[sidecar.system]
kind = "c-cpp"
allow = ["seq", "sh", "sleep"]
[policy.services]
sandbox = "none"
limits = { bytes = "1G" }
"""

USER = Path(__file__).with_name("soak_child.py")
"""The child that uses them, and dies in the middle."""

USERS = 2
"""Of these in a round."""


class Figures(NamedTuple):
    """Counts of an idle daemon, and its memory."""

    descriptors: int
    tasks: int
    threads: int
    rss_bytes: int
    clients: int
    groups: int


def groups_of(pid: int) -> int:
    """Return how many groups of processes a host has, in all hierarchies."""
    pattern = f"{PREFIX}{pid}-*"
    return sum(len([*Path(h.group).glob(pattern)]) for h in hierarchies())


def play(client: HostClient, place: Path) -> None:
    """Play one round, and wait until nothing of it is left."""
    names = [
        client.spawn(["/bin/sh", "-c", script], cwd=str(place)).name
        for script in CHILDREN * 4
    ]
    proofs = [place / f"used-{number}" for number in range(USERS)]
    for proof in proofs:
        client.spawn([sys.executable, "-I", str(USER), str(proof)], policy="services")
    stays = names[len(CHILDREN) - 1]
    for _ in islice(client.logs(stays, follow=True), 2):
        pass
    client.reload()
    for name in names[len(CHILDREN) - 1 :: len(CHILDREN)]:
        client.stop_child(name)
    deadline = time.monotonic() + SETTLE_S
    while client.stats()["children"] > 1:
        if time.monotonic() > deadline:
            raise MeasureError(f"children do not go: {client.ps()}")
        time.sleep(0.01)
    for proof in proofs:
        try:
            proof.unlink()
        except FileNotFoundError:
            raise MeasureError("a child could not use what it should have") from None


def figures(client: HostClient, pid: int) -> Figures:
    """Return what the daemon holds once the connections of the round are closed."""
    stats = {}
    for _ in range(100):
        stats = client.stats()
        if stats["control_connections"] == 1 and stats["clients"] == 1:
            break
        time.sleep(0.01)
    used = stats["usage"]
    return Figures(
        descriptors=used["descriptors"],
        tasks=stats["tasks"],
        threads=used["threads"],
        rss_bytes=used["rss_bytes"],
        clients=stats["clients"],
        groups=groups_of(pid),
    )


def growth(taken: Sequence[Figures]) -> dict[str, float]:
    """Return by how much each figure grew from the second quarter to the last one."""
    quarter = max(1, len(taken) // 4)
    early, late = taken[quarter : 2 * quarter] or taken[:1], taken[-quarter:]

    def median(some: Sequence[Figures], name: str) -> float:
        values: list[float] = [getattr(row, name) for row in some]
        return statistics.median(values)

    names = Figures._fields
    return {name: median(late, name) - median(early, name) for name in names}


def course(taken: Sequence[Figures], parts: int = 8) -> list[int]:
    """Return the median memory of each part of the time, bytes: a leak is a slope."""
    size = max(1, len(taken) // parts)
    pieces = [taken[at : at + size] for at in range(0, len(taken), size)]
    return [int(statistics.median(row.rss_bytes for row in rows)) for rows in pieces]


def soak(sandhost: Path, seconds: float) -> list[Figures]:
    """Play rounds for so long; return what the daemon held after each."""
    taken: list[Figures] = []
    with (
        workplace() as place,
        daemon(sandhost, place, 1, SERVICES) as (process, client),
    ):
        for _ in range(WARM_UP_ROUNDS):
            play(client, place)
        end = time.monotonic() + seconds
        while not taken or time.monotonic() < end:
            play(client, place)
            taken.append(figures(client, process.pid))
        process.terminate()
        status = process.wait(SETTLE_S)
        if status != 0:
            raise MeasureError(f"the daemon exited with {status}")
    return taken


def main(argv: Sequence[str]) -> int:
    """Soak, print, and return the exit status."""
    options = argparse.ArgumentParser(prog="make soak")
    options.add_argument("--seconds", type=float, default=3600.0, metavar="S")
    add_sandhost(options)
    given = options.parse_args(argv)
    try:
        taken = soak(given.sandhost, given.seconds)
    except MeasureError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    grown = growth(taken)
    limits = dict.fromkeys(Figures._fields, 0.0) | {"rss_bytes": MEMORY_BYTES}
    # A worker thread idles out after ten seconds, and comes back.
    limits |= {"threads": 2.0}
    faults = [name for name, more in grown.items() if more > limits[name]]
    told = {"rounds": len(taken), "growth": grown, "grows": faults}
    print(json.dumps({**told, "rss_bytes": course(taken)}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
