"""A killed host leaves nothing that runs, and nothing in the next one's way."""

import time
from pathlib import Path

import pytest

from tests.helpers.command import beneath, heard, running, sandhost, still_there
from tests.helpers.delays import Stopwatch
from tests.system.attacks.conftest import words_of

pytestmark = [pytest.mark.slow, pytest.mark.attack]

GONE_WITHIN_S = 1.0
"""How soon all are gone, beside what the machine's other load took."""

PATIENCE_S = 30.0
"""However busy the machine is."""

# A daemon of its own, and somebody who ignores what is asked of it.
FAMILY = "(setsid sleep 1000 &); trap '' TERM HUP INT; echo up; sleep 1000; sleep 1000"


# attack 39, attack 28
def test_a_killed_host_leaves_nobody_and_the_next_one_starts(
    tmp_path: Path, kind: str
) -> None:
    options, wrapper = words_of(kind, tmp_path)
    (tmp_path / "root").mkdir()
    words: tuple[str | Path, ...] = ("run", *options, "--root", tmp_path / "root")
    words += ("--control", tmp_path / "control", "--", *wrapper)
    with running(*words, "sh", "-c", FAMILY) as host:
        heard(host, b"up\n")
        family = beneath(host.pid)
        assert len(family) >= 3  # the launchpad, the shell, its daemon
        watch = Stopwatch()
        host.kill()
        host.wait()
        while still_there(family) and watch.passed_s < PATIENCE_S:
            time.sleep(0.01)  # the launchpad's end of them is nobody's to wait for
        assert still_there(family) == []
        assert watch.own_s < GONE_WITHIN_S
    assert (tmp_path / "control").is_socket()  # stale: nobody answers
    again = sandhost(*words, "sh", "-c", "echo again")
    assert (again.status, again.out) == (0, b"again\n")
    # It is warned of walls without seccomp, and of nothing else.
    assert all(b"lacks seccomp" in line for line in again.err.splitlines())
