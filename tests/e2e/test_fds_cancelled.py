"""A call on a content that takes a minute does not keep a host whose child has ended."""

import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command import sandhost

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


def test_a_call_ends_with_its_child(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[tools]\nenabled = ["search_fd"]\n')
    begin = time.monotonic()
    outcome = sandhost(
        *("run", "--config", "config.toml", "--timeout", "4", "--"),
        *(sys.executable, "-c", CHILD),
        cwd=tmp_path,
    )
    assert (outcome.status, outcome.out) == (124, b"stored\n")
    assert time.monotonic() - begin < 20
