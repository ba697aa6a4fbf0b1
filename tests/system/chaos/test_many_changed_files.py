"""A workspace with a great many changed files is shown and committed whole."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST
from tests.helpers.rounds import LONG
from tests.system.e2e.test_workspace import Place

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FILES = 100_000 if LONG else 1_000

SCRIPT = "i=0; while [ $i -lt 100 ]; do mkdir d$i; cd d$i; touch $(seq {each}); cd ..; i=$((i+1)); done"


# spec WS8, WS10, WS12
@pytest.mark.timeout(600)
def test_many_changed_files_are_listed_committed_and_left_nowhere(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    script = SCRIPT.replace("{each}", str(FILES // 100))
    done = place.named(script)
    assert done.status == 0
    rows = FILES + 100
    assert f"w: {rows} changed".encode() in done.err
    listed = place.ask("diff", "w", "--name-only")
    assert (listed.status, listed.out.count(b"\n")) == (1, rows)
    commit = (SANDHOST, "workspace", "commit", "w", "--state-dir", place.state)
    told = subprocess.run(commit, stdout=subprocess.PIPE, check=True).stdout
    assert told.count(b"\n") == rows
    made = sum(len(files) for _, _, files in os.walk(place.base))
    assert made >= FILES
    assert place.rows("list") == []
    assert not [name for name in os.listdir(place.base) if name.startswith(".sandhost")]
