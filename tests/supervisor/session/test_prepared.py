"""Prepared requests answer as the ordinary handlers do, and end with their file.

The session is driven by hand, as the pump does when its client is the only active one,
and as it does when it is one of many.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from supervisor.session.prepared import PREPARED_LINES
from tests.helpers.dialogue import Dialogue
from vfs.hostio import MOUNTS, Mount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from supervisor.session.session import Session


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no write be slow: what a thread would do nobody does here.

    Nor a mount that an earlier test has found slow.
    """
    monkeypatch.setattr(Mount, "note", lambda _self, _seconds: None)
    for mount in MOUNTS.values():
        monkeypatch.setattr(mount, "inline", mount.in_memory or mount._nowait)


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
    talk.serve(line + b"ef")
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


def known(session: Session) -> tuple[int, int, int, int]:
    """Return how much a session knows by heart, in all its tables."""
    noted = sum(map(len, session.lines_of.values()))
    assert noted == session.noted_lines
    assert session.rows.keys() <= session.prepared.keys()
    return len(session.prepared), noted, len(session.lines_of), len(session.rows)


def test_what_a_client_says_over_and_over_is_noted_once(
    talk: Dialogue, tmp_path: Path
) -> None:
    # spec S7
    (tmp_path / "f").write_bytes(b"x" * 1000)
    opening = b"OPEN f r false\n"
    sizes = set()
    for _ in range(20):
        fileno = talk.ask(opening)[3:-1]
        talk.ours.sendall(b"READ %b 1\n" % fileno * 20)  # one behind the other
        while talk.session.serve(alone=False):
            pass
        talk.ours.recv(1 << 16)
        assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
        sizes.add(known(talk.session))
    assert sizes <= {(0, 0, 0, 0), (1, 1, 1, 0)}  # from the second time on the OPEN


def test_a_closed_file_leaves_nothing_behind(talk: Dialogue, tmp_path: Path) -> None:
    # spec C1
    (tmp_path / "f").write_bytes(b"x" * 1000)
    fileno = talk.open("f", "r+")
    for size in range(1, 30):
        for _ in range(3):
            assert talk.ask(b"READ %b %d\n" % (fileno, size)).startswith(b"OK ")
            assert talk.ask(b"SEEK %b 0\n" % fileno) == b"OK 0\n"
            # Twice in a row is what is noted.
            assert talk.ask(b"READ %b %d\n" % (fileno, size)).startswith(b"OK ")
            assert talk.ask(b"READ %b %d\n" % (fileno, size)).startswith(b"OK ")
            assert talk.ask(b"SEEK %b 0\n" % fileno) == b"OK 0\n"
    assert known(talk.session) == (30, 29, 1, 29)
    assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    assert known(talk.session) == (0, 0, 0, 0)


def test_of_many_names_only_so_many_are_known(talk: Dialogue, tmp_path: Path) -> None:
    # spec S7
    for number in range(PREPARED_LINES + 100):
        line = b"OPEN n%d w false\n" % number
        for _ in range(2):
            fileno = talk.ask(line)[3:-1]
            assert talk.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
        assert line in talk.session.prepared
        assert known(talk.session)[1] <= PREPARED_LINES
    assert known(talk.session)[1] == 100
    assert (tmp_path / "n0").exists()


def test_with_many_files_open_each_line_is_still_known(
    talk: Dialogue, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    ledger = talk.session.client.ledger
    ledger.limits = (PREPARED_LINES + 100, *ledger.limits[1:])
    filenos = [talk.open("f", "r") for _ in range(PREPARED_LINES + 50)]
    lines = [b"READ %b 1\n" % fileno for fileno in filenos[:100]]
    for line in lines:
        for _ in range(2):
            assert talk.ask(line) == b"OK 1\nx"
    assert all(line in talk.session.prepared for line in lines)


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
    talk.serve(b"PI")
    talk.serve(line)  # the rest of a line that began with PI
    assert talk.ours.recv(1000).startswith(b"ERROR unknown command: PIREAD")
    assert talk.ask(line) == b"OK 1\n3"


def open_often(top: Dialogue, path: Path) -> bytes:
    """Let the OPEN of a file in the top-level view be prepared; return its line."""
    line = b"OPEN %b r true\n" % os.fsencode(path)
    for _ in range(3):
        fileno = top.ask(line)[3:-1]
        assert top.ask(b"CLOSE %b\n" % fileno) == b"OK\n"
    assert line in top.session.prepared
    assert not top.session.client.ledger.used[0]
    return line


def test_a_file_that_is_opened_again_is_a_row_like_any_other(
    top: Dialogue, tmp_path: Path
) -> None:
    # spec S1, O9, R1
    (tmp_path / "f").write_bytes(b"content")
    line = open_often(top, tmp_path / "f")
    filenos = [int(top.ask(line)[3:-1]) for _ in range(8)]
    rows = top.fs.tables.file_rows()
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
    assert not top.session.client.ledger.used[0]
    path.rmdir()
    path.write_bytes(b"new")
    assert top.ask(b"READ %b 9\n" % top.ask(line)[3:-1]) == b"OK 3\nnew"


def test_a_right_that_was_given_up_is_gone_for_lines_that_were_prepared(
    top: Dialogue, tmp_path: Path
) -> None:
    # spec A1, A5
    (tmp_path / "f").write_bytes(b"content")
    line = open_often(top, tmp_path / "f")
    top.session.narrow(b"{}")
    denied = b"ERROR VFS access denied: '%b'\n" % os.fsencode(tmp_path / "f")
    assert top.ask(line) == denied
