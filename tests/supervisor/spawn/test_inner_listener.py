"""Listeners of a child's on their way to the host: all of one message, or none."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from supervisor.spawn.inner_pair import InnerListener
from supervisor.spawn.launchpad import wire
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.stage import descriptors


def test_each_service_has_a_port_of_its_own() -> None:
    inner = InnerListener()
    try:
        assert [inner.add_listener(8087, print) for _ in range(3)] == [8087, 8088, 8089]
        sockets, *others = inner.order()
        assert [port for *_, port in sockets] == [8087, 8088, 8089]
        assert others == [(), ()]
    finally:
        inner.close()


@contextmanager
def listening(count: int) -> Iterator[list[socket.socket]]:
    """Listen on so many ports."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]


# attack 18: of one message the kernel hands over what there is room for, and nobody knows
# whose that is. Received sockets are closed, and none is passed on.
@pytest.mark.parametrize("room", [0, 1, 2])
def test_of_a_message_that_came_in_part_nothing_is_kept(room: int) -> None:
    before, served = descriptors(), list[socket.socket]()
    inner = InnerListener()
    for port in range(1, 4):
        inner.add_listener(port, served.append)
    with listening(3) as made:
        names = [sock.getsockname() for sock in made]
        wire.send_message(inner.theirs, (True,), [sock.fileno() for sock in made])
    with no_descriptor_left(but=room), pytest.raises(OSError, match="Too many") as why:
        inner.receive()
    assert why.value.errno == errno.EMFILE
    assert len(inner.descriptors()) == 2 + room  # named, should anybody ask meanwhile
    inner.serve_received()
    assert (served, inner.descriptors()) == ([], ())
    assert descriptors() == before
    for name in names:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(name)


# The same of an attempt that failed: the next one's is another message.
@pytest.mark.parametrize("room", [0, 1])
def test_what_came_in_part_of_an_attempt_that_failed_is_forgotten(room: int) -> None:
    before, served = descriptors(), list[socket.socket]()
    inner = InnerListener()
    for port in range(1, 3):
        inner.add_listener(port, served.append)
    with listening(2) as failed, listening(2) as made:
        names = [sock.getsockname() for sock in made]
        wire.send_message(inner.theirs, (True,), [sock.fileno() for sock in failed])
        with no_descriptor_left(but=room):
            inner.close_received()
        wire.send_message(inner.theirs, (True,), [sock.fileno() for sock in made])
    inner.receive()
    inner.serve_received()
    assert [sock.getsockname() for sock in served] == names
    for sock in served:
        assert not sock.getblocking()
        sock.close()
    assert descriptors() == before
