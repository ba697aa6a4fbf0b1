"""Requests of ``vfs.client.tools`` over HTTP/1.1, with one socket for each.

Only the parts of HTTP that the ToolExec server uses: chunks, trailers.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a listening host to take a connection and a request."""

QUEUE_PAUSE_S = 0.01
"""Pause between tries to connect while the listener's queue is full."""

HEAD_BYTES = 65_536
"""Longest line of a reply."""

HEAD_LINES = 1024
"""Most lines of a head, or of trailers."""

PIECE_BYTES = 65_536


class ToolError(OSError):
    """The host refused a request.

    Attributes:
        status: status of the HTTP reply.
        exit_code: the status with which a shim exits.
    """

    def __init__(self, status: int, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.exit_code = exit_code


class BrokenLineError(ConnectionError):
    """The reply ended before the tool; the tool's end is not known."""


class ToolServer:
    """The address of a ToolExec server, and the token for it.

    Args:
        url: as of ``ToolClient``.
        token: as of ``ToolClient``.

    Attributes:
        token: the token of its requests.

    Raises:
        ToolError: URL or token is missing, or the URL cannot be used.
    """

    def __init__(self, url: str | None, token: str | None) -> None:
        url = url or os.environ.get("AIFO_TOOLEEXEC_URL")
        token = token or os.environ.get("AIFO_TOOLEEXEC_TOKEN")
        if not url or not token:
            missing = "AIFO_TOOLEEXEC_TOKEN" if url else "AIFO_TOOLEEXEC_URL"
            raise ToolError(0, 1, f"no host runs tools here: {missing} is not set")
        self._address = _address(url)
        self.token = token

    def request(
        self,
        method: bytes,
        target: bytes,
        headers: Mapping[bytes, bytes],
        body: bytes,
        timeout_s: float | None = None,
    ) -> HttpReply:
        """Send a request, and return its reply when its head has come.

        Args:
            method: HTTP method.
            target: the path.
            headers: headers beside those of every request.
            body: a form.
            timeout_s: longest wait for each piece of the reply; None for ever.

        Raises:
            BrokenLineError: no reply came.
            OSError: the host cannot be reached.
        """
        lines = [
            b"%b %b HTTP/1.1" % (method, target),
            b"Host: localhost",
            b"Authorization: Bearer " + self.token.encode(),
            b"X-Aifo-Proto: 2",
            b"TE: trailers",
            b"Connection: close",
            b"Content-Type: application/x-www-form-urlencoded",
            b"Content-Length: %d" % len(body),
            *(b"%b: %b" % pair for pair in headers.items()),
        ]
        sock = _connect(self._address)
        try:
            try:  # noqa: SIM105 - contextlib is not light
                sock.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # an early refusal, which is read next
            sock.settimeout(timeout_s)
            return HttpReply(sock)
        except BaseException:
            sock.close()
            raise


class HttpReply:
    """One reply; its head is read by the constructor.

    Args:
        sock: owned.

    Attributes:
        status: its status.
        headers: by lower-case name; trailers are added at the end of the body.
        body: its pieces as they come; a caller may stop and continue later.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""
        self.body = self._pieces()
        self.status = 100
        while self.status // 100 == 1:  # "100 Continue" and its like
            line, *lines = self._block()
            words = line.split(b" ", 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
                raise BrokenLineError("what answers is no HTTP server")
            self.status = int(words[1]) if words[1].isdigit() else 0
            self.headers = _headers(lines)

    def _pieces(self) -> Iterator[bytes]:
        if b"chunked" in self.headers.get(b"transfer-encoding", b"").lower():
            yield from self._chunks()
            return
        left = self.headers.get(b"content-length", b"0")
        size = int(left) if left.isdigit() else 0
        yield from self._exactly(size)

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self._line().split(b";", 1)[0].strip()
            try:
                size = int(line, 16)
            except ValueError:
                raise BrokenLineError("a chunk without a size") from None
            if size == 0:
                break
            yield from self._exactly(size)
            if self._line():
                raise BrokenLineError("a chunk longer than its size")
        self.headers.update(_headers(self._block()))

    def exit_code(self) -> int | None:
        """Return the exit code of the headers and trailers so far."""
        text = self.headers.get(b"x-exit-code", b"")
        return int(text) if text.isdigit() and len(text) <= 3 else None

    def refusal(self) -> ToolError:
        """Return the error of a reply that is a refusal."""
        text = b"".join(self.body).decode("utf-8", "replace").strip()
        return ToolError(self.status, self.exit_code() or 1, text or "refused")

    def close(self) -> None:
        """Close the line."""
        self._sock.close()

    def _more(self) -> None:
        try:
            more = self._sock.recv(PIECE_BYTES)
        except ConnectionResetError:
            more = b""
        if not more:
            raise BrokenLineError("the host closed it")
        self._data += more

    def _line(self) -> bytes:
        while b"\n" not in self._data:
            if len(self._data) > HEAD_BYTES:
                raise BrokenLineError("a line without an end")
            self._more()
        line, _, self._data = self._data.partition(b"\n")
        return line.removesuffix(b"\r")

    def _block(self) -> list[bytes]:
        lines = [self._line()]
        while lines[-1]:
            lines.append(self._line())
            if len(lines) > HEAD_LINES:
                raise BrokenLineError("a head without an end")
        return lines[:-1] or [b""]

    def _exactly(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._data:
                self._more()
            piece, self._data = self._data[:size], self._data[size:]
            size -= len(piece)
            yield piece


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _address(url: str) -> tuple[str, int] | str:
    """Return (host, port), or the path of a socket."""
    if url.startswith("unix://"):
        return url.removeprefix("unix://")
    rest = url.removeprefix("http://").split("/", 1)[0]
    host, colon, port = rest.rpartition(":")
    if rest == url or not colon or not port.isdigit():
        raise ToolError(
            0, 1, f"cannot use {url!r}: neither http://HOST:PORT nor unix://"
        )
    return host.strip("[]"), int(port)


def _connect(address: tuple[str, int] | str) -> socket.socket:
    import socket  # noqa: PLC0415 - see ``tools``, rule 4

    if isinstance(address, tuple):
        return socket.create_connection(address, CONNECT_TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(CONNECT_TIMEOUT_S)
        _connect_unix(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_unix(sock: socket.socket, path: str) -> None:
    """Connect; try again while the listener's queue is full.

    connect(2) on a socket with a timeout returns EAGAIN at once if the queue is full, and
    the kernel has no event for room in it.
    """
    import time  # noqa: PLC0415 - see ``tools``, rule 4

    until_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError as why:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{path!r} takes no connection") from why
            pause(QUEUE_PAUSE_S)


def pause(seconds: float) -> None:
    """Sleep."""
    import select  # noqa: PLC0415 - see ``tools``, rule 4

    select.select([], [], [], seconds)


def encode(form: list[tuple[bytes, bytes]]) -> bytes:
    """Return a form body; every byte that is not a letter or digit is escaped."""
    return b"&".join(name + b"=" + _quoted(value) for name, value in form)


def _quoted(value: bytes) -> bytes:
    return b"".join(_ESCAPED[byte] for byte in value)


_ESCAPED = [
    bytes([byte]) if bytes([byte]).isalnum() else b"%%%02X" % byte
    for byte in range(256)
]
