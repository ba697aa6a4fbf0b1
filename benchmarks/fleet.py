"""A fleet on machines in namespaces of this one, beside its daemons and Ray.

`tests.helpers.fleetmachines` makes the machines. Doors and control sockets are asked from
this program, which is on none of them: a path of a socket is reached from any net
namespace. Beside the fleet stand, from the same run, its daemons without it, and Ray's own
actors (`fleet_ray`). `--kills` kills nodes of a further fleet (`fleet_kills`), and ends
each part of another one (`fleet_ends`). Needs root.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.fleet_ends import rows_of_ends
from benchmarks.fleet_kills import AIMED, rows_of_kills
from benchmarks.fleet_ray import rows_of_ray
from benchmarks.measure import MeasureError, in_turn, percentile, run, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row, at_most
from supervisor.client import HostClient
from supervisor.cluster.client import FleetClient
from supervisor.control.client import ControlError
from tests.helpers.fleetmachines import (
    Machine,
    UnavailableError,
    joined,
    machines,
    until,
)

NAME = "fleet"
METHOD = "sandhost fleet between machines in namespaces, on Ray"
ROUNDS = 100
CHILDREN, MOST_NODES = 1000, 4
ASKED, COMMANDS = 100, 9
CALLERS = 64
KEY = "sk-bench"
SLEEP = ["/bin/sleep", "100000"]
PROVIDER_PORT = 8000
COUNTED_S = 10.0
"""From a kill until what is left is counted."""

TOGETHER_S = 30.0
"""For the callers to start, before they all call."""

CONFIG = f"""
max_children = {2 * CHILDREN}
[llm]
base_url = "http://127.0.0.1:{PROVIDER_PORT}/v1"
api_key_file = "KEY_FILE"
max_tokens = 10
[fleet]
lease = "15s"
[fleet.quota]
max_tokens = 100
window = "never"
"""
"""A call of the callers reserves more than half of that quota."""

CALLER = """
import socket, sys, time
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
door = socket.socket(fileno=3)
door.sendall(b"LLM_CHAT false 0 0 12 0\\n!wait=5 abcd")
sys.exit(0 if door.makefile("rb").readline().startswith(b"OK ") else 3)
"""


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument("--children", type=int, default=CHILDREN, metavar="N")
    options.add_argument("--nodes", type=int, default=MOST_NODES, metavar="N")
    options.add_argument(
        "--kills",
        type=int,
        default=0,
        metavar="N",
        help=f"kill nodes so often, about 10 s each, and end each part for 20 minutes"
        f" (default none, the aim {AIMED})",
    )
    given = parse(options, argv)
    try:
        rows = measure(given.sandhost, given.rounds, given.nodes, given.children)
    except UnavailableError as why:
        rows = [Row("a fleet", None, "", detail=str(why), is_absent=True)]
    except (AssertionError, ControlError, MeasureError) as why:
        rows = [Row("a fleet", None, "", detail=str(why))]
    rows += rows_of_kills(given.kills)
    if given.kills:
        rows += rows_of_ends()
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


def measure(sandhost: Path, rounds: int, nodes: int, children: int) -> list[Row]:
    """Take all figures on one fleet."""
    names = [f"m{number}" for number in range(nodes)]
    with workplace(Path(tempfile.gettempdir())) as place:
        key = place / "key"
        key.write_text(f"{KEY}\n")
        key.chmod(0o600)
        config = CONFIG.replace("KEY_FILE", str(key))
        return measure_on(names, config, sandhost, rounds, children)


def measure_on(
    names: Sequence[str], config: str, sandhost: Path, rounds: int, children: int
) -> list[Row]:
    """Take all figures on machines with such names."""
    with machines(*names, config=config) as found:
        for one in found:
            start_provider(one)
        begun_s = time.monotonic()
        address, token_file = joined(*found)
        taken_s = time.monotonic() - begun_s
        rows = [Row(f"a fleet of {len(names)} nodes is up", taken_s, "s")]
        rows += rows_of_create(found, rounds)
        rows += rows_of_placing(found, children)
        rows += rows_of_ps(found, sandhost, children // 2)
        rows.append(row_of_callers(found))
        rows.append(row_of_kill(found[0], found[-1]))
        rows += rows_of_ray(found[-1], address, token_file)
    return rows


# Creating


def rows_of_create(found: Sequence[Machine], rounds: int) -> list[Row]:
    """Return what a child takes by the fleet and by its node's daemon alone."""
    head, node = found[0], found[1]
    fleet, daemon = FleetClient(head.control), HostClient(node.control)
    numbers = iter(range(2 * rounds))

    def local() -> None:
        daemon.spawn(SLEEP, name=f"local-{next(numbers)}")

    def far() -> None:
        fleet.ask("spawn", request(f"far-{next(numbers)}", SLEEP, node=node.name))

    pairs = [in_turn(n, [partial(ms, local), partial(ms, far)]) for n in range(rounds)]
    locals_ms, fars_ms = zip(*pairs, strict=True)
    more_ms = statistics.median(fars_ms) - statistics.median(locals_ms)
    data = {
        "local": statistics.median(locals_ms),
        "fleet": statistics.median(fars_ms),
        "local_p95": percentile(locals_ms, 95),
        "fleet_p95": percentile(fars_ms, 95),
    }
    said = f"{data['fleet']:.1f} ms on another node, {data['local']:.1f} by its daemon"
    return [Row("create, beyond a local one", more_ms, "ms", at_most(4.0), said, data)]


def rows_of_placing(found: Sequence[Machine], children: int) -> list[Row]:
    """Return what many children take by the fleet, and by the same daemons alone."""
    share = children // len(found)
    one_s = start_locally(found[:1], share, "one")
    alone_s = start_locally(found, share, "all")
    ask = partial(FleetClient(found[0].control).ask, "spawn")
    fleet_s = ms(partial(ask, request("many", SLEEP, count=share * len(found)))) / 1000
    data = {"fleet_s": fleet_s, "daemons_s": alone_s, "one_daemon_s": one_s}
    said = f"{fleet_s:.2f} s; the daemons, all at once: {alone_s:.2f} s"
    name = f"{share * len(found)} children over {len(found)} nodes, of their daemons"
    return [
        Row(name, fleet_s / alone_s, "", at_most(1.5), said, data),
        Row(f"one daemon alone with {share}", one_s, "s"),
    ]


def start_locally(found: Sequence[Machine], share: int, name: str) -> float:
    """Start children by each daemon, one connection for each; return the seconds."""
    failures: list[ControlError] = []

    def start(one: Machine) -> None:
        client = HostClient(one.control)
        try:
            for number in range(share):
                client.spawn(SLEEP, name=f"{name}-{number}")
        except ControlError as why:
            failures.append(why)

    threads = [Thread(target=start, args=(one,)) for one in found]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise MeasureError(str(failures[0]))
    return time.perf_counter() - begun_s


def rows_of_ps(found: Sequence[Machine], sandhost: Path, children: int) -> list[Row]:
    """Return what a list takes, at a door and as a command, with so many children."""
    fleet = FleetClient(found[1].control)
    for row in fleet.ask("ps")["children"][children:]:
        fleet.ask("kill", {"name": row["name"], "signal": "KILL"})
    until(lambda: running(fleet) <= children)
    door_ms = [ms(partial(fleet.ask, "ps")) for _ in range(ASKED)]
    words = [str(sandhost), "fleet", "ps", "--json", "--control", found[1].control]
    command_ms = [ms(partial(run, words)) for _ in range(COMMANDS)]
    listed = len(fleet.ask("ps")["children"])
    said = f"{children} run, {listed} are listed"
    return [
        Row("ps at a door", statistics.median(door_ms), "ms", at_most(20.0), said),
        Row("ps as a command", statistics.median(command_ms), "ms", at_most(300.0)),
    ]


def running(fleet: FleetClient) -> int:
    """Return how many children run."""
    return sum(row["state"] == "running" for row in fleet.ask("ps")["children"])


def request(name: str, command: Sequence[str], **how: Any) -> dict[str, Any]:
    """Return the arguments of `spawn`."""
    words = {"name": name, "program": {"command": command}, "count": how.get("count")}
    return {**words, "needs": {"node": how["node"]} if "node" in how else {}}


def ms(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1000


# One account


def start_provider(one: Machine) -> None:
    """Start a stand-in for a model's provider on a machine."""
    words = (sys.executable, "-m", "demo.provider", "--port", str(PROVIDER_PORT))
    one.start(*words, "--key", KEY, "--log", str(one.where / "asked"))


def row_of_callers(found: Sequence[Machine]) -> Row:
    """Return how many too many, or too few, callers have got the room for one call."""
    fleet = FleetClient(found[0].control)
    at = time.time() + TOGETHER_S
    words = [sys.executable, "-I", "-S", "-c", CALLER, str(at)]
    rows = fleet.ask("spawn", request("caller", words, count=CALLERS))
    names = [row["name"] for row in rows]
    statuses = [fleet.ask("wait", {"name": name})["status"] for name in names]
    if set(statuses) - {0, 3}:
        raise MeasureError(f"callers ended with {sorted(set(map(str, statuses)))}")
    admitted = statuses.count(0)
    asked = sum(
        '"event": "request"' in line
        for one in found
        if (one.where / "asked").exists()
        for line in (one.where / "asked").read_text().splitlines()
    )
    said = f"{admitted} of {CALLERS} admitted, {asked} asked the provider"
    off = max(abs(admitted - 1), abs(asked - 1))
    return Row("callers at one call's head-room, off by", off, "", at_most(0), said)


# Kills


def row_of_kill(head: Machine, node: Machine) -> Row:
    """Return what is left of a node's fleet children after kill -9 of its daemon."""
    fleet = FleetClient(head.control)
    words = ["/bin/sh", "-c", "setsid sleep 27182 & exec sleep 27182"]
    fleet.ask("spawn", request("killed", words, node=node.name, count=10))
    until(lambda: len(node.pids("sleep 27182")) >= 20)
    node.kill_daemon()
    time.sleep(COUNTED_S)
    left = len(node.pids("sleep 27182"))
    name = f"left of 20 processes {COUNTED_S:g} s after kill -9: sandhost's daemon"
    return Row(name, left, "", at_most(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
