"""One end of an FS Proxy connection, sans-IO: bytes in, messages out, and back.

1. The caller does the I/O of ``HostConnection`` and ``ClientConnection``: it feeds
   ``receive_data`` and drains ``next_message`` until it gives None; ``next_reply`` once
   for each request sent.
2. After a message with a body, the caller takes its bytes with ``take_body``, and reports
   bytes that it received directly into its own memory with ``body_received``.
3. The host's end answers everything that a peer sends: each line gives exactly one
   message (spec F3), also a line that is too long (spec F4).
4. A connection keeps the messages of short OPEN, READ and WRITE lines, which come again
   and again.  Parsing depends on the line only, so a kept message equals a new one.
"""

from protocol import messages as m
from protocol.commands import BY_MESSAGE, error, is_number
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.grammar import format_request, parse_request
from protocol.limits import (
    MAX_LINE_BYTES,
    MAX_REPLY_LINE_BYTES,
    MEMO_LINE_BYTES,
    MEMO_LINES,
)

_TOO_LONG = m.Refusal(error(b"request line too long"))


class HostConnection:
    """The host's end: request bytes in, requests out.

    Args:
        dialect: 1 or 2; fixed when the child is spawned (spec O5).

    Attributes:
        body_left: payload bytes of the last message that have not been taken yet.
        idle: the connection holds no bytes: the next byte starts a line, unless a body
            is left.
        pending: received bytes may hold another message; ``next_message`` looks.
    """

    __slots__ = (
        "_buffer",
        "_dialect",
        "_lines",
        "_skipping",
        "body_left",
        "idle",
        "pending",
    )

    def __init__(self, dialect: int = 2) -> None:
        self._buffer = ReceiveBuffer()
        self._dialect = dialect
        self._lines: dict[bytes, m.Request] = {}  # those that are kept, without LF
        self._skipping = False
        self.idle = True
        self.body_left = 0
        self.pending = False

    def receive_data(self, data: bytes) -> m.Request | None:
        """Add received bytes and return the first message, as ``next_message`` does."""
        if self.idle and not self.body_left:
            end = data.find(b"\n")
            if 0 <= end <= MAX_LINE_BYTES:
                # A line that was received whole needs no buffer.
                line = data[:end]
                end += 1
                if end < len(data):
                    self._buffer.append(data, end)
                    self.pending = True
                    self.idle = False
                message = self._lines.get(line) or self._parse(line)
                self.body_left = message.body
                return message
        self._buffer.append(data)
        self.idle = False
        if self.body_left:
            self.pending = True
            return None
        return self.next_message()

    def next_message(self) -> m.Request | None:
        """Return the next request, or None until more bytes come.

        Raises:
            LocalProtocolError: the body of the last message has not been taken.
        """
        if self.body_left:
            raise LocalProtocolError(f"{self.body_left} body bytes are not taken yet")
        buffer = self._buffer
        message: m.Request | None = None
        if not self._skipping or buffer.skip_line():
            self._skipping = False
            try:
                line = buffer.take_line(MAX_LINE_BYTES)
            except OverflowError:
                self._skipping = True
                message = _TOO_LONG
            else:
                if line is not None:
                    message = self._lines.get(line) or self._parse(line)
                    self.body_left = message.body
        self._settle()
        return message

    def _parse(self, line: bytes) -> m.Request:
        message = parse_request(line, self._dialect)
        if message.recurs and len(line) <= MEMO_LINE_BYTES:
            if len(self._lines) >= MEMO_LINES:
                self._lines.clear()
            self._lines[line] = message
        return message

    def _settle(self) -> None:
        buffer = self._buffer
        self.pending = buffer.at < buffer.end
        self.idle = not (self.pending or self._skipping or buffer)

    def unread(self) -> tuple[bytes, bool]:
        """Return the received bytes that are in no message yet.

        Returns:
            (the bytes, whether they belong to a line that was too long).
        """
        return self._buffer.peek(), self._skipping

    def put_back(self, data: bytes, *, skipping: bool = False) -> None:
        """Continue from the unread bytes of an earlier end of the same connection.

        Args:
            data: from ``unread``.
            skipping: from ``unread``.

        Precondition: nothing was received yet.
        """
        self._skipping = skipping
        self._buffer.append(data)
        self._settle()

    def take_body(self) -> bytes:
        """Return the received bytes of the body; empty when more must come."""
        if not self.pending:
            return b""
        buffer = self._buffer
        piece = buffer.take(self.body_left)
        self.body_left -= len(piece)
        self.pending = buffer.at < buffer.end
        self.idle = not self.pending  # a body never follows a part of a line
        return piece

    def body_received(self, count: int) -> None:
        """Report ``count`` body bytes that the caller received into its own memory.

        Raises:
            LocalProtocolError: fewer bytes are left, or received bytes wait here.
        """
        if count > self.body_left or not self.idle:
            raise LocalProtocolError(f"{count} bytes are not the body's next ones")
        self.body_left -= count

    def extend_body(self, count: int) -> None:
        """Make the body ``count`` bytes longer than its line declared (spec L1)."""
        self.body_left += count

    @property
    def is_mid_message(self) -> bool:
        """Whether a message has begun and is not complete (spec F8)."""
        return bool(self.body_left) or not self.idle


class ClientConnection:
    """The child's end: requests out as bytes, replies in.

    Args:
        dialect: the dialect that the host speaks with this child.
    """

    __slots__ = ("_body_left", "_buffer", "_dialect", "_waiting")

    def __init__(self, dialect: int = 2) -> None:
        self._buffer = ReceiveBuffer()
        self._dialect = dialect
        # A list, for `collections` costs a child more than all of this module.
        self._waiting: list[str] = []
        self._body_left = 0

    def send(self, request: m.Request) -> bytes:
        """Return the request line to send; its payload follows it unchanged.

        Raises:
            ValueError: see ``grammar.format_request``.
        """
        line = format_request(request, self._dialect)
        self._waiting.append(BY_MESSAGE[type(request)].reply)
        return line

    def receive_data(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer.append(data)

    def next_reply(self) -> m.Reply | None:
        """Return the next reply, or None until more bytes come.

        Raises:
            LocalProtocolError: no request waits, or the last body has not been taken.
            RemoteProtocolError: the line is not a reply to the request that waits.
        """
        if self._body_left:
            raise LocalProtocolError(f"{self._body_left} body bytes are not taken yet")
        if not self._waiting:
            raise LocalProtocolError("no request waits for a reply")
        try:
            line = self._buffer.take_line(MAX_REPLY_LINE_BYTES)
        except OverflowError:
            raise RemoteProtocolError("the host's reply line is too long") from None
        if line is None:
            return None
        reply = _parse_reply(line, self._waiting.pop(0))
        self._body_left = reply.body
        return reply

    def take_body(self) -> bytes:
        """Return the received bytes of the reply's body."""
        piece = self._buffer.take(self._body_left)
        self._body_left -= len(piece)
        return piece

    def body_received(self, count: int) -> None:
        """Report ``count`` body bytes that the caller received into its own memory.

        Raises:
            LocalProtocolError: fewer bytes are left, or received bytes wait here.
        """
        if count > self._body_left or self._buffer:
            raise LocalProtocolError(f"{count} bytes are not the body's next ones")
        self._body_left -= count


def _parse_reply(line: bytes, kind: str) -> m.Reply:
    status, _, text = line.partition(b" ")
    if status == b"ERROR":
        return m.Reply(False, text)
    if status != b"OK":
        raise RemoteProtocolError(f"not a reply: {line[:80]!r}")
    if kind in ("empty", "text"):
        return m.Reply(True, text)
    token = text.partition(b" ")[0]
    if not is_number(token):
        raise RemoteProtocolError(f"the reply lacks a number: {line[:80]!r}")
    number = int(token)
    body = number if kind in ("body", "chat") else 0
    return m.Reply(True, text, number, body)


class ReceiveBuffer:
    """Pieces in, lines and payload bytes out, in O(n).

    1. A byte is copied at most twice, for pieces of any size: once into the
       partial line it belongs to, once out as that line.  A line that lies whole in one
       piece is cut from it directly, and so are payload bytes.
    2. A byte is searched for LF once: the search continues where it stopped.
    3. At most one line's limit is held, plus the piece received last.

    Attributes:
        at: offset of the next unread byte in the piece received last.
        end: length of that piece.
    """

    __slots__ = ("_partial", "_piece", "at", "end")

    def __init__(self) -> None:
        self._piece = b""
        self.at = 0
        self.end = 0
        self._partial = bytearray()

    def __len__(self) -> int:
        """Return the number of held bytes."""
        return len(self._partial) + self.end - self.at

    def peek(self) -> bytes:
        """Return the held bytes, and keep them."""
        return bytes(self._partial) + self._piece[self.at :]

    def append(self, piece: bytes, start: int = 0) -> None:
        """Add a received piece, from ``start`` on."""
        if self.at < self.end:
            # Only a caller that feeds before it has drained comes here.
            piece = self._piece[self.at :] + piece[start:]
            start = 0
        self._piece = piece
        self.at = start
        self.end = len(piece)

    def take_line(self, limit: int) -> bytes | None:
        """Cut the next line off, without its LF.

        Args:
            limit: most bytes that the line may have.

        Returns:
            The line, or None while its LF has not come.

        Raises:
            OverflowError: there are more than ``limit`` bytes and no LF among them;
                they are dropped, and the caller continues with ``skip_line``.
        """
        piece = self._piece
        start = self.at
        end = piece.find(b"\n", start)
        partial = self._partial
        if end < 0:
            self.at = len(piece)
            if len(partial) + len(piece) - start > limit:
                partial.clear()
                raise OverflowError
            partial += memoryview(piece)[start:]
            return None
        if len(partial) + end - start > limit:
            partial.clear()
            self.at = end
            raise OverflowError
        self.at = end + 1
        if not partial:
            return piece[start:end]
        partial += memoryview(piece)[start:end]
        line = bytes(partial)
        partial.clear()
        return line

    def skip_line(self) -> bool:
        """Drop bytes up to and including LF; return whether the LF was among them."""
        end = self._piece.find(b"\n", self.at)
        self.at = len(self._piece) if end < 0 else end + 1
        return end >= 0

    def take(self, limit: int) -> bytes:
        """Remove and return up to ``limit`` payload bytes; empty when there are none."""
        start = self.at
        piece = self._piece[start : start + limit]
        self.at = start + len(piece)
        return piece
