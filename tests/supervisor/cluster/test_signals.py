"""Signals that end a command: the first one counts."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from supervisor.cluster.signals import ENDS, exit_at_signals
exit_at_signals()
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    for number in ENDS:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
except SystemExit:
    signal.raise_signal(signal.SIGINT)
    print("ended what was begun", flush=True)
    raise
"""


# spec FL8: a terminal that closes ends a command and its start at once, with two signals.
@pytest.mark.slow
def test_a_second_signal_does_not_cut_the_end() -> None:
    done = subprocess.run(
        (sys.executable, "-c", SCRIPT), capture_output=True, check=False
    )
    assert done.stdout == b"ended what was begun\n"
    assert done.returncode in {128 + signal.SIGHUP, 128 + signal.SIGTERM}
