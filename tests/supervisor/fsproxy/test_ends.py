"""The end of a client: what it had sent is done, what it held is given back, once."""

import errno
import os
import random
import threading
from pathlib import Path

import pytest
import trio

from supervisor.fsproxy.replies import EOF, FAULT, PROCESS_EXIT
from tests.helpers.leaks import open_here
from tests.helpers.sessions import Hall, Line, hall
from vfs.clients import OpenFile
from vfs.ledger import Ledger

__all__ = ["hall"]

MIB = 1024 * 1024


@pytest.fixture(params=["socketpair", "pipes"])
def line(hall: Hall, request: pytest.FixtureRequest) -> Line:
    """Return a client's end, over each transport."""
    return hall.connect(transport=request.param)


async def ended(line: Line) -> None:
    """End the client as the exit of its process does; its end stays open elsewhere."""
    with trio.fail_after(30):
        await line.session.finish(PROCESS_EXIT)


# Its sent requests


# spec S2, L1: a model is asked nothing for the dead, and what follows is a line again.
@pytest.mark.parametrize("separated", [True, False], ids=["separated", "counted"])
@pytest.mark.parametrize("flag", [b"false", b"perhaps"])
@pytest.mark.parametrize("size", [2, 8120, 8150, 100_000])
async def test_a_chat_of_the_dead_ends_where_it_ends(
    hall: Hall, line: Line, separated: bool, flag: bytes, size: int
) -> None:
    number = await line.open(b"f", b"w")
    parts = (b"", b"", b"x" * size, b"general")
    chat = b"LLM_CHAT %b 0 0 %d 7\n" % (flag, size)
    body = (b"\n" if separated else b"").join(parts)
    await line.send(chat + body + b"WRITE %d 10\n0123456789" % number)
    line.session.close_soon(PROCESS_EXIT)
    await ended(line)
    assert (hall.root / "f").read_bytes() == b"0123456789"


# spec S2: what is complete is done, though nobody takes a reply and the end is held.
async def test_the_last_words_of_a_process(hall: Hall, line: Line) -> None:
    first = 1000
    await line.send(
        b"OPEN a w false\nWRITE %d 5\nhello" % first
        + b"OPEN b w+ false\nWRITE %d 3\nabc" % (first + 1)
        + b"SYNC %d\nWRITE %d 3\ndef" % (first + 1, first + 1)
        + b"CLOSE %d\n" % first
        + b"WRITE %d 100\nnot all of it" % (first + 1)
    )
    await ended(line)
    assert (hall.root / "a").read_bytes() == b"hello"
    assert (hall.root / "b").read_bytes() == b"abcdef"
    assert line.session.why_closed == PROCESS_EXIT
    assert line.session.closed_files == [first + 1]


# spec S2: the disk is asked for it, though nobody hears that it was.
async def test_a_sync_of_the_dead(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    fileno = await line.open(b"a", b"w")
    synced: list[str] = []
    monkeypatch.setattr(
        "vfs.backends.host_file.HostHandle.sync",
        lambda file: synced.append(os.readlink(f"/proc/self/fd/{file.fd}")),
    )
    await line.send(b"WRITE %d 1\nxSYNC %d\n" % (fileno, fileno))
    line.session.close_soon(PROCESS_EXIT)
    await ended(line)
    assert synced == [str(hall.root / "a")]


# spec S2: also what comes behind something that takes its time.
@pytest.mark.parametrize(
    "slow", ["publication", "large write", "large read", "sync", "chat", "refused"]
)
async def test_what_was_sent_behind_something_slow(
    hall: Hall, line: Line, slow: str
) -> None:
    (hall.root / "big").write_bytes(b"x" * MIB)
    if slow == "publication":
        line = hall.connect(
            hall.policy(publish="on-close"),
            transport=line.client.pipe_id.partition(":")[2],
        )
    number = await line.open(b"first", b"w+")
    big = await line.open(b"big")
    requests = {
        "publication": b"CLOSE %d\n" % number,
        "large write": b"WRITE %d 60000\n" % number + b"y" * 60_000,
        "large read": b"READ %d %d\n" % (big, MIB) * 5,
        "sync": b"SYNC %d\n" % number,
        "chat": b"LLM_CHAT false 0 0 5 0\nhelloLLM_CONFIG\n",
        "refused": b"WRITE 7 10\n0123456789READ x\nnonsense\n\n",
    }[slow]
    if slow == "large write":
        line.session.outbound.zero_copy = (
            True  # as behind a large READ: a job of its own
        )
    await line.send(
        requests
        + b"OPEN last w false\nWRITE %d 4\ndone\nCLOSE %d\n" % (big + 1, big + 1)
    )
    await ended(line)
    assert (hall.root / "last").read_bytes() == b"done"
    if slow == "large write":
        assert (hall.root / "first").read_bytes() == b"y" * 60_000


# spec S2: only OPEN, READ, WRITE, CLOSE and SYNC are done for the dead, and of the others
# nothing that would show by itself.
async def test_what_is_not_done_for_the_dead(hall: Hall, line: Line) -> None:
    (hall.root / "kept").write_bytes(b"kept")
    fileno = await line.open(b"kept", b"r+")
    await line.send(
        b"MKDIR false d\nREMOVE false kept\nRENAME false 4 3\nkeptnew"
        b"TRUNCATE %d 0\nNARROW 2\n{}LLM_CHAT false 0 0 2 0\nhi"
        % fileno
        + b"OPEN last w false\n"
    )
    # As if the process had ended before the host looked.
    line.session.close_soon(PROCESS_EXIT)
    await ended(line)
    assert sorted(os.listdir(hall.root)) == ["kept", "last"]
    assert (hall.root / "kept").read_bytes() == b"kept"


# spec S2, P1: a WRITE of the dead goes where it was meant to go.
async def test_a_write_of_the_dead_goes_where_its_seek_led(
    hall: Hall, line: Line
) -> None:
    (hall.root / "kept").write_bytes(b"0123456789")
    fileno = await line.open(b"kept", b"r+")
    await line.send(b"SEEK %d 8\nWRITE %d 2\nXX" % (fileno, fileno))
    line.session.close_soon(PROCESS_EXIT)
    await ended(line)
    assert (hall.root / "kept").read_bytes() == b"01234567XX"


# spec S2, A3b, A5: what the dead gave up is not done for them; so does a relay that ends.
async def test_what_the_dead_gave_up_is_not_theirs_any_more(hall: Hall) -> None:
    (hall.root / "kept").write_bytes(b"old")
    line = hall.connect(hall.policy(publish="on-close"))
    fileno = await line.open(b"kept", b"w")
    assert await line.write(fileno, b"half") == b"OK 4"
    await line.send(
        b'NARROW 22\n{"read":[],"write":[]}CLOSE %d\nOPEN last w false\n' % fileno
    )
    line.session.close_soon(PROCESS_EXIT)
    await ended(line)
    assert (hall.root / "kept").read_bytes() == b"old"
    assert not (hall.root / "last").exists()


# spec S2, W2, I6: cut anywhere, whole WRITEs and no others; EOF or exit alike.
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
@pytest.mark.parametrize("how", [EOF, PROCESS_EXIT])
async def test_writes_cut_anywhere(hall: Hall, transport: str, how: str) -> None:
    dice = random.Random(7)
    policy = hall.policy()
    for turn in range(40):
        line = hall.connect(policy, transport=transport)
        fileno = await line.open(b"log", b"w")
        writes = [
            bytes([65 + number % 26]) * dice.choice((1, 10, 500, 5000, 20_000))
            for number in range(dice.randrange(1, 8))
        ]
        stream = b""
        ends = []
        for data in writes:
            stream += b"WRITE %d %d\n%b" % (fileno, len(data), data)
            ends.append(len(stream))
        cut = dice.randrange(len(stream) + 1)
        for start in range(0, cut, 9000):
            await line.send(stream[start : min(start + 9000, cut)])
        if how == EOF:
            line.close()
            await line.gone()
        else:
            await ended(line)
        whole = [data for data, end in zip(writes, ends, strict=True) if end <= cut]
        assert (hall.root / "log").read_bytes() == b"".join(whole), turn


# spec S2: a reset connection is an end like any other.
async def test_a_connection_that_is_reset(hall: Hall) -> None:
    line = hall.connect()
    fileno = await line.open(b"file", b"w")
    # Replies that nobody has read are lost with this end, and the host is told so.
    await line.send(b"PING\n" * 10 + b"WRITE %d 3\nabc" % fileno)
    await trio.testing.wait_all_tasks_blocked()
    line.close()
    await line.gone()
    assert (hall.root / "file").read_bytes() == b"abc"
    assert not hall.fs.tables.files


# Its holdings


# spec S3, I5: everything is given back, whichever way it ends.
@pytest.mark.parametrize("how", ["EOF", "exit", "both", "fault"])
async def test_everything_is_given_back(
    hall: Hall, line: Line, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = hall.policy()
    kinds = ("socket:", str(hall.root))
    before = open_here(*kinds)
    other = hall.connect(policy)
    for mode in (b"w", b"a+", b"r"):
        await other.open(b"file", mode)
    await other.send(b'NARROW 14\n{"read":["."]}')
    assert await other.line() == b"OK"
    await other.send(b"WRITE 1000 9000\nxx")
    await trio.testing.wait_all_tasks_blocked()
    if how in ("EOF", "both"):
        other.close()
    if how == "fault":

        def broken(*_: object, **__: object) -> OpenFile:
            raise RuntimeError("a bug")

        fault = hall.connect(policy)
        monkeypatch.setattr(hall.fs, "open", broken)
        await fault.send(b"OPEN file r false\n")
        await fault.gone()
        monkeypatch.undo()
        assert fault.session.why_closed == FAULT
        assert isinstance(fault.session.failure, RuntimeError)
        fault.close()
        other.close()
    if how in ("exit", "both"):
        await ended(other)
        other.close()
    await other.gone()
    assert len([s for s in hall.closed if s is other.session]) == 1
    assert open_here(*kinds) == before
    # spec S3: EOF of one is nothing to another.
    assert await line.ask(b"PING\n") == b"OK"


# I2, spec S2: on the first of them, and once.
async def test_the_end_comes_once(hall: Hall, line: Line) -> None:
    await line.open(b"file", b"w")
    async with trio.open_nursery() as nursery:
        line.close()
        for _ in range(3):
            nursery.start_soon(line.session.finish, PROCESS_EXIT)
        line.session.close_soon(EOF)
    assert hall.closed == [line.session]
    await line.session.finish(PROCESS_EXIT)
    assert hall.closed == [line.session]


# spec S3: nested clients first.
async def test_nested_clients_end_first(hall: Hall) -> None:
    (hall.root / "file").touch()
    top = hall.connect()
    nested = hall.connect(top.client.policy, Ledger(hall.ledger), parent=top.client)
    top.session.nested.append(nested.session)
    nested.session.parent = top.session
    numbers = [await line.open(b"file") for line in (top, nested)]
    await nested.send(b"OPEN new w false\nWRITE %d 3\nnew" % (numbers[1] + 1))
    await ended(top)
    assert hall.closed == [nested.session, top.session]
    assert (hall.root / "new").read_bytes() == b"new"
    assert await nested.rest() != b"x"


# spec S2, S4: who shares the descriptor of a dead process is shut out at once.
async def test_who_shares_the_descriptor_is_shut_out(hall: Hall) -> None:
    line = hall.connect()
    with (hall.root / "big").open("wb") as file:
        file.truncate(8 * MIB)
    fileno = await line.open(b"big")
    # A reply that is never taken, and requests that wait behind it.
    await line.send(b"READ %d %d\n" % (fileno, 8 * MIB) + b"PING\n" * 100)
    await trio.testing.wait_all_tasks_blocked()
    assert line.session.is_working
    await ended(line)
    with pytest.raises(BrokenPipeError):
        os.write(line.writer, b"PING\n")
    assert len(await line.rest()) < 8 * MIB


# I1: a call into the kernel is waited for; its descriptor is closed afterwards.
async def test_a_call_in_a_thread_is_waited_for(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    fileno = await line.open(b"file", b"w")
    target = line.session.files[fileno].handle.fd
    begun, may_go = threading.Event(), threading.Event()
    plain_write = os.pwrite

    def slow(fd: int, data: bytes, offset: int) -> int:
        if fd == target:
            begun.set()
            may_go.wait(60)
        return plain_write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    await line.send(b"WRITE %d %d\n" % (fileno, 2 * MIB))
    await line.send(b"x" * (2 * MIB))
    await trio.to_thread.run_sync(begun.wait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.session.finish, PROCESS_EXIT)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        os.fstat(target)
        assert line.client.id in hall.fs.tables.clients
        may_go.set()
    assert (hall.root / "file").stat().st_size == 2 * MIB
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(target)


# spec S3, A3b: what is staged and not closed never was, however it ends.
@pytest.mark.parametrize("how", [EOF, PROCESS_EXIT])
async def test_staged_files_end_with_their_client(
    hall: Hall, how: str, tmp_path: Path
) -> None:
    line = hall.connect(hall.policy(publish="on-close"))
    (hall.root / "file").write_bytes(b"old")
    for name in (b"file", b"new"):
        fileno = await line.open(name, b"w")
        assert await line.write(fileno, b"fresh") == b"OK 5"
    if how == EOF:
        line.close()
        await line.gone()
    else:
        await ended(line)
    assert os.listdir(hall.root) == ["file"]
    assert (hall.root / "file").read_bytes() == b"old"
    del tmp_path


# A fault in slow work is one client's, too.
async def test_a_fault_in_a_job_costs_one_client(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = hall.connect(), hall.connect()

    async def broken(*_: object, **__: object) -> list[tuple[bytes, str]]:
        raise RuntimeError("a bug")

    monkeypatch.setattr("vfs.names.list_waiting", broken)
    await line.send(b"LIST false .\n")
    await line.gone()
    assert line.session.why_closed == FAULT
    assert await other.ask(b"PING\n") == b"OK"


# spec S2: a descriptor that fails for any other reason ends the client as well.
async def test_a_transport_that_fails(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = hall.connect(), hall.connect()
    target = line.session.read_fd
    plain_read = os.read

    def broken(fd: int, size: int) -> bytes:
        if fd == target:
            raise OSError(errno.EIO, "Input/output error")
        return plain_read(fd, size)

    monkeypatch.setattr("supervisor.fsproxy.session.os_read", broken)
    await line.send(b"PING\n")
    await line.gone()
    assert isinstance(line.session.failure, OSError)
    assert line.session.failure.errno == errno.EIO
    assert await other.ask(b"PING\n") == b"OK"
    assert await line.rest() == b""
