"""The control socket of a real host: who may ask, what is answered, bad input.

The socket's file is in `test_socket.py`, the asking side in
`test_client.py`.
"""

import contextlib
import errno
import os
import re
import socket
import tempfile
from pathlib import Path

import pytest
import trio
import trio.testing

from hostlib import listener as hostlib_listener
from supervisor.control import server as control
from supervisor.control.server import LINE_BYTES, MAX_CONNECTIONS
from supervisor.doctor.leaks import named_descriptors
from supervisor.usage.samples import Samples, Watcher
from tests.helpers.control import Line, ask, connected, controlled, path
from tests.helpers.delays import NEIGHBOUR_S, slowest_read
from tests.helpers.leaks import open_here
from tests.helpers.stage import Stage, eventually, stage

pytestmark = pytest.mark.slow

__all__ = ["path", "stage"]

# The contract's names, which other programs read.
CLIENT_NAMES = ["id", "pipe_id", "open_files", "connected_at"]
FILE_NAMES = [
    "fileno",
    "filename",
    "mode",
    "client_id",
    "opened_at",
    "is_top_level",
]
RFC_3339_UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


def connections(stage: Stage) -> int:
    """How many control connections the host holds."""
    return list(named_descriptors(stage.host).values()).count("control connection")


# ---------------------------------------------------------------- answers


# spec S1
async def test_clients_are_told_with_the_names_of_the_contract(
    stage: Stage, path: str
) -> None:
    puppet = await stage.puppet()
    fileno = await puppet.open(b"a", b"w")
    rows = await ask(path, "clients")
    assert [list(row)[:4] for row in rows] == [CLIENT_NAMES]
    (row,) = rows
    assert row["id"] == puppet.client_id
    assert row["open_files"] == [fileno]
    assert row["pid"] == puppet.pid
    assert row["parent_id"] is None
    assert re.fullmatch(RFC_3339_UTC, row["connected_at"])


# spec S1
async def test_files_are_told_with_the_names_of_the_contract(
    stage: Stage, path: str
) -> None:
    puppet = await stage.puppet(top_level=True)
    restricted = await puppet.open(b"a", b"w", b"false")
    top_level = await puppet.open(os.fsencode(stage.where / "b"), b"a+", b"true")
    rows = await ask(path, "files")
    assert [list(row)[:6] for row in rows] == [FILE_NAMES, FILE_NAMES]
    told = [(row["fileno"], row["mode"], row["is_top_level"]) for row in rows]
    assert told == [(restricted, "w", False), (top_level, "a+", True)]
    assert {row["client_id"] for row in rows} == {puppet.client_id}


# spec S1
async def test_a_row_is_gone_when_its_child_is(stage: Stage, path: str) -> None:
    puppet = await stage.puppet()
    await puppet.open(b"a", b"w")
    await puppet.kill()
    for table in ("ps", "clients", "files"):
        assert await ask(path, table) == []


async def test_ps_tells_each_child_and_what_it_uses(stage: Stage, path: str) -> None:
    puppet = await stage.puppet()
    await puppet.do("1")
    (row,) = await ask(path, "ps")
    assert row["id"] == puppet.child.id
    assert row["pid"] == puppet.pid
    assert row["state"] == "running"
    assert row["command"][-1].endswith("puppet.py")
    assert row["usage"]["rss_bytes"] > 1_000_000
    assert row["usage"]["descriptors"] == 4
    isolation = row["isolation"]
    assert (isolation["profile"], isolation["network"]) == ("none", "host")
    assert isolation["layers"] == ["session", "descriptors"]


async def test_a_word_that_is_not_utf_8_does_not_break_ps(
    stage: Stage, path: str
) -> None:
    await stage.spawn("/bin/sh", "-c", "exec sleep 1000", os.fsdecode(b"\xff"))
    (row,) = await ask(path, "ps")
    assert row["command"][-1] == "\N{REPLACEMENT CHARACTER}"


async def test_stats_count_what_the_host_holds(stage: Stage, path: str) -> None:
    puppet = await stage.puppet()
    await puppet.open(b"a", b"w")
    stats = await ask(path, "stats")
    assert (stats["children"], stats["clients"], stats["files"]) == (1, 1, 1)
    assert stats["pid"] == os.getpid()
    assert stats["usage"]["rss_bytes"] > 10_000_000
    assert stats["control_connections"] == 1


async def test_questions_on_one_connection_are_answered_in_order(path: str) -> None:
    async with connected(path) as line:
        await line.say(b'{"v":1,"do":"ps"}\n{"v":1,"do":"stats"}\n{"v":2,"do":"ps"}\n')
        replies = [await line.hear() for _ in range(3)]
    assert replies[0] == {"v": 1, "ok": True, "result": []}
    assert replies[1]["result"]["clients"] == 0
    assert not replies[2]["ok"]


async def test_a_question_in_pieces_is_answered(path: str) -> None:
    async with connected(path) as line:
        for byte in b'{"v":1,"do":"ps"}':
            await line.say(bytes([byte]))
        assert await line.ask(b"\n") == {"v": 1, "ok": True, "result": []}


# ---------------------------------------------------------------- bad input


async def test_another_version_is_refused_by_name(path: str) -> None:
    async with connected(path) as line:
        reply = await line.ask(b'{"v":2,"do":"ps"}\n')
        assert reply["ok"] is False
        assert "version 1, not 2" in reply["error"]
        assert (await line.ask(b'{"v":1,"do":"ps"}\n'))["ok"]


async def test_an_unknown_question_is_refused_with_the_known_ones(path: str) -> None:
    async with connected(path) as line:
        reply = await line.ask(b'{"v":1,"do":"kill\\u001b[2J"}\n')
        assert "only ps, clients, files, stats, leaks" in reply["error"]
        assert reply["error"].isprintable()
        assert (await line.ask(b'{"v":1,"do":"ps"}\n'))["ok"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\x00\n",
        b'{"v":1,"do":"\xff"}\n',
        b'{"v":1,"do":"ps","\xff":1}\n',
        b"[" * 60_000 + b"\n",
        b'{"v":1}\n',
        b'{"v":"1","do":"ps"}\n',
        b'{"v":true,"do":"ps"}\n',
        b'{"v":1,"do":"ps","more":1}\n',
        b'{"v":1,"do":"ps"}{"v":1,"do":"ps"}\n',
    ],
)
async def test_garbage_gets_one_error_and_the_end(path: str, garbage: bytes) -> None:
    async with connected(path) as line:
        reply = await line.ask(garbage)
        assert reply["ok"] is False
        assert len(reply["error"]) <= 300
        assert await line.hear() is None


# spec S5
async def test_a_line_without_an_end_is_cut_off(path: str) -> None:
    async with connected(path) as line:
        await line.say(b"x" * (LINE_BYTES + 5000))
        reply = await line.hear()
        assert f"at most {LINE_BYTES} bytes" in reply["error"]
        assert await line.hear() is None


# spec S5
async def test_a_question_that_stalls_is_given_up_and_an_idle_line_is_not(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(path) as idle, connected(path) as stalled:
        with monkeypatch.context() as patch:
            patch.setattr(control, "DEADLINE_S", 0.1)
            await stalled.say(b'{"v":1,')
            assert await stalled.hear() is None
        assert (await idle.ask(b'{"v":1,"do":"ps"}\n'))["ok"]


# spec S5
async def test_an_answer_that_is_not_taken_is_given_up(
    stage: Stage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await stage.spawn("/bin/sh", "-c", "exec sleep 1000", "x" * 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(control, "DEADLINE_S", 0.3)
        async with connected(path) as deaf:
            await deaf.say(b'{"v":1,"do":"ps"}\n' * 10)
            await eventually(lambda: connections(stage) == 1)
            await eventually(lambda: connections(stage) == 0)
    assert (await ask(path, "ps"))[0]["id"] == child.id


# spec S5
async def test_a_flood_of_questions_delays_no_client(stage: Stage, path: str) -> None:
    (stage.root / "a").write_bytes(b"x" * 4096)
    stop = stage.where / "stop"
    question = b'{"v":1,"do":"files"}\n'
    flood = (
        f"(lambda s: s.connect({path!r}) or (lambda answers: sum("
        f"s.send({question!r}) + len(answers.readline()) for _ in iter("
        f"lambda: os.path.exists({str(stop)!r}), True)))(s.makefile('rb')))"
        "(__import__('socket').socket(1))"
    )
    floods = [await stage.puppet() for _ in range(3)]
    for puppet in floods:
        for _ in range(100):
            await puppet.open(b"a")
        puppet.tell(flood)
    neighbour = await stage.puppet()
    fileno = await neighbour.open(b"a")
    # More at once than a host serves one client before it turns to what else there is.
    slowest_s = await slowest_read(stage, neighbour, fileno, 500, 50)
    stop.touch()
    for puppet in floods:
        assert await puppet.hear() > 100_000
    assert slowest_s < NEIGHBOUR_S


# attack 30
async def test_descriptors_that_are_sent_along_are_not_received(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / "sent").touch()
    sent = os.open(tmp_path / "sent", os.O_RDONLY)
    sock = trio.socket.socket(socket.AF_UNIX)
    with sock:
        await sock.connect(path)
        raw = socket.socket(fileno=os.dup(sock.fileno()))
        with raw:
            socket.send_fds(raw, [b'{"v":1,'], [sent] * 200)
        os.close(sent)
        line = Line(trio.SocketStream(sock))
        assert (await line.ask(b'"do":"ps"}\n'))["ok"]
        assert not open_here(str(tmp_path / "sent"))


# ---------------------------------------------------------------- connections


async def test_one_more_connection_ends_the_one_that_idles_longest(path: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lines: list[Line] = []
        for _ in range(MAX_CONNECTIONS + 1):
            line = await stack.enter_async_context(connected(path))
            if len(lines) < MAX_CONNECTIONS:
                assert (await line.ask(b'{"v":1,"do":"clients"}\n'))["ok"]
            lines.append(line)
        assert (await lines[-1].ask(b'{"v":1,"do":"clients"}\n'))["ok"]
        assert await lines[0].hear() is None
        for line in lines[1:]:
            assert (await line.ask(b'{"v":1,"do":"clients"}\n'))["ok"]


async def test_one_more_connection_is_refused_while_all_others_ask(path: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lines = []
        for _ in range(MAX_CONNECTIONS):
            line = await stack.enter_async_context(connected(path))
            await line.say(b"{")
            lines.append(line)
        await trio.testing.wait_all_tasks_blocked()
        surplus = await stack.enter_async_context(connected(path))
        assert f"{MAX_CONNECTIONS} questions" in (await surplus.hear())["error"]
        assert await surplus.hear() is None
        assert (await lines[0].ask(b'"v":1,"do":"clients"}\n'))["ok"]


async def test_a_hundred_connections_that_come_and_go_leave_nothing(path: str) -> None:
    before = len(open_here("socket:"))
    for _ in range(100):
        async with connected(path) as line:
            await line.say(b'{"v":1,"do":"clients"}\n{')
    while len(open_here("socket:")) > before:
        await trio.lowlevel.checkpoint()


async def test_too_few_descriptors_only_pause_the_listener(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    accept = trio.SocketListener.accept
    refusals = [errno.EMFILE, errno.ENFILE]

    async def poor(listener: trio.SocketListener) -> trio.SocketStream:
        if refusals:
            raise OSError(refusals.pop(), "no descriptor")
        return await accept(listener)

    monkeypatch.setattr(hostlib_listener, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(trio.SocketListener, "accept", poor)
    async with controlled(stage) as path:
        assert await ask(path, "ps") == []
    assert not refusals
    text = "the control socket: cannot accept a connection: no descriptor"
    assert capfd.readouterr().err.count(f"{text}; those that come wait") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_whatever_the_mode_of_the_file(
    stage: Stage,
) -> None:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "print(s.makefile().readline())"
    )
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        async with controlled(stage, f"{shared}/control") as path:
            os.chmod(path, 0o666)
            done = await trio.run_process(
                ["/usr/bin/env", "python3", "-I", "-S", "-c", program, path],
                capture_stdout=True,
                check=False,
                user=65_534,
                group=65_534,
                extra_groups=[],
                cwd="/",
            )
            assert b"its own user and root only" in done.stdout
            os.chmod(path, 0o600)
            assert await ask(path, "ps") == []


# Children outlive a fault of an answer, and a host that has no descriptor for it.
# attack 18
@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
            "it cannot now: Too many open files; try again",
        ),
        (ValueError("odd"), "internal error: ValueError; see the host's log"),
    ],
)
async def test_an_answer_that_cannot_be_given_ends_nobody(
    stage: Stage,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    text: str,
) -> None:
    async def sample(_watcher: Watcher, _targets: object) -> Samples:
        await trio.lowlevel.checkpoint()
        raise failure

    monkeypatch.setattr(Watcher, "sample", sample)
    async with connected(path) as line:
        for _ in range(2):  # and the connection goes on
            reply = await line.ask(b'{"v":1,"do":"ps"}\n')
            assert (reply["ok"], reply["error"]) == (False, text)
    assert await ask(path, "clients") == []
