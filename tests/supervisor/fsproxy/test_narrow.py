"""NARROW end to end, and a model that is not there."""

import json
import os
from base64 import b64encode
from pathlib import Path

import pytest
import trio

from tests.helpers.sessions import Hall, Line, hall
from vfs.client.decode import encode_rights
from vfs.ledger import Ledger

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


async def narrow(line: Line, **rights: object) -> bytes:
    """Give up rights."""
    text = json.dumps(rights).encode()
    return await line.ask(b"NARROW %d\n%b" % (len(text), text))


# spec A5
async def test_narrowing(hall: Hall) -> None:
    (hall.root / "sub").mkdir()
    (hall.root / "sub" / "file").write_bytes(b"in sub")
    (hall.root / "file").write_bytes(b"in root")
    line = hall.connect(hall.policy(top_level=True))
    kept = await line.open(b"file", b"r")
    assert await narrow(line, read=["sub"]) == b"OK"
    # Open files stay open; no other access remains.
    assert await line.read(kept, 100) == b"in root"
    fileno = await line.open(b"sub/file")
    assert await line.read(fileno, 100) == b"in sub"
    for request in (
        b"OPEN file r false\n",
        b"OPEN sub/file w false\n",
        b"OPEN sub/../file r false\n",
        b"OPEN /etc/passwd r true\n",
        b"OPEN sub/file r true\n",
        b"STAT false file\n",
        b"LIST false .\n",
        b"MKDIR false sub/d\n",
    ):
        assert (await line.ask(request)).startswith(b"ERROR VFS access denied")
    # It can't be taken back.
    for rights in ({"read": ["."]}, {"write": ["sub"]}, {"read": ["/etc"]}):
        assert (await narrow(line, **rights)).startswith(b"ERROR invalid rights: not")
    assert await narrow(line, read=["sub/file"]) == b"OK"
    caps = await document(line, b"CAPS\n")
    assert isinstance(caps, dict)
    assert caps["rights"] == {
        "top_level": False,
        "grants": [{"name": f"{hall.root}/sub/file", "read": True, "write": False}],
    }


# spec A5: a line that was answered before is asked again.
async def test_lines_that_came_before_are_narrowed_too(hall: Hall) -> None:
    for name in ("kept", "lost"):
        (hall.root / name).write_bytes(b"x")
    line = hall.connect()
    numbers = [await line.open(b"lost") for _ in range(4)]
    for _ in range(4):
        assert await line.ask(b"SEEK %d 0\n" % numbers[0]) == b"OK 0"
        assert await line.read(numbers[0], 1) == b"x"
    assert await narrow(line, read=["kept"]) == b"OK"
    for _ in range(2):
        assert await line.ask(b"OPEN lost r false\n") == (
            b"ERROR VFS access denied: 'lost'"
        )
    await line.open(b"kept")


# spec A5, X1: what is granted may have a name that is not UTF-8.
async def test_names_that_are_not_utf_8(hall: Hall) -> None:
    odd = os.fsencode(hall.where) + b"/\xff"
    os.mkdir(odd)
    for name in (b"\xfe", b"kept"):
        os.close(os.open(odd + b"/" + name, os.O_CREAT))
    line = hall.connect(hall.policy(hall.place(Path(os.fsdecode(odd)), read=True)))
    for names, left in (([odd], odd), ([odd + b"/\xfe"], odd + b"/\xfe")):
        text = encode_rights({"read": names})
        assert await line.ask(b"NARROW %d\n%b" % (len(text), text)) == b"OK"
        caps = await document(line, b"CAPS\n")
        assert isinstance(caps, dict)
        coded = b64encode(left).decode()
        (grant,) = caps["rights"]["grants"]
        assert grant == {"name_b64": coded, "read": True, "write": False}
    await line.open(odd + b"/\xfe")
    assert (await line.ask(b"OPEN %b/kept r false\n" % odd)).startswith(
        b"ERROR VFS access denied"
    )


# spec A5: what a client attaches has what the client has left.
async def test_a_nested_client_has_what_its_parent_has_left(hall: Hall) -> None:
    (hall.root / "a").touch()
    (hall.root / "b").touch()
    line = hall.connect()
    assert await narrow(line, read=["a"]) == b"OK"
    nested = hall.connect(line.client.policy, Ledger(hall.ledger), parent=line.client)
    await nested.open(b"a")
    assert (await nested.ask(b"OPEN b r false\n")).startswith(b"ERROR VFS access")


# spec A5, F6
@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (b"{}", b"OK"),
        (b"[]", b"Expected `object`, got `array`"),
        (b"", b"Input data was truncated"),
        (
            b'{"read": ["\xff"]}',
            b"'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (
            b'{"\xff": 1}',
            b"'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (
            b'{"read": [{"name_b64": "fmls"}]}',
            b"cannot narrow to '~il': No such file or directory",
        ),
        (b'{"read": [{"name_b64": "_"}]}', b"no base64: '_'"),
        (b'{"read": [{"name_b64": "\xc3\xa9"}]}', b"no base64: '\xc3\xa9'"),
        (b'{"read": [{"name_b64": ""}]}', b"an empty name"),
        (b'{"read": [""]}', b"an empty name"),
        (b'{"read": ["no"]}', b"cannot narrow to 'no': No such file or directory"),
        (
            b'{"read": ["a\\n\\u001b"]}',
            rb"cannot narrow to 'a\n\x1b': No such file or directory",
        ),
        (b'{"read": ["/etc"]}', b"not within this client's rights: '/etc'"),
        (b'{"model": "small"}', b"this host has no model, and so no quota"),
    ],
)
async def test_a_document_of_rights(line: Line, text: bytes, reply: bytes) -> None:
    found = await line.ask(b"NARROW %d\n%b" % (len(text), text))
    assert found == (reply if reply == b"OK" else b"ERROR invalid rights: " + reply)
    assert await line.ask(b"PING\n") == b"OK"


# spec A5, W4
@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"NARROW x\n", b"invalid size: x"),
        (b"NARROW\n", b"NARROW requires size"),
        (b"NARROW 2 3\n{}", b"NARROW requires size"),
        (b"NARROW 70000\n" + b" " * 70_000, b"invalid size: 70000 exceeds limit 65536"),
    ],
)
async def test_a_narrowing_that_is_not_well_formed(
    line: Line, request_bytes: bytes, reply: bytes
) -> None:
    assert await line.ask(request_bytes) == b"ERROR " + reply
    assert await line.ask(b"PING\n") == b"OK"


# attack 18, S7: what NARROW holds open is counted, and given back.
async def test_narrowing_again_and_again(hall: Hall) -> None:
    for number in range(20):
        (hall.root / f"d{number}").mkdir()
    line = hall.connect(ledger=Ledger(open_files=50))
    names = [f"d{number}" for number in range(20)]
    replies = [await narrow(line, read=names) for _ in range(4)]
    assert (
        replies
        == [b"OK", b"OK"]
        + [
            b"ERROR invalid rights: too many names: each takes the place of an open file"
        ]
        * 2
    )
    (hall.root / "d1" / "file").touch()
    for _ in range(10):
        await line.open(b"d1/file")
    assert (await line.ask(b"OPEN d1/file r false\n")).endswith(
        b"Too many open files'"[:-1]
    )
    ledger = line.client.ledger
    assert ledger.open_files.used == 50
    line.close()
    await line.gone()
    assert ledger.open_files.used == 0


# The model is not there


# spec F3: each has its answer, its payload is drained.
@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"LLM_CHAT false 0 0 5 0\nhello", b"LLM not available"),
        (b"LLM_CHAT true 3 2 5 7\na\nboohellogeneral", b"LLM not available"),
        # The contract's own second example: three LFs that it does not count.
        (b"LLM_CHAT false 0 0 0 7\n\n\n\ngeneral", b"LLM not available"),
        (b"LLM_CHAT maybe 0 0 0 7\n\n\n\ngeneral", b"invalid is_top_level: maybe"),
        (b"LLM_CHAT false 1 1 1 3\na\nb\nc\nxyz", b"LLM not available"),
        (b"LLM_CHAT false 0 0 0 0\n", b"LLM not available"),
        (b"LLM_CHAT false 0 0 0 2\n\n\n", b"LLM not available"),
        (
            b"LLM_CHAT false 0 0\n",
            (
                b"LLM_CHAT requires is_top_level, input_files_count, "
                b"output_files_count, prompt_length, and preset_length"
            ),
        ),
        (b"LLM_CHAT false 0 x 0 0\n", b"invalid output_files_count: x"),
        (b"LLM_QUOTA\n", b"LLM quota not available"),
        (b"LLM_CONFIG\n", b"LLM config not available"),
        (b"FD_CALL 3\n{} ", b"LLM fds not available"),
        (b"FD_PUT 3\nabc", b"LLM fds not available"),
        (b"ATTACH\n", b"ATTACH not available"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
async def test_what_is_not_available_says_so(
    line: Line, request_bytes: bytes, reply: bytes, step: int
) -> None:
    for start in range(0, len(request_bytes), step):
        await line.send(request_bytes[start : start + step])
        await trio.lowlevel.checkpoint()
    assert await line.line() == b"ERROR " + reply
    assert await line.ask(b"PING\n") == b"OK"
