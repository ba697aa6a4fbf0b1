r"""Clients that a test drives, of a pump, sessions and a VFS; no processes.

A `Hall` has what serves FD 3 and nothing above it; `stage.py` puts one on a whole host.

    async def test_x(hall: Hall) -> None:
        line = hall.connect()
        assert await line.ask(b"PING\n") == b"OK"

The host's own `Pump`, `Session` and `Filesystem`; a client is the other end of a
socketpair, or of two pipes, in the test's hands. When the hall is left every table,
ledger and budget must be as before.
"""

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import trio

from supervisor.fsproxy.dispatch import HANDLERS
from supervisor.fsproxy.ports import Services
from supervisor.fsproxy.pump import Pump
from supervisor.fsproxy.replies import PROCESS_EXIT
from supervisor.fsproxy.session import Session
from tests.helpers import canary
from vfs.clients import Client
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.payload import PayloadBudget
from vfs.places import Place, close_places, open_place
from vfs.policy import Policy


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The answer to LLM_CHAT.

    Attributes:
        line: the reply line, without its LF.
        body: the bytes that followed.
    """

    line: bytes
    body: bytes = b""

    @property
    def completion(self) -> dict[str, Any]:
        """The completion."""
        assert self.line.startswith(b"OK "), self.line
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def text(self) -> str:
        """The answer of the model."""
        content: str = self.completion["choices"][0]["message"]["content"]
        return content

    @property
    def status(self) -> str:
        """The quota, as the reply tells it."""
        return self.line.split(b" ", 2)[2].decode()


def chat_request(
    prompt: bytes = b"",
    preset: bytes = b"",
    inputs: bytes = b"",
    outputs: bytes = b"",
    flag: bytes = b"false",
) -> bytes:
    """Return an LLM_CHAT with exact counts."""
    texts = (inputs, outputs, prompt, preset)
    sizes = b" ".join(b"%d" % len(text) for text in texts)
    return b"LLM_CHAT %b %b\n" % (flag, sizes) + b"".join(texts)


class Line:
    """A client's end, as a test holds it.

    Attributes:
        session: the host's end.
        client: whom the host takes this for.
        is_gone: set once the host has cleaned up after it.
    """

    def __init__(
        self, session: Session, reader: int, writer: int, is_gone: trio.Event
    ) -> None:
        self.is_gone = is_gone
        self.session = session
        self.client = session.client
        self.reader = reader
        self.writer = writer
        self._held = b""

    async def send(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self.writer, left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.writer)

    async def receive(self, size: int = 65_536) -> bytes:
        """Return some bytes that came; none at the end."""
        if self._held:
            data, self._held = self._held[:size], self._held[size:]
            return data
        while True:
            try:
                data = os.read(self.reader, size)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.reader)
            except ConnectionResetError:
                return b""
            else:
                canary.told("a reply", data)
                return data

    async def line(self) -> bytes:
        """Return the next reply line, without its LF."""
        data = b""
        while b"\n" not in data:
            piece = await self.receive()
            if not piece:
                raise EOFError(data)
            data += piece
        found, _, rest = data.partition(b"\n")
        self._held = rest + self._held
        return found

    async def exactly(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        pieces: list[bytes] = []
        while size:
            piece = await self.receive(size)
            if not piece:
                raise EOFError(b"".join(pieces)[-100:])
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    async def rest(self) -> bytes:
        """Return everything up to the end."""
        pieces = []
        while piece := await self.receive():
            pieces.append(piece)
        return b"".join(pieces)

    async def ask(self, request: bytes) -> bytes:
        """Send a request, payload included; return the reply line."""
        await self.send(request)
        return await self.line()

    async def body(self) -> bytes:
        """Take a reply `OK n` and its n bytes."""
        head = await self.line()
        assert head.startswith(b"OK "), head
        return await self.exactly(int(head.split()[1]))

    async def open(
        self, name: bytes, mode: bytes = b"r", flag: bytes = b"false"
    ) -> int:
        """Open a file that must open; return its fileno."""
        reply = await self.ask(b"OPEN %b %b %b\n" % (name, mode, flag))
        assert reply.startswith(b"OK "), reply
        return int(reply[3:])

    async def read(self, fileno: int, size: int) -> bytes:
        """READ; the read must succeed."""
        await self.send(b"READ %d %d\n" % (fileno, size))
        return await self.body()

    async def write(self, fileno: int, data: bytes) -> bytes:
        """WRITE; return the reply line."""
        return await self.ask(b"WRITE %d %d\n%b" % (fileno, len(data), data))

    async def chat(
        self,
        prompt: bytes = b"",
        preset: bytes = b"",
        inputs: bytes = b"",
        outputs: bytes = b"",
        flag: bytes = b"false",
    ) -> ChatReply:
        """Ask the model."""
        await self.send(chat_request(prompt, preset, inputs, outputs, flag))
        return await self.chat_reply()

    async def chat_reply(self) -> ChatReply:
        """Take the reply of an LLM_CHAT."""
        head = await self.line()
        if not head.startswith(b"OK "):
            return ChatReply(head)
        return ChatReply(head, await self.exactly(int(head.split()[1])))

    async def quota(self) -> str:
        """Ask for the quota of the model."""
        return (await self.ask(b"LLM_QUOTA\n")).decode()

    async def llm_config(self) -> dict[str, Any]:
        """Ask for the configuration of the model."""
        await self.send(b"LLM_CONFIG\n")
        found: dict[str, Any] = json.loads(await self.body())
        return found

    async def narrow(self, **rights: object) -> bytes:
        """Give up rights."""
        text = json.dumps(rights).encode()
        return await self.ask(b"NARROW %d\n%b" % (len(text), text))

    def close(self) -> None:
        """Close this end."""
        fds, self.reader, self.writer = {self.reader, self.writer}, -1, -1
        for fd in fds - {-1}:
            os.close(fd)

    def shut_down(self) -> None:
        """Send no more, and go on receiving."""
        with socket.socket(fileno=os.dup(self.writer)) as sock:
            sock.shutdown(socket.SHUT_WR)

    async def gone(self) -> None:
        """Wait until the host has cleaned up after this client."""
        await self.is_gone.wait()


class Hall:
    """A host without processes.

    Attributes:
        root: the private root of clients that are given no policy.
        fs: its VFS.
        pump: its pump.
        budget: its memory for payloads.
        services: offers to its sessions beside files.
        ledger: charged for clients that are given no ledger.
        denials: requests of clients that were denied, in order.
        closed: sessions that are over.
    """

    def __init__(
        self,
        where: Path,
        nursery: trio.Nursery,
        fs: Filesystem,
        pump: Pump,
        budget: PayloadBudget,
        services: Services,
    ) -> None:
        self.where = where
        self.root = where / "root"
        self.root.mkdir(exist_ok=True)
        self.fs = fs
        self.pump = pump
        self.budget = budget
        self.services = services
        self.ledger = Ledger()
        self.denials: list[tuple[str, str, bytes]] = []
        self.closed: list[Session] = []
        self.lines: list[Line] = []
        self._nursery = nursery
        self._places: list[Place] = []
        self._cwd = os.open(where, os.O_PATH | os.O_DIRECTORY)
        self._on_denied = fs.on_denied
        fs.on_denied = self._note_denial
        for task in (pump.run, pump.watch_deadlines, pump.look_at_unwatched):
            nursery.start_soon(task)

    def _note_denial(self, client: Client, what: str, name: bytes) -> None:
        self.denials.append((client.id, what, name))
        if self._on_denied is not None:
            self._on_denied(client, what, name)

    def place(self, path: Path, **rights: object) -> Place:
        """Hold a place until the hall is left."""
        held = open_place(os.fspath(path), **rights)  # type: ignore[arg-type]
        self._places.append(held)
        return held

    def policy(
        self, *grants: Place, top_level: bool = False, **rules: object
    ) -> Policy:
        """Return a policy of the root, made with `rules`, and grants."""
        root = self.place(self.root, read=True, write=True, relative=b"", **rules)
        return Policy((root, *grants), top_level=top_level, cwd_fd=self._cwd)

    def connect(
        self,
        policy: Policy | None = None,
        ledger: Ledger | None = None,
        *,
        transport: str = "socketpair",
        dialect: int = 2,
        max_write_bytes: int = 16 * 1024 * 1024,
        deadline_s: float = 30.0,
        parent: Client | None = None,
    ) -> Line:
        """Connect a client and begin to serve it."""
        mine, theirs = _pair() if transport == "socketpair" else _pipes()
        is_gone = trio.Event()

        def note_end(session: Session) -> None:
            self.closed.append(session)
            is_gone.set()

        session = Session(
            self.pump,
            self.fs,
            self.fs.connect(
                self.policy() if policy is None else policy,
                self.ledger if ledger is None else ledger,
                f"test:{transport}",
                parent,
            ),
            *theirs,
            self.budget,
            handlers=HANDLERS,
            services=self.services,
            dialect=dialect,
            max_write_bytes=max_write_bytes,
            deadline_s=deadline_s,
            on_closed=note_end,
        )
        line = Line(session, *mine, is_gone)
        self.lines.append(line)
        self._nursery.start_soon(session.run)
        self.pump.add(session)
        return line

    def served(self) -> Self:
        """Return this, after the proof that nobody holds anything any more."""
        assert not self.fs.tables.clients
        assert not self.fs.tables.files
        assert not self.ledger.open_files.used
        assert not self.ledger.clients.used
        assert self.budget.payload_memory.used == 0
        assert self.budget.request_memory.used == 0
        assert self.ledger.memory.used == 0
        return self

    async def leave(self) -> None:
        """Close every client's end, and tell the services."""
        for line in self.lines:
            line.close()
            await line.gone()
            for service in self.services:
                service.client_gone(line.client)

    async def close(self) -> None:
        """End every session, and check what is left."""
        for line in self.lines:
            line.close()
            await line.session.finish(PROCESS_EXIT)
        close_places(self._places)
        os.close(self._cwd)
        self.served()


def _pair() -> tuple[tuple[int, int], tuple[int, int]]:
    ends = [end.detach() for end in socket.socketpair()]
    for fd in ends:
        os.set_blocking(fd, False)
    return (ends[0], ends[0]), (ends[1], ends[1])


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    host_reads, child_writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    child_reads, host_writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    return (child_reads, child_writes), (host_reads, host_writes)


@asynccontextmanager
async def open_hall(where: Path) -> AsyncIterator[Hall]:
    """Open a hall in a directory; everything in it ends with the block."""
    async with trio.open_nursery() as nursery:
        budget = PayloadBudget(spool_dir=os.fspath(where))
        hall = Hall(where, nursery, Filesystem(), Pump(), budget, Services())
        try:
            yield hall
            await hall.close()
        finally:
            nursery.cancel_scope.cancel()


@pytest.fixture
async def hall(tmp_path: Path, no_leaks: None) -> AsyncIterator[Hall]:
    """Return a hall in a fresh directory; the test is checked for leaks."""
    del no_leaks
    async with open_hall(tmp_path) as opened:
        yield opened


def pattern(size: int, start: int = 0) -> bytes:
    """Return bytes that tell where they are."""
    first, last = start // 8, (start + size) // 8 + 1
    text = b"%07d " * (last - first) % tuple(range(first, last))
    return text[start - first * 8 :][:size]
