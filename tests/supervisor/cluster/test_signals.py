"""Signals that end a command: the first one counts."""

import signal
import subprocess
import sys

import pytest

from supervisor.cluster.signals import ENDS

SCRIPT = """
import os, signal, sys
from supervisor.cluster.signals import ENDS, exit_at_signals
exit_at_signals()
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    for number in sys.argv[1:]:
        os.kill(os.getpid(), int(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
except (SystemExit, KeyboardInterrupt):
    for number in ENDS:
        signal.raise_signal(number)
    print("ended what was begun", flush=True)
    raise
"""

SHIELDED = """
import signal
from supervisor.cluster.signals import signals_ignored
with signals_ignored():
    for number in {ends}:
        signal.raise_signal(number)
    print("done", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


# spec FL8: a terminal that closes ends a command and its start at once, with two signals.
@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers", [*((number,) for number in ENDS), (signal.SIGHUP, signal.SIGTERM), ENDS]
)
def test_a_second_signal_does_not_cut_the_end(
    numbers: tuple[signal.Signals, ...],
) -> None:
    words = (sys.executable, "-c", SCRIPT, *(str(int(number)) for number in numbers))
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.stdout == b"ended what was begun\n"
    # A KeyboardInterrupt ends Python by the signal itself.
    ends = {128 + number for number in numbers} | {-number for number in numbers}
    assert done.returncode in ends


# spec FL8
@pytest.mark.slow
def test_no_signal_cuts_the_end_of_a_start_that_failed() -> None:
    script = SHIELDED.format(ends=[int(number) for number in ENDS])
    done = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"done\n", -signal.SIGTERM)
