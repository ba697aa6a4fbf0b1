"""Large READs go out by turns: how many of one child in one turn of the loop (spec S5, S7)."""

import itertools
import os
from collections import Counter

import pytest
import trio
import trio.testing

from supervisor.session import pump as pump_module
from tests.helpers.sessions import Hall, Line, hall
from vfs import hostio
from vfs.hostio import Mount
from vfs.ledger import SHARE, Ledger

__all__ = ["hall"]

PIECES = 8
SIZE = PIECES << 20
MANY = 6


class Wire:
    """A kernel that takes every piece at once; which turn of the loop had how many."""

    def __init__(self) -> None:
        self.turn = 0
        self.sent: Counter[int] = Counter()
        self.last: dict[int, int] = {}

    def take(self, to: int, _fd: int, _at: int, size: int) -> int:
        """Be `os.sendfile`."""
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
    monkeypatch.setitem(hostio.MOUNTS, hall.root.stat().st_dev, Mount("tmpfs"))
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


# spec S5, S7: what a child has attached brings it no more of a turn; each has its share.
async def test_a_turn_sends_a_piece_to_a_few_of_one_childs_connections(
    hall: Hall, wire: Wire
) -> None:
    turns = Turns(wire)
    trio.lowlevel.add_instrument(turns)
    lines = await reading(hall, Ledger(), MANY)
    with trio.fail_after(10):
        while wire.pieces < MANY * PIECES:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    assert max(wire.sent.values()) == SHARE
    ends = sorted(wire.last[line.session.write_fd] for line in lines)
    assert ends[-1] - ends[0] <= 2 * MANY  # and not one after the other
    assert hall.pump.sending == 0


async def test_each_child_has_its_share_of_a_turn(hall: Hall, wire: Wire) -> None:
    turns = Turns(wire)
    trio.lowlevel.add_instrument(turns)
    for _ in range(2):
        await reading(hall, Ledger(), SHARE)
    with trio.fail_after(10):
        while wire.pieces < 2 * SHARE * PIECES:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(turns)
    assert max(wire.sent.values()) > SHARE


# spec S5: who READs a large file beside a flood waits for no more of it than it sends.
async def test_a_flood_is_served_in_short_slices_while_a_large_file_goes_out(
    hall: Hall, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick_s = pump_module.SENDING_SLICE_S / 4
    clock = itertools.count()

    class Clock:
        """Each look at it is a quarter of a slice later."""

        @staticmethod
        def monotonic() -> float:
            return next(clock) * tick_s

    flood = hall.connect()

    async def ask() -> None:
        while True:
            await flood.send(b"PING\n" * 5000)

    served: list[int] = []  # pieces sent until then
    serve = hall.pump._serve

    def counted(events: list[tuple[int, int]]) -> int:
        served.append(wire.pieces)
        return serve(events)

    monkeypatch.setattr(hall.pump, "_serve", counted)
    monkeypatch.setattr(pump_module, "time", Clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(flood.rest)
        with trio.fail_after(10):
            await reading(hall, Ledger(), 1)
            while wire.pieces < PIECES:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    turns = [Counter(served)[pieces] for pieces in range(1, PIECES)]
    assert max(turns) <= 8
    assert sum(turns) >= PIECES  # the flood was there


async def test_who_reads_slowly_shortens_no_slices(hall: Hall) -> None:
    (hall.root / "large").write_bytes(bytes(SIZE))
    (line,) = await reading(hall, Ledger(), 1)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert line.session.transfer is not None  # it has not taken it
    assert hall.pump.sending == 0
    assert len(await line.body()) == SIZE
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert line.session.transfer is None
