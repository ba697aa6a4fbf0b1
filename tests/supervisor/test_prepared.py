"""Prepared requests answer as the ordinary handlers do, and end with their file.

The session is driven by hand, as the pump does when its client is the only active one:
only then are prepared lines looked up.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from supervisor.pump import Pump
from supervisor.session import Session
from vfs.filesystem import Filesystem
from vfs.payload import PayloadBudget
from vfs.policy import Ledger, Policy, open_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Dialogue:
    """A client's end of one session, and the session."""

    def __init__(self, root: Path, dialect: int = 2) -> None:
        self.ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        fd = theirs.detach()
        self.fs = Filesystem()
        self.place = open_place(str(root), read=True, write=True, relative=b"")
        client = self.fs.connect(Policy((self.place,)), Ledger(open_files=8), "test")
        self.session = Session(
            Pump(),
            self.fs,
            client,
            fd,
            fd,
            PayloadBudget(),
            dialect=dialect,
            max_write_bytes=1 << 20,
            deadline_s=5.0,
            on_closed=lambda _: None,
        )

    def ask(self, request: bytes) -> bytes:
        """Send bytes, let the session serve, return what it sent."""
        self.ours.sendall(request)
        self.session.serve(alone=True)
        return self.ours.recv(1 << 16)

    def open(self, name: str, mode: str) -> bytes:
        """Open a file and return its fileno's token."""
        reply = self.ask(f"OPEN {name} {mode} false\n".encode())
        assert reply.startswith(b"OK "), reply
        return reply[3:-1]

    def close(self) -> None:
        """Give everything back."""
        self.fs.disconnect(self.session.client, "test")
        self.place.backend.close()
        os.close(self.session.read_fd)
        self.ours.close()


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Dialogue]:
    dialogue = Dialogue(tmp_path)
    yield dialogue
    dialogue.close()


def test_a_read_that_comes_again_goes_on_at_the_offset(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec P1, R1
    (tmp_path / "f").write_bytes(bytes(range(100)))
    line = b"READ %b 10\n" % talk.open("f", "r")
    got = b"".join(talk.ask(line)[6:] for _ in range(10))
    assert line in talk.session.prepared
    assert got == bytes(range(100))


def test_a_prepared_read_sees_the_end_and_what_is_appended_later(
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


def test_a_prepared_write_writes_each_payload_where_the_last_one_ended(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec W1, P1
    line = b"WRITE %b 3\n" % talk.open("f", "w")
    for number in range(50):
        assert talk.ask(line + b"%03d" % number) == b"OK 3\n"
    assert talk.session.write_size > 0
    assert (tmp_path / "f").read_bytes() == b"".join(b"%03d" % n for n in range(50))


def test_a_prepared_write_whose_payload_comes_later_is_whole_all_the_same(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec W2
    line = b"WRITE %b 4\n" % talk.open("f", "w")
    for _ in range(3):
        talk.ask(line + b"abcd")
    talk.ours.sendall(line + b"ef")
    talk.session.serve(alone=True)
    assert (tmp_path / "f").read_bytes() == b"abcd" * 3
    assert talk.ask(b"gh") == b"OK 4\n"
    assert (tmp_path / "f").read_bytes() == b"abcd" * 3 + b"efgh"


def test_a_line_with_the_size_of_a_prepared_write_is_read_as_what_it_is(
    talk: Dialogue,
) -> None:
    # spec T3
    fileno = talk.open("f", "w")
    line = b"WRITE %b 2\n" % fileno
    for _ in range(3):
        talk.ask(line + b"ab")
    other = b"READ %b 1" % fileno
    other += b" " * (talk.session.write_size - len(other) - 1) + b"\n"
    assert len(other) == talk.session.write_size
    assert talk.ask(other) == b"ERROR file not open for reading: %b\n" % fileno


def test_closing_a_file_forgets_every_line_about_it(
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
    assert not talk.session.prepared


def test_an_open_that_comes_again_opens_again(talk: Dialogue) -> None:
    # spec O9, O4
    line = b"OPEN f w false\n"
    for _ in range(4):
        fileno = talk.ask(line)[3:-1]
        assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    assert line in talk.session.prepared
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


def test_a_line_in_two_pieces_is_not_taken_for_a_prepared_one(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec T3
    (tmp_path / "f").write_bytes(b"0123456789")
    line = b"READ %b 1\n" % talk.open("f", "r")
    assert [talk.ask(line) for _ in range(3)][-1] == b"OK 1\n2"
    talk.ours.sendall(b"PI")
    talk.session.serve(alone=True)
    talk.ours.sendall(line)  # the rest of a line that began with PI
    talk.session.serve(alone=True)
    assert talk.ours.recv(1000).startswith(b"ERROR unknown command: PIREAD")
    assert talk.ask(line) == b"OK 1\n3"
