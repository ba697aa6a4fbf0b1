"""How much of one client is done before the others get their turn (spec S5).

The client's end keeps what is sent apart, so that the session receives it piece by piece;
all of it is there before the session has its turn.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from supervisor.fsproxy import session as session_module
from supervisor.fsproxy.session import TURN_S
from tests.helpers.mount_kinds import set_kind
from tests.supervisor.fsproxy.dialogue import Dialogue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TURN_REQUESTS = 64
TURN_PIECES = 8
PIPELINED = 8
"""The bound in `docs/explanation/design.md`; as in `supervisor.fsproxy.session`."""

MANY = 100
"""Pieces that wait: more than a turn has, and no more than a pipe holds."""


class Packets:
    """A client whose every write the session receives as one piece."""

    def __init__(self, root: Path) -> None:
        reader, self._writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._dialogue = Dialogue(root, read_fd=reader)
        self._dialogue.ours.settimeout(60)
        self.session = self._dialogue.session

    def send(self, data: bytes) -> None:
        """Send a piece."""
        assert os.write(self._writer, data) == len(data)

    def ask(self, data: bytes) -> bytes:
        """Send a piece and have it served; return what was said."""
        self.send(data)
        self.session.serve(alone=True)
        return self._dialogue.ours.recv(1 << 16)

    def close(self) -> None:
        """Give everything back."""
        os.close(self._writer)
        self._dialogue.close()


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packets]:
    # A busy disk would be waited for in a thread, which nobody drives here.
    set_kind(monkeypatch, tmp_path, "tmpfs")
    packets = Packets(tmp_path)
    yield packets
    packets.close()


def test_requests_that_came_at_once_take_several_turns(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    try:
        dialogue.ours.sendall(b"PING\n" * 1000)
        session = dialogue.session
        most = count = 0
        while session.requests < 1000:
            before = session.requests
            session.serve(alone=True)
            dialogue.ours.recv(1 << 16)
            most, count = max(most, session.requests - before), count + 1
        assert most <= PIPELINED + 1
        assert count >= 1000 // (PIPELINED + 1)
    finally:
        dialogue.close()


@pytest.mark.parametrize("what", ["ping", "read", "write", "seek and read"])
def test_requests_one_by_one_take_several_turns(
    talk: Packets, tmp_path: Path, what: str
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    fileno = talk.ask(b"OPEN f r+ false\n")[3:-1]
    lines = {
        "ping": (b"PING\n",),
        "read": (b"READ %b 1\n" % fileno,),
        "write": (b"WRITE %b 1\ny" % fileno,),
        "seek and read": (b"SEEK %b 0\n" % fileno, b"READ %b 1\n" % fileno),
    }[what]
    for line in lines * 3:  # so that it is known
        assert talk.ask(line).startswith(b"OK")
    for number in range(MANY):
        talk.send(lines[number % len(lines)])
    session = talk.session
    answered = session.requests
    most = 0
    while session.requests < answered + MANY:
        before = session.requests
        session.serve(alone=True)
        assert session.requests > before
        most = max(most, session.requests - before)
    assert most <= TURN_REQUESTS + 2


@pytest.mark.parametrize("how", ["kept", "dropped", "line"])
def test_pieces_of_one_message_take_several_turns(talk: Packets, how: str) -> None:
    fileno = talk.ask(b"OPEN f w false\n")[3:-1]
    head = {
        "kept": b"WRITE %b %d\n" % (fileno, MANY),
        "dropped": b"WRITE 7 %d\n" % MANY,
        "line": b"",
    }[how]
    if head:
        talk.send(head)
        talk.session.serve(alone=True)
    for _ in range(MANY):
        talk.send(b"x")
    session = talk.session
    end = session.bytes_in + MANY
    most = 0
    while session.bytes_in < end:
        before = session.bytes_in
        session.serve(alone=True)
        assert session.bytes_in > before
        most = max(most, session.bytes_in - before)
    assert most <= TURN_PIECES + 2


# Large READs, long paths: what counts is how long others wait.
@pytest.mark.parametrize("ahead", [True, False], ids=["in advance", "one by one"])
def test_requests_that_take_long_take_more_turns(
    talk: Packets, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(session_module, "now_s", lambda: next(clock) * TURN_S)
    for _ in range(10):
        talk.send(b"MKDIR a\n" * (10 if ahead else 1))
    session = talk.session
    most = 0
    for _ in range(10):
        before = session.requests
        session.serve(alone=True)
        most = max(most, session.requests - before)
    assert 0 < most <= 2


def test_a_large_read_takes_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client takes all at once, so that nothing else ends the turn."""
    sent: list[int] = []

    def take(_to: int, _fd: int, _at: int, size: int) -> int:
        sent.append(size)
        return size

    monkeypatch.setattr(os, "sendfile", take)
    set_kind(monkeypatch, tmp_path, "tmpfs")
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    dialogue = Dialogue(tmp_path)
    try:
        fileno = dialogue.open("f", "r")
        dialogue.serve(b"READ %b %d\n" % (fileno, 1 << 20))
        assert sum(sent) == 1 << 20
        assert not dialogue.session.is_working
        sent.clear()
        dialogue.serve(b"READ %b %d\n" % (fileno, 7 << 20))
        assert sum(sent) == 0
        assert dialogue.session.is_working  # by turns
    finally:
        dialogue.close()
