"""WRITE, CLOSE and offsets end to end, over real sockets."""

import errno
import os
import threading
from collections.abc import Callable
from functools import partial

import pytest
import trio

from tests.helpers.sessions import Hall, Line, hall, pattern

__all__ = ["hall"]

KIB = 1024
MIB = 1024 * 1024


@pytest.fixture(params=["socketpair", "pipes"])
def line(hall: Hall, request: pytest.FixtureRequest) -> Line:
    """Return a client's end, over each transport."""
    return hall.connect(transport=request.param)


# spec W1
@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [0, 1, 4095, 4096, 8192, 65_536, 65_537, 1_000_000, 5 * MIB, 16 * MIB]
)
async def test_a_write_is_whole(hall: Hall, line: Line, size: int) -> None:
    data = pattern(size)
    fileno = await line.open(b"file", b"w+")
    assert await line.write(fileno, data) == b"OK %d" % size
    assert await line.write(fileno, b"end") == b"OK 3"
    assert (hall.root / "file").read_bytes() == data + b"end"


# spec W1: a payload is data, whatever it contains.
async def test_a_payload_is_never_a_request(hall: Hall, line: Line) -> None:
    fileno = await line.open(b"file", b"w")
    data = b"\nCLOSE %d\nOPEN evil w false\n\0\xff\r\n" % fileno
    assert await line.write(fileno, data) == b"OK %d" % len(data)
    assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert (hall.root / "file").read_bytes() == data
    assert os.listdir(hall.root) == ["file"]


# spec W2, I6: the client goes before the last byte came.
@pytest.mark.parametrize("size", [10, 5000, 100_000, 2 * MIB])
@pytest.mark.parametrize("mode", [b"w", b"a", b"r+"])
@pytest.mark.parametrize("half", [False, True])
async def test_a_payload_that_does_not_end(
    hall: Hall, line: Line, size: int, mode: bytes, half: bool
) -> None:
    (hall.root / "file").write_bytes(b"old")
    fileno = await line.open(b"file", mode)
    before = (hall.root / "file").read_bytes()
    await line.send(b"WRITE %d %d\n" % (fileno, size))
    await line.send(b"x" * (size - 1))
    if half and line.reader == line.writer:
        line.shut_down()
        assert await line.rest() == b"ERROR failed to read data: unexpected EOF\n"
    line.close()
    await line.gone()
    assert (hall.root / "file").read_bytes() == before
    assert hall.budget.payload_memory.used == 0


# spec W3: more than may be written at once is drained, then refused.
async def test_a_payload_beyond_the_cap(hall: Hall) -> None:
    line = hall.connect(max_write_bytes=1000)
    fileno = await line.open(b"file", b"w")
    assert await line.write(fileno, b"x" * 1000) == b"OK 1000"
    for size in (1001, 100_000, 3 * MIB):
        expected = b"ERROR invalid size: %d exceeds limit 1000" % size
        assert await line.write(fileno, b"x" * size) == expected
        # spec W6: the cap comes before the fileno.
        assert await line.write(77, b"x" * size) == expected
    assert hall.budget.payload_memory.used == 0
    assert await line.ask(b"PING\n") == b"OK"
    assert (hall.root / "file").stat().st_size == 1000


# spec W4: in step, whatever the error.
@pytest.mark.parametrize("size", [0, 1, 100, 9000, 300_000])
@pytest.mark.parametrize(
    ("tokens", "reply"),
    [
        (b"77 {size}", b"invalid fileno: 77"),
        (b"0 {size}", b"invalid fileno: 0"),
        (b"x {size}", b"invalid fileno: x"),
        (b"-1 {size}", b"invalid fileno: -1"),
        (b"{foreign} {size}", b"invalid fileno: {foreign}"),
        (b"{read} {size}", b"file not open for writing: {read}"),
        (b"{write} {size} more", b"WRITE requires fileno and size"),
    ],
)
async def test_a_refused_payload_is_taken_off_the_line(
    hall: Hall, line: Line, tokens: bytes, reply: bytes, size: int
) -> None:
    (hall.root / "file").touch()
    other = hall.connect()
    numbers = {
        b"{foreign}": await other.open(b"file", b"a"),
        b"{read}": await line.open(b"file"),
        b"{write}": await line.open(b"file", b"a"),
        b"{size}": size,
    }
    for name, number in numbers.items():
        tokens = tokens.replace(name, b"%d" % number)
        reply = reply.replace(name, b"%d" % number)
    payload = b"PING\n" * (size // 5 + 1)
    await line.send(b"WRITE %b\n%b" % (tokens, payload[:size]))
    assert await line.line() == b"ERROR " + reply
    assert await line.ask(b"LLM_QUOTA\n") == b"ERROR LLM quota not available"
    assert (hall.root / "file").read_bytes() == b""


# spec W4, W6: where the size is none, nothing is taken.
@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b"WRITE", b"WRITE requires fileno and size"),
        (b"WRITE 1000", b"WRITE requires fileno and size"),
        (b"WRITE 1000 -5", b"invalid size: -5"),
        (b"WRITE x y", b"invalid size: y"),
        (b"WRITE 1000 5x", b"invalid size: 5x"),
        (b"WRITE 1000 1000000000000000000", b"invalid size: 1000000000000000000"),
        (b"WRITE 1000 0x5 more", b"WRITE requires fileno and size"),
    ],
)
async def test_without_a_size_nothing_is_taken(
    line: Line, request_line: bytes, reply: bytes
) -> None:
    await line.send(request_line + b"\nPING\n")
    assert await line.line() == b"ERROR " + reply
    assert await line.line() == b"OK"


# spec W5: an error of the device; the offset stands, the session goes on.
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("size", [1, 10_000, 2 * MIB])
@pytest.mark.parametrize("mode", [b"r+", b"a+"])
async def test_a_write_that_fails(
    hall: Hall,
    line: Line,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    size: int,
    mode: bytes,
) -> None:
    (hall.root / "file").write_bytes(b"0123456789")
    fileno = await line.open(b"file", mode)
    assert await line.read(fileno, 4) == b"0123"
    plain: dict[str, Callable[..., int]] = {"pwrite": os.pwrite, "write": os.write}
    target = line.session.files[fileno].handle.fd

    def half(real: Callable[..., int], fd: int, data: bytes, *at: int) -> int:
        if fd != target:
            return real(fd, data, *at)
        if len(data) == size and size > 1:
            return real(fd, memoryview(data)[: size // 2], *at)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        for name, real in plain.items():
            patch.setattr(os, name, partial(half, real))
        reply = await line.write(fileno, b"x" * size)
    assert reply == b"ERROR failed to write: " + os.strerror(code).encode()
    content = (hall.root / "file").read_bytes()
    assert len(content) == 10
    assert content[:4] == b"0123"
    assert await line.read(fileno, 2) == content[4:6]
    assert await line.write(fileno, b"zz") == b"OK 2"


# spec W5: a disk that takes a payload in pieces.
@pytest.mark.parametrize("mode", [b"w", b"a"])
async def test_short_writes_are_continued(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch, mode: bytes
) -> None:
    fileno = await line.open(b"file", mode)
    data = pattern(1000)
    plain: dict[str, Callable[..., int]] = {"pwrite": os.pwrite, "write": os.write}
    target = line.session.files[fileno].handle.fd

    def some(real: Callable[..., int], fd: int, piece: bytes, *at: int) -> int:
        return real(fd, memoryview(piece)[:7] if fd == target else piece, *at)

    for name, real in plain.items():
        monkeypatch.setattr(os, name, partial(some, real))
    assert await line.write(fileno, data) == b"OK 1000"
    monkeypatch.undo()
    assert (hall.root / "file").read_bytes() == data


# A long file that is opened with `w`


# spec O3, S5: its blocks are freed where nobody waits for it.
async def test_a_long_file_is_emptied(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfs.opening.INLINE_TRUNCATE_BYTES", 100)
    threads: list[int] = []
    real = os.ftruncate

    def noted(fd: int, size: int) -> None:
        threads.append(threading.get_ident())
        real(fd, size)

    monkeypatch.setattr(os, "ftruncate", noted)
    for size in (100, 101, 5000):
        (hall.root / "file").write_bytes(b"x" * size)
        for mode in (b"w", b"w+"):
            fileno = await line.open(b"file", mode)
            assert (hall.root / "file").read_bytes() == b""
            assert await line.write(fileno, b"x" * size) == b"OK %d" % size
    assert [one == threading.get_ident() for one in threads] == [True] * 2 + [False] * 4


# spec O6, O7: a file that cannot be emptied is not open.
@pytest.mark.parametrize("limit", [0, 10**9])
async def test_a_file_that_cannot_be_emptied(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("vfs.opening.INLINE_TRUNCATE_BYTES", limit)
    (hall.root / "file").write_bytes(b"old")

    def broken(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", broken)
        assert await line.ask(b"OPEN file w false\n") == (
            b"ERROR failed to open file 'file': Operation not permitted"
        )
    assert not hall.fs.tables.files
    assert hall.ledger.open_files.used == 0
    assert not list(hall.fs.descriptors())
    await line.open(b"file", b"w")


# CLOSE


# spec C1
async def test_closing(hall: Hall, line: Line) -> None:
    (hall.root / "file").touch()
    fileno = await line.open(b"file")
    assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    for token in (b"%d" % fileno, b"0", b"1", b"2", b"3", b"-1", b"x", b"1 2"[:1]):
        reply = await line.ask(b"CLOSE %b\n" % token)
        assert reply == b"ERROR invalid fileno: %b" % token
    assert (
        await line.ask(b"READ %d 1\n" % fileno) == b"ERROR invalid fileno: %d" % fileno
    )
    assert not hall.fs.tables.files


# spec C1, A3b: a publication that fails.
async def test_a_close_that_cannot_publish(hall: Hall) -> None:
    line = hall.connect(hall.policy(publish="on-close"))
    (hall.root / "file").write_bytes(b"old")
    staged = await line.open(b"dir", b"w")
    good = await line.open(b"file", b"w")
    for fileno in (staged, good):
        assert await line.write(fileno, b"fresh") == b"OK 5"
    (hall.root / "dir").mkdir()
    assert (hall.root / "file").read_bytes() == b"old"
    assert await line.ask(b"CLOSE %d\n" % staged) == (
        b"ERROR failed to close: Is a directory"
    )
    assert (
        await line.ask(b"CLOSE %d\n" % staged) == b"ERROR invalid fileno: %d" % staged
    )
    assert await line.ask(b"CLOSE %d\n" % good) == b"OK"
    assert (hall.root / "file").read_bytes() == b"fresh"
    assert sorted(os.listdir(hall.root)) == ["dir", "file"]


# spec A3b: what is staged dies with the client, the old content stands.
async def test_what_is_staged_dies_with_its_client(hall: Hall) -> None:
    line = hall.connect(hall.policy(publish="on-close"))
    (hall.root / "file").write_bytes(b"old")
    for name in (b"file", b"new"):
        fileno = await line.open(name, b"w+")
        assert await line.write(fileno, b"fresh") == b"OK 5"
        assert await line.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
        assert await line.read(fileno, 10) == b"fresh"
    line.close()
    await line.gone()
    assert os.listdir(hall.root) == ["file"]
    assert (hall.root / "file").read_bytes() == b"old"


# Offsets


# spec P1
async def test_offsets(hall: Hall, line: Line) -> None:
    (hall.root / "file").write_bytes(b"0123456789")
    one, other = await line.open(b"file", b"r+"), await line.open(b"file", b"r+")
    assert await line.read(one, 3) == b"012"
    assert await line.write(one, b"XX") == b"OK 2"
    assert await line.read(other, 10) == b"012XX56789"
    assert await line.read(one, 10) == b"56789"
    fresh = await line.open(b"fresh", b"w+")
    assert await line.write(fresh, b"abc") == b"OK 3"
    assert await line.read(fresh, 10) == b""
    appending = await line.open(b"file", b"a+")
    assert await line.read(appending, 2) == b"01"
    assert await line.write(appending, b"end") == b"OK 3"
    assert await line.read(appending, 10) == b""
    assert await line.read(one, 10) == b"end"


# spec P1: appends of several handles and clients never overwrite each other.
async def test_appends_of_many(hall: Hall) -> None:
    lines = [hall.connect() for _ in range(4)]

    async def append(line: Line, letter: bytes) -> None:
        fileno = await line.open(b"log", b"a")
        for number in range(30):
            size = 1 + number * 37 % 900
            assert await line.write(fileno, letter * size) == b"OK %d" % size

    async with trio.open_nursery() as nursery:
        for line, letter in zip(lines, (b"a", b"b", b"c", b"d"), strict=True):
            nursery.start_soon(append, line, letter)
    total = sum(1 + number * 37 % 900 for number in range(30))
    content = (hall.root / "log").read_bytes()
    assert {letter: content.count(letter) for letter in (b"a", b"b", b"c", b"d")} == (
        dict.fromkeys((b"a", b"b", b"c", b"d"), total)
    )


@pytest.fixture
def closers(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return who has closed each descriptor last: the thread's id."""
    monkeypatch.setattr("hostlib.large_files.INLINE_TRUNCATE_BYTES", 100_000)
    found: dict[int, int] = {}
    real = os.close

    def noted(fd: int) -> None:
        found[fd] = threading.get_ident()
        real(fd)

    monkeypatch.setattr(os, "close", noted)
    return found


# spec C1, T3, S5: what the last close gives back to the kernel takes it long.
@pytest.mark.parametrize("name", [b"file", b"gone"])
@pytest.mark.parametrize("size", [1000, 300_000])
@pytest.mark.parametrize("has_grown", [False, True])
async def test_a_long_file_without_a_name_is_closed_where_nobody_waits(
    hall: Hall,
    line: Line,
    closers: dict[int, int],
    name: bytes,
    size: int,
    has_grown: bool,
) -> None:
    if has_grown:
        first = await line.open(name, b"w+")
        assert await line.write(first, b"x" * size) == b"OK %d" % size
    else:
        (hall.root / name.decode()).write_bytes(b"x" * size)
        first = await line.open(name)
    again = await line.open(name)
    if name == b"gone" and not has_grown:
        assert await line.ask(b"REMOVE false gone\n") == b"OK"
    elif name == b"gone":
        (hall.root / "gone").unlink()
    for fileno in (first, again):
        fd = hall.fs.tables.files[fileno].handle.fd
        os.fdatasync(fd)
        await line.send(b"CLOSE %d\nCLOSE %d\nPING\n" % (fileno, fileno))
        assert await line.line() == b"OK"
        assert await line.line() == b"ERROR invalid fileno: %d" % fileno
        assert await line.line() == b"OK"
        is_here = closers[fd] == threading.get_ident()
        assert is_here == (size == 1000 or name == b"file")
    assert not hall.fs.tables.files
    assert not list(hall.fs.descriptors())


# spec S5: a child that removes its file by itself between its OPEN and its CLOSE.
async def test_a_long_file_is_looked_at_however_new_it_is(
    hall: Hall, line: Line, closers: dict[int, int]
) -> None:
    (hall.root / "file").write_bytes(b"x" * 300_000)
    fileno = await line.open(b"file")
    (hall.root / "file").unlink()
    fd = hall.fs.tables.files[fileno].handle.fd
    assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert closers[fd] != threading.get_ident()
