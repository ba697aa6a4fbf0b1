"""How long a child takes to start in each kind of walls, beside bare posix_spawn.

From the request to the program that runs, in one host; the peers are posix_spawn(3) of
the same program until its exec, and bubblewrap as a shell would start it, until its end
(it says no sooner that it has started). The first two children of a kind are forked when they
are asked for, the others have waited forked (ADR 47): the medians are theirs, and the first
two have rows of their own. The rows of a big host have one of 500 MB.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import AbsentError, MeasureError
from benchmarks.options import parse, parser
from benchmarks.report import Report, Row, at_most

NAME = "sandbox"
METHOD = "request to exec of /bin/true, medians of runs in turn"
ROUNDS = 50
BIG_BYTES = 500 << 20
FRESH = 2
"""Children of a kind before one waits for the next order."""
TRUE = "/bin/true"

# Runs in a process of its own: a host starts its launchpad before it imports anything.
PROGRAM = r"""
from supervisor.spawn.launchpad.start import start_launchpad
launchpad = start_launchpad()
import json, os, sys, time, trio
from supervisor.host import open_host
from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.sandbox.scratch import Scratch
from supervisor.spec import ChildSpec, minimal_env
rounds, ballast = int(sys.argv[1]), bytearray(int(sys.argv[2]))
ballast[::4096] = b"x" * len(ballast[::4096])
profiles = {
    "none": PROFILES["none"],
    "landlock": make_profile("landlock", ["landlock", "seccomp", "rlimits"]),
    "auto": PROFILES["auto"],
}
def peer():
    start = time.perf_counter()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    took = time.perf_counter() - start
    os.waitpid(pid, 0)
    return took
async def main():
    times = {name: [] for name in profiles}
    peers = {name: [] for name in profiles}
    missing = {}
    null = os.open(os.devnull, os.O_RDWR)
    async with open_host(launchpad) as host:
        # One kind after the other: who waits for its next order is made beside a start.
        for name, profile in profiles.items():
            for number in range(rounds):
                peers[name].append(peer())
                scratch = Scratch(None, has_user="uid" in profile.layers)
                spec = ChildSpec(
                    ("/bin/true",), cwd=scratch.tmp, root=scratch.root,
                    run_dir=scratch.run, made_in=scratch.fd, tmp_dir=scratch.tmp,
                    env=minimal_env(scratch.tmp), stdio=(null,) * 3, sandbox=profile,
                )
                start = time.perf_counter()
                child = await host.spawn(spec)
                times[name].append(time.perf_counter() - start)
                if child.failure is not None:
                    raise SystemExit(child.failure.text)
                await child.wait_gone()
                missing[name] = child.walls.missing
                await scratch.remove()
    print(json.dumps({"times": times, "peers": peers, "missing": missing}))
trio.run(main)
"""

AIMS_MS = {"none": 1.0, "landlock": 4.0, "auto": 4.0}
"""Profile -> most time of a start beyond the peer's."""

WHAT = {
    "none": "none",
    "landlock": "Landlock, seccomp, no namespaces",
    "auto": "auto: everything this machine gives",
}


Times = dict[str, list[float]]


def times_of(rounds: int, ballast_bytes: int) -> tuple[Times, Times]:
    """Return seconds by profile, from a host of its own; of the peer beside each, too."""
    import json  # noqa: PLC0415

    argv = [sys.executable, "-c", PROGRAM, str(rounds), str(ballast_bytes)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=100, check=False,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    if done.returncode != 0:
        raise MeasureError(f"the host failed: {done.stderr.strip()[-200:]}")
    told = json.loads(done.stdout)
    return told["times"], told["peers"]


def bubblewrap_ms(rounds: int) -> list[float]:
    """Return the times of bubblewrap with what a sandbox of it would have."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise AbsentError("bwrap is not installed")
    argv = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev"]
    argv += ["/dev", "--", TRUE]
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        pid = os.posix_spawn(bwrap, argv, {})
        _, status = os.waitpid(pid, 0)
        found.append((time.perf_counter() - start) * 1e3)
        if status != 0:
            raise MeasureError(f"bwrap ended with status {status}")
    return found


def profile_rows(rounds: int) -> list[Row]:
    """Compare each profile with the peer, in a small host and in a big one."""
    small, peers = times_of(rounds, 0)
    big, _ = times_of(rounds, BIG_BYTES)
    rows = []
    for name, aim in AIMS_MS.items():
        peer_ms = statistics.median(peers[name]) * 1e3
        took_ms = statistics.median(small[name]) * 1e3
        detail = f"{took_ms:.2f} - {peer_ms:.2f} ms"
        data = {"took_ms": took_ms, "peer_ms": peer_ms}
        beyond = took_ms - peer_ms
        rows.append(Row(WHAT[name], beyond, "ms", at_most(aim), detail, data))
    for name in AIMS_MS:
        peer_ms = statistics.median(peers[name]) * 1e3
        fresh = statistics.median(small[name][:FRESH] + big[name][:FRESH]) * 1e3
        what = f"{name}: made when it is asked for"
        rows.append(Row(what, fresh - peer_ms, "ms"))
    for name in AIMS_MS:
        ratio = statistics.median(big[name]) / statistics.median(small[name])
        what = f"{name}: a host of 500 MB / a small one"
        rows.append(Row(what, ratio, "x", at_most(1.25)))
    return rows


def bubblewrap_rows(rounds: int) -> list[Row]:
    """Measure bubblewrap itself, for comparison."""
    took_ms = statistics.median(bubblewrap_ms(rounds))
    return [Row("bwrap --unshare-all, start to end", took_ms, "ms")]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    given = parse(parser(NAME, METHOD, rounds=ROUNDS), argv)
    rows: list[Row] = []
    for part in (profile_rows, bubblewrap_rows):
        try:
            rows += part(given.rounds)
        except MeasureError as error:
            is_absent = isinstance(error, AbsentError)
            name = part.__name__
            rows.append(Row(name, None, "", detail=str(error), is_absent=is_absent))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
