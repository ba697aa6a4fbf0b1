"""One request and its reply on a connection; ``aio_connection`` is for Trio.

1. Beside ``protocol`` it imports only modules that a bare interpreter has loaded (and
   fcntl, which is small), for every child loads it.
2. One request at a time on a connection, from its first byte to its reply's last:
   ``vfs.client.turn`` (spec T5).
3. After a request that ended in the middle, the meaning of the next bytes is unknown, so
   the connection is given up: a wrong reply would be worse than none.
4. The host drains everything that it is sent (spec W4), so sending all and then reading
   the reply cannot deadlock.
"""

from __future__ import annotations

import os
import stat

from protocol import ClientConnection, ProtocolError, RemoteProtocolError, limits
from protocol import messages as m
from vfs.client.turn import ConnectionTurn, client_errors

TYPE_CHECKING = False  # `typing` alone would double the time of importing this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeAlias

    from vfs.client.errors import Name

    Payload: TypeAlias = bytes | memoryview

RECEIVE_BYTES = 65_536
"""Size of the first read of a reply: any reply line, and small bodies with it."""

MAX_BODY_BYTES = 256 * 1024 * 1024
"""Longest accepted reply body of a request without a size (LIST, LLM_CHAT)."""


_DOOR = ConnectionTurn(shared=True)
"""The turn at FD 3: all clients of this process share it."""


class Endpoint:
    """The child's end of a connection; the base of both clients.

    Args:
        fds: one socket; or a descriptor for replies and one for requests; or these and
            the socket on which ATTACH's descriptors come.  None: ``FSPROXY_FD``, else 3;
            if that is not the door, a connection to ``FSPROXY_SOCKET``.
        shared: other processes may use these descriptors too.  An attached connection
            has one user, and is cheaper without the record lock.
        dialect: 1 or 2; None: ``FSPROXY_VERSION``.

    Attributes:
        top_level: the claim of calls that make none (``FSPROXY_TOP_LEVEL``).
        dialect: as above.

    Raises:
        NotAChildError: a descriptor is not open, or is no connection.
    """

    def __init__(
        self,
        fds: tuple[int, ...] | None = None,
        *,
        shared: bool = True,
        dialect: int | None = None,
    ) -> None:
        self.turn = _DOOR if fds is None else ConnectionTurn(shared=shared)
        self._shared = shared
        if fds is None:
            fds = _own_descriptors()
        kinds = (stat.S_ISSOCK,) if len(fds) == 1 else (stat.S_ISSOCK, stat.S_ISFIFO)
        for fd in fds:
            _check(fd, kinds)
        self._read_fd = fds[0]
        self._write_fd = fds[1] if len(fds) > 1 else fds[0]
        self._attach_fd = fds[2] if len(fds) > 2 else fds[0] if len(fds) == 1 else -1
        self._lost: str | None = None
        self._write_limit = limits.MAX_WRITE_BYTES
        self._commands: frozenset[str] | None = None  # from CAPS
        self.top_level = os.environ.get("FSPROXY_TOP_LEVEL") == "true"
        if dialect is None:
            dialect = 1 if os.environ.get("FSPROXY_VERSION") == "1" else 2
        self.dialect = dialect

    def disconnect(self) -> None:
        """Close an attached connection.

        The child's own connection stays open: it belongs to the process, and its number
        must not be reused by another descriptor.
        """
        if not self._shared and self._read_fd >= 0:
            for fd in {self._read_fd, self._write_fd}:
                os.close(fd)
            self._read_fd = self._write_fd = -1
            self._lost = "the connection was closed by disconnect()"

    def release(self) -> int:
        """Return the descriptor of an attached connection, and forget it.

        Precondition: attached, and not closed.
        """
        fd, self._read_fd, self._write_fd = self._read_fd, -1, -1
        self._lost = "the connection was handed over by release()"
        return fd

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use the connection too."""
        return self._shared

    @property
    def is_lost(self) -> bool:
        """Whether the connection is given up, so that every further request fails."""
        return self._lost is not None

    def _claim(self, top_level: bool | None) -> bool:
        return self.top_level if top_level is None else top_level

    def _begin(
        self, request: m.Request, names: tuple[Name, ...]
    ) -> tuple[ClientConnection, bytes]:
        """Return the state of a new request, and its line.

        Each request gets a new state (0.7 us), so that no state of one request can
        reach the next one, or a forked process.
        """
        if self._lost is not None:
            raise client_errors().connection_lost(self._lost)
        connection = ClientConnection(self.dialect)
        try:
            return connection, connection.send(request)
        except ValueError:
            raise client_errors().unsendable(request, names) from None

    def _learn_write_limit(self, refusal: OSError, size: int) -> bool:
        """Set the cap on WRITE from the host's refusal; return whether it is smaller."""
        limit = getattr(refusal, "limit_bytes", 0)
        if not 0 < limit < size:
            return False
        self._write_limit = limit
        return True


def _own_descriptors() -> tuple[int, ...]:
    """Return FD 3 if it is the door; else this process's connection to the socket."""
    fds = _descriptors(os.environ.get("FSPROXY_FD", "3"))
    path = os.environ.get("FSPROXY_SOCKET")
    if not path:
        return fds
    from vfs.client import door  # noqa: PLC0415 - rule 1

    if door.is_door(fds[-1]):
        return fds
    return (door.own_connection(path, is_taken=_DOOR.is_taken),)


def _descriptors(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if len(numbers) > 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise client_errors().not_a_child(
            f"FSPROXY_FD={text!r} is not one to three numbers"
        )
    return tuple(int(n) for n in numbers)


def _check(fd: int, kinds: tuple[Callable[[int], bool], ...]) -> None:
    try:
        mode = os.fstat(fd).st_mode
    except (OSError, OverflowError):
        raise client_errors().not_a_child(f"descriptor {fd} is not open") from None
    if not any(is_one(mode) for is_one in kinds):
        raise client_errors().not_a_child(f"descriptor {fd} is no connection to a host")


def check_end(connection: ClientConnection) -> None:
    """Raise ``RemoteProtocolError`` if anything follows the reply (spec T4)."""
    try:
        connection.body_received(0)
    except ProtocolError:
        raise RemoteProtocolError("the host sent more than a reply") from None


class BlockingEndpoint(Endpoint):
    """An endpoint that waits in system calls."""

    def __init__(
        self,
        fds: tuple[int, ...] | None = None,
        *,
        shared: bool = True,
        dialect: int | None = None,
    ) -> None:
        super().__init__(fds, shared=shared, dialect=dialect)
        self._abandoned: list[int] = []

    def abandon(self, fileno: int) -> None:
        """Let the next request close a fileno; a finalizer may call this."""
        self._abandoned.append(fileno)

    def _ask(
        self,
        request: m.Request,
        payload: Payload = b"",
        *,
        names: tuple[Name, ...] = (),
        into: memoryview | None = None,
        most: int = MAX_BODY_BYTES,
        passed: list[int] | None = None,
    ) -> tuple[m.Reply, bytes]:
        """Send a request and return its reply with its body.

        Args:
            request: its payload's size is its ``body``.
            payload: the bytes after the line.
            names: the names of the request, for an error.
            into: buffer for the body; then the returned body is empty.
            most: longest body of an answer to this request, bytes.
            passed: a list for the descriptors that come with the reply.
        """
        while self._abandoned:
            token = b"%d" % self._abandoned.pop()
            self._exchange(m.Close(token), b"", (), None, 0, None)
        reply, body = self._exchange(request, payload, names, into, most, passed)
        if not reply.ok:
            raise client_errors().from_reply(reply.text, *names)
        return reply, body

    def _exchange(
        self,
        request: m.Request,
        payload: Payload,
        names: tuple[Name, ...],
        into: memoryview | None,
        most: int,
        passed: list[int] | None,
    ) -> tuple[m.Reply, bytes]:
        connection, line = self._begin(request, names)
        fd = self._write_fd
        self.turn.take(fd)
        usable = False
        try:
            try:
                self._send(line, payload)
            except ConnectionError as why:
                reply = self._last_reply(connection, why)
            else:
                reply = self._receive_line(connection, passed)
            body = b""
            if reply.body:
                body = self._receive_body(connection, reply.body, into, most)
            check_end(connection)
            usable = True
        except ProtocolError as why:
            self._lost = f"{why}; the connection is given up"
            raise client_errors().connection_lost(self._lost) from why
        except (EOFError, ConnectionError) as why:
            # Other processes on the connection find this out themselves: no mark needed.
            usable = True
            self._lost = f"the host is gone: {why}"
            raise client_errors().connection_lost(self._lost) from why
        finally:
            if not usable and self._lost is None:
                self._lost = "a request was interrupted; the connection is given up"
            self.turn.give_back(fd, usable=usable)
        return reply, body

    def _send(self, line: bytes, payload: Payload) -> None:
        fd = self._write_fd
        rest: list[Payload] = [line, payload] if payload else [line]
        while True:
            try:
                sent = os.writev(fd, rest)
            except BlockingIOError:
                _rare().wait(fd, writable=True)
                continue
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if not rest:
                return
            rest[0] = memoryview(rest[0])[sent:]

    def _receive_line(
        self, connection: ClientConnection, passed: list[int] | None
    ) -> m.Reply:
        by_message = self._attach_fd == self._read_fd
        while True:
            if passed is not None and by_message:
                piece = _rare().receive_passed(self._read_fd, RECEIVE_BYTES, passed)
            else:
                piece = self._receive(RECEIVE_BYTES)
            if not piece:
                raise EOFError("it closed the connection")
            connection.receive_data(piece)
            reply = connection.next_reply()
            if reply is not None:
                break
        if passed is not None and reply.ok:
            if not by_message:
                # It was sent before the reply, with one byte.
                _rare().receive_passed(self._attach_fd, 1, passed)
            if not passed:
                raise RemoteProtocolError("the host attached nothing")
        return reply

    def _last_reply(
        self, connection: ClientConnection, why: ConnectionError
    ) -> m.Reply:
        """Return the reply that the host sent before it closed (ATTACH by socket).

        Raises:
            ConnectionError: there is none.
        """
        try:
            return self._receive_line(connection, None)
        except (EOFError, ConnectionError):
            raise why from None

    def _receive_body(
        self,
        connection: ClientConnection,
        size: int,
        into: memoryview | None,
        most: int,
    ) -> bytes:
        if size > most:
            raise RemoteProtocolError(
                f"the host sends {size} bytes, at most {most} fit"
            )
        head = connection.take_body()
        got = len(head)
        if into is None and got == size:
            return head
        view = memoryview(bytearray(size)) if into is None else into[:size]
        view[:got] = head
        while got < size:
            try:
                count = os.readv(self._read_fd, [view[got:]])
            except BlockingIOError:
                _rare().wait(self._read_fd, writable=False)
                continue
            if not count:
                raise EOFError("it closed the connection inside a reply")
            connection.body_received(count)
            got += count
        return b"" if into is not None else bytes(view)

    def _receive(self, size: int) -> bytes:
        while True:
            try:
                return os.read(self._read_fd, size)
            except BlockingIOError:
                _rare().wait(self._read_fd, writable=False)


def _rare() -> ModuleType:
    """Import and return ``vfs.client.waiting``, which few requests need."""
    import vfs.client.waiting  # noqa: PLC0415 - rule 1

    return vfs.client.waiting
