"""The bounds of a workspace's layer.

Limits of the configuration, the disk's reserve.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.system.e2e.test_workspace import Place, of_root

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def run_bounded(place: Place, limits: str, script: str, *options: str) -> Outcome:
    """Run a script in the workspace ``w``, whose layer has limits."""
    config = place.base.parent / "config.toml"
    config.write_text(f'[workspace.w]\nbase = "{place.base}"\nlimits = {limits}\n')
    words = ("--config", config, "--state-dir", place.state, "--workspace-name", "w")
    return sandhost("run", *words, *options, "--", "sh", "-c", script)


# spec WS17
@pytest.mark.nobody
@pytest.mark.parametrize(
    ("limits", "script", "reason"),
    [
        (
            '{ bytes = "1M" }',
            "head -c 2M /dev/zero > big",
            rb"\d{7} bytes, of 1048576 allowed",
        ),
        (
            "{ files = 10 }",
            "mkdir d; cd d; touch $(seq 20)",
            rb"[12]\d files, of 10 allowed",
        ),
    ],
)
def test_a_child_that_passes_a_limit_is_ended(
    place: Place, limits: str, script: str, reason: bytes
) -> None:
    journal = place.base.parent / "journal"
    wait = "; exec sleep 1000"
    done = run_bounded(place, limits, script + wait, "--journal", str(journal))
    assert done.status in {128 + 9, 128 + 15}
    # How far it had come when it was looked at is by chance.
    told = b"is ended: workspace w: its layer has " + reason
    assert re.search(told, done.err)
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    (row,) = [row for row in rows if row["event"] == "workspace.limit"]
    assert (row["workspace"], row["limit"]) == ("w", limits[2:7])
    # The written files can be looked at.
    assert place.ask("diff", "w", "--name-only").status == 1


# spec WS17
def test_a_child_that_stays_below_its_limits_is_left_alone(place: Place) -> None:
    script = "head -c 500K /dev/zero > a; sleep 0.5; rm a; head -c 900K /dev/zero > b"
    done = run_bounded(place, '{ bytes = "1M", files = 10 }', f"{script}; sleep 0.5")
    assert (done.status, done.err.count(b"ended")) == (0, 0)


# spec WS17
def test_a_child_that_began_beyond_a_limit_may_remove(place: Place) -> None:
    run_bounded(place, "{ files = 100 }", "mkdir d; cd d; touch $(seq 20)")
    script = "sleep 0.5; rm d/1* d/20; sleep 0.5"
    assert run_bounded(place, "{ files = 5 }", script).status == 0
    done = run_bounded(place, "{ files = 5 }", "sleep 0.5; touch $(seq 9); sleep 1000")
    assert b"files, of 5 allowed" in done.err


# spec WS17
@of_root
def test_the_disk_keeps_its_reserve(place: Place) -> None:
    words = [
        SANDHOST, "run", "--state-dir", "$D/state", "--workspace", str(place.base),
        "--workspace-name", "w", "--",
        "sh", "-c", ("'head -c 60M /dev/zero > big;"
        " while head -c 16K /dev/zero >> big; do sleep 0.05; done'"),
    ]  # fmt: skip
    (place.base.parent / "disk").mkdir()
    mount = "mount -t tmpfs -o size=64m none $D"
    used = "df --output=pcent $D | tail -1"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount}; {' '.join(words)}; echo $?; {used}"],
        env={**ENVIRONMENT, "D": str(place.base.parent / "disk")},
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    status, percent = done.stdout.split()
    assert int(status) in {128 + 9, 128 + 15}
    assert 94 <= int(percent.rstrip(b"%")) < 100
    assert b"is ended: workspace w: its disk has " in done.stderr
