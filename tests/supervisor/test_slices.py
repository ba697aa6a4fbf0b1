"""Short turns on a processor for the host and its launchpad, and for nobody else."""

import os

import pytest

from supervisor.launchpad_kernel import SHORT_SLICE_NS, ask_for_slices
from tests.helpers.hosts import Stage, stage
from tests.helpers.slices import NICE, RUNTIME, attributes, has_slices

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


async def test_who_may_not_ask_goes_on_without() -> None:
    # As a thread of real time is, whose policy is not to be touched; or a filter's EPERM.
    before = attributes()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        ask_for_slices(SHORT_SLICE_NS)
        assert attributes()[RUNTIME] != SHORT_SLICE_NS
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert attributes()[RUNTIME] == before[RUNTIME]
