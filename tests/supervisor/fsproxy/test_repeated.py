"""Requests that come again and again are answered as if each were the only one.

The session is driven by hand, as the pump does when its client is the only active one,
and as it does when it is one of many.  `Talk` plays a client on the same core: it has
its turn where the host yields that, takes its reply and asks on within the same turn.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.fsproxy import session
from tests.helpers.tables import file_rows
from tests.supervisor.fsproxy.dialogue import Dialogue
from vfs.mounts import MOUNTS, Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no write be slow: what a thread would do nobody does here.

    Nor a mount that an earlier test has found slow, nor a turn that ends by the clock.
    """
    monkeypatch.setattr(session, "now_s", lambda: 0.0)
    monkeypatch.setattr(Mount, "note", lambda _self, _seconds: None)
    for mount in MOUNTS.values():
        monkeypatch.setattr(mount, "inline", mount.in_memory or mount.takes_nowait)


class Talk(Dialogue):
    """A session whose client has its turn whenever the host yields the core."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.ours.setblocking(False)
        self.to_ask: deque[bytes] = deque()
        self.replies: list[bytes] = []
        self.is_reading = True
        self.turns = 0
        patch.setattr(session, "yield_core", self.client_runs)

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

    async def job(self) -> bytes | None:
        """Do the session's slow work that has begun; return the reply."""
        begun = self.session.job
        assert begun is not None
        return await begun()

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


@pytest.fixture(params=["alone", "crowd"])
def talk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Dialogue]:
    dialogue = Dialogue(tmp_path, alone=request.param == "alone")
    yield dialogue
    dialogue.close()


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Dialogue]:
    dialogue = Dialogue(tmp_path, top_level=True)
    yield dialogue
    dialogue.close()


def test_a_read_that_comes_again_goes_on_at_the_offset(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec P1, R1
    (tmp_path / "f").write_bytes(bytes(range(100)))
    line = b"READ %b 10\n" % talk.open("f", "r")
    got = b"".join(talk.ask(line)[6:] for _ in range(10))
    assert got == bytes(range(100))


def test_a_read_that_comes_again_sees_the_end_and_what_is_appended_later(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec R1
    (tmp_path / "f").write_bytes(b"aaaabb")
    line = b"READ %b 2\n" % talk.open("f", "r")
    assert [talk.ask(line) for _ in range(4)] == [
        b"OK 2\naa",
        b"OK 2\naa",
        b"OK 2\nbb",
        b"OK 0\n",
    ]
    with (tmp_path / "f").open("ab") as file:
        file.write(b"c")
    assert talk.ask(line) == b"OK 1\nc"
    assert talk.ask(line) == b"OK 0\n"


def test_a_write_that_comes_again_writes_each_payload_where_the_last_one_ended(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec W1, P1
    line = b"WRITE %b 3\n" % talk.open("f", "w")
    for number in range(50):
        assert talk.ask(line + b"%03d" % number) == b"OK 3\n"
    assert (tmp_path / "f").read_bytes() == b"".join(b"%03d" % n for n in range(50))


def test_a_write_that_comes_again_and_whose_payload_comes_later_is_whole_all_the_same(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec W2
    line = b"WRITE %b 4\n" % talk.open("f", "w")
    for _ in range(3):
        talk.ask(line + b"abcd")
    talk.serve(line + b"ef")
    assert (tmp_path / "f").read_bytes() == b"abcd" * 3
    assert talk.ask(b"gh") == b"OK 4\n"
    assert (tmp_path / "f").read_bytes() == b"abcd" * 3 + b"efgh"


def test_after_a_close_no_line_about_the_file_is_answered(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec C1, R2, I4
    (tmp_path / "f").write_bytes(b"x" * 100)
    fileno = talk.open("f", "r+")
    lines = (b"READ %b 1\n" % fileno, b"WRITE %b 1\ny" % fileno)
    for line in lines * 1:
        for _ in range(3):
            assert talk.ask(line).startswith(b"OK 1\n")
    close = b"CLOSE %b\n" % fileno
    assert talk.ask(close) == b"OK\n"
    invalid = b"ERROR invalid fileno: %b\n" % fileno
    assert [talk.ask(line) for line in (*lines, close)] == [invalid] * 3


def test_an_open_that_comes_again_opens_again(talk: Dialogue) -> None:
    # spec O9, O4
    line = b"OPEN f w false\n"
    for _ in range(4):
        fileno = talk.ask(line)[3:-1]
        assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    for _ in range(8):  # all that its ledger allows
        assert talk.ask(line).startswith(b"OK ")
    assert talk.ask(line) == b"ERROR failed to open file 'f': Too many open files\n"


def test_in_dialect_1_a_flag_is_no_context_however_often_it_comes(
    tmp_path: Path,
) -> None:
    # spec O5
    dialogue = Dialogue(tmp_path, dialect=1)
    try:
        for _ in range(4):
            assert dialogue.ask(b"OPEN f w internal\n").startswith(b"OK ")
        assert dialogue.ask(b"OPEN f w false\n") == b"ERROR invalid context: false\n"
    finally:
        dialogue.close()


def test_filenos_rise_and_are_never_used_again(talk: Dialogue) -> None:
    # spec O9, I4
    seen = []
    for _ in range(20):
        fileno = talk.open("f", "w")
        seen.append(int(fileno))
        assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    assert seen[0] >= 1000
    assert seen == sorted(set(seen))


def test_a_line_in_two_pieces_is_not_taken_for_one_that_came_before(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec T3
    (tmp_path / "f").write_bytes(b"0123456789")
    line = b"READ %b 1\n" % talk.open("f", "r")
    assert [talk.ask(line) for _ in range(3)][-1] == b"OK 1\n2"
    talk.serve(b"PI")
    talk.serve(line)  # the rest of a line that began with PI
    assert talk.ours.recv(1000).startswith(b"ERROR unknown command: PIREAD")
    assert talk.ask(line) == b"OK 1\n3"


def open_often(top: Dialogue, path: Path) -> bytes:
    """Open a file of the top-level view again and again; return the line of the OPEN."""
    line = b"OPEN %b r true\n" % os.fsencode(path)
    for _ in range(3):
        fileno = top.ask(line)[3:-1]
        assert top.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    assert not top.session.client.ledger.open_files.used
    return line


def test_a_file_that_is_opened_again_is_a_row_like_any_other(
    top: Dialogue, tmp_path: Path
) -> None:
    # spec S1, O9, R1
    (tmp_path / "f").write_bytes(b"content")
    line = open_often(top, tmp_path / "f")
    filenos = [int(top.ask(line)[3:-1]) for _ in range(8)]
    rows = file_rows(top.fs)
    assert [row["fileno"] for row in rows] == filenos
    assert {(row["filename"], row["mode"], row["is_top_level"]) for row in rows} == {
        (str(tmp_path / "f"), "r", True)
    }
    assert top.ask(b"READ %d 100\n" % filenos[-1]) == b"OK 7\ncontent"
    name = os.fsencode(tmp_path / "f")
    full = b"ERROR failed to open file '%b': Too many open files\n" % name
    assert top.ask(line) == full
    assert top.ask(b"CLOSE %d\n" % filenos[0]) == b"OK\n"
    assert top.ask(line).startswith(b"OK ")


def test_what_a_name_stands_for_is_looked_at_each_time(
    top: Dialogue, tmp_path: Path
) -> None:
    # spec O6, O7, A4
    path = tmp_path / "f"
    path.write_bytes(b"old")
    line = open_often(top, path)
    failed = b"ERROR failed to open file '%b': " % os.fsencode(path)
    path.unlink()
    assert top.ask(line) == failed + b"No such file or directory\n"
    os.mkfifo(path)
    assert top.ask(line) == failed + b"Operation not permitted\n"
    path.unlink()
    path.mkdir()
    assert top.ask(line) == failed + b"Is a directory\n"
    assert not top.session.client.ledger.open_files.used
    path.rmdir()
    path.write_bytes(b"new")
    assert top.ask(b"READ %b 9\n" % top.ask(line)[3:-1]) == b"OK 3\nnew"


def test_a_right_that_was_given_up_is_gone_for_lines_that_came_before(
    top: Dialogue, tmp_path: Path
) -> None:
    # spec A1, A5
    (tmp_path / "f").write_bytes(b"content")
    line = open_often(top, tmp_path / "f")
    top.session.narrow(b"{}")
    denied = b"ERROR VFS access denied: '%b'\n" % os.fsencode(tmp_path / "f")
    assert top.ask(line) == denied


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose files are written as those in memory are."""
    (tmp_path / "probe").write_bytes(b"")
    device = (tmp_path / "probe").stat().st_dev
    mount = Mount("tmpfs")
    monkeypatch.setitem(MOUNTS, device, mount)
    return tmp_path


@pytest.fixture
def quick(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    dialogue = Talk(memory, monkeypatch)
    yield dialogue
    dialogue.close()


def test_a_file_that_is_closed_in_the_middle_of_a_turn_is_closed(
    quick: Talk, memory: Path
) -> None:
    # spec C1, I4: the descriptor may be another file's by then
    (memory / "f").write_bytes(b"x" * 100)
    (memory / "g").write_bytes(b"untouched")
    fileno = quick.open("f", "r+")
    write, read = b"WRITE %b 1\ny" % fileno, b"READ %b 1\n" % fileno
    close, other = b"CLOSE %b\n" % fileno, b"OPEN g r+ false\n"
    quick.ask_all([other, b"CLOSE 1001\n"] * 3)
    asked = [write] * 5 + [read] * 5 + [write] * 5 + [close, other, write, read, close]
    replies = quick.ask_all(asked)
    invalid = b"ERROR invalid fileno: %b\n" % fileno
    assert replies[15] == b"OK\n"
    assert replies[16].startswith(b"OK ")
    assert replies[17:] == [invalid] * 3
    assert (memory / "f").read_bytes() == b"yyyyyxxxxxyyyyy" + b"x" * 85
    assert (memory / "g").read_bytes() == b"untouched"


def test_a_read_whose_data_is_not_in_memory_waits_for_the_disk(
    quick: Talk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec R1, I1
    (memory / "f").write_bytes(bytes(range(200)))
    mount = MOUNTS[(memory / "f").stat().st_dev]
    real = mount.read

    def sometimes(fd: int, size: int, offset: int) -> bytes | bytearray:
        if offset == 50:
            raise BlockingIOError
        return real(fd, size, offset)

    monkeypatch.setattr(mount, "read", sometimes)
    line = b"READ %b 10\n" % quick.open("f", "r")
    quick.replies.clear()
    quick.to_ask.extend([line] * 9)
    quick.ours.sendall(line)
    quick.session.serve(alone=True)
    assert b"".join(reply[6:] for reply in quick.replies) == bytes(range(50))
    assert trio.run(quick.job) == b"OK 10\n" + bytes(range(50, 60))


@pytest.mark.parametrize("what", ["READ", "WRITE"])
def test_a_client_that_asks_on_and_on_but_takes_nothing_loses_nothing(
    quick: Talk, memory: Path, what: str
) -> None:
    # spec T3, F8
    content = os.urandom(4_000_000)
    (memory / "f").write_bytes(content)
    fileno = quick.open("f", "r+")
    line = b"READ %b 4000\n" % fileno
    if what == "WRITE":
        line = b"WRITE %b 1\nw" % fileno
    quick.ask_all([line] * 4)
    quick.is_reading = False
    asked = 0
    while not quick.session.is_working:
        quick.to_ask.extend([line] * 64)
        before = len(quick.to_ask)
        quick.client_runs()
        quick.session.serve(alone=True)
        asked += before - len(quick.to_ask)
        quick.to_ask.clear()
        assert asked < 100_000
    answered = quick.session.requests
    got = quick.drain()
    trio.run(quick.job)
    got += quick.drain()
    replies = answered - 5 + 1  # behind an OPEN and four; the last one was a job's
    if what == "WRITE":
        assert got == b"OK 1\n" * replies
        assert (memory / "f").read_bytes()[: replies + 4] == b"w" * (replies + 4)
        assert (memory / "f").read_bytes()[replies + 4 :] == content[replies + 4 :]
    else:
        pieces = [content[at : at + 4000] for at in range(16_000, 4_000_000, 4000)]
        assert got == b"".join(b"OK 4000\n" + piece for piece in pieces[:replies])
    assert quick.session.bytes_out == sum(map(len, (b"OK 1000\n", *quick.replies, got)))


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


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plan=steps())
def test_in_one_turn_or_in_a_turn_each_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int]]
) -> None:
    # spec T3, P1, R1, W1
    outcomes = []
    for in_one_turn in (True, False):
        root = tmp_path_factory.mktemp("root")
        (root / "f").write_bytes(bytes(range(250)) * 20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MOUNTS, root.stat().st_dev, Mount("tmpfs"))
            talk: Dialogue = (
                Talk(root, patch) if in_one_turn else Dialogue(root, alone=False)
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
                assert sum(one.counts.requests.values()) == len(requests)
            finally:
                talk.close()
        outcomes.append((replies, (root / "f").read_bytes(), counted))
    assert outcomes[0] == outcomes[1]
