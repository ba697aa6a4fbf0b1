"""A call that takes a minute does not keep a host whose child has ended."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command import finished, heard, running

pytestmark = pytest.mark.slow

CHILD = """
import random
from vfs.client import Client

source = random.Random(1)
line = "".join(source.choice("ab") for _ in range(1000)) + "\\n"
client = Client()
token = client.fd_put((line * 8000).encode())
client.fd_call("wrap_output", token=token)
print("stored", flush=True)
# So many states that 64 KiB take up to a second.
client.fd_call("search_fd", fd="fd:1", query="(?:a?[ab]{99}b?){9}Z", regex=True)
print("found", flush=True)
"""


def computed_s(pid: int) -> float:
    """How long a process has computed so far, in seconds; proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_call_ends_with_its_child(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[tools]\nenabled = ["search_fd"]\n')
    words = ("run", "--config", "config.toml", "--", sys.executable, "-c", CHILD)
    with running(*words, cwd=tmp_path) as host:
        said = heard(host, b"stored\n")
        begun = computed_s(host.pid)
        while computed_s(host.pid) < begun + 0.2:  # so it searches
            assert host.poll() is None
            time.sleep(0.01)
        host.send_signal(signal.SIGTERM)
        outcome = finished(host)
        # The search is two minutes of computing; of so many it had none.
        assert (outcome.status, said + outcome.out) == (143, b"stored\n")
