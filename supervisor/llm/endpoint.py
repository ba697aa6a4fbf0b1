"""The endpoint for programs that know nothing of this host (face: ``endpoint = true``).

Rules of this file.

1. A token opens one child's account and nothing else; after the child's end it opens
   nothing, and what it had begun is cancelled and charged before the child is gone.
2. A child has at most ``PER_CHILD`` connections, fewer where the host lacks descriptors.
   The oldest that asks nothing makes room; of those without a token, the oldest of the
   listener by which most came (spec S5, S7).
3. What goes wrong with a child's own listener ends that listener.
4. A hand-over keeps addresses and tokens; a request for which nothing was done is read anew.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.gate import Gate
from hostlib.listener import accept, contain_fault, listener_on
from supervisor.fsproxy.ports import Doors
from supervisor.llm.endpoint_call import Asker, answer
from supervisor.llm.endpoint_http import (
    MAX_BODY_BYTES,
    ConnectionTestError,
    HttpConnection,
)
from supervisor.llm.errors import MalformedRequestError, RefusedRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AsyncExitStack

    from supervisor.fsproxy.ports import ChildView
    from supervisor.llm.models import Models
    from supervisor.llm.quota import Node
    from supervisor.spec import ChildSpec
    from vfs.filesystem import Client
    from vfs.payload import Reservation

PER_CHILD = 64
"""Connections of one child: as many as it may have clients."""

STRANGERS = 64
"""Connections that have not shown a token yet; a program shows it at once."""

DESCRIPTORS = 2
"""Of one connection: its own, and that of what is asked of the provider for it."""

STRANGER_S = 10.0
"""How long a connection may take to show a token."""

SOCKET_NAME = "llm.sock"
TOKEN_PREFIX = "sk-sandhost-"  # noqa: S105 - what it begins with is no secret

REPLACED = "the host was replaced by its next program; ask again"
"""What a call under way ends with then."""

INTERRUPT_S = 1.0
"""How long a client may take to take that: it is short."""


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


class Account:
    """What a child's token stands for.

    Attributes:
        client: whose rights count.
        node: pays.
        connections: those that have shown the token, the oldest first.
        listener: the child's own unix socket; None if it has none.
        path: where that is.
        inner: the one on loopback of its net namespace; None as above.
    """

    def __init__(self, client: Client, node: Node) -> None:
        self.client = client
        self.node = node
        self.listener: trio.SocketListener | None = None
        self.inner: trio.SocketListener | None = None
        self.path = ""
        self.connections: dict[_Connection, None] = {}

    def make_room(self) -> bool:
        """End the oldest connection for which nothing is done; tell if there was one.

        Requests that never come whole keep no other from an answer (spec MD7).
        """
        for connection in self.connections:
            if connection.http.received is not None:
                del self.connections[connection]
                connection.http.scope.cancel()
                return True
        return False


class _Connection:
    """One connection, of a child or of a stranger.

    Attributes:
        by: the listener by which it came; None if the program before accepted it.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        ahead: bytes,
        by: trio.SocketListener | None,
    ) -> None:
        self.by = by
        self.http = HttpConnection(stream, ahead)
        self.answering = trio.CancelScope()
        self.over = trio.Event()


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """Whom an endpoint serves.

    Attributes:
        listeners: its own, and those of children.
        connections: that are open.
        strangers: connections of these that have shown no token.
        accounts: of children.
    """

    listeners: int
    connections: int
    strangers: int
    accounts: int


class Endpoint:
    """Made by ``open_endpoint``."""

    def __init__(
        self, models: Models, listener: trio.SocketListener, nursery: trio.Nursery
    ) -> None:
        self._models = models
        self._nursery = nursery
        self._listener = listener
        self.left: EndpointState | None = None
        self.gate = Gate()
        self._listeners = {listener}
        self._accounts: dict[str, Account] = {}
        self._strangers: dict[_Connection, None] = {}
        self._connections: set[_Connection] = set()
        self._port: int = listener.socket.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self._port}/v1"

    async def admit(
        self, child: ChildView, client: Client, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Open a child's account; return what it finds in its environment.

        Raises:
            OSError: its socket cannot be made.
        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        account = self.open_account(token, client, stack)
        take = partial(self._take, account, stack)
        port = child.listen_within(self._port, take, stack)
        env = self._variables(token, port)
        if child.spec.run_dir is not None:
            listener = _unix_listener(child.spec)
            self.listen_for(account, listener, child.spec, stack)
            env["SANDHOST_LLM_SOCKET"] = account.path
        return env

    def _variables(self, token: str, port: int) -> dict[str, str]:
        """Return what tells a program of the endpoint, by the names that clients read.

        Args:
            token: of its child.
            port: the endpoint's, or another one where the child's namespace has that.
        """
        url = f"http://127.0.0.1:{port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": token,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": token,
        }

    def statistics(self) -> EndpointStatistics:
        """Return whom it serves."""
        return EndpointStatistics(
            len(self._listeners),
            len(self._connections),
            len(self._strangers),
            len(self._accounts),
        )

    def doors_of(self, client: Client) -> Doors | None:
        """See ``services.ModelService``."""
        for token, account in self._accounts.items():
            if account.client is client:
                inner = account.inner
                if inner is None:
                    return Doors(self._variables(token, self._port), -1)
                port = inner.socket.getsockname()[1]
                return Doors(self._variables(token, port), inner.socket.fileno())
        return None

    def _take(
        self, account: Account, stack: AsyncExitStack, listener: socket.socket
    ) -> None:
        self.listen_within(account, listener_on(listener.detach()), stack)

    def open_account(
        self, token: str, client: Client, stack: AsyncExitStack
    ) -> Account:
        """Let a token stand for a client; it is closed with the stack."""
        account = Account(client, self._models.accounts.node_of(client))
        self._accounts[token] = account
        stack.push_async_callback(self._dismiss, token)
        return account

    def listen_for(
        self,
        account: Account,
        listener: trio.SocketListener,
        spec: ChildSpec,
        stack: AsyncExitStack,
    ) -> None:
        """Serve a child's own socket until the stack is unwound."""
        account.listener, account.path = listener, f"{spec.run_dir}/{SOCKET_NAME}"
        stack.callback(_unlink, spec)
        self._listen_until(listener, stack)

    def listen_within(
        self, account: Account, listener: trio.SocketListener, stack: AsyncExitStack
    ) -> None:
        """Serve what listens in a child's net namespace until the stack is unwound."""
        account.inner = listener
        self._listen_until(listener, stack)

    def _listen_until(
        self, listener: trio.SocketListener, stack: AsyncExitStack
    ) -> None:
        self._listeners.add(listener)
        scope = trio.CancelScope()
        self._models.fs.set_aside(1)
        stack.callback(self._models.fs.set_aside, -1)
        stack.callback(scope.cancel)
        self._nursery.start_soon(self._listen_own, listener, scope)

    # Handed over

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return any(one.http.received is None for one in self._connections)

    def interrupt(self) -> None:
        """Let what is being answered end with an error."""
        for connection in self._connections:
            if connection.http.received is None:
                connection.answering.cancel()

    def snapshot(self) -> tuple[EndpointState, set[int]]:
        """Return an endpoint at rest as a plain structure, and its descriptors."""
        state = EndpointState(self._listener.socket.fileno(), {}, [])
        fds = {state.listener_fd}
        for token, account in self._accounts.items():
            listener, path = account.listener, os.fsencode(account.path)
            fd = -1 if listener is None else listener.socket.fileno()
            inner = -1 if account.inner is None else account.inner.socket.fileno()
            state.doors[account.client.id] = DoorState(token, fd, path, inner)
            fds |= {fd, inner} - {-1}
        tokens = {
            connection: token
            for token, account in self._accounts.items()
            for connection in account.connections
        }
        for connection in self._connections:
            fd = connection.http.stream.socket.fileno()
            received = connection.http.received
            if fd >= 0 and received is not None:
                token = tokens.get(connection, "")
                state.connections.append(ConnectionState(fd, bytes(received), token))
                fds.add(fd)
        return state, fds

    def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Go on with a child's token and its listeners."""
        left = self.left
        session = child.session
        if left is None or session is None:
            return
        door = left.doors.get(session.client.id)
        if door is None:  # it was started when there was no endpoint
            return
        account = self.open_account(door.token, session.client, stack)
        if door.listener_fd >= 0:
            listener = listener_on(door.listener_fd)
            self.listen_for(account, listener, child.spec, stack)
        if door.inner_fd >= 0:
            self.listen_within(account, listener_on(door.inner_fd), stack)

    def restore_connections(self) -> None:
        """Go on with the connections."""
        left, self.left = self.left, None
        for one in () if left is None else left.connections:
            sock = socket.socket(fileno=one.fd)
            sock.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            self.own(stream, one.received, one.token)

    def own(
        self,
        stream: trio.SocketStream,
        ahead: bytes = b"",
        token: str = "",
        by: trio.SocketListener | None = None,
    ) -> None:
        """Serve a connection.

        Args:
            stream: it; owned.
            ahead: what another program of this host has received by it.
            token: that it has shown to that; empty for none.
            by: the listener by which it came; None if that other program accepted it.
        """
        connection = _Connection(stream, ahead, by)
        self._connections.add(connection)
        self._models.fs.set_aside(DESCRIPTORS)
        account = self._accounts.get(token)
        if account is None:
            self._strangers[connection] = None
        else:
            account.connections[connection] = None
        self._nursery.start_soon(self._serve, connection, account is None)

    async def _dismiss(self, token: str) -> None:
        """Close an account; wait until what it had begun is charged."""
        account = self._accounts.pop(token)
        for connection in tuple(account.connections):
            connection.http.scope.cancel()
        with trio.CancelScope(shield=True):  # bounded: a cancelled call ends at once
            for connection in tuple(account.connections):
                await connection.over.wait()

    async def run(self, listener: trio.SocketListener) -> None:
        """Serve the listener of all until cancelled."""
        await self._listen(listener, trio.CancelScope())

    async def _listen_own(
        self, listener: trio.SocketListener, scope: trio.CancelScope
    ) -> None:
        """Serve a child's own listener; what came by it ends with it (rule 3)."""
        try:
            await self._listen(listener, scope)
        except OSError as why:
            text = (
                "The model endpoint closed a child's own listener: accept failed:"
                f" {why.strerror}; restart the child"
            )
            self._models.log.write("WARNING", text, reason=why.strerror)
        finally:
            for connection in self._connections:
                if connection.by is listener:
                    connection.http.scope.cancel()

    async def _listen(
        self, listener: trio.SocketListener, scope: trio.CancelScope
    ) -> None:
        try:
            with scope:
                await self._accept(listener)
        finally:
            self._listeners.discard(listener)
            listener.socket.close()

    async def _accept(self, listener: trio.SocketListener) -> None:
        while True:
            stream = await accept(listener)
            if len(self._strangers) >= STRANGERS:
                self._make_room()
            self.own(stream, by=listener)

    def _make_room(self) -> None:
        """End the oldest stranger of the listener by which most of them came."""
        ((most, _),) = Counter(one.by for one in self._strangers).most_common(1)
        oldest = next(one for one in self._strangers if one.by is most)
        del self._strangers[oldest]
        oldest.http.scope.cancel()

    async def _serve(self, connection: _Connection, is_stranger: bool) -> None:
        http = connection.http
        try:
            with contain_fault(self._models.log, "the endpoint"), connection.http.scope:
                if is_stranger:
                    connection.http.scope.deadline = trio.current_time() + STRANGER_S
                while await self._serve_one(connection) and http.next_cycle():
                    pass
        finally:
            self._strangers.pop(connection, None)
            for account in self._accounts.values():
                account.connections.pop(connection, None)
            self._connections.discard(connection)
            self._models.fs.set_aside(-DESCRIPTORS)
            with trio.CancelScope(shield=True):  # bounded: closes a socket
                await trio.aclose_forcefully(http.stream)
            connection.over.set()

    async def _serve_one(self, connection: _Connection) -> bool:
        """Answer one request; tell whether there may be another."""
        http = connection.http
        try:
            request = await http.request(partial(self._admit, connection))
            if request is None:
                return False
            with request.memory:
                await self.gate.wait_open()
                http.begin()
                account = self._account(connection, request.token)
                connection.answering = trio.CancelScope()
                with connection.answering:
                    asker = Asker(self._models, account.client, account.node)
                    await answer(asker, http, request)
            if connection.answering.cancelled_caught:
                with trio.move_on_after(INTERRUPT_S):
                    why = RefusedRequestError(503, REPLACED, "interrupted")
                    await http.interrupt(why)
                return False
        except ConnectionTestError:
            await http.answer(200, b"")
            await http.discard(MAX_BODY_BYTES)
        except RefusedRequestError as why:
            http.begin()
            await http.refuse(why)
            await http.discard(MAX_BODY_BYTES)
            is_last = isinstance(why, MalformedRequestError)
            return not is_last and why.status not in (401, 426, 503)
        return True

    async def _admit(self, connection: _Connection, token: str) -> Reservation:
        """Return where the memory of a request is reserved, for the child of its token."""
        await self.gate.wait_open()
        client = self._account(connection, token).client
        return self._models.budget.reservation(client.ledger)

    def _account(self, connection: _Connection, token: str) -> Account:
        # A token has 256 random bits: how long a look-up takes tells nothing of use.
        account = self._accounts.get(token)
        if account is None:
            text = (
                "no such token; a child finds its own in OPENAI_API_KEY while it runs"
            )
            kind = "invalid_request_error"
            raise RefusedRequestError(401, text, kind, "invalid_api_key")
        if connection not in account.connections:
            held = len(account.connections)
            is_full = held >= PER_CHILD or (held and self._models.fs.spare < 0)
            if is_full and not account.make_room():
                text = f"this child asks on {held} connections; wait for one"
                raise RefusedRequestError(503, text, "overloaded")
            account.connections[connection] = None
            self._strangers.pop(connection, None)
            connection.http.scope.deadline = float("inf")
        return account

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors."""
        for listener in self._listeners:
            yield listener.socket.fileno(), "model endpoint"
        for connection in self._connections:
            yield connection.http.stream.socket.fileno(), "model endpoint connection"


def _unix_listener(spec: ChildSpec) -> trio.SocketListener:
    """Listen on a child's own socket; its path may be longer than sun_path (unix(7))."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with spec.run_dir_held() as held:
            sock.bind(f"/proc/self/fd/{held}/{SOCKET_NAME}")
        sock.listen(16)
        sock.setblocking(False)
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise


def _unlink(spec: ChildSpec) -> None:
    # The child may have removed it, and who may write around it the directory.
    with suppress(OSError), spec.run_dir_held() as held:
        os.unlink(SOCKET_NAME, dir_fd=held)


def close_left(left: EndpointState) -> None:
    """Close all of an endpoint that is not configured any more."""
    fds = [left.listener_fd]
    for door in left.doors.values():
        fds += door.listener_fd, door.inner_fd
    for fd in (*fds, *(one.fd for one in left.connections)):
        if fd >= 0:
            os.close(fd)


async def _tcp_listener(port: int) -> trio.SocketListener:
    try:
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    except OSError as why:
        text = f"cannot listen on 127.0.0.1:{port}: {why.strerror}"
        advice = "end what has it, or choose another [llm] endpoint_port"
        raise OSError(why.errno, f"{text}; {advice}") from None
    return listener


@asynccontextmanager
async def open_endpoint(
    models: Models, left: EndpointState | None = None
) -> AsyncIterator[Endpoint]:
    """Listen on loopback; everything ends with the block.

    Args:
        models: answer.
        left: the endpoint of the program before; None if there was none.
    """
    async with trio.open_nursery() as nursery:
        if left is None:
            listener = await _tcp_listener(models.section.endpoint_port)
        else:
            listener = listener_on(left.listener_fd)
        endpoint = Endpoint(models, listener, nursery)
        models.fs.set_aside(DESCRIPTORS * STRANGERS)
        endpoint.left = left
        if left is not None:
            endpoint.gate.shut()  # until all children are entered: their tokens
        nursery.start_soon(endpoint.run, listener)
        try:
            yield endpoint
        finally:
            nursery.cancel_scope.cancel()
