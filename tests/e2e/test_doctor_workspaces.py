"""What doctor tells of workspaces is what a run can have."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST

pytestmark = pytest.mark.slow


def modes(**env: str) -> dict[str, tuple[str, str]]:
    """Return (state, detail) by mode."""
    done = subprocess.run(
        [SANDHOST, "doctor", "--json"], env={**os.environ, **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = json.loads(done.stdout)["workspaces"]
    return {row["mode"]: (row["state"], row["detail"]) for row in rows}


# spec WS2a, WS4
def test_each_mode_is_tried_where_workspaces_are_kept(tmp_path: Path) -> None:
    found = modes(SANDHOST_STATE=str(tmp_path / "state"))
    assert {mode: state for mode, (state, _) in found.items()} == {
        "review": "present",
        "direct": "present",
        "read-only": "present",
    }
    assert list(tmp_path.iterdir()) == []


# spec WS3b, WS4
def test_a_place_that_can_hold_no_layer_is_told_with_what_works(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("an overlay mount needs root")
    names = ("lower", "upper", "work", "merged")
    lower, upper, work, merged = (tmp_path / name for name in names)
    for path in (lower, upper, work, merged):
        path.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    script = 'mount -t overlay overlay -o "$1" "$2" && exec "$3" doctor --json'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", layers, merged, SANDHOST],
        env={**os.environ, "SANDHOST_STATE": str(merged)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = {row["mode"]: row for row in json.loads(done.stdout)["workspaces"]}
    assert rows["review"]["state"] == "missing"
    assert "--state-dir" in rows["review"]["detail"]
    assert rows["direct"]["state"] == "present"
