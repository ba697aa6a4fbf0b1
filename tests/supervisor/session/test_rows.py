"""The same line again and again is answered as if each of them were the only one.

The client is played where the host yields the core to it: it takes the reply that it
has, and sends what it asks next. So all that is asked here is asked within one turn of
the session, as by a client on the same core.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.session import on_files_again, session
from supervisor.session import prepared as session_prepared
from supervisor.session.counts import WRITE
from tests.helpers.dialogue import Dialogue
from vfs.hostio import MOUNTS, PAGE_BYTES, Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

READ = ord("R")


class Talk(Dialogue):
    """A session whose client has its turn whenever the host yields the core."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.ours.setblocking(False)
        self.to_ask: deque[bytes] = deque()
        self.replies: list[bytes] = []
        self.is_reading = True
        self.turns = 0
        for module in (session, session_prepared, on_files_again):
            patch.setattr(module, "_yield_core", self.client_runs)

    def client_runs(self) -> None:
        """Take a reply, if there is one, and send the next request."""
        self.turns += 1
        if self.is_reading:
            try:
                self.replies.append(self.ours.recv(1 << 20))
            except BlockingIOError:
                return
        if self.to_ask:
            self.ours.sendall(self.to_ask.popleft())

    def ask(self, request: bytes) -> bytes:
        """Ask one thing; return the reply."""
        return self.ask_all([request])[0]

    def ask_all(self, requests: Iterable[bytes]) -> list[bytes]:
        """Ask in order, each when the reply before it is there; return the replies."""
        self.to_ask.extend(requests)
        self.replies = []
        wanted = len(self.to_ask)
        self.ours.sendall(self.to_ask.popleft())
        while len(self.replies) < wanted:
            before = len(self.replies)
            self.session.serve(alone=True)
            self.client_runs()
            assert len(self.replies) > before, "the session answers nothing"
        return self.replies

    def drain(self) -> bytes:
        """Take all that the host has sent."""
        taken = b""
        while True:
            try:
                taken += self.ours.recv(1 << 20)
            except BlockingIOError:
                return taken


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all mounts be in memory: rows are what is looked at here, not disks."""
    monkeypatch.setattr(Mount, "note", lambda _self, _seconds: None)
    for mount in MOUNTS.values():
        monkeypatch.setattr(mount, "inline", mount.in_memory or mount._nowait)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose files are written as those in memory are."""
    (tmp_path / "probe").write_bytes(b"")
    device = (tmp_path / "probe").stat().st_dev
    mount = Mount("tmpfs")
    monkeypatch.setitem(MOUNTS, device, mount)
    return tmp_path


@pytest.fixture
def talk(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    dialogue = Talk(memory, monkeypatch)
    yield dialogue
    dialogue.close()


def count_calls(patch: pytest.MonkeyPatch, name: str) -> list[bytes]:
    """Return a list that gets what each call of a row's `_read` or `_write` is about."""
    calls: list[bytes] = []
    real: Callable[..., object] = getattr(on_files_again, name)

    def counted(fd: int, what: object) -> object:
        done = real(fd, what)
        calls.append(done if isinstance(done, bytes) else bytes(what))  # type: ignore[call-overload]
        return done

    patch.setattr(on_files_again, name, counted)
    return calls


def test_reads_in_a_row_go_on_at_the_offset_to_the_end_of_the_file(
    talk: Talk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec P1, R1
    content = bytes(range(256)) * 8
    (memory / "f").write_bytes(content)
    line = b"READ %b 5\n" % talk.open("f", "r")
    in_rows = count_calls(monkeypatch, "_write")
    replies = talk.ask_all([line] * 412)
    assert b"".join(reply.partition(b"\n")[2] for reply in replies) == content
    assert (
        replies[408:]
        == [b"OK 5\n" + content[2040:2045], b"OK 3\n" + content[2045:]]
        + [b"OK 0\n"] * 2
    )
    assert len(in_rows) > 300, "most are answered in a row"


def test_writes_in_a_row_end_where_the_last_one_did_and_cross_pages(
    talk: Talk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec W1, P1
    line = b"WRITE %b 100\n" % talk.open("f", "w")
    pieces = [os.urandom(100) for _ in range(PAGE_BYTES // 100 * 4)]
    in_rows = count_calls(monkeypatch, "_write")
    replies = talk.ask_all(line + piece for piece in pieces)
    assert replies == [b"OK 100\n"] * len(pieces)
    assert (memory / "f").read_bytes() == b"".join(pieces)
    assert len(in_rows) > len(pieces) // 2, "most are taken in a row"


def test_a_file_that_is_closed_in_the_middle_of_a_turn_is_closed(
    talk: Talk, memory: Path
) -> None:
    # spec C1, I4: the descriptor may be another file's by then
    (memory / "f").write_bytes(b"x" * 100)
    (memory / "g").write_bytes(b"untouched")
    fileno = talk.open("f", "r+")
    write, read = b"WRITE %b 1\ny" % fileno, b"READ %b 1\n" % fileno
    close, other = b"CLOSE %b\n" % fileno, b"OPEN g r+ false\n"
    talk.ask_all([other, b"CLOSE 1001\n"] * 3)  # prepared, so that it takes no long way
    asked = [write] * 5 + [read] * 5 + [write] * 5 + [close, other, write, read, close]
    replies = talk.ask_all(asked)
    invalid = b"ERROR invalid fileno: %b\n" % fileno
    assert replies[15] == b"OK\n"
    assert replies[16].startswith(b"OK ")
    assert replies[17:] == [invalid] * 3
    assert (memory / "f").read_bytes() == b"yyyyyxxxxxyyyyy" + b"x" * 85
    assert (memory / "g").read_bytes() == b"untouched"


def test_a_read_whose_data_is_not_in_memory_waits_for_the_disk(
    talk: Talk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec R1, I1
    (memory / "f").write_bytes(bytes(range(200)))
    mount = MOUNTS[(memory / "f").stat().st_dev]
    real = mount.read

    def sometimes(fd: int, size: int, offset: int) -> bytes:
        if offset == 50:
            raise BlockingIOError
        return real(fd, size, offset)

    monkeypatch.setattr(mount, "read", sometimes)
    line = b"READ %b 10\n" % talk.open("f", "r")
    talk.replies.clear()
    talk.to_ask.extend([line] * 9)
    talk.ours.sendall(line)
    talk.session.serve(alone=True)
    assert b"".join(reply[6:] for reply in talk.replies) == bytes(range(50))
    job = talk.session._job
    assert job is not None
    assert trio.run(job) == b"OK 10\n" + bytes(range(50, 60))


def test_an_error_in_a_row_is_told_and_moves_nothing(
    talk: Talk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec W5, F1
    mount = MOUNTS[(memory / "probe").stat().st_dev]
    real, full = mount.write_page, [False]
    assert real is not None

    def until_full(fd: int, data: bytes, offset: int) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(mount, "write_page", until_full)
    line = b"WRITE %b 2\n" % talk.open("f", "w")
    assert talk.ask_all([line + b"ab"] * 10) == [b"OK 2\n"] * 10
    full[0] = True
    failed = b"ERROR failed to write: No space left on device\n"
    assert talk.ask_all([line + b"cd"] * 3) == [failed] * 3
    full[0] = False
    assert talk.ask_all([line + b"ef"] * 3) == [b"OK 2\n"] * 3
    assert (memory / "f").read_bytes() == b"ab" * 10 + b"ef" * 3
    assert talk.session.errors == 3


@pytest.mark.parametrize("what", ["READ", "WRITE"])
def test_a_client_that_asks_on_and_on_but_takes_nothing_loses_nothing(
    talk: Talk, memory: Path, what: str
) -> None:
    # spec T3, F8
    content = os.urandom(4_000_000)
    (memory / "f").write_bytes(content)
    fileno = talk.open("f", "r+")
    line = b"READ %b 4000\n" % fileno
    if what == "WRITE":
        line = b"WRITE %b 1\nw" % fileno
    talk.ask_all([line] * 4)
    talk.is_reading = False
    asked = 0
    while talk.session._job is None:
        talk.to_ask.extend([line] * 64)
        before = len(talk.to_ask)
        talk.client_runs()
        talk.session.serve(alone=True)
        asked += before - len(talk.to_ask)
        talk.to_ask.clear()
        assert asked < 100_000
    answered = talk.session.requests
    got = talk.drain()
    trio.run(talk.session._job)
    got += talk.drain()
    replies = answered - 5 + 1  # behind an OPEN and four; the last one was a job's
    if what == "WRITE":
        assert got == b"OK 1\n" * replies
        assert (memory / "f").read_bytes()[: replies + 4] == b"w" * (replies + 4)
        assert (memory / "f").read_bytes()[replies + 4 :] == content[replies + 4 :]
    else:
        pieces = [content[at : at + 4000] for at in range(16_000, 4_000_000, 4000)]
        assert got == b"".join(b"OK 4000\n" + piece for piece in pieces[:replies])
    assert talk.session.bytes_out == sum(map(len, (b"OK 1000\n", *talk.replies, got)))


def steps() -> st.SearchStrategy[list[tuple[str, int]]]:
    """Return what a client may do, most of it several times in a row."""
    kinds = st.sampled_from(
        ["read", "read2", "write", "write2", "seek", "reopen", "bad"]
    )
    return st.lists(st.tuples(kinds, st.integers(1, 9)), min_size=1, max_size=12)


def script(plan: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield the requests of a plan; filenos rise by one (spec O9)."""
    fileno = 1000
    yield b"OPEN f r+ false\n"
    for number, (kind, times) in enumerate(plan):
        for time in range(times):
            if kind == "reopen":
                yield b"CLOSE %d\n" % fileno
                yield b"OPEN f r+ false\n"
                fileno += 1
            else:
                letter = bytes([97 + (number * 7 + time) % 26])
                yield {
                    "read": b"READ %d 3\n" % fileno,
                    "read2": b"READ %d 40\n" % fileno,
                    "write": b"WRITE %d 4\n" % fileno + letter * 4,
                    "write2": b"WRITE %d 700\n" % fileno + letter * 700,
                    "seek": b"SEEK %d 4090\n" % fileno,
                    "bad": b"READ 999 1\n",
                }[kind]


@settings(max_examples=60, deadline=None)
@given(plan=steps())
def test_in_a_row_or_one_by_one_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int]]
) -> None:
    # spec T3, P1, R1, W1
    outcomes = []
    for in_rows in (True, False):
        root = tmp_path_factory.mktemp("root")
        (root / "f").write_bytes(bytes(range(250)) * 20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MOUNTS, root.stat().st_dev, Mount("tmpfs"))
            talk: Dialogue = (
                Talk(root, patch) if in_rows else Dialogue(root, alone=False)
            )
            try:
                requests = list(script(plan))
                if isinstance(talk, Talk):
                    replies = talk.ask_all(requests)
                else:
                    replies = [talk.ask(request) for request in requests]
                one = talk.session
                counted = (one.requests, one.bytes_in, one.bytes_out, one.errors)
                assert counted[:2] == (len(requests), sum(map(len, requests)))
                assert one.counts.requests[READ] + one.counts.requests[WRITE] == sum(
                    request[:2] in (b"RE", b"WR") for request in requests
                )
            finally:
                talk.close()
        outcomes.append((replies, (root / "f").read_bytes(), counted))
    assert outcomes[0] == outcomes[1]
