"""`python -m benchmarks [NAME] [OPTION]...`: one measuring program, or all.

Each runs as a process of its own with a time limit, so that one that hangs costs its
own figures only, and the whole stays below ten minutes.
"""

import importlib
import signal
import subprocess
import sys
from types import FrameType

from benchmarks.measure import REPOSITORY, MeasureError

# Name and time limit in seconds, about twice what it takes.
PROGRAMS = {
    "wire": 240.0,
    "startup": 60.0,
    "lifecycle": 60.0,
    "idle": 60.0,
    "sandbox": 120.0,
    "workspace": 400.0,
    "neighbours": 240.0,
    "daemon": 120.0,
    "handover": 60.0,
    "toolexec": 120.0,
    "fds": 180.0,
    "llm": 120.0,
    "doors": 180.0,
    "metrics": 120.0,
    "network": 120.0,
    "fleet": 300.0,
}
STOP_S = 10.0  # for a program over its limit, to remove what it has made


def run_all(options: list[str]) -> int:
    """Run every program with the same options and return the highest exit status."""
    statuses = []
    for name, limit_s in PROGRAMS.items():
        argv = [sys.executable, "-m", "benchmarks", name, *options]
        with subprocess.Popen(argv, cwd=REPOSITORY) as program:
            try:
                statuses.append(program.wait(limit_s))
            except subprocess.TimeoutExpired:
                print(f"{name}: not measured, did not end in {limit_s:g} s", flush=True)
                statuses.append(1)
            finally:
                end(program)
    return max(statuses)


def end(program: subprocess.Popen[bytes]) -> None:
    """End a program that still runs: politely, then for sure."""
    program.terminate()
    try:
        program.wait(STOP_S)
    except subprocess.TimeoutExpired:
        program.kill()


def run_one(name: str, options: list[str]) -> int:
    """Run one program in this process and return its exit status."""
    program = importlib.import_module(f"benchmarks.{name}")
    try:
        status: int = program.main(options)
    except MeasureError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return status


def stop(number: int, _frame: FrameType | None) -> None:
    """Leave through every `finally`: directories are removed, hosts are stopped."""
    sys.exit(128 + number)


def main(argv: list[str]) -> int:
    """Choose one program or all of them."""
    signal.signal(signal.SIGTERM, stop)
    try:
        if not argv or (argv[0].startswith("-") and argv[0] not in {"-h", "--help"}):
            return run_all(argv)
        if argv[0] in PROGRAMS:
            return run_one(argv[0], argv[1:])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    names = " | ".join(PROGRAMS)
    print(f"usage: python -m benchmarks [{names}] [--rounds N] [--save] [--strict]")
    return 0 if argv[0] in {"-h", "--help"} else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
