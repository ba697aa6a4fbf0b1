"""Checkpoints of a daemon's child: conversation, descriptors and files as one."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.command import PROGRAMS
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

CONFIG = """
[tools]
enabled = ["read_fd", "checkpoint_process", "restore_process", "list_checkpoints"]
[workspace.repo]
base = "{base}"
[policy.agent]
workspace = ["repo"]
[child.agent]
command = ["sh", "-c", '''{script}''']
policy = "agent"
env = {{ PATH = '{path}' }}
"""

SCRIPT = """
id=$(sandhost fd checkpoints | grep -o 'ckpt:[0-9a-f]*')
if test -z "$id"; then
  echo text | sandhost fd put kept >/dev/null
  echo one >> a.txt; sandhost fd checkpoint; echo two >> a.txt; echo new > b
  id=$(sandhost fd checkpoints | grep -o 'ckpt:[0-9a-f]*')
  sandhost fd restore $id --files; cat a.txt
else
  echo again; sandhost fd restore $id; cat a.txt; ls
fi
echo over"""


def life(host: Daemon, number: int) -> str:
    """Return what the child has said in one of its lives, when that is over."""
    host.wait(lambda: host.log("agent").count(b"over\n") == number)
    host.wait(lambda: host.row("agent").state == "ended")
    return host.log("agent").decode().split("over\n")[number - 1]


# spec WS16, seed 004 ("unified approach")
def test_files_go_back_with_the_rest_between_two_lives(tmp_path: Path) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    (base / "a.txt").write_text("hello\n")
    config = CONFIG.format(base=base, script=SCRIPT, path=PROGRAMS)
    with daemon(tmp_path, config) as host:
        first = life(host, 1)
        (label,) = set(re.findall(r'workspace="repo" label="(ckpt-\w+)"', first))
        assert 'files="when the child has ended"' in first
        # The layer beneath a child that runs stays as it is.
        assert first.endswith("hello\none\ntwo\n")
        (row,) = host.client.workspaces()
        assert row.snapshots == [label]
        host.client.spawn(name="agent")
        second = life(host, 2)
        assert f'label="{label}" files="as they are"' in second
        assert second.endswith("hello\none\na.txt\n")
        assert host.end() == 0
    journal = sorted((tmp_path / "state/journal").glob("*"))
    rows = [json.loads(x) for path in journal for x in path.read_bytes().splitlines()]
    told = [row for row in rows if row.get("label") == label]
    assert [row["event"] for row in told] == [
        "workspace.snapshot",
        "workspace.restored",
    ]
    made, restored = told
    assert made["child_id"] == "child-1"
    assert made["stopped_ns"] > 0
    assert (restored["child_id"], restored["lost"]) == ("child-2", 2)
