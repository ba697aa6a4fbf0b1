"""A small ToolExec server for tests of clients: real tools, and lines that break.

    with tool_server() as server:
        ToolClient(server.url, server.token).run("sh", "-c", "echo hello")

Protocol version 2 on h11 and threads: /exec, /signal, /notify and `GET
/exec/ID?from=N`, with faults on demand.
"""

import os
import signal
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import h11

TOKEN = "0123456789abcdef"  # noqa: S105 - of a test
"""Whom the server knows."""


@dataclass
class Asked:
    """One request as it came.

    Attributes:
        method: of HTTP.
        target: path and query.
        headers: by lower-case name.
        form: in order.
    """

    method: str
    target: str
    headers: dict[str, str]
    form: list[tuple[bytes, bytes]]

    def all(self, key: bytes) -> list[bytes]:
        """Return every value of a field, in order."""
        return [value for name, value in self.form if name == key]


@dataclass
class Faults:
    """The failures, and their numbers.

    Attributes:
        cut_after: the line is cut after so many bytes of output, for each entry once.
        cut_head: so many times the line is cut before the head.
        no_trailer: the exit code is left out.
        trailer: how the name of the exit code is written, in whatever case.
        refuse: answered instead: (status, body, exit code).
        busy: so many times who asks for a tool again is told that the host is busy.
    """

    cut_after: list[int] = field(default_factory=list)
    cut_head: int = 0
    no_trailer: bool = False
    trailer: str = "X-Exit-Code"
    refuse: tuple[int, bytes, int] | None = None
    busy: int = 0


class Tool:
    """One running tool and all that it printed."""

    def __init__(self, command: list[bytes], cwd: bytes) -> None:
        self.output = b""
        self.code: int | None = None
        self.changed = threading.Condition()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            while data := os.read(stdout.fileno(), 65_536):
                with self.changed:
                    self.output += data
                    self.changed.notify_all()
        status = self.process.wait()
        with self.changed:
            self.code = 128 - status if status < 0 else status
            self.changed.notify_all()

    def more(self, offset: int) -> bytes:
        """Wait for output after an offset; empty at the end."""
        with self.changed:
            self.changed.wait_for(
                lambda: len(self.output) > offset or self.code is not None
            )
            return self.output[offset:]

    def signal(self, name: str) -> bool:
        """Signal its group; tell whether it ran."""
        with self.changed:
            if self.code is not None:
                return False
            try:
                os.killpg(self.process.pid, getattr(signal, f"SIG{name}"))
            except ProcessLookupError:  # it has just ended
                return False
            return True


class ToolServer:
    """The server; see `tool_server`.

    Attributes:
        url: where it listens.
        asked: every request so far.
        faults: those that it is to have.
        tools: by execution id.
    """

    def __init__(self, listener: socket.socket, url: str) -> None:
        self.url = url
        self.token = TOKEN
        self.asked: list[Asked] = []
        self.faults = Faults()
        self.tools: dict[str, Tool] = {}
        self.changed = threading.Condition()
        self._listener = listener
        self._threads: list[threading.Thread] = []

    def wait_asked(self, count: int) -> None:
        """Wait until so many requests have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 10.0)

    def accept(self) -> None:
        """Take connections until the listener is closed."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for tool in self.tools.values():
            tool.signal("KILL")
            tool.thread.join()
        for thread in self._threads:
            thread.join()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(ConnectionError):
            conn = h11.Connection(h11.SERVER)
            request, body = None, b""
            while True:
                event = conn.next_event()
                if event is h11.NEED_DATA:
                    conn.receive_data(sock.recv(65_536))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    break
            if request is not None:
                self._answer(sock, conn, _asked(request, body))

    def _answer(self, sock: socket.socket, conn: h11.Connection, asked: Asked) -> None:
        with self.changed:
            self.asked.append(asked)
            self.changed.notify_all()
        path, _, query = asked.target.partition("?")
        if asked.headers.get("authorization") != f"Bearer {self.token}":
            _say(sock, conn, 401, b"unauthorized\n")
        elif self.faults.refuse is not None:
            _say(sock, conn, *self.faults.refuse)
        elif path == "/exec":
            self._exec(sock, conn, asked)
        elif path == "/signal":
            tool = self.tools.get(asked.all(b"exec_id")[0].decode())
            name = asked.all(b"signal")[0].decode().upper().removeprefix("SIG")
            done = tool is not None and tool.signal(name)
            _say(sock, conn, 204 if done else 404, b"" if done else b"not found\n")
        elif path == "/notify":
            said = b"|".join(value for _, value in asked.form) + b"\n"
            _say(sock, conn, 200, said, 3)
        elif path.removeprefix("/exec/") in self.tools:
            if self.faults.busy:
                self.faults.busy -= 1
                _say(sock, conn, 503, b"busy\n")
                return
            offset = int(urllib.parse.parse_qs(query)["from"][0])
            self._stream(sock, conn, path.removeprefix("/exec/"), offset)
        else:
            _say(sock, conn, 404, b"not found\n")

    def _exec(self, sock: socket.socket, conn: h11.Connection, asked: Asked) -> None:
        name = asked.headers.get("x-aifo-exec-id", "unnamed")
        command = [asked.all(b"tool")[-1], *asked.all(b"arg")]
        cwd = asked.all(b"cwd")[-1]
        self.tools[name] = Tool(command, cwd)
        if self.faults.cut_head:
            self.faults.cut_head -= 1
            return
        self._stream(sock, conn, name, 0)

    def _stream(
        self, sock: socket.socket, conn: h11.Connection, name: str, offset: int
    ) -> None:
        tool = self.tools[name]
        head = [("Transfer-Encoding", "chunked"), ("Trailer", "X-Exit-Code")]
        head += [("X-Exec-Id", name), ("Connection", "close")]
        sock.sendall(conn.send(h11.Response(status_code=200, headers=head)) or b"")
        while data := tool.more(offset):
            cut = self.faults.cut_after[0] if self.faults.cut_after else None
            if cut is not None and offset + len(data) >= cut:
                del self.faults.cut_after[0]
                piece = data[: max(0, cut - offset)]
                framed = conn.send(h11.Data(data + b"lost")) or b""
                sock.sendall(framed[: framed.index(b"\r\n") + 2 + len(piece)])
                return
            sock.sendall(conn.send(h11.Data(data)) or b"")
            offset += len(data)
        trailers = (
            [] if self.faults.no_trailer else [(self.faults.trailer, str(tool.code))]
        )
        sock.sendall(conn.send(h11.EndOfMessage(headers=trailers)) or b"")


def _asked(request: h11.Request, body: bytes) -> Asked:
    headers = {n.decode(): v.decode("latin-1") for n, v in request.headers}
    pairs = (pair.partition(b"=") for pair in body.split(b"&") if pair)
    form = [
        (name, urllib.parse.unquote_to_bytes(value.replace(b"+", b" ")))
        for name, _, value in pairs
    ]
    return Asked(request.method.decode(), request.target.decode(), headers, form)


def _say(
    sock: socket.socket, conn: h11.Connection, status: int, body: bytes, code: int = 86
) -> None:
    headers = [("Connection", "close")]
    if status != 204:
        headers += [("Content-Length", str(len(body))), ("X-Exit-Code", str(code))]
    data = conn.send(h11.Response(status_code=status, headers=headers)) or b""
    if body:
        data += conn.send(h11.Data(body)) or b""
    sock.sendall(data + (conn.send(h11.EndOfMessage()) or b""))


@contextmanager
def tool_server(directory: Path | None = None) -> Iterator[ToolServer]:
    """Serve on TCP, or on a unix socket in a directory."""
    if directory is None:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/exec"
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "toolexec.sock"))
        listener.listen()
        url = f"unix://{directory}/toolexec.sock"
    server = ToolServer(listener, url)
    thread = threading.Thread(target=server.accept)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
