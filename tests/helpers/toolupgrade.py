"""A daemon that runs tools and is replaced: the test's side, with a child's token.

`opened_tools`, a daemon with one child that says its token; `Tools`, requests with
that, on plain sockets; `rest`, what is left of a reply.
"""

import json
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.command import TIMEOUT_S
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import assert_clean, replace_daemon
from tests.helpers.toolscene import Reply, parse

TELL = (
    'printf "%s %s\\n" "$AIFO_TOOLEEXEC_URL" "$AIFO_TOOLEEXEC_TOKEN"; exec sleep 1000'
)

CONFIG = """
[toolexec]
log_limit = "{log_limit}"
listen = {listen}
{more}
[sidecar.tools]
kind = "c-cpp"
allow = ["sh", "sleep"]
workspace = "{where}"
{sidecar}
[policy.p]
sandbox = "none"
{policy}
[child.one]
command = {command}
policy = "p"
cwd = "{where}"
"""


class Tools:
    """A daemon with a child, whose token the test uses."""

    def __init__(self, running: Daemon, where: Path, child: str = "one") -> None:
        self.running = running
        self.where = where
        said = running.wait(lambda: running.log(child).decode())
        self.url, self.token = said.splitlines()[0].split()

    def connect(self) -> socket.socket:
        """Connect as the child would."""
        if self.url.startswith("unix://"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(TIMEOUT_S)
            sock.connect(self.url.removeprefix("unix://"))
            return sock
        port = int(self.url.rpartition(":")[2].partition("/")[0])
        return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)

    def head(self, line: str, length: int, proto: int, *more: str) -> bytes:
        """Return the head of a request."""
        lines = [
            line,
            "Host: localhost",
            f"Authorization: Bearer {self.token}",
            f"X-Aifo-Proto: {proto}",
            f"Content-Length: {length}",
            *more,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def request(
        self, script: str, proto: int = 2, *more: str, path: str = "/exec"
    ) -> bytes:
        """Return a request that runs a script."""
        coded = "".join(f"%{byte:02x}" for byte in script.encode())
        body = f"tool=sh&arg=-c&arg={coded}".encode()
        return self.head(f"POST {path} HTTP/1.1", len(body), proto, *more) + body

    def begin(self, script: str, proto: int = 2, *more: str) -> socket.socket:
        """Have a script run; return the connection."""
        sock = self.connect()
        sock.sendall(self.request(script, proto, *more))
        return sock

    def run(self, script: str, proto: int = 2) -> Reply:
        """Have a script run to its end."""
        return rest(self.begin(script, proto))

    def replay(self, name: str, offset: int = 0) -> socket.socket:
        """Ask for the output of an execution."""
        sock = self.connect()
        line = f"GET /exec/{name}?from={offset} HTTP/1.1"
        sock.sendall(self.head(line, 0, 2))
        return sock

    def hear(self, name: str) -> None:
        """Wait until a script has made a file, and take it away."""
        path = self.where / name
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert time.monotonic() < deadline, f"no {name}: {self.running.said()}"
            select.select([], [], [], 0.005)
        path.unlink()

    def replace(self) -> None:
        """Have the host replaced."""
        replace_daemon(self.running)


def rest(sock: socket.socket, before: bytes = b"") -> Reply:
    """Receive what is left of a reply."""
    with sock:
        parts = [before]
        while piece := sock.recv(1 << 20):
            parts.append(piece)
    return parse(b"".join(parts))


def until(sock: socket.socket, mark: bytes) -> bytes:
    """Receive until a mark has come."""
    data = b""
    while mark not in data:
        piece = sock.recv(65_536)
        assert piece, data
        data += piece
    return data


@contextmanager
def opened_tools(
    listen: str = '["unix"]',
    *,
    more: str = "",
    sidecar: str = "",
    log_limit: str = "256M",
    policy: str = "",
    command: Sequence[str] = ("/bin/sh", "-c", TELL),
    errors: int = 0,
) -> Iterator[Tools]:
    """Start a daemon with tools; at its end nothing of them is left.

    Its log has so many errors by then.
    """
    # An address of a unix socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="su-", dir="/tmp") as name:
        where = Path(name)
        (where / "root").mkdir()
        config = CONFIG.format(
            where=name,
            listen=listen,
            more=more,
            sidecar=sidecar,
            log_limit=log_limit,
            policy=policy.format(where=name),
            command=json.dumps(command),
        )
        with daemon(where, config) as running:
            yield Tools(running, where)
            assert_clean(running)
            assert running.end() == 0
            assert running.said().count("ERROR") == errors
