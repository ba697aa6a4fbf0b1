"""Connections of a child to names: over real sockets, between two net namespaces."""

import errno
import hashlib
import os
import random
import resource
import socket
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.hosts import Address
from supervisor.network.resolver import ResolverError
from supervisor.network.section import NetworkSection
from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.scene import (
    Scene,
    echo,
    is_reset,
    read_all,
    reset,
    scene,
)

WEB = {"web.test": ["203.0.113.5"]}


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that runs as usual, and can be put forward."""
    return MockClock(rate=1.0)


# spec NET6: a granted name is resolved by the host, and bytes go both ways.
@pytest.mark.parametrize("kind", [dns.A, dns.AAAA])
@pytest.mark.parametrize("address", ["203.0.113.5", "2001:db8:1::5"])
async def test_a_granted_name_is_connected_to(kind: int, address: str) -> None:
    async with scene("web.test:80", names={"web.test": [address]}) as stage:
        stage.serve(address, 80, echo)
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
# spec NET5: no question for a refused name leaves the host.
# attack 58
async def test_what_has_no_rule_is_not_there() -> None:
    async with scene("web.test:80", names=WEB) as stage:
        with pytest.raises(ConnectionRefusedError):
            await stage.connect("web.test", 81)
        assert (await stage.ask("other.test")).code == 3
        assert stage.told() == [("other.test", None, "no-rule", "other.test:443")]
        assert not stage.names.asked


# spec NET5: an address of the pool that stands for no name is reset.
# spec NET4: 127.0.0.1 on a granted port is reset.
# attack 58
@pytest.mark.parametrize("address", ["198.18.77.7", "127.0.0.1", "198.18.0.1", "::1"])
async def test_an_address_of_no_name_is_reset(address: str) -> None:
    async with scene("web.test:80", names=WEB) as stage:
        async with await stage.connect(address, 80) as stream:
            assert await is_reset(stream)
        assert stage.told() == [(address, 80, "no-name", None)]


# spec NET6: an error of one side is a reset of the other, never a clean end.
# attack 61
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


# spec NET6: likewise in the other direction.
async def test_an_upload_that_is_cut_is_seen_to_be_cut() -> None:
    seen = trio.Event()

    async def take(stream: trio.SocketStream) -> None:
        assert await stream.receive_some() == b"half"
        await stream.send_all(b"!")
        assert await is_reset(stream)
        seen.set()

    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, take)
        stream = await stage.connect("web.test", 80)
        await stream.send_all(b"half")
        assert await stream.receive_some() == b"!"
        await reset(stream)
        await seen.wait()


# spec NET6: the end of one side is the half-close of the other.
async def test_a_half_close_goes_through() -> None:
    async def answer_late(stream: trio.SocketStream) -> None:
        await stream.send_all(hashlib.sha256(await read_all(stream)).digest())

    data = random.Random(5).randbytes(3_000_000)
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, answer_late)
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(data)
            await stream.send_eof()
            assert await read_all(stream) == hashlib.sha256(data).digest()


# spec NET6: bytes go both ways at once, whatever their number.
@pytest.mark.parametrize("size", [1, 65_536, 9_000_001])
async def test_bytes_arrive_as_they_were_sent(size: int) -> None:
    data = random.Random(size).randbytes(size)
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        async with await stage.connect("web.test", 80) as stream:

            async def send() -> None:
                await stream.send_all(data)
                await stream.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                assert await read_all(stream) == data
        assert stage.figures.bytes_in == stage.figures.bytes_out == size


# spec NET6: bytes wait with their sender while the other side takes none.
@pytest.mark.slow
async def test_a_sender_waits_for_a_slow_reader() -> None:
    size = 64 * 1024 * 1024
    sent = trio.Event()

    async def flood(stream: trio.SocketStream) -> None:
        await stream.send_all(bytes(size))
        sent.set()

    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, flood)
        async with await stage.connect("web.test", 80) as stream:
            assert await stream.receive_some(1)
            await wait_all_tasks_blocked(0.1)
            assert not sent.is_set()
            assert stage.figures.bytes_in < size
            assert len(await read_all(stream)) == size - 1


# spec NET6: an idle connection costs two descriptors, an hour, and then a reset.
# attack 61
async def test_an_idle_connection_holds_little_and_ends_after_an_hour(
    mock_clock: MockClock,
) -> None:
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        streams = []
        for _ in range(20):
            stream = await stage.connect("web.test", 80)
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            streams.append(stream)
        await wait_all_tasks_blocked()
        words = [word for _, word in stage.network.descriptors()]
        assert words.count("connection of a child") == 2 * len(streams)
        spare = len(stage.outside.pipes.descriptors())
        assert stage.outside.pipes.open == spare // 2 <= 8
        mock_clock.jump(3500)
        await streams[0].send_all(b"y")
        assert await streams[0].receive_some() == b"y"
        mock_clock.jump(200)
        for stream in streams[1:]:
            assert await is_reset(stream)
        await streams[0].send_all(b"z")
        assert await streams[0].receive_some() == b"z"
        assert stage.figures.open == 1


# spec NET6: 1,024 connections of a child; the next one is refused, and told.
# spec NET14: over the limit of connections: reset, with the reason.
# attack 61
@pytest.mark.slow
async def test_a_child_has_as_many_connections_as_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("the test has four descriptors a connection")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        streams = [await stage.connect("web.test", 80) for _ in range(1024)]
        for stream in streams:
            await stream.send_all(b"x")
        for stream in streams:
            assert await stream.receive_some() == b"x"
        assert stage.figures.open == 1024
        async with await stage.connect("web.test", 80) as one_more:
            assert await is_reset(one_more)
        assert stage.told() == [("web.test", 80, "limit-connections", None)]
        await streams.pop().aclose()
        await wait_all_tasks_blocked(0.01)
        async with await stage.connect("web.test", 80) as again:
            await again.send_all(b"x")
            assert await again.receive_some() == b"x"


CLOSED = [
    ("10.1.0.5", "private-address", "web.test:80@private"),
    ("169.254.169.254", "private-address", None),
    ("127.0.0.1", "own-address", None),
    ("203.0.113.1", "own-address", None),
    ("2001:db8:1::1", "own-address", None),
    ("fd00:5::1", "private-address", "web.test:80@private"),
    ("::ffff:10.1.0.5", "private-address", None),
    ("::ffff:203.0.113.1", "own-address", None),
    ("::", "private-address", None),
    ("0.0.0.1", "private-address", None),
    ("64:ff9b::a9fe:a9fe", "private-address", None),
    ("2002:a01:5::", "private-address", None),
]


# spec NET3: no name reaches what is the host's, or the cloud's, though it answers there.
# attack 57
@pytest.mark.parametrize(("address", "reason", "rule"), CLOSED)
@pytest.mark.parametrize("others", [[], ["203.0.113.5"]], ids=["alone", "mixed"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_name_that_stands_for_a_closed_address_is_refused(
    address: str, reason: str, rule: str | None, others: list[str], *, is_first: bool
) -> None:
    answer = [address, *others] if is_first else [*others, address]
    async with scene("web.test:80", names={"web.test": answer}) as stage:
        v4 = stage.serve("0.0.0.0", 80, echo)  # noqa: S104 - of a namespace
        v6 = stage.serve("::", 80, echo)
        async with await stage.connect("web.test", 80) as stream:
            assert await is_reset(stream)
        ((name, port, told, would_allow),) = stage.told()
        assert (name, port, told) == ("web.test", 80, reason)
        if not others:
            assert would_allow == rule
        assert not [*v4, *v6]


# spec NET3: `private` opens private ranges, and nothing else.
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.1.0.5", None),
        ("169.254.169.254", "private-address"),
        ("127.0.0.1", "own-address"),
    ],
)
async def test_private_opens_what_is_private(address: str, reason: str | None) -> None:
    names = {"db.test": [address]}
    async with scene("db.test:80@private", names=names) as stage:
        accepted = stage.serve("0.0.0.0", 80, echo)  # noqa: S104 - of a namespace
        async with await stage.connect("db.test", 80) as stream:
            await stream.send_eof()
            assert await is_reset(stream) is (reason is not None)
        assert len(accepted) == (reason is None)
        assert [row[2] for row in stage.told()] == ([reason] if reason else [])


# spec NET6: what is judged is what is dialled; another answer is judged anew (rebinding).
# attack 57
async def test_a_name_that_moves_to_a_closed_address_is_refused_from_then_on(
    mock_clock: MockClock,
) -> None:
    async with scene("web.test:80", names=WEB) as stage:
        accepted = stage.serve("0.0.0.0", 80, echo)  # noqa: S104 - of a namespace
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            stage.names.answers["web.test"] = ["169.254.169.254"]
            mock_clock.jump(5.1)
            async with await stage.connect("web.test", 80) as second:
                assert await is_reset(second)
            await stream.send_all(b"y")
            assert await stream.receive_some() == b"y"
        (only,) = accepted
        assert only.socket.getsockname()[0] == "203.0.113.5"
        assert stage.names.asked == ["web.test", "web.test"]
        assert stage.told() == [("web.test", 80, "private-address", None)]


# spec NET6: one look-up a connection, and what it found is kept for 5 s at most.
async def test_answers_are_kept_for_five_seconds(mock_clock: MockClock) -> None:
    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        for seconds, asked in ((0, 1), (4, 1), (0.9, 1), (0.2, 2), (4, 2)):
            mock_clock.jump(seconds)
            async with await stage.connect("web.test", 80) as stream:
                await stream.send_eof()
                assert await read_all(stream) == b""
            assert len(stage.names.asked) == asked


# spec NET6: an address that does not answer, or refuses, is followed by the next one.
async def test_the_next_address_is_tried() -> None:
    names = {"web.test": ["203.0.113.7", "2001:db8:1::7", "192.0.2.9", "203.0.113.5"]}
    async with scene("web.test:80", names=names) as stage:
        stage.serve("203.0.113.5", 80, echo)
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
        assert not stage.events


# spec NET6: what is allowed and cannot be reached is reset, and told as a failure.
@pytest.mark.parametrize(
    ("answer", "event", "reason"),
    [
        (["203.0.113.5"], "network.failed", "ECONNREFUSED"),
        (["192.0.2.9"], "network.failed", "ENETUNREACH"),
        (ResolverError("EAI_AGAIN"), "network.failed", "EAI_AGAIN"),
        ([], "network.refused", "no-such-name"),
    ],
)
async def test_what_cannot_be_reached_is_reset(
    answer: list[str] | ResolverError, event: str, reason: str
) -> None:
    async with scene("web.test:80") as stage:
        stage.names.answers["web.test"] = answer
        for _ in range(3):
            async with await stage.connect("web.test", 80) as stream:
                assert await is_reset(stream)
        fields = await stage.event(event)
        assert (fields["child_id"], fields["name"], fields["port"]) == (
            "c1",
            "web.test",
            80,
        )
        assert fields["reason"] == reason
        assert not stage.events  # once a minute
        assert sum(row.count for row in stage.figures.refused) == (
            3 if event == "network.refused" else 0
        )


# spec NET3: where the host's own addresses are not known, nothing is dialled.
async def test_nothing_is_dialled_while_own_addresses_are_not_known() -> None:
    def fail() -> frozenset[Address]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with scene("web.test:80", names=WEB) as stage:
        accepted = stage.serve("203.0.113.5", 80, echo)
        stage.own_addresses = fail
        async with await stage.connect("web.test", 80) as stream:
            assert await is_reset(stream)
        assert (await stage.event("network.failed"))["reason"] == "EMFILE"
        assert not accepted


# spec NET6: a fault of the host ends one connection, and is told in its log.
async def test_a_fault_ends_one_connection(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> frozenset[Address]:
        raise ZeroDivisionError

    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        before, stage.own_addresses = stage.own_addresses, fail
        async with await stage.connect("web.test", 80) as stream:
            assert await is_reset(stream)
        stage.own_addresses = before
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
    assert (
        "Fault serving a child's connection: ZeroDivisionError"
        in capfd.readouterr().err
    )


# spec NET3: a wide rule for addresses is the public internet, and nothing closed.
# spec NET4: an address without a rule is no place that there is a way to.
async def test_addresses_are_reached_by_rules_for_addresses() -> None:
    routes = ("203.0.113.0/24", "169.254.169.254/32", "10.1.0.0/16")
    rules = ("0.0.0.0/0:80", "10.1.0.5:80", "!203.0.113.6:80", "203.0.113.1:81")
    async with scene(*rules, routes=routes) as stage:
        accepted = stage.serve("0.0.0.0", 80, echo)  # noqa: S104 - of a namespace
        stage.serve("203.0.113.1", 81, echo)
        for address, port in (
            ("203.0.113.5", 80),
            ("10.1.0.5", 80),
            ("203.0.113.1", 81),
        ):
            async with await stage.connect(address, port) as stream:
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"
        told = {
            "169.254.169.254": ("private-address", "169.254.169.254:80"),
            "10.1.0.6": ("private-address", "10.1.0.6:80"),
            "203.0.113.1": ("own-address", "203.0.113.1:80"),
            "203.0.113.6": ("refused-by-rule", "!203.0.113.6:80"),
        }
        for address in told:
            async with await stage.connect(address, 80) as stream:
                assert await is_reset(stream)
        assert stage.told() == [(name, 80, *why) for name, why in told.items()]
        assert len(accepted) == 2
        with pytest.raises(OSError, match="unreachable"):
            await stage.connect("198.51.100.7", 80)


# spec NET3: a refusal of an address holds for the names that stand for it.
async def test_a_name_that_stands_for_a_refused_address_is_refused() -> None:
    async with scene("*:80", "!203.0.113.0/24:80", names=WEB) as stage:
        accepted = stage.serve("203.0.113.5", 80, echo)
        async with await stage.connect("web.test", 80) as stream:
            assert await is_reset(stream)
        assert stage.told() == [
            ("web.test", 80, "refused-by-rule", "!203.0.113.0/24:80")
        ]
        assert not accepted


# spec NET4: where port 53 or 3128 is granted, the address says what is meant.
@pytest.mark.parametrize("port", [53, 3128])
async def test_a_port_of_the_hosts_own_is_shared(port: int) -> None:
    async with scene(f"web.test:{port}", names=WEB) as stage:
        stage.serve("203.0.113.5", port, echo)
        for kind in (dns.A, dns.AAAA):
            async with await stage.connect("web.test", port, kind) as stream:
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"
        assert not stage.events


# spec NET6: a reset of a side that has ended, and is silent, is a reset of the other.
@pytest.mark.parametrize("is_child", [True, False])
async def test_a_reset_after_a_half_close_is_noticed(*, is_child: bool) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"x")
        await trio.sleep_forever()

    async with scene("web.test:80", names=WEB) as stage:
        accepted = stage.serve("203.0.113.5", 80, serve)
        inner = await stage.connect("web.test", 80)
        assert await inner.receive_some() == b"x"
        ends = [inner, *accepted]
        first, other = ends if is_child else reversed(ends)
        await first.send_eof()
        assert await other.receive_some() == b""
        assert stage.figures.open == 1
        # Nothing is sent from here on that would meet the reset.
        await reset(first)
        while stage.figures.open:  # noqa: ASYNC110 - figures tell nobody
            await trio.sleep(0.001)
        with pytest.raises(trio.BrokenResourceError):
            await other.send_all(b"y")
        words = {word for _, word in stage.network.descriptors()}
        assert words == {"network of a child"}
        pipes = stage.outside.pipes
        assert len(pipes.descriptors()) == 2 * pipes.open


# spec NET6: the end of a child is the end of its connections, by reset.
async def test_the_end_of_a_child_resets_its_connections() -> None:
    seen = trio.Event()

    async def wait(stream: trio.SocketStream) -> None:
        await stream.send_all(b"x")
        assert await is_reset(stream)
        seen.set()

    async with scene("web.test:80", names=WEB) as stage:
        stage.serve("203.0.113.5", 80, wait)
        async with await stage.connect("web.test", 80) as stream:
            assert await stream.receive_some() == b"x"
            await stage.network.aclose()
            await seen.wait()
            assert await is_reset(stream)
        assert not list(stage.network.descriptors())
        with pytest.raises(ConnectionRefusedError):
            await stage.connect("198.18.0.2", 80)


# spec NET6: small writes go at once on both sides, and a dead host outside is noticed.
@pytest.mark.parametrize("way", ["name", "proxy", "upstream"])
async def test_both_sides_send_at_once_and_the_outer_is_kept_alive(way: str) -> None:
    upstream = "http://203.0.113.5:8080" if way == "upstream" else None
    section = NetworkSection(["web.test:80"], upstream=upstream)
    async with scene(section=section, names=WEB) as stage:
        stage.serve("203.0.113.5", 80, echo)
        stage.serve("203.0.113.5", 8080, agree)
        host, port = ("127.0.0.1", 3128) if way == "proxy" else ("web.test", 80)
        async with await stage.connect(host, port) as stream:
            if way == "proxy":
                await stream.send_all(
                    b"CONNECT web.test:80 HTTP/1.1\r\nHost: web.test\r\n\r\n"
                )
                assert await stream.receive_some()
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            found = dict(options_of(stage))
        assert found == {"inner": (1, 0, None), "outer": (1, 1, 120)}


async def agree(stream: trio.SocketStream) -> None:
    """Answer as a proxy, and send everything back."""
    assert (await stream.receive_some()).endswith(b"\r\n\r\n")
    await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
    await echo(stream)


def options_of(stage: Scene) -> Iterator[tuple[str, tuple[int, int, int | None]]]:
    """Yield of each side TCP_NODELAY, SO_KEEPALIVE, and seconds to notice an end."""
    for number, word in stage.network.descriptors():
        if word != "connection of a child":
            continue
        with socket.socket(fileno=os.dup(number)) as sock:
            is_outer = sock.getpeername()[0] == "203.0.113.5"
            is_kept = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, pause, count = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                )
            )
            at_once = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            after_s = idle + pause * count if is_kept else None
            yield "outer" if is_outer else "inner", (at_once, is_kept, after_s)
