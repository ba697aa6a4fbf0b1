"""READ end to end, over real sockets: what it answers, and what cannot disturb it."""

import errno
import os
from pathlib import Path

import pytest
import trio

from protocol.limits import MAX_READ_BYTES
from tests.helpers.sessions import Hall, Line, hall, pattern

__all__ = ["hall"]

VERSION = Path("/proc/version").read_bytes()
KIB = 1024
MIB = 1024 * 1024


@pytest.fixture(params=["socketpair", "pipes"])
def line(hall: Hall, request: pytest.FixtureRequest) -> Line:
    """Return a client's end, over each transport."""
    return hall.connect(transport=request.param)


# spec R1: as many as asked for, or as there are.
@pytest.mark.parametrize(
    "size", [0, 1, 100, 4096, 8192, 65_535, 65_536, 65_537, 200_000, 3 * MIB]
)
async def test_a_read_is_filled(hall: Hall, line: Line, size: int) -> None:
    (hall.root / "file").write_bytes(pattern(size + 10))
    fileno = await line.open(b"file")
    assert await line.read(fileno, size) == pattern(size)
    assert await line.read(fileno, size + 100) == pattern(10, size)
    for ask in (0, 1, 100_000):
        assert await line.read(fileno, ask) == b""


# spec R1: what anybody appends is seen.
async def test_what_is_appended_later_is_seen(hall: Hall, line: Line) -> None:
    (hall.root / "file").write_bytes(b"one")
    fileno = await line.open(b"file")
    assert await line.read(fileno, 100_000) == b"one"
    assert await line.read(fileno, 100) == b""
    with (hall.root / "file").open("ab") as appending:
        appending.write(b"two" + bytes(100_000))
    assert await line.read(fileno, 3) == b"two"
    assert await line.read(fileno, 200_000) == bytes(100_000)


# spec R1: what says that it is empty, and is not, is read all the same.
@pytest.mark.parametrize("size", [100, 65_536, 65_537, 1_000_000])
async def test_a_file_of_procfs_is_read(hall: Hall, size: int) -> None:
    line = hall.connect(policy=hall.policy(top_level=True))
    fileno = await line.open(b"/proc/version", flag=b"true")
    assert await line.read(fileno, size) == VERSION[:size]


# spec R1, R3: 16 MiB at most, and a size is no allocation.
async def test_a_read_is_capped(hall: Hall, line: Line) -> None:
    with (hall.root / "file").open("wb") as file:
        file.truncate(MAX_READ_BYTES + 5)
    fileno = await line.open(b"file")
    await line.send(b"READ %d %d\n" % (fileno, 10**17))
    head = await line.line()
    assert head == b"OK %d" % MAX_READ_BYTES
    left = MAX_READ_BYTES
    while left:
        left -= len(await line.exactly(min(left, MIB)))
    assert await line.read(fileno, 10**17) == bytes(5)


# spec R2: count, fileno, size, mode.
async def test_the_order_of_a_reads_checks(hall: Hall, line: Line) -> None:
    (hall.root / "file").touch()
    read, write = await line.open(b"file"), await line.open(b"file", b"a")
    for request, reply in (
        (b"READ", b"READ requires fileno and size"),
        (b"READ x", b"READ requires fileno and size"),
        (b"READ x y z", b"READ requires fileno and size"),
        (b"READ x y", b"invalid fileno: x"),
        (b"READ 77 y", b"invalid fileno: 77"),
        (b"READ 77 5", b"invalid fileno: 77"),
        (b"READ %d y" % read, b"invalid size: y"),
        (b"READ %d y" % write, b"invalid size: y"),
        (b"READ %d 5" % write, b"file not open for reading: %d" % write),
        (b"READ %d 0" % write, b"file not open for reading: %d" % write),
        (b"READ %d 100000" % write, b"file not open for reading: %d" % write),
    ):
        assert await line.ask(request + b"\n") == b"ERROR " + reply


# spec R1: a file that shrinks while it is on its way; the promise is kept.
@pytest.mark.parametrize("keep", [0, 100_000, MIB])
async def test_a_file_that_shrinks_on_its_way(
    hall: Hall, line: Line, keep: int
) -> None:
    size = 8 * MIB
    (hall.root / "file").write_bytes(b"x" * size)
    fileno = await line.open(b"file")
    await line.send(b"READ %d %d\nPING\n" % (fileno, size))
    assert await line.line() == b"OK %d" % size
    got = await line.exactly(MIB)
    os.truncate(hall.root / "file", keep)
    got += await line.exactly(size - MIB)
    assert got.strip(b"\0") == b"x" * len(got.strip(b"\0"))
    assert len(got) == size
    # In step: the next reply is the next reply.
    assert await line.line() == b"OK"


# spec R1: what is on the disk only is read by a thread, and the client sees no difference.
@pytest.mark.parametrize("size", [100, 65_536, 65_537, 1_000_000])
@pytest.mark.parametrize("left", [10, 3_000_000])
async def test_what_is_not_in_memory(
    hall: Hall, line: Line, size: int, left: int
) -> None:
    fd = os.open(hall.root / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, pattern(MIB + left))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    fileno = await line.open(b"file")
    assert await line.ask(b"SEEK %d %d\n" % (fileno, MIB)) == b"OK %d" % MIB
    await line.send(b"READ %d %d\nPING\n" % (fileno, size))
    assert await line.body() == pattern(min(size, left), MIB)
    assert await line.line() == b"OK"
    assert await line.read(fileno, 8) == pattern(8, MIB + size)[: max(0, left - size)]


# spec R2: an error of the disk is an error of that READ, and the offset stands.
@pytest.mark.parametrize("size", [100, 300_000])
async def test_a_read_that_fails(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    (hall.root / "file").write_bytes(pattern(500_000))
    fileno = await line.open(b"file")
    assert await line.read(fileno, 10) == pattern(10)
    file = line.session.files[fileno]
    with monkeypatch.context() as patch:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "preadv", broken)
        patch.setattr(os, "pread", broken)
        patch.setattr(os, "sendfile", broken)
        patch.setattr(file.handle.mount, "read", broken)
        reply = await line.ask(b"READ %d %d\n" % (fileno, size))
    assert reply == b"ERROR failed to read: Input/output error"
    assert await line.read(fileno, size) == pattern(size, 10)


# The zero-copy rule: what comes behind a large READ does not change what was read.
@pytest.mark.parametrize("where", ["disk", "tmpfs"])
@pytest.mark.parametrize("how", ["WRITE", "TRUNCATE", "repeated"])
async def test_a_change_behind_a_large_read(
    hall: Hall, line: Line, where: str, how: str
) -> None:
    size = 150_000
    name = hall.root / "file"
    if where == "tmpfs":
        name = Path("/dev/shm") / f"behind-{os.getpid()}"
        policy = hall.policy(top_level=True)
        line = hall.connect(policy, transport=line.client.pipe_id.partition(":")[2])
    name.write_bytes(b"a" * size)
    flag = b"true" if where == "tmpfs" else b"false"
    try:
        fileno = await line.open(os.fsencode(name), b"r+", flag)
        if how == "repeated":
            for _ in range(3):
                assert await line.write(fileno, b"a" * 100) == b"OK 100"
                assert await line.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
        requests = b"READ %d %d\nSEEK %d 0\n" % (fileno, size, fileno)
        count = 100 if how == "repeated" else size
        if how == "TRUNCATE":
            requests += b"TRUNCATE %d 10\nTRUNCATE %d %d\n" % (fileno, fileno, size)
        else:
            requests += b"WRITE %d %d\n%b" % (fileno, count, b"b" * count)
        async with trio.open_nursery() as nursery:
            if how == "repeated":  # each line alone, as a client that waits sends it
                head, _, rest = requests.partition(b"WRITE")
                for piece in (*head.splitlines(keepends=True), b"WRITE" + rest):
                    await line.send(piece)
                    await let_the_host_work()
            else:
                nursery.start_soon(line.send, requests)
            await let_the_host_work()
            assert await line.body() == b"a" * size
            assert await line.line() == b"OK 0"
            if how == "TRUNCATE":
                assert [await line.line(), await line.line()] == [b"OK", b"OK"]
            else:
                assert await line.line() == b"OK %d" % count
        changed = b"a" * 10 if how == "TRUNCATE" else b"b" * count
        kept = bytes(size) if how == "TRUNCATE" else b"a" * size
        assert name.read_bytes() == changed + kept[len(changed) :]
    finally:
        name.unlink()


async def let_the_host_work() -> None:
    """Let the host do all that it can do while nobody takes its replies."""
    for _ in range(300):  # it lives in this thread: a few turns would do
        await trio.lowlevel.checkpoint()


# A kernel that cannot send this file by itself: it goes through the host.
async def test_a_file_that_sendfile_does_not_know(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "file").write_bytes(pattern(3 * MIB))
    fileno = await line.open(b"file")

    def unknown(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", unknown)
    assert await line.read(fileno, 2 * MIB) == pattern(2 * MIB)
    await line.send(b"READ %d %d\n" % (fileno, MIB))
    await let_the_host_work()
    os.truncate(hall.root / "file", 2 * MIB + 10)
    got = await line.body()
    assert got.rstrip(b"\0") == pattern(MIB, 2 * MIB)[: len(got.rstrip(b"\0"))]
    assert len(got) == MIB
