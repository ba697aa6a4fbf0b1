"""Requests that came whole are taken apart once, and mean what they would mean (ADR 79)."""

import socket
from contextlib import suppress

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import toolexec
from supervisor.accepting import make_room
from supervisor.toolexec import heads
from supervisor.toolexec import wire as wire_module
from supervisor.toolexec.connection import Connection
from supervisor.toolexec.throttle import Throttle
from supervisor.toolexec.wire import SMALL_HEAD_BYTES, GoneError, Wire
from tests.helpers.toolscene import Scene, pair, parse, receive_all, send

HEAD = b"POST /exec HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
BODY = b"tool=true"
WHOLE = HEAD + BODY


def told(sent: bytes, more: bytes = b"") -> tuple[Wire, socket.socket]:
    """A wire to which something was sent, and then more."""
    ours, theirs = pair()
    theirs.sendall(sent)
    if more:
        theirs.sendall(more)
    return Wire(ours, Throttle()), theirs


async def received(how: Wire) -> object:
    """What a wire makes of a request, or for what it refuses it."""
    try:
        return await how.receive(lambda _: Throttle())
    except heads.RefusedAtOnceError as why:
        return why.refusal


def tried(how: Wire) -> object:
    """What it makes of it at once."""
    try:
        return how.receive_at_once()
    except heads.RefusedAtOnceError as why:
        return why.refusal


PIECES = st.sampled_from(
    [
        WHOLE,
        WHOLE.replace(b"POST", b"HEAD"),
        HEAD,
        BODY,
        b"x",
        b"\r\n",
        b"Content-Length: 9\r\n",
        b"HEAD ",
        b"POST ",
    ]
)


# spec E9, attack 33: a short cut is none in what it means.
@given(
    st.lists(PIECES, max_size=4).map(b"".join)
    | st.integers(0, len(WHOLE)).map(lambda cut: WHOLE[:cut]),
    st.sampled_from([b"", b"x", WHOLE]),
)
@settings(deadline=None)
def test_what_is_received_at_once_is_what_would_be_received(
    sent: bytes, more: bytes
) -> None:
    async def both() -> None:
        wire, client = told(sent, more)
        other, its_client = told(sent, more)
        for one in (client, its_client):
            one.shutdown(socket.SHUT_WR)
        with suppress(GoneError):
            expected = await received(other)
            for _ in range(2):  # the second time from memory
                again, third = told(sent, more)
                assert tried(again) in (None, expected)
                again.close()
                third.close()
            if tried(wire) is None:
                assert await received(wire) == expected  # nothing of it is lost
            assert wire._is_head == other._is_head
        for sock in (wire, other, client, its_client):
            sock.close()

    trio.run(both)


async def test_a_small_request_that_came_whole_is_taken_apart_once() -> None:
    wire_module._small_request.cache_clear()
    for _ in range(3):
        wire, client = told(WHOLE)
        assert wire.receive_at_once() == (heads.read_small(HEAD)[0], BODY)
        assert b"".join(wire.received) + wire._ahead == WHOLE  # for the next program
        wire.close()
        client.close()
    assert wire_module._small_request.cache_info().misses == 1
    for cut in range(len(WHOLE)):
        wire, client = told(WHOLE[:cut])
        assert wire.receive_at_once() is None
        wire.close()
        client.close()
    # Nothing is kept of what is none.
    assert wire_module._small_request.cache_info().currsize == 1


# spec E10, attack 33: what the kernel gives by itself may not be all that has come.
async def test_bytes_behind_a_request_with_descriptors_are_seen() -> None:
    wire, client = told(b"")
    socket.send_fds(client, [WHOLE], [client.fileno()])
    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert wire.receive_at_once() is None
    refusal = await received(wire)
    assert isinstance(refusal, toolexec.Refusal)
    assert refusal.status == 400
    wire.close()
    client.close()


# The same for a request that the program before has received.
async def test_bytes_behind_a_request_that_was_handed_over_are_seen() -> None:
    wire, client = told(b"more")
    wire.hold(WHOLE)
    assert wire.receive_at_once() is None
    assert isinstance(await received(wire), toolexec.Refusal)
    wire.close()
    client.close()


# spec S5: who has no token costs no more for a head that is none.
@pytest.mark.slow
async def test_a_bad_head_is_read_once(scene: Scene) -> None:
    heads.read_small.cache_clear()
    bad = b"POST /exec HTTP/3.7\r\nHost: a\r\n\r\n"
    assert (await scene.say(bad)).status == 400
    assert heads.read_small.cache_info().misses == 1
    with await scene.connect() as sock:
        await send(sock, bad.replace(b"POST", b"HEAD"))
        assert (await receive_all(sock)).endswith(b"\r\n\r\n")  # a head, no body


# spec E9: it has had its turn, and somebody else's takes no longer for it.
async def test_a_large_request_is_not_taken_apart_at_once() -> None:
    size = SMALL_HEAD_BYTES
    large = HEAD.replace(b"9", b"%d" % size) + b"x" * size
    wire, client = told(large)
    assert wire.receive_at_once() is None
    wire.close()
    client.close()


# spec S5, rule 4 of `connection`: who is served does not idle, and makes no room.
@pytest.mark.slow
async def test_who_is_served_at_once_makes_no_room(scene: Scene) -> None:
    with await scene.connect() as sock:
        scene.tool.gate.shut()  # as while the host is being replaced
        await send(sock, scene.request(b"tool=true"))
        connections: list[Connection] = []
        while not connections:
            await trio.testing.wait_all_tasks_blocked()
            connections = [one for s in scene.tool.servers for one in s.everybody()]
        assert make_room(connections) is None
        scene.tool.gate.open()
        assert parse(await receive_all(sock)).code == 0


# spec S5, rule 4 of `connection`: who was told to make room is not served any more.
@pytest.mark.slow
async def test_who_was_to_make_room_before_its_turn_is_not_served(scene: Scene) -> None:
    ours, theirs = pair()
    theirs.sendall(scene.request(b"tool=true"))
    connection = Connection(scene.tool, ours, Throttle())
    assert make_room([connection]) is connection
    await connection.serve()
    assert theirs.recv(1) == b""
    theirs.close()
    assert scene.stage.events("exec.started") == []
