"""Bytes received with a request, and when its connection may be made to give way."""

import socket

import pytest
import trio.testing

from hostlib.fairness import Share
from hostlib.listener import make_room
from protocol.toolexec import requests
from supervisor.toolexec import http_heads
from supervisor.toolexec.connection import Connection, hold_no_place
from supervisor.toolexec.wire import Wire
from tests.helpers.toolscene import Scene, pair, parse, receive_all, send

HEAD = b"POST /exec HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
WHOLE = HEAD + b"tool=true"


def told(sent: bytes, more: bytes = b"") -> tuple[Wire, socket.socket]:
    """A wire to which something was sent, and then more."""
    ours, theirs = pair()
    theirs.sendall(sent)
    if more:
        theirs.sendall(more)
    return Wire(ours, Share()), theirs


async def received(how: Wire) -> object:
    """The request that a wire returns, or its refusal."""
    try:
        return await how.receive(lambda _: Share())
    except http_heads.RefusedAtOnceError as why:
        return why.refusal


# spec E10, attack 33: what the kernel gives by itself may not be all that has come.
async def test_bytes_behind_a_request_with_descriptors_are_seen() -> None:
    wire, client = told(b"")
    socket.send_fds(client, [WHOLE], [client.fileno()])
    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    refusal = await received(wire)
    assert isinstance(refusal, requests.Refusal)
    assert refusal.status == 400
    wire.close()
    client.close()


# The same for a request that the program before has received.
async def test_bytes_behind_a_request_that_was_handed_over_are_seen() -> None:
    wire, client = told(b"more")
    wire.hold(WHOLE)
    assert isinstance(await received(wire), requests.Refusal)
    wire.close()
    client.close()


# spec S5, rule 4 of `connection`: who is served does not idle, and makes no room.
@pytest.mark.slow
async def test_a_connection_that_is_served_makes_no_room(scene: Scene) -> None:
    with await scene.connect() as sock:
        scene.tool.context.gate.shut()  # as while the host is being replaced
        await send(sock, scene.request(b"tool=true"))
        connections: list[Connection] = []
        while not connections:
            await trio.testing.wait_all_tasks_blocked()
            connections = [one for s in scene.tool.servers for one in s.everybody()]
        assert make_room(connections) is None
        scene.tool.context.gate.open()
        assert parse(await receive_all(sock)).code == 0


# spec S5, rule 4 of `connection`: who was told to make room is not served any more.
@pytest.mark.slow
async def test_a_connection_that_was_to_make_room_is_not_served(scene: Scene) -> None:
    ours, theirs = pair()
    theirs.sendall(scene.request(b"tool=true"))
    connection = Connection(scene.tool.context, ours, Share(), hold_no_place)
    assert make_room([connection]) is connection
    await connection.serve()
    assert theirs.recv(1) == b""
    theirs.close()
    assert scene.stage.events("exec.started") == []
