"""The hierarchical proxy between nested clients and a host in memory.

Most tests run twice: with a host that knows ATTACH, where each nested client has a
connection of its own, and with one that does not, where they take turns.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio
import trio.testing
from loguru import logger

from protocol import limits
from protocol import messages as m
from tests.helpers.fakehost import FakeHost, Gate, Peer
from vfs import client as door
from vfs import relay, relay_attached, relay_serial
from vfs.aio import AsyncClient
from vfs.relay import NestedClient, Relay, RelayError, open_relay
from vfs.relay_attached import QUEUE_REQUESTS

SERIAL = frozenset({b"ATTACH", b"NARROW"})
MIB = 1024 * 1024

Kind = TypeVar("Kind", bound=m.Request)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    number = logger.add(
        lambda line: lines.append(str(line).rstrip("\n")), format="{message}"
    )
    yield lines
    logger.remove(number)


class Scene:
    """A host, the process that relays, and what a test needs to look at them.

    Attributes:
        host: the host.
        relay: the proxy.
        own: the relaying process's own client.
    """

    def __init__(self, host: FakeHost, relay: Relay, own: AsyncClient) -> None:
        self.host = host
        self.relay = relay
        self.own = own
        self.ends: list[socket.socket] = []

    async def connect(self, rights: dict[str, object] | None = None) -> NestedClient:
        """Return a nested client, whose end is closed when the scene is over."""
        nested = await self.relay.new_client(rights)
        self.ends.append(nested.child_end)
        return nested

    async def nested(self) -> tuple[NestedClient, AsyncClient]:
        """Return a nested client and its own view of its connection."""
        nested = await self.connect()
        return nested, AsyncClient((nested.child_end.fileno(),))

    def upstream_of(self, number: int) -> Peer:
        """Return the connection that the n-th nested client has at the host."""
        return self.host.peers[0 if self.relay.is_serial else number]


@asynccontextmanager
async def scene(
    unknown: frozenset[bytes] = frozenset(), dialect: int = 2
) -> AsyncIterator[Scene]:
    with FakeHost(unknown=unknown) as host, host.connect() as line:
        own = AsyncClient((line.fileno(),), dialect=2)
        async with open_relay(own, dialect=dialect) as relay:
            scene = Scene(host, relay, own)
            try:
                yield scene
            finally:
                for end in scene.ends:
                    end.close()


both = pytest.mark.parametrize(
    "unknown", [frozenset(), SERIAL], ids=["attach", "serial"]
)


async def wait(event_owner: Peer | Gate) -> None:
    """Wait until a connection is gone at the host, or a gate is reached."""
    event = event_owner.gone if isinstance(event_owner, Peer) else event_owner.reached
    await trio.to_thread.run_sync(event.wait)


async def dialogue(line: socket.socket, request: bytes, size: int) -> bytes:
    """Send bytes and return the next ``size`` ones that come."""
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(line.dup()))
    async with stream:
        await stream.send_all(request)
        reply = b""
        while len(reply) < size and (more := await stream.receive_some(65_536)):
            reply += more
    line.setblocking(True)
    return reply


async def send(nested: NestedClient, data: bytes) -> None:
    """Send more than the line holds, so not in this thread."""
    await trio.to_thread.run_sync(nested.child_end.sendall, data)


def seen(peer: Peer, kind: type[Kind]) -> list[Kind]:
    return [request for request in peer.seen if isinstance(request, kind)]


# A nested client works as any other


@both
async def test_a_nested_client_works_as_any_other(unknown: frozenset[bytes]) -> None:
    # spec N1
    async with scene(unknown) as s:
        _, client = await s.nested()
        content = os.urandom(3 * MIB)
        fileno = await client.open("a b", "w+")
        await client.write(fileno, content)
        await client.seek(fileno, 0)
        assert await client.read_all(fileno) == content
        await client.sync(fileno)
        await client.truncate(fileno, 5)
        await client.close(fileno)
        await client.rename("a b", "c d")
        assert await client.listdir() == [("c d", "file")]
        await client.mkdir("d")
        await client.remove("c d")
        with pytest.raises(FileNotFoundError):
            await client.stat("c")
        assert await client.llm_quota() == "110.0 weighted tokens (no limit)"
        assert await client.llm_config() == {"default_model": "m"}
        assert "OPEN" in str((await client.caps())["commands"])
        await client.ping()


@both
async def test_the_flag_is_forced_to_false(unknown: frozenset[bytes]) -> None:
    # spec N3, A5
    async with scene(unknown) as s:
        _, client = await s.nested()
        await client.open("a", "w", top_level=True)
        await client.stat("a", top_level=True)
        await client.listdir(".", top_level=True)
        await client.mkdir("d", top_level=True)
        await client.rename("a", "b", top_level=True)
        await client.remove("b", top_level=True)
        with pytest.raises(door.FsProxyError, match="LLM not available"):
            await client.llm_chat("x", top_level=True)
        flags = [
            request.flag
            for request in s.upstream_of(1).seen
            if isinstance(request, m.Open | m.NameRequest | m.Rename | m.Chat)
        ]
        assert flags == [False] * 7


@both
async def test_replies_come_in_order_whoever_gives_them(
    unknown: frozenset[bytes],
) -> None:
    # spec T3, F3, R2: the relay refuses some of these itself
    requests = (
        b"PING\nNONSENSE\nOPEN a w false\n\nREAD 1 2 3\nCLOSE\nREAD 77 x\n"
        b"WRITE 77 3\nabcWRITE 1 2 3\nabOPEN a q true\nLLM_QUOTA x\nPING\n"
        b"STAT true a\r \nWRITE x 4\nPINGWRITE 5 x\nREAD -1 2\n"
    )
    replies = (
        b"OK\nERROR unknown command: NONSENSE\nOK 1000\nERROR empty request\n"
        b"ERROR READ requires fileno and size\nERROR CLOSE requires fileno\n"
        b"ERROR invalid fileno: 77\nERROR invalid fileno: 77\n"
        b"ERROR WRITE requires fileno and size\nERROR invalid mode: q\n"
        b"ERROR LLM_QUOTA takes no parameters\nOK\nERROR invalid filename: a?\n"
        b"ERROR invalid fileno: x\nERROR invalid size: x\nERROR invalid fileno: -1\n"
    )
    async with scene(unknown) as s:
        nested = await s.connect()
        assert await dialogue(nested.child_end, requests, len(replies)) == replies


@both
async def test_a_line_without_end_is_refused_at_once(
    unknown: frozenset[bytes],
) -> None:
    # spec F4
    async with scene(unknown) as s:
        nested = await s.connect()
        too_long = b"ERROR request line too long\n"
        line = nested.child_end
        assert await dialogue(line, b"x" * 70_000, len(too_long)) == too_long
        assert await dialogue(line, b"x" * 200_000 + b"\nPING\n", 3) == b"OK\n"


@both
@pytest.mark.parametrize("separator", [b"", b"\n"])
async def test_a_chat_is_cut_as_the_host_cuts_it(
    unknown: frozenset[bytes], separator: bytes
) -> None:
    # spec L1: three LFs that are not counted are led upstream too
    async with scene(unknown) as s:
        s.host.chat = (b"{}", b"1.0 weighted tokens (no limit)")
        nested = await s.connect()
        payload = separator.join((b"in", b"out", b"ask " * 20_000, b"general"))
        request = b"LLM_CHAT true 2 3 80000 7\n" + payload + b"PING\n"
        reply = b"OK 2 1.0 weighted tokens (no limit)\n{}OK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert s.host.chatted == [payload]


async def test_nested_clients_may_speak_the_older_dialect() -> None:
    # spec O5
    async with scene(dialect=1) as s:
        nested = await s.connect()
        requests = b"OPEN a b w\nOPEN c w user\nOPEN d w internal\n"
        replies = b"OK 1000\nOK 1001\nOK 1002\n"
        assert await dialogue(nested.child_end, requests, len(replies)) == replies
        assert s.host.peers[1].seen == [
            m.Open(b"a b", b"w", False),
            m.Open(b"c", b"w", False),
            m.Open(b"d", b"w", False),
        ]


@both
async def test_a_payload_cannot_become_requests_at_a_host_that_does_not_know_it(
    unknown: frozenset[bytes],
) -> None:
    # spec A5: an old host would read what follows as lines, top-level flag and all
    smuggled = b"OPEN secret w true\nCLOSE 1000\n"
    words = (b"FD_PUT", b"FD_CALL", b"NARROW")
    for caps in (frozenset[bytes](), frozenset({b"CAPS"})):
        async with scene(unknown | {*words, b"RENAME"} | caps) as s:
            nested = await s.connect()
            for word in words:
                request = word + b" %d\n" % len(smuggled) + smuggled
                reply = b"ERROR unknown command: " + word + b"\n"
                found = await dialogue(nested.child_end, request, len(reply))
                assert found == reply
            request = b"RENAME true 10 %d\n" % (len(smuggled) - 10) + smuggled
            reply = b"ERROR unknown command: RENAME\n"
            assert await dialogue(nested.child_end, request, len(reply)) == reply
            assert not any(seen(peer, m.Open) for peer in s.host.peers)


@both
async def test_a_client_that_says_no_more_still_gets_its_replies(
    unknown: frozenset[bytes],
) -> None:
    async with scene(unknown) as s:
        s.host.chat = (b"{}", b"1.0 weighted tokens (no limit)")
        gate = s.host.gates[m.Chat] = Gate()
        nested = await s.connect()
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        nested.child_end.shutdown(socket.SHUT_WR)
        await wait(gate)
        gate.opened.set()
        reply = b"OK 2 1.0 weighted tokens (no limit)\n{}"
        assert await dialogue(nested.child_end, b"", len(reply)) == reply


# What a nested client leaves


@both
async def test_what_it_left_open_is_closed_upstream(
    unknown: frozenset[bytes], logged: list[str]
) -> None:
    # spec N2
    async with scene(unknown) as s:
        own = await s.own.open("own", "w")
        nested, client = await s.nested()
        left = [await client.open(name, "w") for name in ("a", "b", "c")]
        await client.close(left.pop(1))
        assert nested.filenos == tuple(left)
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert [r.fileno for r in seen(s.upstream_of(1), m.Close)[1:]] == left
        assert [line for line in logged if line.startswith("Sent")] == [
            f"Sent close request for fileno {n} (downstream EOF)" for n in left
        ]
        assert s.host.open_files() == [own]


@both
async def test_eof_alone_closes_it_too(unknown: frozenset[bytes]) -> None:
    # spec N2, S2
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        gate = s.host.gates[m.Close] = Gate()
        nested.child_end.close()
        await wait(gate)
        gate.opened.set()
        await nested.finished()
        assert s.host.open_files() == []


@both
async def test_the_end_of_its_process_ends_it_though_a_grandchild_holds_the_line(
    unknown: frozenset[bytes],
) -> None:
    # spec S2, S3
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        with nested.child_end.dup() as grandchild:
            nested.child_end.close()
            await s.relay.client_done(nested)
            assert s.host.open_files() == []
            assert grandchild.recv(1) == b""
            with pytest.raises(BrokenPipeError):
                grandchild.send(b"PING\n")


@both
async def test_what_it_had_sent_before_it_died_is_done_first(
    unknown: frozenset[bytes],
) -> None:
    # spec S2: it read none of the replies, which makes a reset of the EOF
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(
            b"WRITE 1000 3\nabcWRITE 1000 3\ndefOPEN b w true\nPING\nhalf a li"
        )
        gate = s.host.gates[m.Ping] = Gate()
        await wait(gate)
        gate.opened.set()
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert s.host.files == {b"a": b"abcdef", b"b": b""}
        assert s.host.open_files() == []


async def test_death_inside_a_payload_tears_nothing_with_attach(
    logged: list[str],
) -> None:
    # spec W2: no CLOSE can travel on that connection any more; its end does it
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        await send(nested, b"WRITE 1000 1000000\n" + bytes(400_000))
        nested.child_end.close()
        await s.relay.client_done(nested)
        await wait(s.host.peers[1])
        assert s.host.peers[1].torn
        assert s.host.files == {b"a": b""}
        assert s.host.open_files() == []
        released = (
            "Released filenos 1000 by closing their connection"
            " (downstream EOF inside a request)"
        )
        assert released in logged


async def test_death_inside_a_payload_tears_nothing_in_turns() -> None:
    # spec W2: the connection of all must not be left inside a request
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        await send(nested, b"WRITE 1000 1000000\n" + bytes(400_000))
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert not seen(s.host.peers[0], m.Write)
        assert s.host.files == {b"a": b""}
        assert s.host.open_files() == []
        await s.own.ping()


@both
async def test_death_inside_a_payload_that_is_only_drained_is_no_tear(
    unknown: frozenset[bytes],
) -> None:
    # spec N2, W4
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"WRITE 1000 500 x\n" + bytes(100))
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert len(seen(s.upstream_of(1), m.Close)) == 1


async def test_a_model_is_not_asked_on_for_the_dead() -> None:
    # spec L10: closing the connection is what ends the call
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        nested.child_end.close()
        await nested.finished()  # while the host still asks
        gate.opened.set()
        await wait(s.host.peers[1])
        assert s.host.open_files() == []


async def test_a_model_is_not_asked_on_though_a_grandchild_holds_the_line() -> None:
    # spec L10, S2
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        nested = await s.connect()
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        await s.relay.client_done(nested)
        gate.opened.set()
        nested.child_end.close()


@both
async def test_no_call_is_begun_for_the_dead(unknown: frozenset[bytes]) -> None:
    # spec S2: it died while the request before was under way
    async with scene(unknown) as s:
        gate = s.host.gates[m.Ping] = Gate()
        nested = await s.connect()
        # As many as go upstream at once, and one more, so that the chat waits here.
        pings = b"PING\n" * (QUEUE_REQUESTS + 2)
        nested.child_end.sendall(pings + b"LLM_CHAT false 0 0 2 0\nhiPING\n")
        await wait(gate)
        nested.child_end.close()
        gate.opened.set()
        await s.relay.client_done(nested)
        assert len(seen(s.upstream_of(1), m.Ping)) == QUEUE_REQUESTS + 3
        assert not s.host.chatted


@both
async def test_the_end_of_the_relay_ends_all(
    unknown: frozenset[bytes], no_leaks: None
) -> None:
    # spec N2
    del no_leaks
    with FakeHost(unknown=unknown) as host:
        with host.connect() as line:
            async with open_relay(AsyncClient((line.fileno(),))) as relay:
                ends = []
                for name in "abc":
                    nested = await relay.new_client()
                    client = AsyncClient((nested.child_end.fileno(),))
                    await client.open(name, "w")
                    ends.append(nested.child_end)
            assert host.open_files() == []
            for end in ends:
                assert end.recv(1) == b""
                end.close()
        for peer in host.peers:
            await wait(peer)


# Siblings


@both
async def test_siblings_cannot_use_each_others_numbers(
    unknown: frozenset[bytes],
) -> None:
    # spec N3, W4, attack 19
    async with scene(unknown) as s:
        own = await s.own.open("own", "w+")
        _, first = await s.nested()
        _, second = await s.nested()
        number = await first.open("a", "w+")
        await first.write(number, b"secret")
        for foreign in (number, own):
            for call in (
                second.read(foreign, 1),
                second.write(foreign, b"x" * 100_000),
                second.seek(foreign, 0),
                second.truncate(foreign, 0),
                second.sync(foreign),
                second.close(foreign),
            ):
                with pytest.raises(door.FsProxyError, match="invalid fileno"):
                    await call
        await first.seek(number, 0)
        assert await first.read(number, 10) == b"secret"
        await first.close(number)
        with pytest.raises(door.FsProxyError, match="invalid fileno"):
            await first.close(number)


async def test_a_slow_request_does_not_stop_the_siblings() -> None:
    # spec N4
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        slow, _ = await s.nested()
        slow.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        _, other = await s.nested()
        fileno = await other.open("a", "w+")
        await other.write(fileno, b"x")
        await s.own.ping()
        assert not gate.opened.is_set()
        gate.opened.set()


async def test_without_attach_requests_take_turns() -> None:
    # spec N4: correct, merely serial
    async with scene(SERIAL) as s:
        s.host.chat = (b"{}", b"1.0 weighted tokens (no limit)")
        gate = s.host.gates[m.Chat] = Gate()
        _, slow = await s.nested()
        _, other = await s.nested()
        order = []

        async def chat() -> None:
            await slow.llm_chat("hi")
            order.append("chat")

        async def ping() -> None:
            await other.ping()
            order.append("ping")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat)
            await wait(gate)
            nursery.start_soon(ping)
            await trio.testing.wait_all_tasks_blocked()
            gate.opened.set()
        assert order == ["chat", "ping"]


@both
async def test_a_client_that_takes_nothing_stops_itself(
    unknown: frozenset[bytes],
) -> None:
    # spec N4, S5, attack 17
    async with scene(unknown) as s:
        s.host.files[b"a"] = bytearray(8 * MIB)
        stalled, client = await s.nested()
        await client.open("a")
        stalled.child_end.sendall(b"READ 1000 8000000\n" * 5)
        _, other = await s.nested()
        for _ in range(20):
            fileno = await other.open("b", "w+")
            await other.write(fileno, b"x" * 100_000)
            await other.seek(fileno, 0)
            assert len(await other.read(fileno, 100_000)) == 100_000
            await other.close(fileno)


@both
async def test_a_flood_of_refusals_is_held_back(unknown: frozenset[bytes]) -> None:
    # spec S5: nobody takes the replies, so the requests must stop being taken
    async with scene(unknown) as s:
        nested = await s.connect()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(nested.child_end))
        with trio.move_on_after(0.3) as scope:
            for _ in range(10_000):
                await stream.send_all(b"NONSENSE\n" * 1000)
        assert scope.cancelled_caught
        _, other = await s.nested()
        await other.ping()
        await stream.aclose()


# Rights


async def test_rights_are_narrowed_before_anybody_has_the_connection() -> None:
    # spec A5
    async with scene() as s:
        nested = await s.connect({"read": ["in"], "write": [], "quota": 5})
        client = AsyncClient((nested.child_end.fileno(),))
        peer = s.host.peers[1]
        assert peer.rights == {"read": ["in"], "write": [], "quota": 5}
        assert isinstance(peer.seen[0], m.Narrow)
        s.host.files[b"in"] = bytearray(b"x")
        assert await client.read(await client.open("in"), 5) == b"x"
        with pytest.raises(PermissionError):
            await client.open("in", "w")
        # Its own wish to shrink passes through.
        await client.narrow({"read": [], "write": []})
        with pytest.raises(PermissionError):
            await client.open("in")
        nested.child_end.close()


@pytest.mark.parametrize(
    ("unknown", "why"),
    [
        (frozenset({b"NARROW"}), "does not know NARROW"),
        (frozenset({b"ATTACH"}), "has no ATTACH"),
    ],
)
async def test_what_cannot_be_narrowed_is_not_started(
    unknown: frozenset[bytes], why: str
) -> None:
    # spec A5
    async with scene(unknown) as s:
        with pytest.raises(RelayError, match=why):
            await s.connect({"read": []})
        for peer in s.host.peers[1:]:
            await wait(peer)
        nested = await s.connect()
        nested.child_end.close()


async def test_a_narrowing_that_the_host_refuses_is_an_error() -> None:
    # spec A5
    async with scene() as s:
        s.host.fails[m.Narrow] = b"ERROR invalid rights: read is no list\n"
        with pytest.raises(door.FsProxyError, match="invalid rights"):
            await s.connect({"read": 5})
        await wait(s.host.peers[1])


async def test_in_turns_a_client_cannot_narrow_or_attach() -> None:
    # spec A5, N4: it would be everybody's connection
    async with scene(frozenset({b"ATTACH"})) as s:
        nested = await s.connect()
        request = b"NARROW 2\n{}ATTACH\nPING\n"
        reply = b"ERROR unknown command: NARROW\nERROR unknown command: ATTACH\nOK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert s.host.peers[0].rights is None


# More connections, more depth


async def test_a_nested_client_may_attach_through_the_relay() -> None:
    # spec N4
    async with scene() as s:
        nested, client = await s.nested()
        attached = await client.attach()
        assert s.host.peers[2].parent is s.host.peers[1]
        fileno = await attached.open("a", "w", top_level=True)
        assert seen(s.host.peers[2], m.Open) == [m.Open(b"a", b"w", False)]
        with pytest.raises(door.FsProxyError, match="invalid fileno"):
            await client.close(fileno)
        attached.disconnect()
        await wait(s.host.peers[2])
        assert s.host.open_files() == []
        nested.child_end.close()


async def test_attaches_among_other_requests_get_their_descriptors() -> None:
    # spec N4, T3
    async with scene() as s:
        nested = await s.connect()
        nested.child_end.sendall(b"PING\nATTACH\nPING\nATTACH\nPING\n")
        data, fds = b"", []
        while data.count(b"\n") < 5:
            piece, more, _, _ = await trio.to_thread.run_sync(
                socket.recv_fds, nested.child_end, 4096, 8
            )
            data += piece
            fds += more
        assert data == b"OK\nOK 3\nOK\nOK 4\nOK\n"
        for fd in fds:
            attached = AsyncClient((fd,), shared=False)
            await attached.ping()
            attached.disconnect()
        assert len(fds) == 2


async def test_the_end_of_a_process_ends_what_it_attached() -> None:
    # spec S2, S3: nested ones first
    async with scene() as s:
        nested, client = await s.nested()
        attached = await client.attach()
        await attached.open("a", "w")
        await s.relay.client_done(nested)
        await wait(s.host.peers[2])
        assert s.host.open_files() == []
        with pytest.raises(door.ConnectionLostError):
            await attached.ping()
        attached.disconnect()
        nested.child_end.close()


@both
async def test_eight_relays_deep_it_is_the_same(unknown: frozenset[bytes]) -> None:
    # spec N1, N4
    async def deeper(own: AsyncClient, left: int) -> None:
        if left:
            async with open_relay(own) as relay:
                nested = await relay.new_client()
                await deeper(AsyncClient((nested.child_end.fileno(),)), left - 1)
                nested.child_end.close()
                await relay.client_done(nested)
            return
        content = os.urandom(300_000)
        fileno = await own.open("a", "w+", top_level=True)
        await own.write(fileno, content)
        await own.seek(fileno, 0)
        assert await own.read_all(fileno) == content
        if not unknown:
            attached = await own.attach()
            await attached.ping()
            attached.disconnect()

    with FakeHost(unknown=unknown) as host, host.connect() as line:
        await deeper(AsyncClient((line.fileno(),)), 8)
        assert host.open_files() == []
        flags = [r.flag for p in host.peers for r in p.seen if isinstance(r, m.Open)]
        assert flags == [False]


# The host's faults


async def test_a_lost_upstream_connection_ends_its_lane_alone(
    logged: list[str],
) -> None:
    async with scene() as s:
        _, first = await s.nested()
        _, second = await s.nested()
        await first.open("a", "w")
        s.host.raw_replies.append(b"")
        with pytest.raises(door.ConnectionLostError):
            await first.ping()
        await second.ping()
        assert any("Upstream connection lost" in line for line in logged)
        assert not any(line.startswith("Sent close") for line in logged)


async def test_garbage_from_the_host_ends_the_lane() -> None:
    async with scene() as s:
        _, client = await s.nested()
        s.host.raw_replies.append(b"HELLO\n")
        with pytest.raises(door.ConnectionLostError):
            await client.ping()
        await wait(s.host.peers[1])


async def test_the_loss_of_the_one_connection_ends_all_lanes(
    logged: list[str],
) -> None:
    async with scene(SERIAL) as s:
        _, first = await s.nested()
        _, second = await s.nested()
        s.host.raw_replies.append(b"")
        with pytest.raises(door.ConnectionLostError):
            await first.ping()
        with pytest.raises(door.ConnectionLostError):
            await second.ping()
        assert any("Upstream connection lost" in line for line in logged)


async def test_a_host_without_commands_in_its_caps_is_refused() -> None:
    with FakeHost() as host, host.connect() as line:
        host.raw_replies.append(b"OK 2\n{}")
        with pytest.raises(door.FsProxyError, match="lacks its commands"):
            async with open_relay(AsyncClient((line.fileno(),))):
                pass


async def test_a_stalled_host_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # spec S5
    for module in (relay, relay_attached):
        monkeypatch.setattr(module, "SETTLE_S", 0.02)
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        s.host.gates[m.Close] = gate = Gate()
        await s.relay.client_done(nested)
        assert gate.reached.is_set()
        gate.opened.set()
        await wait(s.host.peers[1])
        assert s.host.open_files() == []


async def test_a_request_that_a_stalled_host_holds_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    # spec S5
    monkeypatch.setattr(relay, "SETTLE_S", 0.02)
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        gate = s.host.gates[m.Ping] = Gate()
        nested.child_end.sendall(b"PING\n")
        await wait(gate)
        await s.relay.client_done(nested)
        gate.opened.set()
        await wait(s.host.peers[1])
        assert any(line.startswith("Released filenos 1000") for line in logged)


async def test_a_host_that_dies_at_the_end_has_released_everything() -> None:
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        s.host.raw_replies.append(b"")
        await s.relay.client_done(nested)
        await wait(s.host.peers[1])


async def test_an_error_inside_goes_through_as_it_came() -> None:
    class OwnError(Exception):
        pass

    with FakeHost() as host, host.connect() as line:
        with pytest.raises(OwnError):
            async with open_relay(AsyncClient((line.fileno(),))):
                raise OwnError


# Bounds of the lane that takes turns


async def test_in_turns_a_payload_is_bounded() -> None:
    # spec W3, W4, attack 15
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        size = limits.MAX_WRITE_BYTES + 1
        request = b"WRITE 1000 %d\n" % size + bytes(size) + b"PING\n"
        reply = b"ERROR invalid size: 16777217 exceeds limit 16777216\nOK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert not seen(s.host.peers[0], m.Write)


async def test_in_turns_a_read_is_bounded() -> None:
    # spec R1, R3
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w+")
        assert await dialogue(nested.child_end, b"READ 1000 99999999\n", 5) == b"OK 0\n"
        (read,) = seen(s.host.peers[0], m.Read)
        assert read == m.Read(b"1000", limits.MAX_READ_BYTES)


async def test_in_turns_a_payload_that_does_not_come_ends_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # spec F8, attack 16
    monkeypatch.setattr(relay_serial, "DEADLINE_S", 0.01)
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"WRITE 1000 100\nhalf")
        await nested.finished()
        assert nested.child_end.recv(1) == b""
        assert s.host.open_files() == []
        nested.child_end.close()


# Real processes


@both
@pytest.mark.slow
async def test_a_nested_process_is_killed_inside_a_write(
    unknown: frozenset[bytes],
) -> None:
    # spec N2, W2
    program = """
import os
from vfs.client import Client
client = Client()
fileno = client.open("a", "w+", top_level=True)
client.write(fileno, b"whole")
os.write(int(os.environ["FSPROXY_FD"]), b"WRITE %d 1000000\\n" % fileno + bytes(90_000))
os.kill(os.getpid(), 9)
"""
    async with scene(unknown) as s:
        nested = await s.connect()
        process = start(program, nested.child_end)
        nested.child_end.close()
        assert await trio.to_thread.run_sync(process.wait) == -signal.SIGKILL
        await s.relay.client_done(nested)
        if not unknown:
            await wait(s.host.peers[1])
        assert s.host.files == {b"a": b"whole"}
        assert s.host.open_files() == []
        await s.own.ping()


@both
@pytest.mark.slow
async def test_shell_commands_work_behind_a_relay(unknown: frozenset[bytes]) -> None:
    # spec N1, T5
    program = "import sys; from vfs.fscmd import main; sys.exit(main(sys.argv[1:]))"
    command = f"{shlex.quote(sys.executable)} -I -c {shlex.quote(program)}"
    script = f'fs() {{ {command} "$@"; }}; fs cat a | fs put b; fs ls; fs stat c'
    async with scene(unknown) as s:
        s.host.files[b"a"] = bytearray(os.urandom(3 * MIB))
        nested = await s.connect()
        process = start_shell(script, nested.child_end)
        nested.child_end.close()
        out, err = await trio.to_thread.run_sync(process.communicate)
        await s.relay.client_done(nested)
        assert (out, err.count(b"\n")) == (b"a\nb\n", 1)
        assert b"cannot stat 'c': No such file" in err
        assert s.host.files[b"b"] == s.host.files[b"a"]
        assert s.host.open_files() == []


def start_shell(script: str, line: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]},
    )


def start(program: str, line: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno())},
    )
