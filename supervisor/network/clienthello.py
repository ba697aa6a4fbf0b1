"""The name that a TLS connection is for, read from its ClientHello (spec NET7).

1. Nothing is decrypted, and no byte is lost: the bytes read are kept to be sent on.
2. A message may lie in any number of records (RFC 8446, 5.1) and segments.
3. An ambiguous message is refused: a server might read it in another way.
"""

from __future__ import annotations

import struct

from supervisor.network.hosts import HostError, parse_name
from supervisor.network.reasons import Reason

MAX_HELLO_BYTES = 65_536
"""Bytes until a ClientHello is complete; those with post-quantum keys take 2 KiB."""
TIMEOUT_S = 10.0
"""How long a client may take to send one."""

_RECORD = struct.Struct("!BBBH")  # type, version (major, minor), length
_HANDSHAKE = 22
_MAX_RECORD_BYTES = 16_384  # of a record in the clear
_CLIENT_HELLO = 1
_MESSAGE_HEADER_BYTES = 4  # type, 24 bits of length
_VERSION_AND_RANDOM_BYTES = 34
_MAX_SESSION_ID_BYTES = 32
_SERVER_NAME = 0
_HOST_NAME = 0


class HelloError(Exception):
    """A connection that does not begin with a ClientHello for one name.

    Attributes:
        reason: why it is refused.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class HelloReader:
    """Reads the first message of a connection.

    Attributes:
        held: all that was received, to be sent on once the name is found to be granted.
    """

    def __init__(self) -> None:
        self.held = bytearray()
        self._at = 0  # where in `held` the next record begins
        self._message = bytearray()

    def receive(self, data: bytes) -> str | None:
        """Add what a client sent.

        Args:
            data: the bytes of one segment; empty at the end of the stream.

        Returns:
            The name that the ClientHello asks for, as `parse_name` returns it; None
            while the ClientHello is not complete.

        Raises:
            HelloError: it never will be, or it asks for no name or another's.
        """
        self.held += data
        while self._take_record():
            size = self._message_size()
            if size is not None and len(self._message) > size:
                raise HelloError(Reason.TLS_NO_HELLO)  # a second message behind it
            if size is not None and len(self._message) == size:
                return server_name(bytes(self._message[_MESSAGE_HEADER_BYTES:]))
        if not data:
            raise HelloError(Reason.TLS_NO_HELLO)
        return None

    def _take_record(self) -> bool:
        """Move the next record into the message; tell whether all of it was there."""
        left = len(self.held) - self._at
        if left and self.held[self._at] != _HANDSHAKE:
            raise HelloError(Reason.TLS_NO_HELLO)
        if left < _RECORD.size:
            return False
        _, major, _, size = _RECORD.unpack_from(self.held, self._at)
        start = self._at + _RECORD.size
        if major != 3 or not 0 < size <= _MAX_RECORD_BYTES:
            raise HelloError(Reason.TLS_NO_HELLO)
        if start + size > MAX_HELLO_BYTES:
            raise HelloError(Reason.TLS_NO_HELLO)
        if len(self.held) < start + size:
            return False
        self._message += self.held[start : start + size]
        self._at = start + size
        return True

    def _message_size(self) -> int | None:
        """Return how long the message is with its header; None if that has not come."""
        if self._message[0] != _CLIENT_HELLO:
            raise HelloError(Reason.TLS_NO_HELLO)
        if len(self._message) < _MESSAGE_HEADER_BYTES:
            return None
        size = int.from_bytes(self._message[1:_MESSAGE_HEADER_BYTES], "big")
        return _MESSAGE_HEADER_BYTES + size


class _Fields:
    """Reads vectors with a length before them (RFC 8446, 3.4)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        start = self._at
        self._at += size
        if self._at > len(self._data):
            raise HelloError(Reason.TLS_NO_HELLO)
        return self._data[start : self._at]

    def number(self, size: int) -> int:
        """Return the next number of some bytes."""
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Return the next vector; its length takes some bytes."""
        return self.take(self.number(size))

    def end(self) -> None:
        """Refuse what follows the last field."""
        if self:
            raise HelloError(Reason.TLS_NO_HELLO)


def server_name(hello: bytes) -> str:
    """Return the one name that the body of a ClientHello asks for.

    Raises:
        HelloError: it is none, or asks for none or for several.
    """
    fields = _Fields(hello)
    fields.take(_VERSION_AND_RANDOM_BYTES)
    session_id = fields.vector(1)
    ciphers = fields.vector(2)
    compressions = fields.vector(1)
    is_odd = len(session_id) > _MAX_SESSION_ID_BYTES or len(ciphers) % 2
    if is_odd or not ciphers or not compressions:
        raise HelloError(Reason.TLS_NO_HELLO)
    if not fields:
        raise HelloError(Reason.TLS_NO_SNI)  # without extensions, as before TLS 1.2
    extensions = _Fields(fields.vector(2))
    fields.end()
    lists = []
    while extensions:
        kind, data = extensions.number(2), extensions.vector(2)
        if kind == _SERVER_NAME:
            lists.append(data)
    if not lists:
        raise HelloError(Reason.TLS_NO_SNI)
    if len(lists) > 1:
        raise HelloError(Reason.TLS_OTHER_NAME)
    return _one_name(lists[0])


def _one_name(extension: bytes) -> str:
    """Return the name in a `server_name` extension (RFC 6066, 3)."""
    fields = _Fields(extension)
    names = _Fields(fields.vector(2))
    fields.end()
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or names:
        raise HelloError(Reason.TLS_OTHER_NAME)
    try:
        return parse_name(name.decode("ascii"))
    except (UnicodeDecodeError, HostError):
        raise HelloError(Reason.TLS_OTHER_NAME) from None
