"""One client in another's way.

Floods, stalls, silence, lies (spec S5), and deadlines.

Bounds are generous, for this machine may be busy: what is counted is that replies come.
"""

import errno
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import pytest
import trio

from supervisor.fsproxy.replies import EOF, SLOW
from tests.helpers.delays import NEIGHBOUR_S, kept_waiting_s
from tests.helpers.sessions import Hall, Line, hall
from vfs.ledger import Ledger

__all__ = ["hall"]

MIB = 1024 * 1024
READS = 40


@asynccontextmanager
async def bothered(task: object, *args: object) -> AsyncIterator[None]:
    """Let a client do its worst meanwhile."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task, *args)  # type: ignore[arg-type]
        yield
        nursery.cancel_scope.cancel()


async def assert_a_neighbour_is_served(hall: Hall, reads: int = READS) -> None:
    """Read again and again as another client; no read may take long.

    One in ten may, for the machine may be busy with something else.
    """
    (hall.root / "neighbour").write_bytes(b"x" * 100)
    line = hall.connect()
    fileno = await line.open(b"neighbour")
    late = 0
    for _ in range(reads):
        assert await line.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
        start, kept = time.perf_counter(), kept_waiting_s()
        assert await line.read(fileno, 100) == b"x" * 100
        count_request = time.perf_counter() - start - (kept_waiting_s() - kept)
        late += count_request > NEIGHBOUR_S
    assert late <= reads // 10


@contextmanager
def endless(fd: int) -> Iterator[None]:
    """Let a process of its own write zeros, as fast as they are taken."""
    os.set_blocking(fd, True)
    with subprocess.Popen(["cat", "/dev/zero"], stdout=fd) as process:
        yield
        process.kill()
    os.set_blocking(fd, False)


# Floods: each as fast as the socket takes it, from a thread of its own.


async def flood(line: Line, data: bytes, *, take: bool) -> None:
    """Send the same bytes again and again; take the replies or let them lie."""
    os.set_blocking(line.writer, True)

    def send() -> None:
        try:
            while True:
                os.write(line.writer, data)
        except OSError:
            pass  # the test is over

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(trio.to_thread.run_sync, send, abandon_on_cancel=True)
        )
        if take:
            nursery.start_soon(line.rest)


# spec S5
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "data"),
    [
        (b"", b"PING\n" * 5000),
        (b"", b"\n" * 50_000),
        (b"", b"x" * 100_000),
        (b"", b"\0\xff\n\r" * 20_000),
        (b"", b"OPEN nothing r false\n" * 2000),
        (b"", b"STAT false .\n" * 2000),
        (b"WRITE 77 999999999999999999\n", b"y" * 200_000),
        (b"WRITE {n} 16000000\n", b"y" * 200_000),
        (b"RENAME false 999999999999 1\n", b"y" * 200_000),
        (b"LLM_CHAT false 0 0 8388608 0\n", b"y" * 200_000),
    ],
)
@pytest.mark.parametrize("take", [True, False])
async def test_a_flood_drowns_nobody_else(
    hall: Hall, before: bytes, data: bytes, take: bool
) -> None:
    line = hall.connect(transport="pipes")
    fileno = await line.open(b"mine", b"w")
    await line.send(before.replace(b"{n}", b"%d" % fileno))
    async with bothered(partial(flood, line, data, take=take)):
        await assert_a_neighbour_is_served(hall)
        line.session.close_soon(EOF)  # which ends the flood
        await line.gone()


# spec S5, spec F4: a process of its own sends, faster than the host can look.
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
@pytest.mark.parametrize("before", [b"", b"WRITE 77 999999999999999999\n"])
async def test_an_endless_message_drowns_nobody_else(
    hall: Hall, transport: str, before: bytes
) -> None:
    line = hall.connect(transport=transport)
    await line.send(before)
    with endless(line.writer):
        await assert_a_neighbour_is_served(hall)


# spec S5: one that asks for much and takes nothing.
@pytest.mark.parametrize("size", [60_000, 16 * MIB])
async def test_a_client_that_never_takes_its_replies(hall: Hall, size: int) -> None:
    with (hall.root / "big").open("wb") as file:
        file.truncate(16 * MIB)
    line = hall.connect()
    fileno = await line.open(b"big")
    async with bothered(
        line.send, b"READ %d %d\nSEEK %d 0\n" % (fileno, size, fileno) * 2000
    ):
        await assert_a_neighbour_is_served(hall)


# spec S5: directories of ten thousand names, again and again.
@pytest.mark.slow
async def test_long_listings_are_in_nobodys_way(hall: Hall) -> None:
    many = hall.root / "many"
    many.mkdir()
    for number in range(10_000):
        (many / f"entry-{number}").touch()
    line = hall.connect()
    async with bothered(line.send, b"LIST false many\n" * 20):
        async with bothered(line.rest):
            await assert_a_neighbour_is_served(hall, 200)


# spec S7: a child with many connections and a disk that hangs; another's disk does not.
async def test_a_hanging_disk_hangs_its_own_child_only(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: may_go.wait(60))
    policy, top = hall.policy(), Ledger()
    lines = [hall.connect(policy, Ledger(top)) for _ in range(30)]
    for line in lines:
        fileno = await line.open(b"file", b"a")
        await line.send(b"SYNC %d\n" % fileno)
    other = hall.connect(policy, Ledger())
    with trio.fail_after(30):
        for number in range(5):
            await other.open(b"new", b"w")
            assert await other.ask(b"RENAME false 3 2\nnewit") == b"OK"
            assert await other.ask(b"REMOVE false it\n") == b"OK", number
    may_go.set()
    for line in lines:
        assert await line.line() == b"OK"


# attack 15, attack 16: lies about lengths cost no memory; slow ones cost no time.
async def test_many_payloads_that_never_come(hall: Hall) -> None:
    lines = [hall.connect(ledger=Ledger()) for _ in range(40)]
    for line in lines:
        fileno = await line.open(b"file", b"a")
        await line.send(b"WRITE %d 16777216\nx" % fileno)
    await assert_a_neighbour_is_served(hall)
    assert hall.budget.payload_memory.used <= 64 * MIB
    # spec W3: nobody is refused, and those beyond the budget are spooled.
    assert hall.budget.spooled == 40 - 4
    for line in lines:
        line.close()
        await line.gone()
    assert (hall.root / "file").read_bytes() == b""


# spec S7: one child may take its own memory and disk, and no more.
async def test_many_payloads_of_one_child(hall: Hall) -> None:
    top = Ledger()
    lines = [hall.connect(ledger=Ledger(top)) for _ in range(20)]
    for line in lines:
        fileno = await line.open(b"file", b"a")
        await line.send(b"WRITE %d 16777216\nx" % fileno)
    await trio.testing.wait_all_tasks_blocked()
    other = hall.connect(ledger=Ledger())
    fileno = await other.open(b"other", b"w")
    assert await other.write(fileno, bytes(3 * MIB)) == b"OK %d" % (3 * MIB)
    # Half of the memory, and 128 MiB of disk; the other payload took no file.
    assert hall.budget.spooled == 8
    assert hall.budget.payload_memory.used == 32 * MIB
    refused = lines[-1]
    await refused.send(bytes(16 * MIB - 1))
    assert await refused.line() == (
        b"ERROR failed to read data: Cannot allocate memory"
    )
    assert await refused.ask(b"PING\n") == b"OK"
    for line in lines:
        line.close()
        await line.gone()
    assert not top.payload_memory.used
    assert not top.spooled_bytes.used


# spec W3: a payload beyond the budget is as whole as any other.
async def test_a_spooled_payload_is_written_whole(hall: Hall) -> None:
    hog = hall.connect()
    held = await hog.open(b"hog", b"w")
    hall.budget.payload_memory.limit = MIB
    await hog.send(b"WRITE %d %d\nx" % (held, MIB))
    line = hall.connect()
    fileno = await line.open(b"file", b"w")
    for size in (1000, 70_000, 3 * MIB):
        data = os.urandom(size)
        # In two pieces, or a small one never needs a place to wait in.
        await line.send(b"WRITE %d %d\n" % (fileno, size))
        await line.send(data[:500])
        await trio.testing.wait_all_tasks_blocked()
        await line.send(data[500:])
        assert await line.line() == b"OK %d" % size
        assert (hall.root / "file").read_bytes()[-size:] == data
    assert hall.budget.spooled == 3


# attack 18: no descriptor, no room for a payload: an error of that WRITE, in step.
@pytest.mark.parametrize("when", ["begin", "advance"])
async def test_a_payload_for_which_there_is_no_room(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    line = hall.connect()
    fileno = await line.open(b"file", b"w")
    hall.budget.payload_memory.limit = 0
    code = errno.EMFILE if when == "begin" else errno.ENOSPC

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    if when == "begin":
        monkeypatch.setattr("vfs.payload.open_unnamed", refuse)
    else:
        monkeypatch.setattr("vfs.payload.write_all", refuse)
    for size in (9000, 300_000):
        reply = await line.write(fileno, b"PING\n" * (size // 5))
        assert reply == b"ERROR failed to read data: " + os.strerror(code).encode()
    monkeypatch.undo()
    assert await line.write(fileno, b"x" * 9000) == b"OK 9000"
    assert (hall.root / "file").read_bytes() == b"x" * 9000


# attack 18: one that opens all it can; the host keeps what others need.
async def test_descriptor_exhaustion(hall: Hall) -> None:
    (hall.root / "file").touch()
    greedy = hall.connect(ledger=Ledger(open_files=256))
    await greedy.send(b"OPEN file r false\n" * 300)
    replies = [await greedy.line() for _ in range(300)]
    assert all(reply.startswith(b"OK ") for reply in replies[:256])
    assert set(replies[256:]) == {
        b"ERROR failed to open file 'file': Too many open files"
    }
    await assert_a_neighbour_is_served(hall)
    assert await greedy.ask(b"CLOSE %b\n" % replies[0][3:]) == b"OK"
    await greedy.open(b"file")


# attack 18: the process itself has no descriptor left.
async def test_when_the_host_has_no_descriptor_left(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = hall.connect()
    (hall.root / "file").touch()
    for transport in ("r", "w"):
        with monkeypatch.context() as patch:

            def no_more(*_: object) -> int:
                raise OSError(errno.EMFILE, "Too many open files")

            patch.setattr("vfs.backends.host.open_beneath", no_more)
            assert await line.ask(b"OPEN file %b false\n" % transport.encode()) == (
                b"ERROR failed to open file 'file': Too many open files"
            )
    assert line.client.ledger.open_files.used == 0
    await line.open(b"file")


# Deadlines


# spec F8, attack 16: a message that was begun must end.
@pytest.mark.parametrize(
    "begun", [b"P", b"OPEN a", b"WRITE 77 10\nabc", b"x" * 70_000, b"NARROW 5\n{"]
)
async def test_a_message_that_does_not_end_in_time(hall: Hall, begun: bytes) -> None:
    line = hall.connect(deadline_s=0.1)
    await line.send(b"PING\n" + begun)
    assert await line.line() == b"OK"
    with trio.fail_after(30):
        await line.gone()
    assert line.session.why_closed == SLOW
    # spec F3: it is the one exception.
    assert not hall.fs.tables.clients


# spec F8, attack 16: drop by drop it is still one message.
async def test_a_message_that_comes_drop_by_drop(hall: Hall) -> None:
    line = hall.connect(deadline_s=0.2)
    fileno = await line.open(b"file", b"w")
    await line.send(b"WRITE %d 1000000\n" % fileno)

    async def drip() -> None:
        with suppress(BrokenPipeError):  # it is told so where the host was quicker
            while True:
                await line.send(b"x")
                await trio.sleep(0.01)  # the attack itself, not a wait for something

    async with bothered(drip):
        with trio.fail_after(30):
            await line.gone()
        assert line.session.why_closed == SLOW
    assert (hall.root / "file").read_bytes() == b""


# spec F8: a client that is busy all the time begins one message after the other.
@pytest.mark.slow
async def test_a_busy_client_outlives_the_deadline(hall: Hall) -> None:
    line = hall.connect(deadline_s=1.0)
    fileno = await line.open(b"file", b"w")
    request = b"WRITE %d 3000\n" % fileno + b"x" * 3000
    stop = trio.Event()
    sent = 0

    async def talk() -> None:
        nonlocal sent
        half = len(request) // 2
        await line.send(request[:half])
        while not stop.is_set():
            # Always in the middle of one when the host looks.
            await line.send(request[half:] + request[:half])
            sent += 1
            await trio.lowlevel.checkpoint()
        await line.send(request[half:])
        sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        deadline = trio.current_time() + 2.5
        answered = 0
        while trio.current_time() < deadline:
            assert await line.line() == b"OK 3000"
            answered += 1
        stop.set()
        while answered < sent or nursery.child_tasks:
            assert await line.line() == b"OK 3000"
            answered += 1
    assert await line.ask(b"PING\n") == b"OK"


# spec F8: between messages a client may idle for ever.
@pytest.mark.slow
async def test_an_idle_client_outlives_the_deadline(hall: Hall) -> None:
    line = hall.connect(deadline_s=1.0)
    for _ in range(2):
        await line.send(b"PI")
        await trio.testing.wait_all_tasks_blocked()
        assert await line.ask(b"NG\n") == b"OK"
        await trio.sleep(1.1)  # the idling itself, not a wait for something
    assert await line.ask(b"PING\n") == b"OK"
    assert not hall.closed


# spec F8, attack 17: a reply must be taken.
@pytest.mark.parametrize("size", [65_536, 8 * MIB])
async def test_a_reply_that_is_not_taken_in_time(hall: Hall, size: int) -> None:
    with (hall.root / "big").open("wb") as file:
        file.truncate(8 * MIB)
    line = hall.connect(deadline_s=0.1)
    fileno = await line.open(b"big")
    async with bothered(
        line.send, b"READ %d %d\nSEEK %d 0\n" % (fileno, size, fileno) * 500
    ):
        with trio.fail_after(30):
            await line.gone()
    assert line.session.why_closed == SLOW
    assert not hall.fs.tables.files


# spec F8: who takes it slowly, but in time, gets all of it.
async def test_a_reply_that_is_taken_slowly(hall: Hall) -> None:
    data = os.urandom(4 * MIB)
    (hall.root / "big").write_bytes(data)
    line = hall.connect(deadline_s=60)
    fileno = await line.open(b"big")
    await line.send(b"READ %d %d\n" % (fileno, len(data)))
    assert await line.line() == b"OK %d" % len(data)
    got = b""
    while len(got) < len(data):
        got += await line.exactly(min(MIB // 4, len(data) - len(got)))
        await trio.testing.wait_all_tasks_blocked()
    assert got == data
