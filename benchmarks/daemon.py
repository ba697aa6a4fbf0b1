"""A daemon with a thousand children: costs of asking, spawning, idling, stopping.

The daemon is the command `sandhost serve` in a process of its own; the questions come
over its control socket from this program. Beside them stand, from the same run, a bare
round trip over a unix socket between two processes, and `posix_spawn` of the same child.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from benchmarks.idle import usage
from benchmarks.measure import MeasureError, clean_environment, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row, at_least, at_most
from supervisor.client import ControlError, HostClient

NAME = "daemon"
METHOD = "sandhost serve with sleeping children; asked over its control socket"
ROUNDS = 1
CHILDREN = 1000
ASKED = 300
SPAWNED = 300
WINDOW_S = 5.0
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
WATCHED_WITHIN_S = 30.0
ECHO = (
    sys.executable,
    "-ISc",
    "import os\nwhile data := os.read(0, 4096): os.write(1, data)",
)
CHILD = ("/bin/sleep", "100000")


class Figures(NamedTuple):
    """The figures of one daemon; times in ms, except the stop."""

    ps_ms: float
    round_trip_ms: float
    bare_ms: float
    spawns_per_s: float
    walled_per_s: float
    bare_spawns_per_s: float
    idle_percent: float
    worst_lag_ms: float
    longest_slice_ms: float
    stop_s: float


@contextmanager
def daemon(
    sandhost: Path, place: Path, children: int, more: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], HostClient]]:
    """Run a daemon with children, ready; at the end it is killed if it still runs."""
    config = place / "daemon.toml"
    words = ", ".join(f'"{word}"' for word in CHILD)
    config.write_text(
        f'[host]\nruntime_dir = "{place}/run"\nstate_dir = "{place}/state"\n'
        f"max_children = {children + SPAWNED + 10}\n[policy.plain]\nsandbox = 'none'\n"
        + more
        + "".join(f"[child.c{n}]\ncommand = [{words}]\n" for n in range(children))
    )
    address = str(place / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address)
        ear.settimeout(START_TIMEOUT_S)
        command = [
            str(sandhost),
            "serve",
            "--config",
            str(config),
            "--log-level",
            "error",
        ]
        env = {**clean_environment(), "NOTIFY_SOCKET": address}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env) as process:
            try:
                while not ear.recv(4096).startswith(b"READY=1"):
                    pass  # how many children have begun
                yield process, HostClient(f"{place}/run/control")
            except TimeoutError:
                raise MeasureError(
                    f"the daemon was not ready in {START_TIMEOUT_S:g} s"
                ) from None
            finally:
                process.kill()


def time_ms(call: Any, times: int) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


def question_ms(path: str) -> float:
    """Return a round trip on an open connection: `stats` counts a few rows only."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)

        def ask() -> None:
            line.sendall(b'{"v":1,"do":"files"}\n')
            if not line.recv(65_536).endswith(b"\n"):
                raise MeasureError("no whole answer")

        return time_ms(ask, ASKED)


def bare_ms() -> float:
    """Return a round trip of the same bytes with a process that does nothing else."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        subprocess.Popen(ECHO, stdin=theirs.fileno(), stdout=theirs.fileno()) as echo,
    ):
        theirs.close()

        def ask() -> None:
            ours.sendall(b'{"v":1,"do":"files"}\n')
            if not ours.recv(4096):
                raise MeasureError("the bare peer has ended")

        taken = time_ms(ask, ASKED)
        ours.shutdown(socket.SHUT_WR)
        echo.wait()
    return taken


def spawns_per_s(
    client: HostClient, total: int, policy: str | None, at_once: int = 4
) -> float:
    """Spawn short-lived children from a few connections; return their number a second.

    Args:
        client: of the daemon.
        total: children.
        policy: whose layers they get; None for the usual.
        at_once: connections.
    """
    failures: list[ControlError] = []

    def spawn() -> None:
        try:
            for _ in range(total // at_once):
                client.spawn(["/bin/true"], policy=policy)
        except ControlError as why:
            failures.append(why)

    threads = [Thread(target=spawn) for _ in range(at_once)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - begun
    if failures:
        raise MeasureError(str(failures[0]))
    return total / taken_s


def bare_spawns_per_s(total: int) -> float:
    """Start and wait for the same program without a host."""
    begun = time.perf_counter()
    for _ in range(total):
        os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], {}), 0)
    return total / (time.perf_counter() - begun)


def measure(sandhost: Path, children: int) -> Figures:
    """Take the figures of one daemon."""
    with workplace() as place, daemon(sandhost, place, children) as (process, client):
        if len(client.ps()) != children:
            raise MeasureError(f"not {children} children")
        # The CPU of a host that nobody asks, its samples and watches included.
        time.sleep(1.0)
        begun_s, before = time.monotonic(), usage([process.pid])
        time.sleep(WINDOW_S)
        idle = usage([process.pid]).cpu_s - before.cpu_s
        idle_percent = idle / (time.monotonic() - begun_s) * 100
        figures = {
            "ps_ms": time_ms(client.ps, 9),
            "round_trip_ms": question_ms(client.path),
            "bare_ms": bare_ms(),
            "spawns_per_s": spawns_per_s(client, SPAWNED, "plain"),
            "walled_per_s": spawns_per_s(client, SPAWNED // 3, None),
            "bare_spawns_per_s": bare_spawns_per_s(SPAWNED),
            "idle_percent": idle_percent,
            "worst_lag_ms": client.stats()["loop_lag_worst_s"] * 1000,
            "longest_slice_ms": longest_slice_ms(client),
        }
        begun_s = time.monotonic()
        process.terminate()
        status = process.wait(STOP_TIMEOUT_S)
        if status != 0:
            raise MeasureError(f"the daemon exited with {status}")
        return Figures(**figures, stop_s=time.monotonic() - begun_s)


def longest_slice_ms(client: HostClient) -> float:
    """Return how long sampling held the loop at most: for `ps`, and by itself.

    CPU time of the loop's thread. It samples by itself every ten seconds; until it has,
    there is only the one of `ps`.
    """
    deadline = time.monotonic() + WATCHED_WITHIN_S
    while not (stats := client.stats())["watching_longest_s"]:
        if time.monotonic() > deadline:
            raise MeasureError("the daemon does not watch its children")
        time.sleep(0.1)
    longest: float = max(stats["sampling_longest_s"], stats["watching_longest_s"])
    return longest * 1000


def rows_of(taken: Sequence[Figures], children: int) -> list[Row]:
    """Return the medians over the rounds."""

    def median(name: str) -> float:
        values: list[float] = [getattr(figures, name) for figures in taken]
        return statistics.median(values)

    bare = f"bare round trip {median('bare_ms'):.3f} ms"
    spawns = f"bare posix_spawn and wait: {median('bare_spawns_per_s'):.0f}/s"
    lag = "while it started them, too"
    return [
        Row(f"ps of {children} children", median("ps_ms"), "ms", at_most(200.0)),
        Row("control round trip", median("round_trip_ms"), "ms", at_most(1.0), bare),
        Row(
            "spawns without layers",
            median("spawns_per_s"),
            "/s",
            at_least(200.0),
            spawns,
        ),
        Row("spawns in all layers", median("walled_per_s"), "/s"),
        Row("CPU, idle", median("idle_percent"), "%", at_most(2.0)),
        Row(
            "the loop was late by at most",
            median("worst_lag_ms"),
            "ms",
            at_most(50.0),
            lag,
        ),
        Row(
            "sampling held the loop at most",
            median("longest_slice_ms"),
            "ms",
            at_most(5.0),
            "CPU time between two checkpoints",
        ),
        Row(f"stop of {children} children", median("stop_s"), "s", at_most(5.0)),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument("--children", type=int, default=CHILDREN, metavar="N")
    given = parse(options, argv)
    try:
        taken = [measure(given.sandhost, given.children) for _ in range(given.rounds)]
        rows = rows_of(taken, given.children)
    except (MeasureError, ControlError, TimeoutError) as error:
        rows = [Row("a daemon", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
