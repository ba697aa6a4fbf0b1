"""Connections of a child to names: over real sockets, between two net namespaces."""

import pytest
import trio

from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.scene import echo, is_reset, read_all, reset, scene

WEB = {"web.test": ["203.0.113.5"]}


# spec NET6: a granted name is resolved by the host, and bytes go both ways.
@pytest.mark.parametrize("kind", [dns.A, dns.AAAA])
async def test_a_granted_name_is_connected_to(kind: int) -> None:
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        stream = await stage.connect("web.test", 80, kind)
        async with stream:
            await stream.send_all(b"over there")
            await stream.send_eof()
            assert await read_all(stream) == b"over there"
        (row,) = stage.figures.names
        assert (row.name, row.port, row.connections) == ("web.test", 80, 1)
        assert (row.bytes_in, row.bytes_out) == (10, 10)
        assert not stage.events


# spec NET4: a port that no rule has refuses connections; a name without a rule is none.
async def test_what_has_no_rule_is_not_there() -> None:
    async with scene("web.test:80", names=WEB) as stage:
        with pytest.raises(ConnectionRefusedError):
            await stage.connect("web.test", 81)
        assert (await stage.ask("other.test")).code == 3
        assert stage.told() == [("other.test", None, "no-rule", "other.test:443")]
        assert not stage.names.asked


# spec NET6: an address of the pool that stands for no name is reset.
async def test_an_address_of_no_name_is_reset() -> None:
    async with scene("web.test:80", names=WEB) as stage:
        async with await stage.connect("198.18.77.7", 80) as stream:
            assert await is_reset(stream)
        assert stage.told() == [("198.18.77.7", 80, "no-name", None)]
        async with await stage.connect("127.0.0.1", 80) as stream:
            assert await is_reset(stream)


# spec NET6: an error of one side is a reset of the other, never a clean end.
async def test_a_download_that_is_cut_is_seen_to_be_cut() -> None:
    async def cut(stream: trio.SocketStream) -> None:
        await stream.send_all(b"the first half")
        await stream.receive_some(1)  # it has arrived
        await reset(stream)

    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, cut)
        async with await stage.connect("web.test", 80) as stream:
            assert await stream.receive_some() == b"the first half"
            await stream.send_all(b".")
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
