"""Ray's own actors with `subprocess.run`, beside the fleet's children.

    python -m benchmarks.fleet_ray ADDRESS BIND COUNT

is the driver, on one of the fleet's machines: it makes actors, has each run a program to
its end and then one that stays, and waits for the end of its input.
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import REPOSITORY, MeasureError
from benchmarks.report import Row
from supervisor.cluster.ray_processes import environment
from tests.helpers.fleetmachines import Machine, until

ACTORS = 10
COUNTED_S = 10.0
"""From a kill until what is left is counted."""

STAYS = "setsid sleep 31415 & exec sleep 31415"


def rows_of_ray(one: Machine, address: str, token_file: str) -> list[Row]:
    """Return how long Ray's actors take to start, and what kills leave of them.

    Its raylet is killed at the end.
    """
    words = one.words(
        sys.executable, "-m", "benchmarks.fleet_ray", address, one.address, str(ACTORS)
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, cwd=REPOSITORY, env=environment(token_file)
    ) as driver:
        line = driver.stdout.readline() if driver.stdout else b""
        if not line:
            raise MeasureError("Ray's own actors did not start")
        starts_ms = json.loads(line)
        until(lambda: len(one.pids("sleep 31415")) >= 2 * ACTORS)
        half = one.pids("ray::Runner")[: ACTORS // 2]
        one.kill(*half)
        time.sleep(COUNTED_S)
        of_actors = len(one.pids("sleep 31415")) - 2 * (ACTORS - len(half))
        before = len(one.pids("sleep 31415"))
        one.kill(one.pid_of_ray("raylet"))
        time.sleep(COUNTED_S)
        of_raylet = len(one.pids("sleep 31415"))
        driver.kill()
    one.kill(*one.pids("sleep 31415"))
    left = f"{COUNTED_S:g} s after kill -9"
    return [
        Row(
            "create: Ray's actor with subprocess.run",
            statistics.median(starts_ms),
            "ms",
        ),
        Row(f"left of {2 * len(half)} processes {left}: Ray's actors", of_actors, ""),
        Row(f"left of {before} processes {left}: Ray's raylet", of_raylet, ""),
    ]


class Runner:
    """Runs programs, in an actor of Ray."""

    def run(self, *command: str) -> int:
        """Run a program; return its exit status."""
        return subprocess.run(command, check=False).returncode


def main(argv: list[str]) -> int:
    """Be the driver; return the exit status."""
    import ray  # noqa: PLC0415 - not by who measures

    from supervisor.cluster.ray_adapter import Driver  # noqa: PLC0415 - as above

    address, bind, count = argv[0], argv[1], int(argv[2])
    with Driver(address, bind):
        own = ray.get_runtime_context().get_node_id()
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            own, soft=False
        )

        remote: Any = ray.remote(num_cpus=0, scheduling_strategy=where)
        runner = remote(Runner)
        starts_ms, actors = [], []
        for _ in range(count):
            begun = time.perf_counter()
            actor = runner.remote()
            ray.get(actor.run.remote("/bin/true"))
            starts_ms.append((time.perf_counter() - begun) * 1000)
            actors.append(actor)
        _running = [actor.run.remote("/bin/sh", "-c", STAYS) for actor in actors]
        print(json.dumps(starts_ms), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
