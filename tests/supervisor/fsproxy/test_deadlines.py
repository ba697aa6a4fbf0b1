"""When a deadline ends a conversation (spec F8): not before, and soon after.

Delays between clients are in ``test_neighbours``.
"""

import os

import pytest
import trio

from supervisor.fsproxy.replies import SLOW
from tests.helpers.delays import Stopwatch
from tests.helpers.sessions import Hall, hall
from tests.helpers.stage import eventually

__all__ = ["hall"]

MIB = 1024 * 1024
DEADLINE_S = 0.3
SOON_S = 1.0
"""How late the end may be, beside what the machine's other load took."""


# spec F8, attack 16, attack 17
@pytest.mark.parametrize("request_bytes", [b"WRITE %d 10\nabc", b"READ %d 8388608\n"])
async def test_a_deadline_is_neither_early_nor_late(
    hall: Hall, request_bytes: bytes
) -> None:
    with (hall.root / "big").open("wb") as file:
        file.truncate(8 * MIB)
    line = hall.connect(deadline_s=DEADLINE_S)
    fileno = await line.open(b"big", b"r+")
    watch = Stopwatch()
    await line.send(request_bytes % fileno)
    await eventually(lambda: line.session.why_closed is not None)
    assert line.session.why_closed == SLOW
    assert watch.passed_s >= DEADLINE_S
    assert watch.own_s < DEADLINE_S + SOON_S


# spec F8, attack 17: drop by drop a reply is not taken in time either.
async def test_a_reply_that_is_taken_drop_by_drop(hall: Hall) -> None:
    (hall.root / "big").write_bytes(os.urandom(8 * MIB))
    line = hall.connect(deadline_s=DEADLINE_S)
    fileno = await line.open(b"big")
    watch = Stopwatch()
    await line.send(b"READ %d %d\n" % (fileno, 8 * MIB))
    assert await line.line() == b"OK %d" % (8 * MIB)
    with trio.fail_after(60):
        while line.session.why_closed is None:
            await line.exactly(1000)
            await trio.sleep(0.005)  # the slowness itself, not a wait for something
    assert line.session.why_closed == SLOW
    assert watch.own_s < DEADLINE_S + SOON_S
