"""Lines of a child's log: pieces with marks, without, and with a gap."""

from supervisor.cli.log_lines import LogLines, parts_of
from supervisor.client import LogEntry, LogMark

OUT = LogMark(offset=0, time_s=0.0, stream="out", begins=True)
ERR = LogMark(offset=4, time_s=1.5, stream="err", begins=False)


def test_a_piece_is_parted_at_its_marks() -> None:
    entry = LogEntry(0, b"one\nbad\n", 0, (OUT, ERR))
    assert list(parts_of(entry)) == [(OUT, b"one\n"), (ERR, b"bad\n")]
    late = LogEntry(2, b"e\nbad\n", 0, (OUT, ERR))
    assert list(parts_of(late)) == [(OUT, b"e\n"), (ERR, b"bad\n")]
    early = LogEntry(0, b"one\nbad\n", 0, (ERR,))
    assert list(parts_of(early)) == [(None, b"one\n"), (ERR, b"bad\n")]


def test_a_piece_without_marks_is_of_no_known_stream() -> None:
    entry = LogEntry(0, b"one\ntwo", 0, ())
    assert list(parts_of(entry)) == [(None, b"one\ntwo")]
    view = LogLines(timestamps=False, raw=False)
    assert b"".join(view.take(entry)) == b"-   | one\n"
    gap = LogEntry(100, b"three\n", 93, ())
    assert b"".join(view.take(gap)) == b"-   | two\n-   | three\n"
