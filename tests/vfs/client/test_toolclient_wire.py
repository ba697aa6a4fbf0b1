"""A request of the tool client while too many others wait to be taken."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vfs.client import tools_wire
from vfs.client.tools_wire import ToolServer


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A listener whose queue is full."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.bind(str(tmp_path / "sock"))
        sock.listen(1)
        while True:
            with socket.socket(socket.AF_UNIX) as waiting:  # stays there, and is closed
                waiting.setblocking(False)
                if waiting.connect_ex(str(tmp_path / "sock")) == errno.EAGAIN:
                    break
        yield sock


def ask(where: Path) -> int:
    """Send a request, and return the status of the reply."""
    endpoint = ToolServer(f"unix://{where}/sock", "t")
    reply = endpoint.request(b"GET", b"/healthz", {}, b"", 10.0)
    try:
        return reply.status
    finally:
        reply.close()


def test_a_full_queue_is_waited_for(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    # It does not pause before it was refused.
    monkeypatch.setattr(tools_wire, "pause", lambda _: refused.set())

    def serve() -> None:
        assert refused.wait(60)
        with ExitStack() as stack:
            while True:
                line = stack.enter_context(listener.accept()[0])
                line.settimeout(10)
                if line.recv(65_536):  # those before it say nothing, and are gone
                    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    return

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    assert ask(tmp_path) == 200
    server.join(10)


def test_it_is_not_waited_for_without_end(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_wire, "CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match="takes no connection"):
        ask(tmp_path)
    assert listener.fileno() >= 0
