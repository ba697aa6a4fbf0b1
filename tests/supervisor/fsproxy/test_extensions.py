"""The extensions end to end, NARROW, and a model that is not there."""

import base64
import json
import os
from pathlib import Path

import pytest
import trio

from protocol import COMMANDS, limits
from tests.helpers.sessions import Hall, Line, hall

__all__ = ["hall"]


@pytest.fixture(params=["socketpair", "pipes"])
def line(hall: Hall, request: pytest.FixtureRequest) -> Line:
    """Return a client's end, over each transport."""
    (hall.root / "file").write_bytes(b"0123456789")
    return hall.connect(transport=request.param)


async def document(line: Line, request: bytes) -> object:
    """Send a request that is answered with a JSON document; return it."""
    await line.send(request)
    return json.loads(await line.body())


# spec X1
async def test_ping_and_caps(hall: Hall, line: Line) -> None:
    assert await line.ask(b"PING\n") == b"OK"
    caps = await document(line, b"CAPS\n")
    assert isinstance(caps, dict)
    assert caps["version"] == 2
    assert caps["commands"] == sorted(word.decode() for word in COMMANDS)
    assert caps["limits"] == {
        "line": limits.MAX_LINE_BYTES,
        "read": limits.MAX_READ_BYTES,
        "write": limits.MAX_WRITE_BYTES,
    }
    assert caps["rights"] == {"top_level": False, "grants": []}
    assert await line.ask(b"CAPS now\n") == b"ERROR CAPS takes no parameters"
    del hall


# spec X1, A3
async def test_caps_tells_what_was_granted(hall: Hall) -> None:
    for name in ("in", "out"):
        (hall.where / name).mkdir()
    (hall.where / "in" / "file").touch()
    policy = hall.policy(
        hall.place(hall.where / "in" / "file", read=True),
        hall.place(hall.where / "out", write=True),
        top_level=True,
    )
    line = hall.connect(policy)
    caps = await document(line, b"CAPS\n")
    assert isinstance(caps, dict)
    assert caps["rights"] == {
        "top_level": True,
        "grants": [
            {"name": f"{hall.where}/in/file", "read": True, "write": False},
            {"name": f"{hall.where}/out", "read": False, "write": True},
        ],
    }


# spec X1: a name that is not UTF-8 is base64 here too.
async def test_caps_tells_a_grant_whatever_its_name(hall: Hall) -> None:
    odd = os.fsencode(hall.where) + b"/\xff"
    os.mkdir(odd)
    line = hall.connect(hall.policy(hall.place(Path(os.fsdecode(odd)), read=True)))
    caps = await document(line, b"CAPS\n")
    assert isinstance(caps, dict)
    assert caps["rights"]["grants"] == [
        {"name_b64": base64.b64encode(odd).decode(), "read": True, "write": False}
    ]


# spec X1
async def test_seek(line: Line) -> None:
    fileno = await line.open(b"file", b"r+")
    assert await line.ask(b"SEEK %d 7\n" % fileno) == b"OK 7"
    assert await line.read(fileno, 100) == b"789"
    assert await line.ask(b"SEEK %d 1000\n" % fileno) == b"OK 1000"
    assert await line.read(fileno, 100) == b""
    assert await line.read(fileno, 100_000) == b""
    assert await line.ask(b"SEEK %d 12\n" % fileno) == b"OK 12"
    assert await line.write(fileno, b"x") == b"OK 1"
    assert await line.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
    assert await line.read(fileno, 100) == b"0123456789\0\0x"
    for request, reply in (
        (b"SEEK %d\n", b"SEEK requires fileno and offset"),
        (b"SEEK %d -1\n", b"invalid offset: -1"),
        (b"SEEK %d 5 6\n", b"SEEK requires fileno and offset"),
    ):
        assert await line.ask(request % fileno) == b"ERROR " + reply
    assert await line.ask(b"SEEK 77 5\n") == b"ERROR invalid fileno: 77"
    # As far as numbers go; a write there is the file system's business.
    assert await line.ask(b"SEEK %d 999999999999999999\n" % fileno) == (
        b"OK 999999999999999999"
    )
    assert await line.write(fileno, b"xx") == b"ERROR failed to write: File too large"
    assert await line.read(fileno, 5) == b""


# spec X1
async def test_sync_and_truncate(hall: Hall, line: Line) -> None:
    fileno, reading = await line.open(b"file", b"r+"), await line.open(b"file")
    assert await line.ask(b"SYNC %d\n" % fileno) == b"OK"
    assert await line.ask(b"SYNC %d\n" % reading) == b"OK"
    assert await line.ask(b"TRUNCATE %d 3\n" % fileno) == b"OK"
    assert (hall.root / "file").read_bytes() == b"012"
    assert await line.ask(b"TRUNCATE %d 5\n" % fileno) == b"OK"
    assert (hall.root / "file").read_bytes() == b"012\0\0"
    for request, reply in (
        (b"TRUNCATE %d 0\n" % reading, b"file not open for writing: %d" % reading),
        (b"TRUNCATE 77 0\n", b"invalid fileno: 77"),
        (b"TRUNCATE %d x\n" % fileno, b"invalid size: x"),
        (b"TRUNCATE %d\n" % fileno, b"TRUNCATE requires fileno and size"),
        (b"SYNC\n", b"SYNC requires fileno"),
        (b"SYNC 77\n", b"invalid fileno: 77"),
        (
            b"TRUNCATE %d 999999999999999999\n" % fileno,
            b"failed to truncate: File too large",
        ),
    ):
        assert await line.ask(request) == b"ERROR " + reply


# spec X1: names that are not UTF-8 are base64, and blanks are part of a name.
async def test_stat_and_list(hall: Hall, line: Line) -> None:
    (hall.root / "a dir").mkdir()
    odd = os.fsencode(hall.root) + b"/a dir/\xff\n"
    os.close(os.open(odd, os.O_CREAT))
    (hall.root / "a dir" / "caf\u00e9").write_bytes(b"12345")
    (hall.root / "a dir" / "link").symlink_to("nowhere")
    status = await document(line, b"STAT false a dir/caf\xc3\xa9\n")
    found = (hall.root / "a dir" / "caf\u00e9").stat()
    assert status == {"size": 5, "mtime_ns": found.st_mtime_ns, "kind": "file"}
    status = await document(line, b"STAT false a dir\n")
    assert isinstance(status, dict)
    assert status["kind"] == "directory"
    assert await document(line, b"LIST false a dir\n") == [
        {"name": "caf\u00e9", "kind": "file"},
        {"name": "link", "kind": "link"},
        {"name_b64": base64.b64encode(b"\xff\n").decode(), "kind": "file"},
    ]
    for request, reply in (
        (b"STAT false\n", b"STAT requires is_top_level and filename"),
        (b"STAT\n", b"STAT requires is_top_level and filename"),
        (b"STAT maybe x\n", b"invalid is_top_level: maybe"),
        (b"LIST true .\n", b"VFS access denied: '.'"),
        (b"STAT false no\n", b"failed to stat 'no': No such file or directory"),
        (b"LIST false file\n", b"failed to list 'file': Not a directory"),
        (b"LIST false no\n", b"failed to list 'no': No such file or directory"),
    ):
        assert await line.ask(request) == b"ERROR " + reply


# spec X1, I9: a listing is bounded.
async def test_a_listing_that_is_too_long(
    hall: Hall, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.MAX_LIST_ENTRIES > 3
    monkeypatch.setattr(limits, "MAX_LIST_ENTRIES", 3)
    for number in range(2):
        (hall.root / str(number)).touch()
    found = await document(line, b"LIST false .\n")
    assert isinstance(found, list)
    assert len(found) == 3
    (hall.root / "2").touch()
    assert await line.ask(b"LIST false .\n") == (
        b"ERROR failed to list '.': Value too large for defined data type"
    )


# spec X1
async def test_making_and_removing(hall: Hall, line: Line) -> None:
    assert await line.ask(b"MKDIR false new dir\n") == b"OK"
    assert (hall.root / "new dir").is_dir()
    for request, reply in (
        (b"MKDIR false new dir\n", b"failed to make 'new dir': File exists"),
        (b"MKDIR false no/d\n", b"failed to make 'no/d': No such file or directory"),
        (b"REMOVE false no\n", b"failed to remove 'no': No such file or directory"),
        (b"REMOVE false .\n", b"failed to remove '.': Invalid argument"),
        (b"MKDIR false\n", b"MKDIR requires is_top_level and filename"),
        (b"REMOVE 1 x\n", b"invalid is_top_level: 1"),
        (b"MKDIR false a\0b\n", b"failed to make 'a?b': Invalid argument"),
        (b"REMOVE false a\0b\n", b"failed to remove 'a?b': Invalid argument"),
    ):
        assert await line.ask(request) == b"ERROR " + reply
    (hall.root / "new dir" / "f").touch()
    assert await line.ask(b"REMOVE false new dir\n") == (
        b"ERROR failed to remove 'new dir': Directory not empty"
    )
    assert await line.ask(b"REMOVE false new dir/f\n") == b"OK"
    assert await line.ask(b"REMOVE false new dir\n") == b"OK"
    assert os.listdir(hall.root) == ["file"]


# spec X1
@pytest.mark.parametrize("pieces", [1, 3])
async def test_renaming(hall: Hall, line: Line, pieces: int) -> None:
    async def rename(old: bytes, new: bytes) -> bytes:
        request = b"RENAME false %d %d\n%b%b" % (len(old), len(new), old, new)
        step = -(-len(request) // pieces)
        for start in range(0, len(request), step):
            await line.send(request[start : start + step])
            await trio.testing.wait_all_tasks_blocked()
        return await line.line()

    assert await rename(b"file", b"new\nname ") == b"OK"
    assert os.listdir(hall.root) == ["new\nname "]
    assert await rename(b"new\nname ", b"file") == b"OK"
    for old, new, reply in (
        (b"no", b"x", b"failed to rename 'no': No such file or directory"),
        (b"file", b"no/x", b"failed to rename 'file': No such file or directory"),
        (b"file", b"../x", b"VFS access denied: '../x'"),
        (b"../x", b"file", b"VFS access denied: '../x'"),
        (b"a\0", b"b", b"failed to rename 'a?': Invalid argument"),
        (b"file", b"b\0", b"failed to rename 'file': Invalid argument"),
        (b"n" * 300, b"b", b"failed to rename '%b': File name too long" % (b"n" * 200)),
    ):
        assert await rename(old, new) == b"ERROR " + reply
    for request, reply in (
        (
            b"RENAME false 4\n",
            b"RENAME requires is_top_level, old_length, and new_length",
        ),
        (b"RENAME false x 1\n", b"invalid old_length: x"),
        (b"RENAME maybe 4 1\nfilex", b"invalid is_top_level: maybe"),
        (
            b"RENAME false 1 1 1\nab",
            b"RENAME requires is_top_level, old_length, and new_length",
        ),
        (b"RENAME true 4 1\nfilex", b"VFS access denied: 'file'"),
    ):
        assert await line.ask(request) == b"ERROR " + reply
    reply = await line.ask(b"RENAME false 0 4\nfile")
    assert reply.startswith(b"ERROR RENAME requires")
    reply = await line.ask(b"RENAME false 99999 1\n" + b"x" * 100_000)
    assert reply.startswith(b"ERROR failed to rename")
    assert reply.endswith(b"File name too long")
    assert await line.ask(b"PING\n") == b"OK"
    assert os.listdir(hall.root) == ["file"]


# spec A2: a client with the top-level right does all of it anywhere.
async def test_names_in_the_top_level_view(hall: Hall, tmp_path: Path) -> None:
    line = hall.connect(hall.policy(top_level=True))
    where = os.fsencode(tmp_path)
    assert await line.ask(b"MKDIR true %b/d\n" % where) == b"OK"
    assert await line.ask(b"MKDIR true e\n") == b"OK"  # beneath the working directory
    assert (tmp_path / "e").is_dir()
    new = where + b"/d/e"
    request = b"RENAME true 1 %d\ne%b" % (len(new), new)
    assert await line.ask(request) == b"OK"
    assert await line.ask(b"REMOVE true d/e\n") == b"OK"
    assert await line.ask(b"MKDIR false %b/x\n" % where) == (
        b"ERROR VFS access denied: '%b/x'" % where
    )
    assert await line.ask(b"MKDIR true /\n") == (
        b"ERROR failed to make '/': Invalid argument"
    )
    status = await document(line, b"STAT true /\n")
    assert isinstance(status, dict)
    assert status["kind"] == "directory"
