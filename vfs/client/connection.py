"""One request and its reply on a child's connection.

``vfs.client`` builds the requests and reads the answers; here is what happens between.
``vfs.client.aio`` has the same in Trio's words and shares ``Endpoint``.

Rules of this file.

1. Beside ``protocol`` it imports only what a bare interpreter has loaded already (and
   fcntl, which is small): this is what every child pays for.
2. One request at a time on a connection, from its first byte to its reply's last:
   ``vfs.client.turn`` (spec T5).
3. A request that ended in the middle leaves a stream whose next bytes nobody can name.
   The connection is then given up for good: a wrong reply is worse than none.
4. The host drains whatever it is sent (spec W4), so to send everything and then to
   read the reply cannot deadlock.
"""

from __future__ import annotations

import os
import stat

from protocol import ClientConnection, ProtocolError, RemoteProtocolError, limits
from protocol import messages as m
from vfs.client.turn import Turn, client_errors

TYPE_CHECKING = False  # `typing` alone would double the time of importing this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeAlias

    from vfs.client.errors import Name

    Payload: TypeAlias = bytes | memoryview

RECEIVE_BYTES = 65_536
"""First look at a reply: holds every reply line, and small bodies with it."""

MAX_BODY_BYTES = 256 * 1024 * 1024
"""Longest reply body accepted where the request names no size (LIST, LLM_CHAT)."""


_DOOR = Turn(shared=True)
"""A process has one door and so one turn at it, however many clients it makes."""


class Endpoint:
    """The child's end of a connection, as both clients know it.

    Args:
        fds: one socket; or the descriptors that replies are read from and requests are
            written to; or these and the socket that ATTACH's descriptors come by.
            None: what the environment says (``FSPROXY_FD``, else 3), or, where that is
            another thing, a connection to ``FSPROXY_SOCKET``.
        shared: other processes may use these descriptors too.  An attached connection
            has one user, and is cheaper without the record lock.
        dialect: 1 or 2; None: what the environment says (``FSPROXY_VERSION``).

    Attributes:
        top_level: the claim where a call makes none (``FSPROXY_TOP_LEVEL``).
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
        self._turn = _DOOR if fds is None else Turn(shared=shared)
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
        self._commands: frozenset[str] | None = None  # once CAPS was asked for them
        self.top_level = os.environ.get("FSPROXY_TOP_LEVEL") == "true"
        if dialect is None:
            dialect = 1 if os.environ.get("FSPROXY_VERSION") == "1" else 2
        self.dialect = dialect

    def disconnect(self) -> None:
        """Close an attached connection.

        The child's own one stays open: it belongs to the process, and a later
        descriptor of its number must not be taken for it.
        """
        if not self._shared and self._read_fd >= 0:
            for fd in {self._read_fd, self._write_fd}:
                os.close(fd)
            self._read_fd = self._write_fd = -1
            self._lost = "the connection was closed by disconnect()"

    def release(self) -> int:
        """Hand an attached connection over: return its descriptor and forget it.

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
        """Whether it is given up, so that every further request fails."""
        return self._lost is not None

    def _claim(self, top_level: bool | None) -> bool:
        return self.top_level if top_level is None else top_level

    def _begin(
        self, request: m.Request, names: tuple[Name, ...]
    ) -> tuple[ClientConnection, bytes]:
        """Return the state of a new request, and its line.

        A new state for each (0.7 us), so that nothing of one request can reach the
        next one, or a forked process.
        """
        if self._lost is not None:
            raise client_errors().lost(self._lost)
        connection = ClientConnection(self.dialect)
        try:
            return connection, connection.send(request)
        except ValueError:
            raise client_errors().unsendable(request, names) from None

    def _learn_write_limit(self, refusal: OSError, size: int) -> bool:
        """Take the host's cap on WRITE from its refusal; tell whether it helps."""
        limit = getattr(refusal, "limit_bytes", 0)
        if not 0 < limit < size:
            return False
        self._write_limit = limit
        return True


def _own_descriptors() -> tuple[int, ...]:
    """Return FD 3 as the host has given it; else this process's way to its socket."""
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
        """Have a fileno closed by the next request; a finalizer may call it."""
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
            payload: what follows the line.
            names: what it is about, for an error.
            into: where the body goes, in place of what is returned.
            most: longest body that is an answer to this request, bytes.
            passed: takes the descriptors that come with the reply.
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
        self._turn.take(fd)
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
            raise client_errors().lost(self._lost) from why
        except (EOFError, ConnectionError) as why:
            # A client that shares the connection finds that out alone: no mark needed.
            usable = True
            self._lost = f"the host is gone: {why}"
            raise client_errors().lost(self._lost) from why
        finally:
            if not usable and self._lost is None:
                self._lost = "a request was interrupted; the connection is given up"
            self._turn.give_back(fd, usable=usable)
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
                # Sent before the reply, with one byte to carry it.
                _rare().receive_passed(self._attach_fd, 1, passed)
            if not passed:
                raise RemoteProtocolError("the host attached nothing")
        return reply

    def _last_reply(
        self, connection: ClientConnection, why: ConnectionError
    ) -> m.Reply:
        """Return what the host said before it closed a connection (ATTACH by socket).

        Raises:
            ConnectionError: it said nothing.
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
    """Return ``vfs.client.waiting``: waiting on non-blocking descriptors, and ATTACH."""
    import vfs.client.waiting  # noqa: PLC0415 - rule 1

    return vfs.client.waiting
