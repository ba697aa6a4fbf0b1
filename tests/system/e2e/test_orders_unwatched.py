"""Orders to a host without an epoll watch: they are received all the same."""

import sys
from pathlib import Path

import pytest

from tests.helpers.daemon import daemon
from tests.system.e2e.test_used_up import NO_WATCH

pytestmark = pytest.mark.slow

CONFIG = """
[policy.walled]
sandbox = "auto"
[child.greedy]
command = ["/bin/sleep", "1000"]
policy = "walled"
"""


# attack 18, spec S5: who has used them up can be ended, others can be started.
def test_orders_need_no_epoll_watch(tmp_path: Path) -> None:
    flag = tmp_path / "used-up"
    wrapper = (sys.executable, "-c", NO_WATCH, str(flag))
    with daemon(tmp_path, CONFIG, wrapper=wrapper) as running:
        flag.touch()
        for _ in range(3):
            running.client.spawn(["/bin/sleep", "1000"], policy="walled")
        running.client.stop_child("greedy")
        assert running.row("greedy").pid is None
        assert running.end() == 0, running.said()
