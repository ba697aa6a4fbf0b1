"""One of 20 children does its worst within its limits: the others go on reading."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.rounds import LONG

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.attack]

REPOSITORY = Path(__file__).parents[3]

MOST_MS = 100.0
"""How much longer than beside an idle child a READ of a neighbour may take (spec S5). How
many times as long it is (aim: 2 times) is the measuring program's to tell."""

BRIEF = ("--rounds", "1", "--reads", "40")
"""A disturbance lasts half as long as the measurement, and tells 0.1 s as well."""

LOOKS = 3
"""A delay by the machine's other load is not there each time."""


# attack 29, attack 20, spec S5: bombs, floods, `yes > f`, and whoever stands still.
@pytest.mark.timeout(900)
def test_the_worst_of_one_child_is_little_to_the_others() -> None:
    if not LONG:
        pytest.skip("it takes two processors of its own: see make chaos")
    more_ms: dict[str, float] = {}
    for _ in range(LOOKS):
        more_ms = looked()
        if max(more_ms.values()) < MOST_MS:
            return
    pytest.fail(f"more than {MOST_MS} ms later: {more_ms}")


def looked() -> dict[str, float]:
    """Return how much later neighbours are beside each that does its worst, ms (p99)."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.neighbours", *BRIEF],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    data = {row["name"]: row["data"] for row in rows}
    found = {name: one["beside_ms"] - one["at_rest_ms"] for name, one in data.items()}
    assert set(found) == {
        "flood of READs, 16 in advance",
        "flood of READs, one by one",
        "flood of PINGs by 63 connections",
        "READs of 16 MiB, 4 in advance",
        "READs of 16 MiB by 32 connections",
        "flood without reading",
        "fork bomb",
        "fork bomb, from its first moment",
        "memory bomb",
        "stopped in a WRITE",
        "yes > f",
    }
    return found
