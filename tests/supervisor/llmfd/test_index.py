"""The index of a text: as if each character were looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd.errors import NotTextError
from supervisor.llmfd.index import BLOCK_BYTES, IndexReader, scan

FORBIDDEN = {chr(code) for code in range(32)} - set("\t\n\r") | {"\ufffe", "\uffff"}

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.text(max_size=40).map(str.encode),
        st.sampled_from(
            [
                b"\n" * 70,
                b"x" * 65,
                b"\xef",
                b"\xbf\xbe",
                b"\xef\xbf\xbf",
                b"\x7f",
                b"\r\n",
            ]
        ),
        st.integers(1, BLOCK_BYTES).map(lambda size: b"." * size),
        st.integers(1, BLOCK_BYTES).map(lambda size: b"\n" * size),
    ),
    max_size=8,
)


def is_text(data: bytes) -> bool:
    """Tell it as slowly as it is defined."""
    try:
        return not FORBIDDEN & set(data.decode())
    except UnicodeDecodeError:
        return False


@given(PIECES)
def test_text_is_what_is_utf8_and_may_stand_in_xml(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    reader = IndexReader()
    for piece in pieces:
        reader.feed(
            b"<" + piece + b">", 1, 1 + len(piece)
        )  # surrounding bytes do not count
    index = reader.finish()
    assert (index is not None) is is_text(data)
    if index is None:
        with pytest.raises(NotTextError):
            scan(data)
        return
    text = data.decode()
    assert (index.size, index.chars) == (len(data), len(text))
    assert index.is_ascii is text.isascii()
    assert index.lines == len(data.removesuffix(b"\n").split(b"\n")) - (not data)
    for offset in {*range(0, len(data), BLOCK_BYTES), len(data) // 2, len(data)}:
        assert index.newlines_before(data, offset) == data.count(b"\n", 0, offset)


@pytest.mark.parametrize("byte", range(256))
def test_a_byte_counts_at_any_place(byte: int) -> None:
    for size in (1, 63, 64, 65, BLOCK_BYTES - 1, BLOCK_BYTES):
        for at in {0, 1, size // 2, size - 1} - {size}:
            data = bytearray(b" " * size)
            data[at] = byte
            reader = IndexReader()
            reader.feed(bytes(data))
            index = reader.finish()
            assert (index is not None) is is_text(bytes(data))
            assert index is None or index.lines == data[:-1].count(b"\n") + 1
