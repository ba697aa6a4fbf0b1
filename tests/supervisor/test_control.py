"""The control socket of a real host: its file, who may ask, and what is answered.

Questions are asked in a thread by the blocking client, or byte for byte over a socket.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from supervisor import control
from supervisor.control import LINE_BYTES, MAX_CONNECTIONS, serve_control
from supervisor.control_client import ControlError, call, control_path
from supervisor.leaks import held
from tests.helpers.hosts import NEIGHBOUR_S, Stage, eventually, stage
from tests.helpers.spawning import ROOT

pytestmark = pytest.mark.slow

__all__ = ["stage"]

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


@contextlib.asynccontextmanager
async def controlled(stage: Stage, path: str | None = None) -> AsyncIterator[str]:
    """Serve a stage's control socket; gives its path."""
    where = path or str(stage.where / "control")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, stage.host, where)
        yield where
        nursery.cancel_scope.cancel()


@pytest.fixture
async def path(stage: Stage) -> AsyncIterator[str]:
    async with controlled(stage) as path:
        yield path


async def ask(path: str, do: str) -> Any:
    """Ask with the blocking client, in a thread beside the host."""
    return await trio.to_thread.run_sync(call, path, do)


def connections(stage: Stage) -> int:
    """How many control connections the host holds."""
    return list(held(stage.host).values()).count("control connection")


def is_socket(path: str) -> bool:
    """Whether a socket is there."""
    return stat.S_ISSOCK(os.lstat(path).st_mode)


class Line:
    """A connection on which a test says what it wants."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._heard = b""

    async def say(self, data: bytes) -> None:
        """Send bytes."""
        await self.stream.send_all(data)

    async def hear(self) -> Any:
        """Receive one line; None at the end of the stream."""
        while b"\n" not in self._heard:
            try:
                more = await self.stream.receive_some(65_536)
            except trio.BrokenResourceError:  # closed with something of ours unread
                more = b""
            if not more:
                assert not self._heard
                return None
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\n")
        return json.loads(text)

    async def ask(self, data: bytes) -> Any:
        """Send bytes, receive one line."""
        await self.say(data)
        return await self.hear()


@contextlib.asynccontextmanager
async def connected(path: str) -> AsyncIterator[Line]:
    """Connect to a control socket."""
    sock = trio.socket.socket(socket.AF_UNIX)
    await sock.connect(path)
    async with trio.SocketStream(sock) as stream:
        yield Line(stream)


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
    assert row["isolation"] == {"profile": "none", "layers": []}


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
    monkeypatch.setattr(control, "DEADLINE_S", 0.1)
    async with connected(path) as idle, connected(path) as stalled:
        await stalled.say(b'{"v":1,')
        assert await stalled.hear() is None
        assert (await idle.ask(b'{"v":1,"do":"ps"}\n'))["ok"]


# spec S5
async def test_an_answer_that_is_not_taken_is_given_up(
    stage: Stage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DEADLINE_S", 0.1)
    child = await stage.spawn("/bin/sh", "-c", "exec sleep 1000", "x" * 100_000)
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
    slowest_s = await neighbour.do(f"slowest({fileno}, 500)")
    stop.touch()
    for puppet in floods:
        assert await puppet.hear() > 100_000
    assert slowest_s < NEIGHBOUR_S


# attack 30
async def test_descriptors_that_are_sent_along_are_not_received(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    null = os.open(os.devnull, os.O_RDONLY)
    sock = trio.socket.socket(socket.AF_UNIX)
    with sock:
        await sock.connect(path)
        raw = socket.socket(fileno=os.dup(sock.fileno()))
        with raw:
            socket.send_fds(raw, [b'{"v":1,'], [null] * 200)
        os.close(null)
        line = Line(trio.SocketStream(sock))
        assert (await line.ask(b'"do":"ps"}\n'))["ok"]
        # This end of the connection, and the host's.
        assert len(os.listdir("/proc/self/fd")) == before + 2


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
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        async with connected(path) as line:
            await line.say(b'{"v":1,"do":"clients"}\n{')
    while len(os.listdir("/proc/self/fd")) > before:
        await trio.lowlevel.checkpoint()


async def test_too_few_descriptors_only_pause_the_listener(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = trio.SocketListener.accept
    refusals = [errno.EMFILE, errno.ENFILE]

    async def poor(listener: trio.SocketListener) -> trio.SocketStream:
        if refusals:
            raise OSError(refusals.pop(), "no descriptor")
        return await accept(listener)

    monkeypatch.setattr(control, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(trio.SocketListener, "accept", poor)
    async with controlled(stage) as path:
        assert await ask(path, "ps") == []
    assert not refusals


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_whatever_the_mode_of_the_file(
    stage: Stage,
) -> None:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "print(s.makefile().readline())"
    )
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)  # noqa: S103 - so that the file's mode decides
        async with controlled(stage, f"{shared}/control") as path:
            os.chmod(path, 0o666)  # noqa: S103 - as if somebody had opened it up
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


# ---------------------------------------------------------------- the socket's file


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
async def test_the_file_is_its_owners_alone_whatever_the_umask(
    stage: Stage, umask: int
) -> None:
    before = os.umask(umask)
    try:
        async with controlled(stage) as path:
            status = os.lstat(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()


async def test_the_file_is_gone_when_the_host_stops(stage: Stage) -> None:
    async with controlled(stage) as path:
        assert is_socket(path)
    assert sorted(os.listdir(stage.where)) == ["journal", "root"]


# attack 39
async def test_a_socket_that_a_dead_host_left_is_replaced(stage: Stage) -> None:
    path = str(stage.where / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    async with controlled(stage):
        assert await ask(path, "ps") == []


# attack 39
async def test_a_living_hosts_socket_is_not_taken(stage: Stage, path: str) -> None:
    with pytest.raises(OSError, match="a living host listens there") as refusal:
        await serve_control(stage.host, path)
    assert refusal.value.errno == errno.EADDRINUSE
    assert refusal.value.filename == path
    assert await ask(path, "ps") == []


# attack 39
async def test_a_socket_whose_queue_is_full_is_alive(stage: Stage) -> None:
    path = str(stage.where / "control")
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(path)
        with pytest.raises(OSError, match="a living host listens there"):
            await serve_control(stage.host, path)
    assert is_socket(path)


@pytest.mark.parametrize("kind", ["file", "directory", "fifo", "link"])
async def test_what_is_not_a_socket_is_left_alone(stage: Stage, kind: str) -> None:
    where = stage.where / "control"
    if kind == "file":
        where.write_text("precious")
    elif kind == "directory":
        where.mkdir()
    elif kind == "fifo":
        os.mkfifo(where)
    else:
        where.symlink_to("nowhere")
    before = where.lstat()
    with pytest.raises(OSError, match="it is there and not a socket") as refusal:
        await serve_control(stage.host, str(where))
    assert refusal.value.filename == str(where)
    assert where.lstat() == before


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing/control", "its directory does not exist"),
        ("control/", "it names a directory"),
        ("journal/control", "Not a directory"),
        ("x" * 256, "File name too long"),
    ],
)
async def test_a_place_that_will_not_do_is_told(
    stage: Stage, path: str, why: str
) -> None:
    with pytest.raises(OSError, match=why) as refusal:
        await serve_control(stage.host, f"{stage.where}/{path}")
    assert refusal.value.filename == f"{stage.where}/{path}"


async def test_a_locked_directory_is_given_up_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.control_socket.LOCK_TIMEOUT_S", 0.05)
    holder = os.open(stage.where, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_SH)
        with pytest.raises(OSError, match="its directory is locked"):
            await serve_control(stage.host, str(stage.where / "control"))
    finally:
        os.close(holder)


async def test_many_hosts_that_want_one_path_leave_one_that_answers(
    stage: Stage,
) -> None:
    path = str(stage.where / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    refused = 0

    async def want() -> None:
        nonlocal refused
        try:
            await serve_control(stage.host, path)
        except OSError as why:
            if why.errno != errno.EADDRINUSE:
                raise
            refused += 1

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(want)
        await eventually(lambda: refused == 7)
        assert await ask(path, "ps") == []
        nursery.cancel_scope.cancel()


async def test_a_stopping_host_leaves_anothers_socket_alone(stage: Stage) -> None:
    async with controlled(stage) as path:
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert is_socket(path)


async def test_a_path_longer_than_an_address_works(stage: Stage) -> None:
    deep = stage.where / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with controlled(stage, str(deep / "control")) as path:
        assert await ask(path, "ps") == []


# ---------------------------------------------------------------- the asking side


@contextlib.contextmanager
def impostor(path: Path, says: bytes) -> Iterator[None]:
    """Listen at a path, say something to whoever connects, and close."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(says)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_no_socket_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="there is no such socket") as why:
        call(str(tmp_path / "control"), "ps")
    assert "\n" not in str(why.value)


# attack 39
def test_a_dead_hosts_socket_is_said_in_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(ControlError, match="nobody listens, so its host has ended"):
        call(path, "ps")


def test_something_else_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match="it is not a socket"):
        call(str(tmp_path / "file"), "ps")


@pytest.mark.parametrize(
    "says", [b"", b"220 ready\n", b"[]\n", b'{"v":2,"ok":true}\n', b'{"v":1', b"\xff\n"]
)
def test_an_impostor_is_found_out(tmp_path: Path, says: bytes) -> None:
    with (
        impostor(tmp_path / "control", says),
        pytest.raises(ControlError, match="is not a sandhost of this version"),
    ):
        call(str(tmp_path / "control"), "ps")


def test_a_host_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control"))
        silent.listen()
        begin = time.monotonic()
        with pytest.raises(ControlError, match=r"no answer .* within 0\.1 s"):
            call(str(tmp_path / "control"), "ps", timeout_s=0.1)
    assert time.monotonic() - begin < 5


async def test_a_refusal_reaches_the_asker(path: str) -> None:
    with pytest.raises(ControlError, match="refused: it does not know 'reboot'"):
        await ask(path, "reboot")


def test_asking_needs_no_framework() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        " import supervisor.control_client, supervisor.tables; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"trio", "msgspec", "psutil", "rich", "typer", "loguru"}


def test_the_path_comes_from_the_option_the_environment_or_the_run_time_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SANDHOST_CONTROL", raising=False)
    assert control_path(None) is None
    (tmp_path / "sandhost").mkdir()
    (tmp_path / "sandhost" / "control").touch()
    assert control_path(None) == str(tmp_path / "sandhost" / "control")
    monkeypatch.setenv("SANDHOST_CONTROL", "/elsewhere")
    assert control_path(None) == "/elsewhere"
    assert control_path("/given") == "/given"
