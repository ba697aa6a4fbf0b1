"""Changes of a running child's rules, limits, what is learned, and figures."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from hostlib.accounts import Account
from supervisor.network.child_network import NetworkBounds
from supervisor.network.dns import frame
from supervisor.network.network_state import ChildNetworkState
from supervisor.network.resolver import ResolverError
from supervisor.network.rule import RuleError
from supervisor.network.section import NetworkSection
from supervisor.network.used_rules import MAX_USES, LearnedState
from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.hellos import client_hello
from tests.supervisor.network.scene import Scene, echo, is_reset, read_all, scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.network.addresses import Network

NAMES = {
    "web.test": ["203.0.113.5"],
    "new.test": ["203.0.113.6"],
    "db.test": ["10.1.0.5"],
}


async def _works(stage: Scene, host: str, port: int, kind: int = dns.A) -> bool:
    async with await stage.connect(host, port, kind) as stream:
        try:
            await stream.send_all(b"x")
            return await stream.receive_some() == b"x"
        except trio.BrokenResourceError:
            return False


def _serve(stage: Scene) -> None:
    for port in (53, 80, 81, 3128):
        stage.serve("0.0.0.0", port, echo)  # noqa: S104 - of a namespace


# spec NET11: metrics name what a rule names, and nothing that a child chooses.
async def test_metrics_name_what_rules_name() -> None:
    rules = ("web.test:80", "*.b.test:80", "10.1.0.5:80", "203.0.113.0/24:80")
    names = {**NAMES, "c.b.test": ["203.0.113.5"]}
    routes = ("203.0.113.0/24", "10.1.0.0/16")
    async with scene(*rules, names=names, routes=routes) as stage:
        _serve(stage)
        for host in ("web.test", "c.b.test", "10.1.0.5", "203.0.113.9"):
            async with await stage.connect(host, 80) as stream:
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"
        found = {row.name: row.connections for row in stage.network.granted_figures()}
        assert found == {"web.test": 1, "10.1.0.5": 1, "(others)": 2}


# spec NET12: the next connection obeys, and what is open stays.
# attack 58
async def test_a_name_that_is_denied_is_refused_from_then_on() -> None:
    async with scene("web.test:80", "new.test:80", names=NAMES) as stage:
        _serve(stage)
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            (address,) = (await stage.ask("web.test")).texts
            await stage.change(deny=["web.test:80"])
            assert (await stage.ask("web.test")).code == 3
            # A remembered address still belongs to the same name.
            assert not await _works(stage, address, 80)
            await stream.send_all(b"y")
            assert await stream.receive_some() == b"y"
        assert await _works(stage, "new.test", 80)
        assert await stage.event("network.changed") == {
            "child_id": "c1",
            "allow": [],
            "deny": ["web.test:80"],
            "cut": False,
        }
        assert [row[1:] for row in stage.told()] == [
            (None, "refused-by-rule", "!web.test:80"),
            (80, "refused-by-rule", "!web.test:80"),
        ]
        assert stage.figures.rules == ("new.test:80", "!web.test:80")
        await stage.change(allow=["web.test:80"])
        assert await _works(stage, address, 80)


# spec NET12: `--cut` ends what is open and not allowed any more, by reset.
async def test_a_cut_resets_what_is_not_allowed_any_more() -> None:
    async with scene("web.test:80", "new.test:80", names=NAMES) as stage:
        _serve(stage)
        streams = {}
        for name in ("web.test", "new.test"):
            streams[name] = await stage.connect(name, 80)
            await streams[name].send_all(b"x")
            assert await streams[name].receive_some() == b"x"
        await stage.change(deny=["web.test:80"], cut=True)
        assert await is_reset(streams["web.test"])
        await streams["new.test"].send_all(b"y")
        assert await streams["new.test"].receive_some() == b"y"


# spec NET12: a port that is new is listened on, for v4 and v6.
# spec NET4: later sockets are made of the stock.
@pytest.mark.parametrize("port", [81, 53, 3128])
async def test_a_port_that_is_new_is_listened_on(port: int) -> None:
    async with scene("web.test:80", names=NAMES) as stage:
        _serve(stage)
        await stage.change(allow=[f"new.test:{port}"])
        for kind in (dns.A, dns.AAAA):
            assert await _works(stage, "new.test", port, kind)
        # Port 53 of 127.0.0.1 is the DNS, and 3128 the proxy, as before.
        async with await stage.connect("127.0.0.1", 3128) as stream:
            await stream.send_all(b"CONNECT web.test:80 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        async with await stage.connect("127.0.0.1", 53) as stream:
            question = dns.question("web.test")
            await stream.send_all(len(question).to_bytes(2, "big") + question)
            assert dns.read((await stream.receive_some())[2:]).texts
        await stage.change(deny=[f"new.test:{port}"])
        if port == 81:
            with pytest.raises(ConnectionRefusedError):
                await stage.connect("198.18.0.2", 81)
            for _ in range(20):  # the stock is not used up
                await stage.change(allow=["new.test:81"])
                await stage.change(deny=["new.test:81"])
            await stage.change(allow=["new.test:81"])
            assert await _works(stage, "new.test", 81)


# spec NET12: a faulty change changes nothing.
async def test_a_change_that_cannot_be_made_changes_nothing() -> None:
    async with scene("web.test:80", names=NAMES, stock=2) as stage:
        _serve(stage)
        before = stage.figures
        with (
            stage.child.listener("127.0.0.1", 82),
            pytest.raises(RuleError, match="port 82: the child listens on it itself"),
        ):
            await stage.change(allow=["new.test:81,82"])
        with pytest.raises(RuleError, match="Too many open files"):
            await stage.change(allow=["new.test:83,84,85"])
        with pytest.raises(RuleError, match="no address can be added"):
            await stage.change(allow=["203.0.113.7:80"])
        assert stage.figures == before
        assert not stage.events
        with pytest.raises(ConnectionRefusedError):
            await stage.connect("198.18.0.2", 81)


# spec NET12: an address that is allowed later gets a route.
async def test_an_address_that_is_allowed_later_gets_a_route() -> None:
    added: list[str] = []

    async def add(networks: Sequence[Network]) -> None:
        await trio.lowlevel.checkpoint()
        added.extend(map(str, networks))

    async def fail(_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EPERM, "Operation not permitted")

    rules = ("198.51.100.0/24:80",)
    routes = ("198.51.100.0/24", "203.0.113.0/24")
    async with scene(
        *rules, routes=routes, bounds=NetworkBounds(add_routes=add)
    ) as stage:
        stage.serve("203.0.113.5", 80, echo)
        await stage.change(allow=["203.0.113.5:80", "198.51.100.0/24:81"])
        assert added == ["203.0.113.5/32"]
        assert await _works(stage, "203.0.113.5", 80)
    async with scene(bounds=NetworkBounds(add_routes=fail)) as stage:
        with pytest.raises(RuleError, match="not permitted"):
            await stage.change(allow=["203.0.113.5:80"])


# spec NET14: bytes are charged to a child and every ancestor; over the limit: reset.
@pytest.mark.parametrize("of_parent", [True, False])
async def test_bytes_beyond_a_limit_are_not_passed_on(*, of_parent: bool) -> None:
    parent = Account[int](None, 1000 if of_parent else None)
    account = Account[int](parent, None if of_parent else 1000)
    bounds = NetworkBounds(net_bytes=account)
    async with scene("web.test:80", names=NAMES, bounds=bounds) as stage:
        _serve(stage)
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(bytes(400))
            got = b""
            while len(got) < 400:
                got += await stream.receive_some()
            await stream.send_all(bytes(300))
            assert await is_reset(stream)
        fields = await stage.event("network.refused")
        assert fields["reason"] == "limit-net_bytes"
        assert parent.used == account.used <= 1000
        assert stage.figures.bytes_in + stage.figures.bytes_out == account.used


# spec NET14: connections are charged to a child and every ancestor.
async def test_connections_beyond_the_limit_of_a_parent_are_refused() -> None:
    parent = Account[int](None, 3)
    bounds = NetworkBounds(connections=Account(parent))
    async with scene("web.test:80", names=NAMES, bounds=bounds) as stage:
        _serve(stage)
        streams = []
        for _ in range(3):
            streams.append(await stage.connect("web.test", 80))
            await streams[-1].send_all(b"x")
            assert await streams[-1].receive_some() == b"x"
        assert not await _works(stage, "web.test", 80)
        assert [row[2] for row in stage.told()] == ["limit-connections"]
        assert parent.used == 3
    assert parent.used == 0


# spec NET10, NET12: a live change is refused what check-config refuses.
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("new.test:80,8000", "port 8000 is published"),
        ("127.0.0.1:81", "is the child's own loopback"),
        ("localhost:81", "is the child's own loopback"),
        ("198.18.0.7:81", "holds the addresses of the child's names"),
        ("0.0.0.0:81", "is the child itself"),
    ],
)
async def test_a_live_rule_that_cannot_be_is_refused(rule: str, why: str) -> None:
    section = NetworkSection(["web.test:80"], publish=["8000"])
    async with scene(section=section, names=NAMES) as stage:
        with pytest.raises(RuleError, match=why) as refused:
            await stage.change(allow=["new.test:81", rule])
        assert str(refused.value).startswith("cannot ")
        assert f"'{rule}'" in str(refused.value)
        assert stage.figures.rules == ("web.test:80",)


# spec NET13: what is used is noted, and the smallest list of it.
async def test_a_child_that_learns_notes_what_it_has_used() -> None:
    section = NetworkSection(
        "learn",
        within=["*:443@tls=any", "*:80,81@private", "203.0.113.0/24:80"],
    )
    names = {**NAMES, "tls.test": ["203.0.113.5"], "ssh.test": ["203.0.113.5"]}
    routes = ["203.0.113.0/24"]
    async with scene(section=section, names=names, routes=routes) as stage:
        _serve(stage)
        stage.serve("203.0.113.5", 443, echo)
        for host in ("web.test", "db.test", "203.0.113.9"):
            assert await _works(stage, host, 80)
        assert await _works(stage, "web.test", 81)
        for host, data in (
            ("tls.test", client_hello("tls.test")),
            ("ssh.test", b"SSH-2.0-x\r\n"),
        ):
            async with await stage.connect(host, 443) as stream:
                await stream.send_all(data[:3])
                assert await stream.receive_some(3) == data[:3]
                await stream.send_all(data[3:])
                got = data[:3]
                while got != data:
                    got += await stream.receive_some()
        async with await stage.connect("gone.test", 80) as stream:
            assert await is_reset(stream)
        assert stage.network.learned_rules() == (
            "203.0.113.9:80",
            "db.test:80@private",
            "ssh.test:443@tls=any",
            "tls.test:443",
            "web.test:80,81",
        )
        assert stage.figures.mode == "learn"


# spec NET13: whatever is asked for within the bound is noted, also what is not reached.
async def test_a_child_that_learns_notes_what_it_did_not_reach() -> None:
    section = NetworkSection("learn", within=["*:80@private", "*:81"])
    names = {**NAMES, "late.test": ["203.0.113.5"]}
    async with scene(section=section, names=names) as stage:
        stage.names.answers["lost.test"] = ResolverError("EAI_AGAIN")
        for host, port in (
            ("web.test", 80),  # nothing listens there
            ("db.test", 80),
            ("lost.test", 80),  # no name server answers
            ("gone.test", 80),  # no such name: a rule would not have sufficed
            ("db.test", 81),  # refused: its address is private
        ):
            async with await stage.connect(host, port) as stream:
                assert await is_reset(stream)
        async with await stage.connect("127.0.0.1", 3128) as stream:
            head = b"CONNECT late.test:80 HTTP/1.1\r\nHost: late.test\r\n\r\n"
            await stream.send_all(head)
            assert b" 502 " in await read_all(stream)
        assert stage.network.learned_rules() == (
            "db.test:80@private",
            "late.test:80",
            "lost.test:80",
            "web.test:80",
        )


# spec NET13: a list that does not suffice is told.
async def test_uses_that_were_not_noted_are_counted() -> None:
    uses = [f"a{number}.test:80" for number in range(MAX_USES)]
    section = NetworkSection("learn", within=["*:80"])
    state = ChildNetworkState(learned=LearnedState(uses, 0))
    async with scene(section=section, names=NAMES, state=state) as stage:
        assert "not_learned" not in msgspec.to_builtins(stage.figures)
        assert not await _works(stage, "web.test", 80)
        assert stage.figures.not_learned == 1


# spec NET11: the figures of a child have one form, and stay after connections.
async def test_figures_are_those_of_the_forms() -> None:
    async with scene("web.test:80", names=NAMES) as stage:
        _serve(stage)
        async with await stage.connect("web.test", 80) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            row = msgspec.to_builtins(stage.figures)["names"][0]
            assert row == {
                "name": "web.test",
                "port": 80,
                "connections": 1,
                "open": 1,
                "bytes_in": 1,
                "bytes_out": 1,
            }
        await stage.ask("other.test")
        figures = msgspec.to_builtins(stage.figures)
        refused = figures.pop("refused")
        assert [list(row) for row in refused] == [
            ["name", "port", "reason", "rule", "count", "time"]
        ]
        figures.pop("names")
        figures.pop("open")
        assert figures == {
            "child_id": "c1",
            "name": "alice",
            "mode": "rules",
            "rules": ("web.test:80",),
            "published": (),
            "connections": 1,
            "bytes_in": 1,
            "bytes_out": 1,
        }
        assert stage.network.refused == 1


# spec NET4: half-open connections cost the host nothing, and others get through.
# attack 61
@pytest.mark.slow
async def test_half_open_connections_hold_up_nobody() -> None:
    async with scene("web.test:80", names=NAMES) as stage:
        _serve(stage)
        (v4,) = (await stage.ask("web.test")).texts
        (v6,) = (await stage.ask("web.test", dns.AAAA)).texts
        for address, port in (
            (v4, 80),
            (v6, 80),
            ("127.0.0.1", 53),
            ("127.0.0.1", 3128),
        ):
            _flood(stage, address, port)
        for kind in (dns.A, dns.AAAA):
            assert await _works(stage, "web.test", 80, kind)
        assert stage.figures.connections == 2
        for port, data in (
            (53, frame(dns.question("web.test", dns.A))),
            (3128, b"\5\1\0"),
        ):
            sock = trio.socket.from_stdlib_socket(stage.child.make_socket())
            await sock.connect(("127.0.0.1", port))
            async with trio.SocketStream(sock) as stream:
                await stream.send_all(data)
                assert await stream.receive_some()


def _flood(stage: Scene, address: str, port: int) -> None:
    """Send 20,000 SYNs to a listener, and answer nothing."""
    is_v6 = ":" in address
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    with stage.child.entered():
        raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_TCP)
        with raw, socket.socket(family, socket.SOCK_DGRAM) as chosen:
            chosen.connect((address, port))
            source = chosen.getsockname()[0]
            for number in range(1, 20_001):
                syn = _syn(family, source, address, 10_000 + number, port)
                raw.sendto(syn, (address, 0))


def _syn(family: int, source: str, address: str, source_port: int, port: int) -> bytes:
    """Return a SYN; its pseudo-header is that of RFC 9293, 3.1, or of RFC 8200, 8.1."""
    head = source_port.to_bytes(2, "big") + port.to_bytes(2, "big") + bytes(8)
    rest = b"\x50\x02\xff\xff"
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, address)
    data = ends + b"\0\6\0\x14" + head + rest + bytes(4)
    total = sum(
        int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head + rest + (total ^ 0xFFFF).to_bytes(2, "big") + bytes(2)
