"""Connections to one of several addresses: the order of tries, and the winner."""

import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
import trio
from trio.testing import MockClock

from supervisor.network.dialer import MAX_TRIED, NEXT_AFTER_S, dial
from supervisor.network.hosts import Address
from supervisor.network.sockets import close_socket
from tests.supervisor.network.netns import OUTSIDE, Namespace

SILENT = [ip_address(f"198.51.100.{n}") for n in range(1, 20)]
"""Where a listener's queue is full, so that the kernel drops what comes."""
GOOD = ip_address("203.0.113.5")
REFUSING = ip_address("203.0.113.6")


@pytest.fixture
def world() -> Iterator[None]:
    """Have servers that answer, and some that do not."""
    namespace = Namespace(OUTSIDE)
    try:
        with namespace.entered():
            good = socket.create_server((str(GOOD), 80))
            full = socket.create_server(("198.51.100.1", 80), backlog=0)
            clients = [socket.socket() for _ in range(3)]
            others = [socket.create_server((str(a), 80), backlog=0) for a in SILENT[1:]]
            try:
                for listener in (full, *others):
                    for _ in range(3):
                        client = socket.socket()
                        client.setblocking(False)
                        client.connect_ex(listener.getsockname())
                        clients.append(client)
                yield
            finally:
                for sock in (good, full, *clients, *others):
                    sock.close()
    finally:
        namespace.close()


async def _dialled(addresses: list[Address]) -> tuple[str, float, set[socket.socket]]:
    """Return which address won, after how long, and what is open."""
    held: set[socket.socket] = set()
    started = trio.current_time()
    sock = await dial(addresses, 80, held)
    winner = sock.getpeername()[0]
    assert held == {sock}
    close_socket(sock)
    return winner, trio.current_time() - started, held


# spec NET6: the next address after 250 ms or an error.
@pytest.mark.usefixtures("world")
async def test_the_next_address_is_tried_after_a_while(
    autojump_clock: MockClock,
) -> None:
    del autojump_clock
    for count in (0, 1, 3):
        winner, after_s, _ = await _dialled([*SILENT[:count], GOOD])
        assert winner == str(GOOD)
        assert after_s == pytest.approx(count * NEXT_AFTER_S)


@pytest.mark.usefixtures("world")
async def test_the_next_address_is_tried_at_once_after_an_error(
    autojump_clock: MockClock,
) -> None:
    del autojump_clock
    winner, after_s, _ = await _dialled([REFUSING, ip_address("192.0.2.1"), GOOD])
    assert (winner, after_s) == (str(GOOD), 0)


# spec NET6: where all fail it is told why the first did.
@pytest.mark.usefixtures("world")
async def test_the_first_error_is_told() -> None:
    held: set[socket.socket] = set()
    with pytest.raises(ConnectionRefusedError):
        await dial([REFUSING, ip_address("192.0.2.1")], 80, held)
    assert not held


# spec NET6: no more than a few descriptors for a name of many addresses.
@pytest.mark.usefixtures("world")
async def test_few_addresses_are_tried(autojump_clock: MockClock) -> None:
    del autojump_clock
    held: set[socket.socket] = set()
    with trio.move_on_after(30) as scope:
        await dial([*SILENT, GOOD], 80, held)
    assert scope.cancelled_caught
    assert not held
    with pytest.raises(ConnectionRefusedError):
        await dial([REFUSING] * MAX_TRIED + [GOOD], 80, held)
