"""`sandhost run` is killed by -9.

Nothing runs on, and the next run is not disturbed.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from supervisor.sandbox.groups import PREFIX, hierarchies
from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    beneath,
    finished,
    heard,
    running,
    sandhost,
    still_there,
)

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 30.0
"""However busy the machine is; chaos tells how soon it is."""


def groups_of(pid: int) -> list[Path]:
    """Return the groups of processes that a host has made."""
    tops = [Path(hierarchy.group) for hierarchy in hierarchies()]
    return [path for top in tops for path in top.glob(f"{PREFIX}{pid}-*")]


# attack 39: orphans, a stale socket, a staged file.
def test_a_killed_run_is_followed_by_a_clean_one(tmp_path: Path) -> None:
    root, control = tmp_path / "root", tmp_path / "control"
    root.mkdir()
    (root / "a").write_text("old")
    config = tmp_path / "config"
    config.write_text('[policy.run]\npublish = "on-close"\n')
    options = ("--root", root, "--control", control, "--config", config)
    script = (
        "printf 'OPEN a w false\\n' >&3; read -r r n <&3;"
        'printf "WRITE $n 3\\nnew" >&3; read -r r <&3;'
        "setsid sleep 1000 & echo $! $$; wait"
    )
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    with running("run", *options, "--", "sh", "-c", script, env=env) as process:
        heard(process, b"\n")
        children = beneath(process.pid)
        assert len(children) > 3
        groups = groups_of(process.pid)
        assert groups or not any(os.access(h.group, os.W_OK) for h in hierarchies())
        process.send_signal(signal.SIGKILL)
        assert finished(process).status == -signal.SIGKILL
    deadline = time.monotonic() + GONE_WITHIN_S
    while still_there(children):
        assert time.monotonic() < deadline, "a child outlived its host"
    while any(group.exists() for group in groups):
        assert time.monotonic() < deadline, "a group outlived its host"
    assert os.listdir(root) == ["a"]
    assert (root / "a").read_text() == "old"
    words = ("run", *options, "--", "sh", "-c", "echo again | $0 fs put a", SANDHOST)
    outcome = sandhost(*words, env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    assert (root / "a").read_text() == "again\n"
    assert not control.exists()


# A host that lost its launchpad cannot go on, and says so; nothing runs on.
def test_a_killed_launchpad_ends_the_run_in_one_line() -> None:
    script = "setsid sleep 1000 & echo up; wait"
    with running("run", "--", "sh", "-c", script) as process:
        heard(process, b"up\n")
        children = beneath(process.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid, _ in children}
        (launchpad,) = [pid for pid, name in names.items() if "pad" in name]
        pidfd = os.pidfd_open(launchpad)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        outcome = finished(process)
    assert outcome.status == 125
    assert b"Traceback" not in outcome.err
    assert b"launchpad" in outcome.err
    assert not still_there(children)
