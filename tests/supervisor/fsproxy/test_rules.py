r"""The contract end to end: framing and OPEN, over real sockets, without processes.

READ and WRITE, the extensions, and who is in whose way have files of their own:
the other files of this folder.
"""

import os
import stat

import pytest
import trio

from protocol.limits import MAX_LINE_BYTES
from tests.helpers.sessions import Hall, Line, hall

__all__ = ["hall"]

TRANSPORTS = ["socketpair", "pipes"]


@pytest.fixture(params=TRANSPORTS)
def line(hall: Hall, request: pytest.FixtureRequest) -> Line:
    """Return a client's end, over each transport."""
    (hall.root / "file").write_bytes(b"0123456789")
    return hall.connect(transport=request.param)


# spec T3, T4: one reply a request, in order, however the requests were cut.
@pytest.mark.parametrize("step", [1, 7, 100, 100_000])
async def test_pipelined_requests_are_answered_in_order(line: Line, step: int) -> None:
    first = await line.open(b"out", b"w+")
    requests = [b"PING\n", b"WRITE %d 5\nhello" % first, b"SEEK %d 1\n" % first]
    requests += [b"READ %d 3\n" % first, b"nonsense\n", b"READ %d 100\n" % first]
    requests += [b"CLOSE %d\n" % first, b"CLOSE %d\n" % first, b"PING\n"]
    expected = (
        b"OK\nOK 5\nOK 1\nOK 3\nellERROR unknown command: nonsense\nOK 1\noOK\n"
        b"ERROR invalid fileno: %d\nOK\n" % first
    )
    stream = b"".join(requests)
    for start in range(0, len(stream), step):
        await line.send(stream[start : start + step])
        await trio.lowlevel.checkpoint()
    assert await line.exactly(len(expected)) == expected
    # spec T4: nothing follows until the next request.
    assert await line.ask(b"PING\n") == b"OK"


# spec T3: a thousand requests in one piece.
async def test_a_thousand_requests_in_one_piece(line: Line) -> None:
    fileno = await line.open(b"file")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            line.send, b"".join(b"SEEK %d %d\n" % (fileno, n) for n in range(1000))
        )
        for number in range(1000):
            assert await line.line() == b"OK %d" % number


# spec F1
@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b"PING\r\n", b"OK"),
        (b"  \t PING \t \r\n", b"OK"),
        (b"ping\n", b"ERROR unknown command: ping"),
        (b"PING\r\r\n", b"ERROR unknown command: PING?"),
        (b"SEEK\t{n}   \t3\n", b"OK 3"),
        (b"PING x\n", b"ERROR PING takes no parameters"),
        # spec F2
        (b"\n", b"ERROR empty request"),
        (b" \t \r\n", b"ERROR empty request"),
        (b"HELLO world\n", b"ERROR unknown command: HELLO"),
        # spec F5, attack 14
        (b"READ -1 5\n", b"ERROR invalid fileno: -1"),
        (b"READ {n} 0x10\n", b"ERROR invalid size: 0x10"),
        (b"READ {n} +5\n", b"ERROR invalid size: +5"),
        (b"READ {n} 5_0\n", b"ERROR invalid size: 5_0"),
        (b"READ {n} 1e3\n", b"ERROR invalid size: 1e3"),
        (b"READ {n} \xd9\xa3\n", b"ERROR invalid size: \xd9\xa3"),
        (b"READ {n} 1000000000000000000\n", b"ERROR invalid size: 1000000000000000000"),
        (b"READ {n} 999999999999999999\n", b"OK 10"),
        (b"READ 1e3 5\n", b"ERROR invalid fileno: 1e3"),
        # spec F9
        (b"CLOSE\n", b"ERROR CLOSE requires fileno"),
        (b"CLOSE {n} {n}\n", b"ERROR CLOSE requires fileno"),
        (b"LLM_QUOTA now\n", b"ERROR LLM_QUOTA takes no parameters"),
        (b"LLM_CONFIG x\n", b"ERROR LLM_CONFIG takes no parameters"),
        (b"READ {n}\n", b"ERROR READ requires fileno and size"),
        (b"READ {n} 1 true\n", b"OK 1"),
        (b"READ {n} 1 maybe\n", b"ERROR READ requires fileno and size"),
    ],
)
async def test_a_line_has_one_answer(
    line: Line, request_line: bytes, reply: bytes
) -> None:
    fileno = await line.open(b"file")
    assert await line.ask(request_line.replace(b"{n}", b"%d" % fileno)) == reply
    if reply.startswith(b"OK ") and b"READ" in request_line:
        await line.exactly(int(reply[3:]))
    # spec F3: no error ends the session.
    assert await line.ask(b"PING\n") == b"OK"


# spec F4: said as soon as the limit is passed; the rest is dropped, and not kept.
async def test_a_line_that_is_too_long(line: Line) -> None:
    await line.send(b"x" * (MAX_LINE_BYTES + 1))
    assert await line.line() == b"ERROR request line too long"
    for _ in range(50):
        await line.send(b"y" * 100_000)
    assert len(line.session.conn.unread()[0]) < 2 * MAX_LINE_BYTES
    assert await line.ask(b"\nPING\n") == b"OK"
    longest = b"OPEN " + b"n" * (MAX_LINE_BYTES - 12) + b" r false"
    assert len(longest) == MAX_LINE_BYTES + 1
    assert await line.ask(longest[1:] + b"\n") == b"ERROR unknown command: PEN"
    assert await line.ask(longest + b"\n") == b"ERROR request line too long"


# spec F6, attack 13, attack 23: no second line, no escape sequence, 200 bytes.
async def test_what_is_echoed_is_short_and_harmless(line: Line) -> None:
    nasty = b"a\x1b[31m\x00\x07\r\x7f" + b"x" * 500
    shown = b"a?[31m????" + b"x" * 190
    for request, before, after in (
        (b"%b\n", b"ERROR unknown command: ", b""),
        (b"READ %b 1\n", b"ERROR invalid fileno: ", b""),
        (b"OPEN %b r false\n", b"ERROR failed to open file '", b"': Invalid argument"),
        (
            b"OPEN ../%b r false\n",
            b"ERROR failed to open file '../",
            b"Invalid argument",
        ),
        (b"OPEN x %b false\n", b"ERROR invalid mode: ", b""),
        (b"STAT false %b\n", b"ERROR failed to stat '", b"': Invalid argument"),
    ):
        reply = await line.ask(request % nasty)
        assert reply.startswith(before)
        assert reply.endswith(after)
        assert shown[:150] in reply
        assert len(reply) <= len(before) + 200 + len(after) + 4


# spec F7
@pytest.mark.parametrize("sent", [b"PI", b"OPEN new w fal", b"WRITE 1000", b"\x00"])
async def test_a_line_that_does_not_end(hall: Hall, sent: bytes) -> None:
    line = hall.connect()
    await line.send(b"PING\n" + sent)
    line.shut_down()
    assert await line.rest() == b"OK\n"
    await line.gone()
    assert os.listdir(hall.root) == []


# OPEN


# spec O1
@pytest.mark.parametrize(
    "name",
    [b"a b", b"a  b", b"r", b"r true", b"a\tb", b"a r w", b"'a'", b'"a b"', b"-"],
)
async def test_names_keep_their_blanks(hall: Hall, line: Line, name: bytes) -> None:
    await line.open(name, b"w")
    assert sorted(os.listdir(os.fsencode(hall.root))) == sorted([name, b"file"])


# spec O2, O3
@pytest.mark.parametrize(
    ("rest", "reply"),
    [
        (b"", b"OPEN requires filename, mode, and is_top_level"),
        (b" a", b"OPEN requires filename, mode, and is_top_level"),
        (b" a r", b"OPEN requires filename, mode, and is_top_level"),
        (b" r false", b"OPEN requires filename, mode, and is_top_level"),
        (b" a rw false", b"invalid mode: rw"),
        (b" a R false", b"invalid mode: R"),
        (b" a r++ false", b"invalid mode: r++"),
        (b" a wb false", b"invalid mode: wb"),
        (b" a r maybe", b"invalid is_top_level: maybe"),
        (b" a r True", b"invalid is_top_level: True"),
        (b" a r 1", b"invalid is_top_level: 1"),
        (b" a x maybe", b"invalid mode: x"),
    ],
)
async def test_an_open_that_is_not_well_formed(
    line: Line, rest: bytes, reply: bytes
) -> None:
    assert await line.ask(b"OPEN%b\n" % rest) == b"ERROR " + reply


# spec O3: the flags of each mode.
async def test_the_six_modes(hall: Hall, line: Line) -> None:
    for mode in (b"r", b"r+"):
        reply = await line.ask(b"OPEN new %b false\n" % mode)
        assert reply == b"ERROR failed to open file 'new': No such file or directory"
    for mode in (b"r", b"a", b"r+", b"a+"):
        await line.open(b"file", mode)
        assert (hall.root / "file").read_bytes() == b"0123456789"
    for mode in (b"w", b"w+"):
        (hall.root / "file").write_bytes(b"0123456789")
        await line.open(b"file", mode)
        assert (hall.root / "file").read_bytes() == b""
    for number, mode in enumerate((b"w", b"a", b"w+", b"a+")):
        await line.open(b"%d" % number, mode)
        assert (hall.root / str(number)).exists()


# spec O4: the order of the checks.
async def test_the_root_is_looked_for_after_the_line(hall: Hall, line: Line) -> None:
    hall.root.rename(hall.where / "elsewhere")
    for request, reply in (
        (b"OPEN a r\n", b"OPEN requires filename, mode, and is_top_level"),
        (b"OPEN a x maybe\n", b"invalid mode: x"),
        (b"OPEN a r maybe\n", b"invalid is_top_level: maybe"),
        (b"OPEN ../a r false\n", b"VFS not available"),
        (b"OPEN a r true\n", b"VFS not available"),
        (b"STAT true b\n", b"VFS not available"),
        (b"RENAME true 1 1\ncd", b"VFS not available"),
        (b"STAT false a\n", b"VFS not available"),
        (b"LIST false .\n", b"VFS not available"),
        (b"MKDIR false a\n", b"VFS not available"),
        (b"REMOVE false a\n", b"VFS not available"),
        (b"RENAME false 1 1\nab", b"VFS not available"),
    ):
        assert await line.ask(request) == b"ERROR " + reply
    # spec A1: a claim is on record, whatever else is wrong.
    assert [denial[1:] for denial in hall.denials] == [
        ("OPEN", b"a"), ("STAT", b"b"), ("RENAME", b"c"),
    ]  # fmt: skip
    (hall.where / "elsewhere").rename(hall.root)


# spec X1, A1: of two names the one that is denied, in the reply and on record.
async def test_a_denied_rename_names_what_is_denied(hall: Hall, line: Line) -> None:
    (hall.root / "mine").mkdir()
    (hall.root / "out").symlink_to("/tmp")
    for old, new, named in (
        (b"mine", b"/etc/passwd", b"/etc/passwd"),
        (b"mine", b"../b", b"../b"),
        (b"mine", b"out/b", b"out/b"),
        (b"/etc/passwd", b"mine/a", b"/etc/passwd"),
        (b"out/b", b"mine/a", b"out/b"),
        (b"../a", b"../b", b"../a"),
    ):
        head = b"RENAME false %d %d\n" % (len(old), len(new))
        reply = await line.ask(head + old + new)
        assert reply == b"ERROR VFS access denied: '" + named + b"'"
        assert hall.denials[-1][1:] == ("RENAME", named)


# spec O5: the older dialect.
@pytest.mark.parametrize(
    ("rest", "reply"),
    [
        (b"file r", b"OK"),
        (b"file r internal", b"OK"),
        (b"a b r internal", b"OK"),
        (b"a b r", b"OK"),
        (b"file r user", b"ERROR VFS access denied: 'file'"),
        (b"file r other", b"ERROR invalid context: other"),
        (b"file x", b"ERROR invalid mode: x"),
        (b"a b x", b"ERROR invalid mode: x"),
        (b"file x internal", b"ERROR invalid mode: x"),
        (b"file", b"ERROR OPEN requires filename and mode"),
        (b"", b"ERROR OPEN requires filename and mode"),
    ],
)
async def test_dialect_1(hall: Hall, rest: bytes, reply: bytes) -> None:
    for name in ("file", "a b"):
        (hall.root / name).touch()
    line = hall.connect(dialect=1)
    found = await line.ask(b"OPEN %b\n" % rest)
    assert found == reply if reply != b"OK" else found.startswith(b"OK 1")


# spec O5: a line that was answered before is the same line in its own dialect only.
async def test_the_other_dialect_is_not_remembered(hall: Hall) -> None:
    (hall.root / "file").touch()
    line = hall.connect(dialect=1)
    for _ in range(4):
        await line.ask(b"OPEN file r internal\n")
    for word in (b"false", b"true"):
        assert await line.ask(b"OPEN file r %b\n" % word) == (
            b"ERROR invalid context: " + word
        )


# spec O5: without a context the connection's own right decides.
async def test_dialect_1_with_the_top_level_right(hall: Hall) -> None:
    (hall.where / "beside").touch()
    line = hall.connect(hall.policy(top_level=True), dialect=1)
    for context, reply in ((b"", b"OK"), (b" user", b"OK"), (b" internal", b"ERROR")):
        assert (await line.ask(b"OPEN beside r%b\n" % context)).startswith(reply)


# spec O6, A1: and the host takes note.
async def test_denials(hall: Hall, line: Line) -> None:
    for request, name in (
        (b"OPEN ../secret r false\n", b"../secret"),
        (b"OPEN /etc/passwd r false\n", b"/etc/passwd"),
        (b"OPEN file r true\n", b"file"),
        (b"STAT true file\n", b"file"),
        (b"LIST true .\n", b"."),
        (b"MKDIR false ../d\n", b"../d"),
        (b"REMOVE false /etc\n", b"/etc"),
        (b"RENAME false 4 4\nfile../f", b"../f"),
    ):
        assert await line.ask(request) == b"ERROR VFS access denied: '%b'" % name
        who, what, where = hall.denials.pop()
        assert (who, where) == (line.client.id, name)
        assert what.encode() == request.split()[0]
    assert not hall.denials


# spec O6
async def test_a_file_is_made_with_the_umask(hall: Hall, line: Line) -> None:
    old = os.umask(0o027)
    try:
        await line.open(b"new", b"w")
    finally:
        os.umask(old)
    assert stat.S_IMODE((hall.root / "new").stat().st_mode) == 0o640


# spec O7, attack 8, attack 9: at once, and unharmed.
@pytest.mark.parametrize("mode", [b"r", b"w", b"a", b"r+", b"w+", b"a+"])
async def test_only_regular_files_are_opened(
    hall: Hall, line: Line, mode: bytes
) -> None:
    os.mkfifo(hall.root / "fifo")
    (hall.root / "dir").mkdir()
    with trio.fail_after(30):
        for name, reasons in (
            (b"fifo", (b"Operation not permitted", b"No such device or address")),
            (b"dir", (b"Is a directory",)),
            (b".", (b"Is a directory",)),
            (b"dir/", (b"Is a directory",)),
            (b"file/", (b"Is a directory", b"Not a directory")),
        ):
            reply = await line.ask(b"OPEN %b %b false\n" % (name, mode))
            assert reply in [
                b"ERROR failed to open file '%b': %b" % (name, reason)
                for reason in reasons
            ]
    assert (hall.root / "file").read_bytes() == b"0123456789"


# spec O8, attack 12, attack 11
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"a\0b", b"Invalid argument"),
        (b"n" * 300, b"File name too long"),
        (b"x/" * 3000 + b"x", b"File name too long"),
        (b"d/" * 1000 + b"x", b"No such file or directory"),
        (b"\xff\xfe\xfd", b"No such file or directory"),
    ],
)
async def test_an_impossible_name_is_an_ordinary_error(
    line: Line, name: bytes, reason: bytes
) -> None:
    shown = name.replace(b"\0", b"?")[:200]
    assert await line.ask(b"OPEN %b r false\n" % name) == (
        b"ERROR failed to open file '%b': %b" % (shown, reason)
    )
    for word, verb in ((b"STAT", b"stat"), (b"LIST", b"list"), (b"REMOVE", b"remove")):
        assert await line.ask(b"%b false %b\n" % (word, name)) == (
            b"ERROR failed to %b '%b': %b" % (verb, shown, reason)
        )
    assert await line.ask(b"PING\n") == b"OK"


# spec O9, I4
async def test_filenos_rise_over_all_clients(hall: Hall) -> None:
    lines = [hall.connect() for _ in range(3)]
    (hall.root / "file").touch()
    last = 999
    for turn in range(12):
        line = lines[turn % 3]
        fileno = await line.open(b"file")
        assert fileno > last
        last = fileno
        if turn % 2:
            assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"


# attack 19: a number of another client is as unknown as one that never was.
async def test_guessing_filenos(hall: Hall) -> None:
    (hall.root / "file").write_bytes(b"secret")
    owner, thief = hall.connect(), hall.connect()
    fileno = await owner.open(b"file", b"r+")
    for number in (*range(-2, 10), *range(990, fileno + 20)):
        unknown = b"ERROR invalid fileno: %d" % number
        for request in (b"READ %d 10\n", b"CLOSE %d\n", b"SYNC %d\n", b"SEEK %d 1\n"):
            assert await thief.ask(request % number) == unknown
        assert await thief.ask(b"TRUNCATE %d 0\n" % number) == unknown
        assert await thief.ask(b"WRITE %d 4\nevil" % number) == unknown
    assert await owner.read(fileno, 10) == b"secret"
    assert (hall.root / "file").read_bytes() == b"secret"
