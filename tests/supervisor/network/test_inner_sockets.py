"""The host's sockets in a child's net namespace: taken, counted, closed."""

import errno
import socket

import pytest

from supervisor.network.inner_sockets import InnerSockets


def made(*, has_v6: bool = True) -> InnerSockets:
    """Return what a namespace has whose rules grant ports 53 and 443."""
    kinds = (socket.AF_INET, socket.AF_INET6) if has_v6 else (socket.AF_INET,)
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stream, proxy = socket.socket(), socket.socket()
    return InnerSockets(
        datagram,
        stream,
        proxy,
        {
            53: (stream, *map(socket.socket, kinds[1:])),
            443: tuple(map(socket.socket, kinds)),
        },
        [socket.socket(kind) for _ in range(2) for kind in kinds],
        has_v6,
    )


# spec NET4: the listener of port 53 is one, though it has two uses.
def test_each_descriptor_is_counted_once_and_closed() -> None:
    sockets = made()
    held = sockets.descriptors()
    assert len(held) == len(set(held)) == 3 + 1 + 2 + 4
    sockets.close()
    assert sockets.descriptors() == ()


# spec NET4: a port that is allowed live is listened on by a socket of the stock.
def test_the_stock_gives_sockets_of_a_family_until_none_is_left() -> None:
    sockets = made()
    try:
        for _ in range(2):
            with sockets.take(socket.AF_INET6) as taken:
                assert taken.family == socket.AF_INET6
        with pytest.raises(OSError, match="Too many open files") as refused:
            sockets.take(socket.AF_INET6)
        assert refused.value.errno == errno.EMFILE
        assert [one.family for one in sockets.stock] == [socket.AF_INET] * 2
    finally:
        sockets.close()
