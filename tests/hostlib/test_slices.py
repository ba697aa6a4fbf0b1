"""Short turns on a processor for the host and its launchpad, and for nobody else."""

import os
import subprocess
import sys

import pytest

from hostlib.linux.syscalls import SHORT_SLICE_NS
from tests.architecture.tree import ROOT
from tests.helpers.slices import NICE, RUNTIME, attributes, has_slices
from tests.helpers.stage import Stage, stage

__all__ = ["stage"]


@pytest.fixture(autouse=True)
def kernel() -> None:
    before = attributes()[RUNTIME]
    if not has_slices():
        pytest.skip("this kernel has no slices of one's own (Linux 6.12)")
    assert attributes()[RUNTIME] == before


async def test_the_host_and_its_launchpad_ask_and_no_child_inherits(
    stage: Stage,
) -> None:
    child = await stage.puppet()
    assert attributes()[RUNTIME] == SHORT_SLICE_NS
    assert attributes(stage.launchpad)[RUNTIME] == SHORT_SLICE_NS
    for _ in range(3):  # forked for it, and in stock
        child = await stage.puppet()
        assert attributes(child.pid)[RUNTIME] != SHORT_SLICE_NS
        assert attributes(child.pid)[NICE] == max(os.nice(0), 0)


BATCH = """
import os
from hostlib.linux.syscalls import SHORT_SLICE_NS, ask_for_slices
from tests.helpers.slices import RUNTIME, attributes
policy = os.SCHED_BATCH | os.SCHED_RESET_ON_FORK
os.sched_setscheduler(0, policy, os.sched_param(0))
ask_for_slices(SHORT_SLICE_NS)
assert os.sched_getscheduler(0) == policy
print(attributes()[RUNTIME] != SHORT_SLICE_NS)
"""


def test_who_has_another_policy_is_let_be() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BATCH], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"True\n", b"")


# Its children would not inherit the nice value with SCHED_RESET_ON_FORK: it is left.
def test_a_host_that_goes_before_others_already_asks_for_nothing() -> None:
    script = BATCH.partition("policy =")[0] + (
        "os.setpriority(os.PRIO_PROCESS, 0, -5)\nask_for_slices(SHORT_SLICE_NS)\n"
        "print(attributes()[RUNTIME] != SHORT_SLICE_NS, os.sched_getscheduler(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    if b"PermissionError" in done.stderr:
        pytest.skip("this user may not go before others")
    assert (done.stdout, done.stderr) == (b"True 0\n", b"")
