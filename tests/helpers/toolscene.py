"""A host that runs tools in a test.

Real sockets, real processes, curl as the client.

    async def test_x(scene: Scene) -> None:
        reply = await scene.curl("tool=printf", "arg=hello")
        assert (reply.status, reply.body, reply.code) == (200, b"hello", 0)

`opened_scene`, a host with ToolExec and children whose tokens are used;
`DirectoryRoutes`, one sidecar that is a directory and the system's PATH; `Reply`, what
a client saw.
"""

import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.toolexec.token import TokenRights
from supervisor.fsproxy.ports import ChildView
from supervisor.toolexec.routes import SpawnPlan, Target, ToolRefusedError
from supervisor.toolexec.service import (
    TOKEN,
    URL,
    ToolExec,
)
from tests.helpers.stage import Puppet, Stage, open_stage

PATH = "/usr/local/bin:/usr/bin:/bin"
ALLOWED = frozenset(
    {
        *("cat", "env", "false", "head", "ls", "printf", "pwd", "python3", "seq", "sh"),
        *("sha256sum", "sleep", "stat", "true", "tty", "yes"),
        # Tools that are allowed and fail.
        *("missing", "directory", "notexec", "elsewhere", "faulty"),
    }
)

CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as a client saw it."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    trailers: dict[bytes, bytes]
    chunks: tuple[bytes, ...] = ()

    @property
    def code(self) -> int:
        """The exit code, from the trailer or the header."""
        found = self.trailers.get(b"x-exit-code", self.headers.get(b"x-exit-code"))
        assert found is not None, self
        return int(found)


class DirectoryRoutes:
    """One sidecar: a directory, or the root of whoever asks, and the system's PATH."""

    name = "directory"
    kind = "c-cpp"
    timeout_s = 0.0
    tty = False
    fd3 = False

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.env = {"PATH": PATH, "LANG": "C"}
        self.asked: list[str] = []

    def is_permitted(self, child: ChildView, tool: str, rights: TokenRights) -> bool:
        """Whether the one allowlist has it."""
        self.asked.append(f"permitted {tool}")
        return tool in ALLOWED

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: TokenRights
    ) -> Target:
        """Choose the one sidecar."""
        self.asked.append(f"route {tool}")
        await trio.lowlevel.checkpoint()
        if tool == "elsewhere":
            raise ToolRefusedError(409, b"tool 'elsewhere' not available\n")
        return self

    def busy(self) -> str | None:
        """Nothing is."""
        return None

    def snapshot(self) -> tuple[object, set[int]]:
        """Have nothing to hand over."""
        return None, set()

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """Open a directory of the workspace."""
        self.asked.append("open_cwd")
        if cwd == os.fsencode(self.workspace):  # as a shim sends it
            cwd = b"."
        text = cwd.removeprefix(b"/workspace").lstrip(b"/") if cwd != b"." else b"."
        try:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            return os.open(os.path.join(os.fsencode(self.workspace), text), flags)
        except OSError:
            raise ToolRefusedError(400, b"bad request: no such cwd\n") from None

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """Find the tool in PATH."""
        if tool == "faulty":
            raise OSError(5, "the sidecar is broken")
        places = {
            "missing": "/nowhere/missing",
            "directory": "/usr/bin",
            "notexec": "/etc/passwd",
        }
        found = places.get(tool)
        for directory in PATH.split(":"):
            if found is None and os.access(f"{directory}/{tool}", os.X_OK):
                found = f"{directory}/{tool}"
        assert found is not None, tool
        return SpawnPlan(found, (tool, *map(os.fsdecode, args)), self.env)


class Tenant:
    """One child of the scene, and what it was told."""

    def __init__(self, puppet: Puppet, url: str, token: str) -> None:
        self.puppet = puppet
        self.url = url
        self.token = token

    @property
    def path(self) -> str:
        """The path of its socket."""
        assert self.url.startswith("unix://"), self.url
        return self.url.removeprefix("unix://")


class Scene:
    """An open host that runs tools.

    Attributes:
        tool: its service.
        routes: its one sidecar.
        child: the first child; requests are made with its token.
        workspace: where tools run.
    """

    def __init__(
        self, stage: Stage, tool: ToolExec, routes: DirectoryRoutes, child: Tenant
    ) -> None:
        self.stage = stage
        self.tool = tool
        self.routes = routes
        self.child = child
        self.workspace = routes.workspace

    # Requests as bytes

    def head(
        self,
        length: int | None = None,
        *extra: str,
        line: str = "POST /exec HTTP/1.1",
        proto: str | None = "2",
        token: str | None = "",
    ) -> bytes:
        """Return the head of a request; "" is the first child's token."""
        lines = [line, "Host: localhost"]
        if token is not None:
            lines.append(f"Authorization: Bearer {token or self.child.token}")
        if proto is not None:
            lines.append(f"X-Aifo-Proto: {proto}")
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, *extra, "", ""]).encode()

    def request(self, body: bytes, *extra: str, **changes: Any) -> bytes:
        """Return a whole request."""
        return self.head(len(body), *extra, **changes) + body

    async def connect(self, tenant: Tenant | None = None) -> socket.socket:
        """Connect to a child's socket."""
        url = (tenant or self.child).url
        if url.startswith("unix://"):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.connect(url.removeprefix("unix://"))
            return sock
        host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        sock = socket.socket(socket.AF_INET)
        sock.connect((host, int(port)))
        sock.setblocking(False)
        return sock

    async def say(
        self, data: bytes, *, half_close: bool = False, tenant: Tenant | None = None
    ) -> Reply:
        """Send bytes, and return the reply; the connection is at its end then."""
        with await self.connect(tenant) as sock:
            try:
                await send(sock, data)
                if half_close:
                    sock.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all of it was taken
            return parse(await receive_all(sock))

    async def run(self, *pairs: str, **changes: Any) -> Reply:
        """Run a tool by a form."""
        return await self.say(self.request("&".join(pairs).encode(), **changes))

    # curl

    async def curl(
        self, *pairs: str, proto: int = 2, options: Iterable[str] = (), path: str = ""
    ) -> Reply:
        """Make a request as a shell's client does."""
        url = self.child.url
        if url.startswith("unix://"):
            where = [
                "--unix-socket",
                self.child.path,
                f"http://localhost{path or '/exec'}",
            ]
        else:
            where = [url.removesuffix("/exec") + (path or "/exec")]
        form = [word for pair in pairs for word in ("--data-urlencode", pair)]
        done = await trio.run_process(
            [
                "curl", "-sS", "--no-buffer", "-D", "/dev/stderr",
                "-H", f"Authorization: Bearer {self.child.token}",
                "-H", f"X-Aifo-Proto: {proto}", "-H", "TE: trailers",
                *form, *options, *where,
            ],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        heads, _, trailer = done.stderr.rpartition(b"\r\n\r\n")
        head = heads.rpartition(b"\r\n\r\n")[2]  # after a 100 there is another
        first, *lines = head.split(b"\r\n")
        return Reply(
            int(first.split()[1]),
            fields(lines),
            done.stdout,
            fields(trailer.split(b"\r\n")),
        )

    async def tenant(self, **changes: Any) -> Tenant:
        """Start one more child."""
        return await make_tenant(self.stage, self.workspace, **changes)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that do not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


async def send(sock: socket.socket, data: bytes) -> None:
    """Send all of some bytes."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def receive(sock: socket.socket, size: int = 65_536) -> bytes:
    """Receive some bytes; nothing at the end."""
    while True:
        try:
            return sock.recv(size)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)


async def receive_until(sock: socket.socket, mark: bytes) -> bytes:
    """Receive until a mark has come."""
    data = b""
    while mark not in data:
        more = await receive(sock)
        assert more, f"the end instead of {mark!r}: {data!r}"
        data += more
    return data


async def receive_all(sock: socket.socket) -> bytes:
    """Receive until the end; a reset is one."""
    parts = []
    try:
        while more := await receive(sock):
            parts.append(more)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def fields(lines: Iterable[bytes]) -> dict[bytes, bytes]:
    """Take header lines apart; names in lower case."""
    found = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.lower()] = value.strip()
    return found


def parse(data: bytes) -> Reply:
    """Take a whole reply apart, strictly."""
    assert data, "no reply"
    head, _, rest = data.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100 "):
        head, _, rest = rest.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = fields(lines)
    status = int(first.split()[1])
    assert headers[b"connection"] == b"close"
    if headers.get(b"transfer-encoding") != b"chunked":
        length = int(headers.get(b"content-length", b"0"))
        assert len(rest) == length, (length, rest)
        return Reply(status, headers, rest, {})
    chunks, at = [], 0
    while True:
        size = CHUNK.match(rest, at)
        assert size, rest[at : at + 50]
        at = size.end() + int(size[1], 16)
        if int(size[1], 16) == 0:
            break
        chunks.append(rest[size.end() : at])
        assert rest[at : at + 2] == b"\r\n", rest[at - 10 : at + 10]
        at += 2
    assert rest.endswith(b"\r\n\r\n"), rest[at:]
    trailers = fields(rest[at:].split(b"\r\n"))
    return Reply(status, headers, b"".join(chunks), trailers, tuple(chunks))


async def make_tenant(stage: Stage, where: Path, **changes: Any) -> Tenant:
    """Start a child and ask it what it was told."""
    run_dir = where.parent / f"run-{len(stage.host.children)}-{os.urandom(3).hex()}"
    run_dir.mkdir(mode=0o700)
    puppet = await stage.puppet(run_dir=str(run_dir), **changes)
    names = ("AIFO_TOOLEEXEC_URL", "AIFO_TOOLEEXEC_TOKEN")
    assert names == (URL, TOKEN)
    url, token = await puppet.do(f"[os.environ[name] for name in {names!r}]")
    return Tenant(puppet, url, token)


@asynccontextmanager
async def opened_scene(where: Path, **settings: Any) -> AsyncIterator[Scene]:
    """Open a host that runs tools, with one child."""
    workspace = where / "workspace"
    workspace.mkdir()
    routes = DirectoryRoutes(workspace)
    async with open_stage(where, tools=routes, toolexec=settings) as stage:
        yield Scene(stage, stage.tools, routes, await make_tenant(stage, workspace))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A host that runs tools as it does by default."""
    async with opened_scene(tmp_path) as open_scene:
        yield open_scene


def curl_is_there() -> bool:
    """Whether the foreign client is installed."""
    return (
        subprocess.run(["curl", "-V"], capture_output=True, check=False).returncode == 0
    )
