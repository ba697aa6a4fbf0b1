"""Large READs go out by turns.

How many of one child in one turn of the loop (spec S5, S7).
"""

import errno
import itertools
import os
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from supervisor.fsproxy import pump as pump_module
from supervisor.fsproxy.replies import SLOW
from supervisor.fsproxy.transport import FileTransfer
from tests.helpers.mount_kinds import set_kind
from tests.helpers.sessions import Hall, Line, hall
from vfs.ledger import Ledger

__all__ = ["hall"]

PIECES = 8
SIZE = PIECES << 20
MANY = 6


class Wire:
    """A kernel that takes every piece at once; which turn of the loop had how many.

    Attributes:
        cut: connections whose clients hang up when they are sent a file.
    """

    def __init__(self) -> None:
        self.turn = 0
        self.cut: set[int] = set()
        self.sent: Counter[int] = Counter()
        self.last: dict[int, int] = {}

    def take(self, to: int, _fd: int, _at: int, size: int) -> int:
        """Be `os.sendfile`."""
        if to in self.cut:
            raise ConnectionResetError(errno.ECONNRESET, "hung up")
        self.sent[self.turn] += 1
        self.last[to] = self.turn
        return size

    @property
    def pieces(self) -> int:
        return sum(self.sent.values())


class Turns(trio.abc.Instrument):
    """Counts the loop's turns."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def before_io_wait(self, timeout: float) -> None:
        del timeout
        self._wire.turn += 1


@pytest.fixture
def wire(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> Wire:
    (hall.root / "large").write_bytes(bytes(SIZE))
    # A busy disk would be waited for in a thread.
    set_kind(monkeypatch, hall.root, "tmpfs")
    found = Wire()
    monkeypatch.setattr(os, "sendfile", found.take)
    return found


async def reading(hall: Hall, top: Ledger, count: int) -> list[Line]:
    """Return connections of one child, each of which asks for all of a large file."""
    policy = hall.policy()
    lines = [hall.connect(policy, Ledger(top)) for _ in range(count)]
    numbers = [await line.open(b"large") for line in lines]
    for line, number in zip(lines, numbers, strict=True):
        await line.send(b"READ %d %d\n" % (number, SIZE))
    return lines


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that holds nothing in memory: a file is loaded before it is sent."""
    monkeypatch.setattr(FileTransfer, "is_in_memory", lambda _: False)


# spec S5, S7: what a child has attached brings it no more of a turn; each has its share.
@pytest.mark.parametrize("disk", [None, "slow_disk"])
async def test_a_turn_sends_a_piece_to_a_few_of_one_childs_connections(
    hall: Hall, wire: Wire, disk: str | None, request: pytest.FixtureRequest
) -> None:
    if disk is not None:
        request.getfixturevalue(disk)
    turns = Turns(wire)
    trio.lowlevel.add_instrument(turns)
    lines = await reading(hall, Ledger(), MANY)
    with trio.fail_after(10):
        while wire.pieces < MANY * PIECES:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    assert max(wire.sent.values()) <= 2
    if disk is None:  # else they come when they are loaded
        assert max(wire.sent.values()) == 2
        ends = sorted(wire.last[line.session.write_fd] for line in lines)
        assert ends[-1] - ends[0] <= 2 * MANY  # and not one after the other
    assert hall.pump.sending == 0


async def test_each_child_has_its_share_of_a_turn(hall: Hall, wire: Wire) -> None:
    turns = Turns(wire)
    trio.lowlevel.add_instrument(turns)
    for _ in range(2):
        await reading(hall, Ledger(), 2)
    with trio.fail_after(10):
        while wire.pieces < 2 * 2 * PIECES:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    assert max(wire.sent.values()) > 2


# spec S5: who hangs up while it is sent a file keeps nobody else's from being sent.
async def test_who_hangs_up_gives_its_turn_back(hall: Hall, wire: Wire) -> None:
    top = Ledger()
    lines = [hall.connect(hall.policy(), Ledger(top)) for _ in range(4)]
    wire.cut = {line.session.write_fd for line in lines}
    for line in lines:
        await line.send(b"READ %d %d\n" % (await line.open(b"large"), SIZE))
    with trio.fail_after(10):
        for line in lines:
            await line.gone()
    assert (top.sends.borrowed_tokens, hall.pump.sending, wire.pieces) == (0, 0, 0)
    wire.cut.clear()
    await reading(hall, top, 1)
    with trio.fail_after(10):
        while wire.pieces < PIECES:
            await trio.lowlevel.checkpoint()


# A piece goes out at once; what is more by turns.
async def test_what_is_more_than_a_piece_goes_by_turns(hall: Hall, wire: Wire) -> None:
    turns, top = Turns(wire), Ledger()
    trio.lowlevel.add_instrument(turns)
    line = hall.connect(hall.policy(), Ledger(top))
    number = await line.open(b"large")
    await line.ask(b"READ %d %d\n" % (number, 1 << 20))
    assert wire.pieces == 1
    wire.sent.clear()
    await line.ask(b"READ %d %d\n" % (number, (1 << 20) + 1))
    with trio.fail_after(10):
        while wire.pieces < 2:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    assert list(wire.sent.values()) == [1, 1]


# spec F8: whoever takes nothing is not waited for; from a slow disk neither.
@pytest.mark.usefixtures("slow_disk")
async def test_a_file_of_a_slow_disk_is_taken_in_time(hall: Hall) -> None:
    (hall.root / "large").write_bytes(bytes(SIZE))
    line = hall.connect(deadline_s=0.05)
    number = await line.open(b"large")
    await line.send(b"READ %d %d\n" % (number, SIZE))
    with trio.fail_after(10):
        await line.gone()
    assert line.session.why_closed == SLOW


@asynccontextmanager
async def flooded(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mark: Callable[[], int]
) -> AsyncIterator[list[int]]:
    """Have a client flood; its pump's clock is 0.05 ms later at each look.

    Yields:
        The values of `mark` each time that the pump serves.
    """
    clock = itertools.count()

    class Clock:
        """Counts the looks at it."""

        @staticmethod
        def monotonic() -> float:
            return next(clock) * 0.000_05

    flood = hall.connect()

    async def ask() -> None:
        while True:
            await flood.send(b"PING\n" * 5000)

    served: list[int] = []
    serve = hall.pump.serve_events

    def counted(events: list[tuple[int, int]]) -> None:
        served.append(mark())
        serve(events)

    monkeypatch.setattr(hall.pump, "serve_events", counted)
    monkeypatch.setattr(pump_module, "time", Clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(flood.rest)
        with trio.fail_after(10):
            yield served
        nursery.cancel_scope.cancel()


# spec S5: who READs a large file beside a flood waits for no more of it than it sends.
async def test_a_flood_is_served_in_short_slices_while_a_large_file_goes_out(
    hall: Hall, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with flooded(hall, monkeypatch, lambda: wire.pieces) as served:
        await reading(hall, Ledger(), 1)
        while wire.pieces < PIECES:
            await trio.lowlevel.checkpoint()
    turns = [Counter(served)[pieces] for pieces in range(1, PIECES)]
    assert max(turns) <= 8
    assert sum(turns) >= PIECES  # the flood was there


# A short slice costs the flood a checkpoint more often: only then.
async def test_a_flood_alone_is_served_in_long_slices(
    hall: Hall, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(wire)
    trio.lowlevel.add_instrument(turns)
    async with flooded(hall, monkeypatch, lambda: wire.turn) as served:
        while len(served) < 100:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    # Not the longest: the first after a rest is always a long one.
    assert statistics.median(Counter(served).values()) >= 8


async def test_who_reads_slowly_shortens_no_slices(hall: Hall) -> None:
    (hall.root / "large").write_bytes(bytes(SIZE))
    (line,) = await reading(hall, Ledger(), 1)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert line.session.outbound.transfer is not None  # it has not taken it
    assert hall.pump.sending == 0
    assert len(await line.body()) == SIZE
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert line.session.outbound.transfer is None
