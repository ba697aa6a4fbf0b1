"""The HTTP endpoint for programs that only know model APIs (``endpoint = true``).

Rules of this file.

1. A token opens only one child's account.  At the child's end its calls are cancelled and
   charged before the child is gone, and the token opens nothing.
2. A child has at most ``PER_CHILD`` connections, fewer if the host lacks descriptors.  The
   oldest idle one makes room; of those without a token, the oldest of the listener with
   most of them (spec S5, S7).
3. A fault of a child's own listener ends that listener only.
4. A hand-over keeps addresses and tokens; an unanswered request is read again.
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

from hostlib.handover import Gate
from hostlib.listener import contain_fault
from hostlib.listener_set import ListenerSet
from supervisor.fsproxy.ports import Doors
from supervisor.llm.endpoint_call import Asker, answer
from supervisor.llm.endpoint_http import (
    MAX_BODY_BYTES,
    ConnectionTestError,
    HttpConnection,
)
from supervisor.llm.errors import MalformedRequestError, RefusedRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AsyncExitStack

    from supervisor.fsproxy.ports import ChildView
    from supervisor.llm.models import Models
    from supervisor.llm.quota import Node
    from supervisor.spec import ChildSpec
    from vfs.clients import Client
    from vfs.payload import MemoryReservation

PER_CHILD = 64
"""Most connections of one child: as many as clients."""

STRANGERS = 64
"""Most connections without a token yet; a program sends its token at once."""

DESCRIPTORS = 2
"""Descriptors of one connection: its own, and one for a call to the provider."""

STRANGER_S = 10.0
"""How long a connection may take to send a token."""

SOCKET_NAME = "llm.sock"
TOKEN_PREFIX = "sk-sandhost-"  # noqa: S105 - what it begins with is no secret

REPLACED = "the host was replaced by its next program; ask again"
"""The error of a call that an exchange interrupts."""

INTERRUPT_S = 1.0
"""How long a client may take to receive that error, which is short."""


class DoorState(msgspec.Struct):
    """The endpoint's state of one child; -1 for a listener that it does not have.

    Attributes:
        listener_fd: its unix socket.
        inner_fd: its listener on loopback of its net namespace.
    """

    token: str
    listener_fd: int
    path: bytes
    inner_fd: int = -1


class ConnectionState(msgspec.Struct):
    """A connection, the received bytes of a request, and its token."""

    fd: int
    received: bytes
    token: str


class EndpointState(msgspec.Struct):
    """The state of the endpoint; ``doors`` is by the ids of children's own clients."""

    listener_fd: int
    doors: dict[str, DoorState]
    connections: list[ConnectionState]


class TokenOwner:
    """The account of a child's token.

    Attributes:
        client: the client whose rights count.
        node: the node that pays.
        connections: connections with the token, the oldest first.
        listener: the child's own unix socket; None if it has none.
        path: path of that socket.
        inner: its listener on loopback of its net namespace; None if it has none.
    """

    def __init__(self, client: Client, node: Node) -> None:
        self.client = client
        self.node = node
        self.listener: socket.socket | None = None
        self.inner: socket.socket | None = None
        self.path = ""
        self.connections: dict[_Connection, None] = {}

    def make_room(self) -> bool:
        """End the oldest idle connection; return whether there was one.

        Incomplete requests do not keep other requests from an answer (spec MD7).
        """
        for connection in self.connections:
            if not connection.is_answering:
                del self.connections[connection]
                connection.http.scope.cancel()
                return True
        return False


class _Connection:
    """One connection, with or without a token.

    Attributes:
        by: the listener that accepted it; None if the program before accepted it.
        answering: the scope of an answer, which a hand-over interrupts.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        ahead: bytes,
        by: socket.socket | None,
    ) -> None:
        self.by = by
        self.http = HttpConnection(stream, ahead)
        self.answering = trio.CancelScope()
        self.over = trio.Event()
        self._is_discarding = False

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.http.received is None and not self._is_discarding

    async def answer_early(self, send: Callable[[], Awaitable[None]]) -> bool:
        """Answer a request that may not be whole yet, and drop the rest of it.

        The rest is no work: neither a hand-over nor another connection waits for it.

        Args:
            send: sends the answer.

        Returns:
            Whether it was sent; False if a hand-over has interrupted it.
        """
        self.http.begin()
        self.answering = trio.CancelScope()
        with self.answering:
            await send()
        if self.answering.cancelled_caught:
            return False
        self._is_discarding = True
        await self.http.discard(MAX_BODY_BYTES)
        self._is_discarding = False
        return True


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """Counts of an endpoint.

    Attributes:
        listeners: listeners, its own and those of children.
        connections: open connections.
        strangers: open connections without a token.
        accounts: accounts of children.
    """

    listeners: int
    connections: int
    strangers: int
    accounts: int


class Endpoint:
    """The endpoint of a host; made by ``open_endpoint``."""

    def __init__(
        self, models: Models, listener: socket.socket, nursery: trio.Nursery
    ) -> None:
        self._models = models
        self._descriptors = models.fs.descriptor_account
        self._nursery = nursery
        self._listener = listener
        self.left: EndpointState | None = None
        self.gate = Gate()
        self.listeners: set[socket.socket] = set()
        self._listener_set = ListenerSet("model endpoint")
        self._accounts: dict[str, TokenOwner] = {}
        self._strangers: dict[_Connection, None] = {}
        self._connections: set[_Connection] = set()
        self._port: int = listener.getsockname()[1]
        self._listen(listener)
        nursery.start_soon(self._listener_set.run, models.log)

    async def admit(
        self, child: ChildView, client: Client, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Open a child's account; return the variables for its environment.

        Raises:
            OSError: its socket cannot be made.
        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        account = self.open_account(token, client, stack)
        take = partial(self._take, account, stack)
        port = child.listen_within(self._port, take, stack)
        env = self._variables(token, port)
        if child.spec.run_dir is not None:
            listener = open_unix_listener(child.spec)
            self.listen_for(account, listener, child.spec, stack)
            env["SANDHOST_LLM_SOCKET"] = account.path
        return env

    def _variables(self, token: str, port: int) -> dict[str, str]:
        """Return the variables by which programs find the endpoint.

        Args:
            token: the child's token.
            port: the port in the child's net namespace.
        """
        url = f"http://127.0.0.1:{port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": token,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": token,
        }

    def statistics(self) -> EndpointStatistics:
        """Return the counts of its listeners, connections and accounts."""
        return EndpointStatistics(
            len(self.listeners),
            len(self._connections),
            len(self._strangers),
            len(self._accounts),
        )

    def doors_of(self, client: Client) -> Doors | None:
        """See ``ports.Model``."""
        for token, account in self._accounts.items():
            if account.client is client:
                inner = account.inner
                if inner is None:
                    return Doors(self._variables(token, self._port), -1)
                port = inner.getsockname()[1]
                return Doors(self._variables(token, port), inner.fileno())
        return None

    def _take(
        self, account: TokenOwner, stack: AsyncExitStack, listener: socket.socket
    ) -> None:
        """Serve a listener in a child's net namespace until the stack is closed."""
        account.inner = listener
        self._listen_until(listener, stack)

    def open_account(
        self, token: str, client: Client, stack: AsyncExitStack
    ) -> TokenOwner:
        """Open an account for a token; it is closed with the stack."""
        account = TokenOwner(client, self._models.accounts.node_of(client))
        self._accounts[token] = account
        stack.push_async_callback(self._dismiss, token)
        return account

    def listen_for(
        self,
        account: TokenOwner,
        listener: socket.socket,
        spec: ChildSpec,
        stack: AsyncExitStack,
    ) -> None:
        """Serve a child's own socket until the stack is closed."""
        account.listener, account.path = listener, f"{spec.run_dir}/{SOCKET_NAME}"
        stack.callback(unlink_socket, spec)
        self._listen_until(listener, stack)

    def _listen_until(self, listener: socket.socket, stack: AsyncExitStack) -> None:
        """Serve a child's own listener; its connections end with it (rule 3)."""
        stack.enter_context(self._descriptors.holding(1))
        stack.callback(self._close, listener)
        self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.listeners.add(listener)
        self._listener_set.add(
            listener, partial(self.own, by=listener), partial(self._fail, listener)
        )

    def _fail(self, listener: socket.socket, why: OSError) -> None:
        whose, what = "a child's own", "child"
        if listener is self._listener:
            whose, what = "its", "host"
        text = (
            f"The model endpoint closed {whose} listener: accept failed:"
            f" {why.strerror}; restart the {what}"
        )
        self._models.log.write("WARNING", text, reason=why.strerror)
        self._close(listener)

    def _close(self, listener: socket.socket) -> None:
        """Close a listener, and end its connections."""
        self.listeners.discard(listener)
        self._listener_set.remove(listener)
        listener.close()
        for connection in self._connections:
            if connection.by is listener:
                connection.http.scope.cancel()

    # Hand-over

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return any(one.is_answering for one in self._connections)

    def interrupt(self) -> None:
        """End the requests that are being answered with an error."""
        for connection in self._connections:
            if connection.is_answering:
                connection.answering.cancel()

    def snapshot(self) -> tuple[EndpointState, set[int]]:
        """Return the state of an endpoint at rest, and its descriptors."""
        state = EndpointState(self._listener.fileno(), {}, [])
        fds = {state.listener_fd}
        for token, account in self._accounts.items():
            listener, path = account.listener, os.fsencode(account.path)
            fd = -1 if listener is None else listener.fileno()
            inner = -1 if account.inner is None else account.inner.fileno()
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
        """Restore a child's token and its listeners."""
        left = self.left
        session = child.session
        if left is None or session is None:
            return
        door = left.doors.get(session.client.id)
        if door is None:  # it was started when there was no endpoint
            return
        account = self.open_account(door.token, session.client, stack)
        if door.listener_fd >= 0:
            listener = socket.socket(fileno=door.listener_fd)
            self.listen_for(account, listener, child.spec, stack)
        if door.inner_fd >= 0:
            self._take(account, stack, socket.socket(fileno=door.inner_fd))

    def restore_connections(self) -> None:
        """Restore the connections."""
        left, self.left = self.left, None
        for one in () if left is None else left.connections:
            self.own(socket.socket(fileno=one.fd), one.received, one.token)

    def own(
        self,
        sock: socket.socket,
        ahead: bytes = b"",
        token: str = "",
        by: socket.socket | None = None,
    ) -> None:
        """Serve a connection.

        Args:
            sock: the connection; owned.
            ahead: bytes of a request that the program before has received.
            token: the token that the program before has received; empty for none.
            by: the listener that accepted it; None if the program before did.
        """
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        connection = _Connection(stream, ahead, by)
        self._connections.add(connection)
        self._descriptors.record(DESCRIPTORS)
        account = self._accounts.get(token)
        if account is None:
            if len(self._strangers) >= STRANGERS:
                self._make_room()
            self._strangers[connection] = None
        else:
            account.connections[connection] = None
        self._nursery.start_soon(self._serve, connection, account is None)

    async def _dismiss(self, token: str) -> None:
        """Close an account; wait until its calls are charged."""
        account = self._accounts.pop(token)
        for connection in tuple(account.connections):
            connection.http.scope.cancel()
        with trio.CancelScope(shield=True):  # bounded: a cancelled call ends at once
            for connection in tuple(account.connections):
                await connection.over.wait()

    def _make_room(self) -> None:
        """End the oldest connection without a token, of the listener with most."""
        ((most, _),) = Counter(one.by for one in self._strangers).most_common(1)
        oldest = next(one for one in self._strangers if one.by is most)
        del self._strangers[oldest]
        oldest.http.scope.cancel()

    async def _serve(self, connection: _Connection, is_stranger: bool) -> None:
        http = connection.http
        try:
            with contain_fault(self._models.log, "the endpoint"), http.scope:
                if is_stranger:
                    http.scope.deadline = trio.current_time() + STRANGER_S
                while await self._serve_one(connection) and http.next_cycle():
                    pass
        finally:
            self._strangers.pop(connection, None)
            for account in self._accounts.values():
                account.connections.pop(connection, None)
            self._connections.discard(connection)
            self._descriptors.record(-DESCRIPTORS)
            with trio.CancelScope(shield=True):  # bounded: closes a socket
                await trio.aclose_forcefully(http.stream)
            connection.over.set()

    async def _serve_one(self, connection: _Connection) -> bool:
        """Answer one request; return whether there may be another."""
        http = connection.http
        try:
            request = await http.request(partial(self._admit, connection))
            if request is None:
                return False
            with request.memory:
                await self.gate.wait_open()
                http.begin()
                account = self._account(connection, request.head.token)
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
            return await connection.answer_early(partial(http.answer, 200, b""))
        except RefusedRequestError as why:
            was_sent = await connection.answer_early(partial(http.refuse, why))
            is_last = isinstance(why, MalformedRequestError)
            return was_sent and not is_last and why.status not in (401, 426, 503)
        return True

    async def _admit(self, connection: _Connection, token: str) -> MemoryReservation:
        """Return the reservation of memory for a request, of its token's child."""
        await self.gate.wait_open()
        client = self._account(connection, token).client
        return self._models.budget.reservation(client.ledger)

    def _account(self, connection: _Connection, token: str) -> TokenOwner:
        # A token has 256 random bits: the time of a look-up does not help to guess it.
        account = self._accounts.get(token)
        if account is None:
            text = (
                "no such token; a child finds its own in OPENAI_API_KEY while it runs"
            )
            kind = "invalid_request_error"
            raise RefusedRequestError(401, text, kind, "invalid_api_key")
        if connection not in account.connections:
            held = len(account.connections)
            is_full = held >= PER_CHILD or (held and self._descriptors.excess)
            if is_full and not account.make_room():
                text = f"this child asks on {held} connections; wait for one"
                raise RefusedRequestError(503, text, "overloaded")
            account.connections[connection] = None
            self._strangers.pop(connection, None)
            connection.http.scope.deadline = float("inf")
        return account

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield each descriptor, with a word for it."""
        for listener in self.listeners:
            yield listener.fileno(), "model endpoint"
        for fd in self._listener_set.descriptors():
            yield fd, "listeners of the model endpoint"
        for connection in self._connections:
            yield connection.http.stream.socket.fileno(), "model endpoint connection"


def open_unix_listener(spec: ChildSpec) -> socket.socket:
    """Listen on a child's own socket; its path may be longer than sun_path (unix(7))."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with spec.run_dir_held() as held:
            sock.bind(f"/proc/self/fd/{held}/{SOCKET_NAME}")
        sock.listen(16)
    except BaseException:
        sock.close()
        raise
    return sock


def unlink_socket(spec: ChildSpec) -> None:
    """Remove the endpoint's socket from a child's run directory."""
    # The child may have removed the socket, or its directory.
    with suppress(OSError), spec.run_dir_held() as held:
        os.unlink(SOCKET_NAME, dir_fd=held)


def close_left(left: EndpointState) -> None:
    """Close the descriptors of an endpoint that is not configured any more."""
    fds = [left.listener_fd]
    for door in left.doors.values():
        fds += door.listener_fd, door.inner_fd
    for fd in (*fds, *(one.fd for one in left.connections)):
        if fd >= 0:
            os.close(fd)


def _tcp_listener(port: int) -> socket.socket:
    try:
        # The kernel lowers the backlog to net.core.somaxconn: listen(2).
        return socket.create_server(("127.0.0.1", port), backlog=0xFFFF)
    except OSError as why:
        reason = os.strerror(why.errno or 0)
        text = f"cannot listen on 127.0.0.1:{port}: {reason}"
        advice = "end what has it, or choose another [llm] endpoint_port"
        raise OSError(why.errno, f"{text}; {advice}") from None


@asynccontextmanager
async def open_endpoint(
    models: Models, left: EndpointState | None = None
) -> AsyncIterator[Endpoint]:
    """Open the endpoint on loopback, for the length of the block.

    Args:
        models: the host's models.
        left: the endpoint's state from the program before; None if there was none.
    """
    if left is None:
        listener = _tcp_listener(models.section.endpoint_port)
    else:
        listener = socket.socket(fileno=left.listener_fd)
    account = models.fs.descriptor_account
    with listener, account.holding(DESCRIPTORS * STRANGERS):
        async with trio.open_nursery() as nursery:
            endpoint = Endpoint(models, listener, nursery)
            endpoint.left = left
            if left is not None:
                endpoint.gate.shut()  # until all children are entered, with tokens
            try:
                yield endpoint
            finally:
                nursery.cancel_scope.cancel()
