"""Clients of a child with bounds on bytes and files, while a thread changes some."""

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from tests.helpers.sessions import Hall, Line, hall
from vfs.backends.host_file import HostHandle
from vfs.ledger import Ledger

__all__ = ["hall"]

SIZE = 1000


class Disk:
    """A disk on which a truncation ends when the test lets it."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = threading.Event()

    async def is_at_work(self) -> None:
        """Wait until a truncation has begun."""
        assert await trio.to_thread.run_sync(self.asked.wait, 10)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk()
    truncate = HostHandle.truncate
    trios = threading.current_thread()

    def wait(self: HostHandle, size: int) -> None:
        if threading.current_thread() is not trios:
            made.asked.set()
            assert made.goes_on.wait(60)
        truncate(self, size)

    monkeypatch.setattr(HostHandle, "truncate", wait)
    yield made
    made.goes_on.set()


def pair(hall: Hall, **limits: int) -> tuple[Line, Line, Ledger]:
    """Return two clients of one child, and its ledger."""
    ledger = Ledger(None, **limits)
    policy = hall.policy()
    one, other = (hall.connect(policy, Ledger(ledger)) for _ in range(2))
    return one, other, ledger


async def truncating(hall: Hall, disk: Disk, one: Line) -> None:
    """Let a client make a file `f` and begin to empty it."""
    fileno = await one.open(b"f", b"w+")
    assert await one.write(fileno, b"x" * SIZE) == b"OK %d" % SIZE
    await one.send(b"TRUNCATE %d 0\n" % fileno)
    await disk.is_at_work()
    del hall


async def quiet(line: Line) -> None:
    """Let everything be done that does not wait, and see that nothing was said."""
    with trio.move_on_after(0.05) as patience:
        await line.receive()
    assert patience.cancelled_caught


# spec S7: what is counted is what is there, whoever is at it at the same time.
@pytest.mark.parametrize(
    ("request_", "reply", "used"),
    [
        (b"WRITE %d 10\n0123456789", b"OK 10", (10, 1)),
        (b"OPEN f w false\n", b"OK 1002", (0, 1)),
        (b"OPEN g a false\n", b"OK 1002", (0, 2)),
        (b"MKDIR false d\n", b"OK", (0, 2)),
        (b"REMOVE false f\n", b"OK", (0, 0)),
        (b"RENAME false 1 1\nfg", b"OK", (0, 1)),
    ],
)
async def test_a_change_waits_for_its_turn(
    hall: Hall, disk: Disk, request_: bytes, reply: bytes, used: tuple[int, int]
) -> None:
    one, other, ledger = pair(hall, size_bytes=100 * SIZE, files=100)
    await truncating(hall, disk, one)
    fileno = await other.open(b"f", b"r+")  # which changes nothing, and need not wait
    await other.send(request_ % fileno if b"%" in request_ else request_)
    await quiet(other)
    disk.goes_on.set()
    assert await other.line() == reply
    assert await one.line() == b"OK"
    if not used[1]:
        for line in (one, other):
            line.close()
            await line.gone()
    assert (ledger.size_bytes.used, ledger.files.used) == used


async def test_who_reads_closes_or_ends_waits_for_nobodys_turn(
    hall: Hall, disk: Disk
) -> None:
    # spec S4, S5
    one, other, ledger = pair(hall, size_bytes=100 * SIZE)
    await truncating(hall, disk, one)
    fileno = await other.open(b"f", b"r+")
    assert len(await other.read(fileno, 10)) == 10
    assert await other.ask(b"CLOSE %d\n" % fileno) == b"OK"
    await other.open(b"f", b"r+")
    other.close()
    with trio.fail_after(30):
        await other.gone()
    disk.goes_on.set()
    assert await one.line() == b"OK"
    assert ledger.size_bytes.used == 0


async def test_another_child_waits_for_nobodys_turn(hall: Hall, disk: Disk) -> None:
    # spec S5, S7
    one, *_ = pair(hall, size_bytes=100 * SIZE, files=100)
    await truncating(hall, disk, one)
    stranger, _, ledger = pair(hall, size_bytes=100 * SIZE, files=100)
    fileno = await stranger.open(b"g", b"w")
    assert await stranger.write(fileno, b"y" * 10) == b"OK 10"
    assert await stranger.ask(b"MKDIR false d\n") == b"OK"
    assert (ledger.size_bytes.used, ledger.files.used) == (10, 2)
    disk.goes_on.set()
    assert await one.line() == b"OK"


async def test_what_a_header_has_reserved_is_kept_until_its_turn(
    hall: Hall, disk: Disk
) -> None:
    # spec W2, W3, S7
    one, other, ledger = pair(hall, size_bytes=4 * SIZE)
    fileno = await other.open(b"g", b"w")
    await truncating(hall, disk, one)
    await other.send(b"WRITE %d %d\n" % (fileno, 3 * SIZE))
    await trio.testing.wait_all_tasks_blocked(0.02)
    await other.send(b"y" * 3 * SIZE)
    await quiet(other)
    assert ledger.size_bytes.used == 3 * SIZE
    disk.goes_on.set()
    assert await other.line() == b"OK %d" % (3 * SIZE)
    assert await one.line() == b"OK"
    assert ledger.size_bytes.used == 3 * SIZE
