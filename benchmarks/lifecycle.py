"""Start and end of a child: from spawn to its first reply, after kill -9.

The host runs in this program, idle but for the one child. Spawns are compared with a
bare `posix_spawn` of the same child, in turn. A killed child holds open files, half of
a 1 MiB WRITE and, in one of the two measures, a grandchild in a session of its own that
keeps FD 3 open; after each kill it is checked that nothing is left. At last hosts of their
own are killed, with three such children each: of their trees nothing may be left.
"""

import fcntl
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from benchmarks.crowd import crowd_command
from benchmarks.hosts import Host, open_host, run_trio
from benchmarks.measure import MeasureError, percentile, workplace
from benchmarks.options import parse, parser
from benchmarks.probes import Fifo, fifo
from benchmarks.report import Report, Row, at_most

NAME = "lifecycle"
METHOD = "one host in this program, idle but for one child"
ROUNDS = 300
ACCUSTOMED = 3
"""Children after which one waits, forked, for the next order (ADR 47)."""
WARM_UP = 10  # the first spawns import, allocate and fault in what later ones reuse
KILL_AIM = at_most(10.0)
SPAWN_AIM = at_most(2.0)
HOST_KILL_AIM = at_most(1000.0)
HOST_KILLS = 30  # each starts a host; no more than rounds
CROWD = 3
TREE_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds
FAR_FD = 10  # above every number that a child is given


class Bench:
    """A host, the FIFO of its probes, and the directory of both."""

    def __init__(self, host: Host, place: Path, heard: Fifo) -> None:
        self._host = host
        self._heard = heard
        self._busy = ["-f", str(place / "read.dat"), "-w", str(place / "torn.dat")]

    async def kill_ms(self, *, grandchild: bool) -> float:
        """Kill a busy child and return how long anything of it was left.

        Args:
            grandchild: the child has left one that holds FD 3.

        Raises:
            MeasureError: something of it is left for good.
        """
        before = self._holdings()
        extra = ["-g"] if grandchild else []
        child = await self._host.spawn(self._heard.probe(*self._busy, *extra))
        probe = await self._heard.next()
        watched = [probe.pid, *([probe.grandchild] if grandchild else [])]
        pidfds = [os.pidfd_open(pid) for pid in watched]
        begun_ns = time.monotonic_ns()
        signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        status = await child.wait_gone()
        for pidfd in pidfds:
            with trio.move_on_after(TREE_TIMEOUT_S):
                await trio.lowlevel.wait_readable(pidfd)
        taken_ms = (time.monotonic_ns() - begun_ns) / 1e6
        ended, _, _ = select.select(pidfds, [], [], 0)
        for pidfd in pidfds:
            os.close(pidfd)
        if status != 128 + signal.SIGKILL or len(ended) != len(pidfds):
            raise MeasureError(f"a child with status {status} was called gone")
        if (after := self._holdings()) != before:
            raise MeasureError(
                f"a killed child left descriptors, rows: {before}, {after}"
            )
        return taken_ms

    async def spawn_ms(self) -> float:
        """Spawn a child on the host and return how long its first reply took."""
        begun_ns = time.monotonic_ns()
        child = await self._host.spawn(self._heard.probe())
        probe = await self._heard.next()
        pidfd = os.pidfd_open(probe.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        await child.wait_gone()
        return (probe.replied_ns - begun_ns) / 1e6

    async def bare_spawn_ms(self) -> float:
        """Spawn the same child without a host, and answer it by hand."""
        begun_ns = time.monotonic_ns()
        pid, connection = start_bare(self._heard.probe())
        pidfd = os.pidfd_open(pid)
        probe = await self._heard.next()
        connection.close()
        await trio.lowlevel.wait_readable(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)  # noqa: ASYNC222 - it has ended
        os.close(pidfd)
        return (probe.replied_ns - begun_ns) / 1e6

    def _holdings(self) -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), self._host.rows()


def start_bare(argv: list[str]) -> tuple[int, socket.socket]:
    """Start a child with a socket as FD 3 and answer its one request.

    Returns:
        Its pid and the connection.
    """
    ours, theirs = socket.socketpair()
    # Not 3 already: dup2 onto itself would leave the descriptor to close at exec.
    far = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, FAR_FD)
    actions = [(os.POSIX_SPAWN_DUP2, far, 3)]
    pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)
    theirs.close()
    os.close(far)
    ours.recv(64)
    ours.send(b"OK\n")
    return pid, ours


async def measure(rounds: int) -> list[Row]:
    """Take every figure on one host."""
    with workplace() as place, fifo(place) as heard:
        (place / "read.dat").write_bytes(b"x" * 4096)
        async with open_host(place) as host:
            bench = Bench(host, place, heard)
            kills: dict[bool, list[float]] = {False: [], True: []}
            spawns: list[tuple[float, float]] = []
            for _ in range(ACCUSTOMED):
                await bench.spawn_ms()
            for number in range(WARM_UP + rounds):
                taken = {held: await bench.kill_ms(grandchild=held) for held in kills}
                # In turn, odd rounds backwards, so that a steady drift cancels out.
                hosted_first = await bench.spawn_ms() if number % 2 else None
                bare_ms = await bench.bare_spawn_ms()
                hosted_ms = hosted_first or await bench.spawn_ms()
                if number >= WARM_UP:
                    spawns.append((bare_ms, hosted_ms))
                    for held, taken_ms in taken.items():
                        kills[held].append(taken_ms)
    return [
        kill_row("kill -9 to all freed, p99", kills[False]),
        kill_row("kill -9 to all freed, p99, grandchild on FD 3", kills[True]),
        spawn_row(spawns),
    ]


def host_kill_ms() -> float:
    """Kill a host with a tree beneath it; return how long anything of that was left.

    Raises:
        MeasureError: something of it is left for good.
    """
    with workplace() as place, fifo(place) as heard:
        command = crowd_command("hold", CROWD, place, heard.probe("-g"))
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as host:
            if host.stdin is None or host.stdout is None:
                raise MeasureError("a host without pipes")
            host.stdout.readline()
            host.stdin.write(b"go\n")
            host.stdin.flush()
            probes = [heard.next_blocking() for _ in range(CROWD)]
            pads = {_parent_of(probe.pid) for probe in probes}
            tree = [
                *pads,
                *(pid for one in probes for pid in (one.pid, one.grandchild)),
            ]
            pidfds = [os.pidfd_open(pid) for pid in tree]
            begun_ns = time.monotonic_ns()
            host.kill()
            left = set(pidfds)
            while left:
                ended, _, _ = select.select(left, [], [], TREE_TIMEOUT_S)
                if not ended:
                    raise MeasureError(f"{len(left)} of a killed host's tree are left")
                left -= set(ended)
            taken_ms = (time.monotonic_ns() - begun_ns) / 1e6
            for pidfd in pidfds:
                os.close(pidfd)
    return taken_ms


def _parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return int(stat.rpartition(")")[2].split()[1])


def host_kill_row(times_ms: Sequence[float]) -> Row:
    """Return the slowest of the kills of hosts."""
    data = {"p50_ms": statistics.median(times_ms), "max_ms": max(times_ms)}
    detail = f"p50 {data['p50_ms']:.2f}, of {len(times_ms)}"
    name = "kill -9 of a host to its whole tree gone, max"
    return Row(name, data["max_ms"], "ms", HOST_KILL_AIM, detail, data)


def kill_row(name: str, times_ms: Sequence[float]) -> Row:
    """Return the p99 of the kills."""
    data = {
        "p50_ms": statistics.median(times_ms),
        "p99_ms": percentile(times_ms, 99),
        "max_ms": max(times_ms),
    }
    detail = f"p50 {data['p50_ms']:.2f}, max {data['max_ms']:.2f}"
    return Row(name, data["p99_ms"], "ms", KILL_AIM, detail, data)


def spawn_row(pairs: Sequence[tuple[float, float]]) -> Row:
    """Return the median of what the host adds to a neighbouring bare spawn."""
    data = {
        "bare_ms": statistics.median(bare for bare, _ in pairs),
        "host_ms": statistics.median(hosted for _, hosted in pairs),
        "host_p99_ms": percentile([hosted for _, hosted in pairs], 99),
    }
    added_ms = statistics.median(hosted - bare for bare, hosted in pairs)
    detail = f"{data['host_ms']:.2f} / bare posix_spawn {data['bare_ms']:.2f}"
    return Row("spawn to first reply, added", added_ms, "ms", SPAWN_AIM, detail, data)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    given = parse(parser(NAME, METHOD, rounds=ROUNDS), argv)
    try:
        rows = run_trio(measure, given.rounds)
        kills = [host_kill_ms() for _ in range(min(HOST_KILLS, given.rounds))]
        rows.append(host_kill_row(kills))
    except MeasureError as error:
        rows = [Row("a child's life", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
