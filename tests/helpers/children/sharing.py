"""A child of four processes that use one FD 3 at once (spec T5).

Each reads the file `shared` in pieces, with a handle of its own, and prints how many
requests it made and how many answers were wrong.
"""

import json
import os

from vfs.client import Client

PROCESSES = 4
ROUNDS = 100
CONTENT = b"0123456789" * 500


def work() -> dict[str, int]:
    """Read, and compare."""
    client = Client()
    requests = wrong = 0
    for round_number in range(ROUNDS):
        fileno = client.open("shared")
        size = 1 + round_number * 49
        wrong += client.read(fileno, size) != CONTENT[:size]
        client.close(fileno)
        requests += 3
    return {"requests": requests, "wrong": wrong}


def main() -> None:
    """Fork, work, and wait for the others."""
    pids = [os.fork() for _ in range(2)]  # two forks in a row: four processes
    os.write(1, json.dumps(work()).encode() + b"\n")
    for pid in pids:
        if pid:
            os.waitpid(pid, 0)


main()
