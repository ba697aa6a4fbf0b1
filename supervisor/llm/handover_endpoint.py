"""The model's endpoint, handed from one program of a host to the next.

What it is: its listeners, tokens, and the connections that wait for a request or are in
the middle of one.  What it is not: calls; those under way end with an error before.

Rules of this file.

1. A child was told an address and a token, and both stay.
2. A request that has not come whole, or for which nothing was done, is read again from
   its first byte.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import msgspec
import trio

from supervisor.accepting import listener_on

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from supervisor.llm.endpoint import Endpoint
    from supervisor.session.ports import ChildView


class DoorState(msgspec.Struct):
    """What one child was told, and its own listeners; -1: it has none.

    Attributes:
        listener_fd: its unix socket.
        inner_fd: on loopback of its net namespace.
    """

    token: str
    listener_fd: int
    path: bytes
    inner_fd: int = -1


class ConnectionState(msgspec.Struct):
    """A connection, what it has sent of a request, and the token that it has shown."""

    fd: int
    received: bytes
    token: str


class EndpointState(msgspec.Struct):
    """All of it; ``doors`` by the children's own clients."""

    listener_fd: int
    doors: dict[str, DoorState]
    connections: list[ConnectionState]


def state_of(endpoint: Endpoint) -> tuple[EndpointState, set[int]]:
    """Return an endpoint at rest as a plain structure, and its descriptors."""
    state = EndpointState(endpoint._listener.socket.fileno(), {}, [])
    fds = {state.listener_fd}
    for token, account in endpoint._accounts.items():
        listener, path = account.listener, os.fsencode(account.path)
        fd = -1 if listener is None else listener.socket.fileno()
        inner = -1 if account.inner is None else account.inner.socket.fileno()
        state.doors[account.client.id] = DoorState(token, fd, path, inner)
        fds |= {fd, inner} - {-1}
    tokens = {
        connection: token
        for token, account in endpoint._accounts.items()
        for connection in account.connections
    }
    for connection in endpoint._connections:
        fd = connection.http.stream.socket.fileno()
        received = connection.http.received
        if fd >= 0 and received is not None:
            token = tokens.get(connection, "")
            state.connections.append(ConnectionState(fd, bytes(received), token))
            fds.add(fd)
    return state, fds


def enter(endpoint: Endpoint, child: ChildView, stack: AsyncExitStack) -> None:
    """Go on with a child's token and its listeners."""
    left = endpoint.left
    session = child.session
    if left is None or session is None:
        return
    door = left.doors.get(session.client.id)
    if door is None:  # it was started when there was no endpoint
        return
    account = endpoint.open_account(door.token, session.client, stack)
    if door.listener_fd >= 0:
        listener = listener_on(door.listener_fd)
        endpoint.listen_for(account, listener, child.spec, stack)
    if door.inner_fd >= 0:
        endpoint.listen_within(account, listener_on(door.inner_fd), stack)


def close(left: EndpointState) -> None:
    """Close all of an endpoint that is not configured any more."""
    fds = [left.listener_fd]
    for door in left.doors.values():
        fds += door.listener_fd, door.inner_fd
    for fd in (*fds, *(one.fd for one in left.connections)):
        if fd >= 0:
            os.close(fd)


def go_on(endpoint: Endpoint) -> None:
    """Go on with the connections."""
    left, endpoint.left = endpoint.left, None
    for one in () if left is None else left.connections:
        sock = socket.socket(fileno=one.fd)
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        endpoint.own(stream, one.received, one.token)
