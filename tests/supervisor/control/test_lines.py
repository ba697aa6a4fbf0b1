"""Lines of the control socket, however the bytes come."""

import pytest

from supervisor.control import lines
from supervisor.control.lines import LineReader, LineTooLongError


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_come(size: int) -> None:
    sent = b"one\n\ntwo\nthree\nres"
    reader, found = LineReader(), []
    for begin in range(0, len(sent), size):
        found += reader.feed(sent[begin : begin + size])
    assert found == [b"one", b"", b"two", b"three"]
    assert reader.rest() == b"res"


def test_a_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    reader = LineReader()
    assert reader.feed(b"0123456789\n01234") == [b"0123456789"]
    assert reader.feed(b"56789\n") == [b"0123456789"]
    reader.feed(b"0123456789")
    with pytest.raises(LineTooLongError, match="more than 10 bytes"):
        reader.feed(b"0")
