"""Short turns on a processor for the host and its launchpad, and for nobody else."""

import ctypes
import os
import struct

import pytest

from supervisor.launchpad_kernel import SHORT_SLICE_NS, ask_for_slices, system_call
from tests.helpers.hosts import Stage, stage

__all__ = ["stage"]

GETATTR = 315 if os.uname().machine == "x86_64" else 275
NICE, RUNTIME = 3, 5


def attributes(pid: int = 0) -> tuple[int, ...]:
    """Return a thread's sched_attr: size, policy, flags, nice, priority, runtime ..."""
    memory = ctypes.create_string_buffer(48)
    system_call(GETATTR, pid, ctypes.addressof(memory), 48, 0)
    found: tuple[int, ...] = struct.unpack("IIQiIQQQ", memory.raw)
    return found


@pytest.fixture(autouse=True)
def kernel() -> None:
    before = attributes()[RUNTIME]
    ask_for_slices(SHORT_SLICE_NS)
    took = attributes()[RUNTIME]
    ask_for_slices(0)
    if took != SHORT_SLICE_NS:
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
