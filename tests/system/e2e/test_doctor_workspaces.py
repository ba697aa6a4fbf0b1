"""The modes of workspaces in doctor are those of a run."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from supervisor.cli.doctor_workspaces import try_modes
from supervisor.sandbox.attempts import used_layers
from tests.helpers.command import SANDHOST, small_disk
from tests.system.e2e.test_workspace import of_root

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
@pytest.mark.nobody
def test_each_mode_is_tried_where_workspaces_are_kept(tmp_path: Path) -> None:
    found = modes(SANDHOST_STATE=str(tmp_path / "state"))
    assert {mode: state for mode, (state, _) in found.items()} == {
        "review": "present",
        "direct": "present",
        "read-only": "present",
    }
    assert found["review"][1].partition(";")[0].endswith(f", of {used_layers()}")
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


# spec WS4: a full TMPDIR is a reason, and no traceback; what was started is waited for
@of_root
@pytest.mark.parametrize(
    ("inodes", "made"), [(1, "make a directory"), (4, "start a run that tries it")]
)
def test_a_full_temporary_directory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, made: str
) -> None:
    monkeypatch.setenv("SANDHOST_STATE", str(tmp_path / "state"))
    with small_disk(tmp_path, f"1m,nr_inodes={inodes}") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        review, *others = try_modes()
        assert list(disk.iterdir()) == []
    for row in others:
        assert row["state"] == "missing"
        assert f"cannot {made}" in row["detail"]
        assert "No space left on device; name another" in row["detail"]
    # There was room for the first one, and it has ended.
    assert review["state"] == ("present" if inodes > 1 else "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# spec WS4: where workspaces cannot be kept
@pytest.mark.nobody
def test_a_place_that_cannot_be_entered_is_told(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root enters every directory")
    (tmp_path / "shut").mkdir(mode=0o000)
    found = modes(SANDHOST_STATE=str(tmp_path / "shut/state"))
    assert {state for state, _ in found.values()} == {"missing"}
    assert "Permission denied; name another directory" in found["review"][1]
