"""Output of commands, as programs that read it find it."""

import os
import subprocess
import sys

import pytest

WRITE = """
import os
from hostlib.messages import print_bytes

os.set_blocking(1, False)
for number in range(30):
    assert print_bytes(b"%02d" % number + bytes(9_998))
os.write(2, b"all")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_pipe_that_does_not_block_is_waited_for(unbuffered: str) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", WRITE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"all")
    assert out == b"".join(b"%02d" % number + bytes(9_998) for number in range(30))
