"""The standard input of a child that is sent what it reads."""

import os
from collections.abc import Iterator

import pytest
import trio

from supervisor.kept_children.input_pipe import (
    MOST_WAITING_BYTES,
    InputError,
    InputPipe,
)


@pytest.fixture
def ends() -> Iterator[tuple[int, InputPipe]]:
    """The reading end of a pipe, and what writes into it."""
    reader, writer = os.pipe()
    pipe = InputPipe(writer)
    yield reader, pipe
    pipe.close()
    os.close(reader)


# spec FL3
async def test_pieces_arrive_whole_and_once(ends: tuple[int, InputPipe]) -> None:
    reader, pipe = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipe.run)
        assert pipe.take(b"ab", 0, is_last=False)
        assert pipe.take(b"ab", 0, is_last=False)
        assert pipe.take(b"cd", None, is_last=False)
        with pytest.raises(InputError, match="it has 4 bytes, and these begin at 9"):
            pipe.take(b"e", 9, is_last=False)
        assert pipe.take(b"", 4, is_last=True)
        assert pipe.take(b"", 4, is_last=True)
    assert os.read(reader, 9) == b"abcd"
    assert os.read(reader, 9) == b""
    with pytest.raises(InputError, match="it reads no more"):
        pipe.take(b"e", 4, is_last=False)


# spec FL3
async def test_a_child_that_reads_nothing_takes_no_more_for_now(
    ends: tuple[int, InputPipe],
) -> None:
    reader, pipe = ends
    size = MOST_WAITING_BYTES + 1
    assert pipe.take(b"x" * size, None, is_last=False)
    assert not pipe.take(b"y", None, is_last=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipe.run)
        left = size
        while left:
            await trio.lowlevel.wait_readable(reader)
            left -= len(os.read(reader, 65_536))
        assert pipe.take(b"y", None, is_last=True)
    assert os.read(reader, 9) == b"y"


# spec FL3
async def test_a_child_that_has_closed_its_input_takes_no_more() -> None:
    reader, writer = os.pipe()
    pipe = InputPipe(writer)
    os.close(reader)
    assert pipe.take(b"x", None, is_last=False)
    await pipe.run()
    assert pipe.descriptors() == ()
    with pytest.raises(InputError, match="it reads no more"):
        pipe.take(b"y", None, is_last=False)
