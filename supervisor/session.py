"""One client's conversation: bytes from its descriptors, replies back, in order.

A session is a state machine that the pump drives from the hot side (``serve``) and its
own task from the slow side (``run``); exactly one of the two owns it at any time.

Rules of this file.

1. Strictly one reply a request, in request order (spec T3): the next line is looked at
   only when the reply before it has been taken, whole, by the kernel.
2. ``serve`` never waits.  What would wait (a disk, a client that does not read) becomes
   a job; the pump forgets the session until the job is done.
3. A message that began must end within the deadline, and a reply must be taken within
   it (spec F8); between messages a client may idle for ever.
4. Whatever goes wrong with the transport closes the session, once (spec S2).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol import HostConnection
from supervisor.dispatch import HANDLERS, POSTHUMOUS
from supervisor.transport import FileTransfer, bytes_unread, bytes_waiting, revoke
from vfs.hostio import in_thread
from vfs.policy import close_places

if TYPE_CHECKING:
    from supervisor.pump import Pump
    from vfs.clients import Client
    from vfs.filesystem import Filesystem
    from vfs.openfile import OpenFile
    from vfs.payload import Payload, PayloadBudget
    from vfs.policy import Place

RECEIVE_BYTES = 8192
"""First look at what came: holds any request line of use and a 4 KiB payload."""

TURN_REQUESTS = 64
"""Requests of one client before the others get their turn: about half a millisecond."""

POLLS = 2
"""Times that the core is yielded and polled after a reply before the pump parks."""

EOF = "pipe EOF"
PROCESS_EXIT = "process exit"
SLOW = "deadline"
"""Why a session closed; the first two are the contract's words (spec S3)."""

_UNEXPECTED_EOF = b"ERROR failed to read data: unexpected EOF\n"

Job = Callable[[], Awaitable[bytes | None]]
"""Slow work of one request; what it returns is the reply."""

_read = os.read
_write = os.write
_yield_core = os.sched_yield


class Session:
    """One client's conversation.

    Args:
        pump: drives the hot side.
        fs: the VFS.
        client: whose requests these are.
        read_fd: requests come here; non-blocking, owned by the session.
        write_fd: replies go here; may equal ``read_fd``.
        budget: memory for payloads.
        dialect: 1 or 2.
        max_write_bytes: largest payload of a WRITE (spec W3).
        deadline_s: for what has begun (spec F8).
        on_closed: called once, when the session is over.

    Attributes:
        files: the client's open files, looked up by every request.
    """

    __slots__ = (
        "_drain_reply",
        "_finish",
        "_job",
        "_job_scope",
        "_on_closed",
        "_over",
        "_payload",
        "_stop",
        "_suspended",
        "_wake",
        "budget",
        "bytes_read",
        "bytes_written",
        "client",
        "closed_files",
        "conn",
        "deadline_s",
        "dialect",
        "failure",
        "files",
        "fs",
        "max_write_bytes",
        "narrowed_places",
        "nested",
        "on_attach",
        "pump",
        "read_fd",
        "why_closed",
        "write_fd",
        "zero_copy",
    )

    def __init__(  # noqa: PLR0913 - the parts of one conversation
        self,
        pump: Pump,
        fs: Filesystem,
        client: Client,
        read_fd: int,
        write_fd: int,
        budget: PayloadBudget,
        *,
        dialect: int,
        max_write_bytes: int,
        deadline_s: float,
        on_closed: Callable[[Session], None],
    ) -> None:
        self.pump = pump
        self.fs = fs
        self.client = client
        self.files = client.files
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.budget = budget
        self.max_write_bytes = max_write_bytes
        self.deadline_s = deadline_s
        self.dialect = dialect
        self.conn = HostConnection(dialect)
        self.nested: list[Session] = []
        self._on_closed = on_closed
        self.on_attach: Callable[[Session], Awaitable[bytes]] | None = None
        self.zero_copy = False
        self.bytes_read = 0
        self.bytes_written = 0
        self.narrowed_places: tuple[Place, ...] = ()
        self.why_closed: str | None = None
        self._payload: Payload | None = None
        self._finish: Callable[[bytes | memoryview], bytes | None] | None = None
        self._drain_reply: bytes | None = None
        self._job: Job | None = None
        self._job_scope: trio.CancelScope | None = None
        self._wake = trio.Event()
        self._over = trio.Event()
        self._stop = False
        self._suspended = False
        self.failure: OSError | None = None
        self.closed_files: list[int] = []

    # The hot side

    def serve(self, *, alone: bool) -> bool:
        """Answer what has come, without waiting.

        Args:
            alone: no other client is active, so the core may be yielded to this one
                after a reply: its next request then comes without a wake-up.

        Returns:
            Whether requests are left over that this turn did not get to.
        """
        conn = self.conn
        read_fd = self.read_fd
        write_fd = self.write_fd
        handlers = HANDLERS
        misses = 0
        turns = TURN_REQUESTS
        message = conn.next_message() if conn.pending else None
        try:
            while True:
                if message is not None:
                    reply = handlers[type(message)](self, message)
                else:
                    try:
                        if conn.body_left:
                            reply = self._receive_body()
                        else:
                            data = _read(read_fd, RECEIVE_BYTES)
                            if not data:
                                self.close_soon(EOF)
                                return False
                            message = conn.receive_data(data)
                            continue
                    except BlockingIOError:
                        misses += 1
                        if misses > POLLS or not alone:
                            return False
                        _yield_core()
                        continue
                if reply is None:
                    if self._suspended:
                        return False
                    message = None  # its body is on the way
                    continue
                try:
                    sent = _write(write_fd, reply)
                except BlockingIOError:
                    sent = 0
                if sent != len(reply):
                    self.start(partial(self.send, memoryview(reply)[sent:]))
                    return False
                turns -= 1
                if turns < 0:
                    return True
                if conn.pending:
                    message = conn.next_message()
                else:
                    message = None
                    if alone:
                        misses = 0
                        _yield_core()
        except OSError as why:
            # Everything but EINTR, which the interpreter retries, is fatal (spec S2).
            self.close_soon(EOF, why)
            return False

    def _receive_body(self) -> bytes | None:
        """Receive some of a body; return the reply once it is complete."""
        conn = self.conn
        payload = self._payload
        if payload is None:
            space = self.budget.scratch[: conn.body_left]
        else:
            space = payload.space()
        count = os.readv(self.read_fd, [space])
        if not count:
            self._send_last(_UNEXPECTED_EOF)
            self.close_soon(EOF)
            return None
        conn.body_received(count)
        if payload is not None:
            payload.advance(count)
        return None if conn.body_left else self._end_body()

    def _end_body(self) -> bytes | None:
        finish, self._finish = self._finish, None
        if self._payload is None:
            reply, self._drain_reply = self._drain_reply, None
            return reply
        if finish is None:
            raise RuntimeError("a body without an end")
        try:
            reply = finish(self._payload.view())
        finally:
            if not self._suspended:
                self._drop_payload()
        return reply

    def _drop_payload(self) -> None:
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.close()

    # What handlers call

    def collect(
        self, piece: bytes, finish: Callable[[bytes | memoryview], bytes | None]
    ) -> bytes | None:
        """Receive the rest of the current body, then call ``finish`` with all of it.

        Args:
            piece: what ``take_body`` gave of it so far.
            finish: answers the request, or starts a job and returns None.
        """
        left = self.conn.body_left
        if not left:
            return finish(piece)
        self._payload = payload = self.budget.begin(len(piece) + left)
        self._finish = finish
        if piece:
            payload.add(piece)
        return None

    def drain(self, reply: bytes) -> bytes | None:
        """Take the whole body of the current message off the line, then reply (W4)."""
        self.conn.take_body()
        if not self.conn.body_left:
            return reply
        self._drain_reply = reply
        return None

    def start(self, job: Job) -> None:
        """Hand the current request to the session's own task."""
        self._job = job
        self._suspended = True
        self.pump.suspend(self)
        self._wake.set()

    @property
    def is_mid_message(self) -> bool:
        """Whether a message has begun and is not complete (spec F8)."""
        return self.conn.is_mid_message and not self._suspended

    # The slow side

    async def run(self) -> None:
        """Do the session's slow work until it is over, then clean up (spec S3)."""
        try:
            while not self._stop:
                await self._wake.wait()
                self._wake = trio.Event()
                if self._job is not None:
                    await self._run_job(self._job)
        finally:
            with trio.CancelScope(shield=True):
                for nested in tuple(self.nested):
                    await nested.finish(self.why_closed or EOF)
            self._clean_up()

    async def _run_job(self, job: Job) -> None:
        with trio.CancelScope() as self._job_scope:
            try:
                reply = await job()
                if reply is not None:
                    await self.send(reply)
            except trio.TooSlowError:
                self.close_soon(SLOW)
            except OSError as why:
                self.close_soon(EOF, why)
        self._job = None
        self._job_scope = None
        self._drop_payload()
        if not self._stop:
            self._suspended = False
            self.pump.resume(self)

    async def send(self, reply: bytes | memoryview) -> None:
        """Send a reply that did not fit at once, within the deadline (spec F8)."""
        data = memoryview(reply)
        with trio.fail_after(self.deadline_s):
            while data:
                try:
                    data = data[_write(self.write_fd, data) :]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.write_fd)

    def send_file(self, file: OpenFile, size: int) -> bytes | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them."""
        transfer = FileTransfer(self.write_fd, file, size)
        self.bytes_read += size
        self.zero_copy = True
        if not transfer.is_in_memory():
            self.start(partial(self._send_file_waiting, transfer))
            return None
        misses = 0
        while not transfer.is_done:
            if transfer.push():
                misses = 0
            elif misses == POLLS:
                self.start(partial(self._send_file, transfer))
                return None
            else:
                misses += 1
                _yield_core()
        return b""

    async def _send_file_waiting(self, transfer: FileTransfer) -> None:
        await in_thread(transfer.load)
        await self._send_file(transfer)

    async def _send_file(self, transfer: FileTransfer) -> None:
        with trio.fail_after(self.deadline_s):
            while not transfer.is_done:
                if transfer.push():
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_writable(self.write_fd)

    async def wait_taken(self) -> None:
        """Wait until the client has taken the bytes of files that READs lent it."""
        with trio.fail_after(self.deadline_s):
            while self.zero_copy and bytes_unread(self.write_fd):
                # No event tells that a socket's queue is empty; clients that send a
                # WRITE before they read a reply are rare enough to look.
                await trio.sleep(0.001)
        self.zero_copy = False

    def narrow(self, document: bytes) -> None:
        """Give up rights for good (spec A5).

        Raises:
            RightsError: the document does not narrow what the client has.
        """
        policy = self.client.policy.narrowed(document)
        self.narrowed_places += tuple(
            place for place in policy.places if place not in self.client.policy.places
        )
        self.client.policy = policy

    # The end

    def close_soon(self, why: str, failure: OSError | None = None) -> None:
        """Stop serving; the session's task cleans up.  The first reason counts."""
        if self.why_closed is None:
            self.why_closed = why
            self.failure = failure
        self._stop = True
        self._suspended = True
        self.pump.suspend(self)
        if self._job_scope is not None:
            self._job_scope.cancel()
        self._wake.set()

    async def finish(self, why: str) -> None:
        """End the session of a process that has ended, and wait for its clean-up.

        What the process had sent is done first (spec S2); a job in flight is waited
        for, never abandoned (I1).
        """
        if not self._stop and self._job is None:
            self.drain_sent()
        self.close_soon(why)
        await self._over.wait()

    def drain_sent(self) -> None:
        """Do what a dead client had sent, as far as it is complete (spec S2)."""
        limit = bytes_waiting(self.read_fd)
        conn = self.conn
        message = conn.next_message() if conn.pending else None
        try:
            while not self._suspended:
                if message is not None:
                    if type(message) in POSTHUMOUS:
                        HANDLERS[type(message)](self, message)
                    else:
                        self.drain(b"")
                elif limit <= 0:
                    return
                elif conn.body_left:
                    before = conn.body_left
                    self._receive_body()
                    limit -= before - conn.body_left
                else:
                    data = _read(self.read_fd, min(RECEIVE_BYTES, limit))
                    if not data:
                        return
                    limit -= len(data)
                    message = conn.receive_data(data)
                    continue
                message = conn.next_message() if conn.pending else None
        except OSError:
            return  # a reset connection holds nothing more (spec S2)

    def _send_last(self, reply: bytes) -> None:
        with contextlib.suppress(OSError):
            _write(self.write_fd, reply)

    def _clean_up(self) -> None:
        """Give everything back, in reverse order of acquisition; runs once."""
        self._stop = True
        self.pump.forget(self)
        self._drop_payload()
        self.closed_files = self.fs.disconnect(self.client, self.why_closed or EOF)
        close_places(self.narrowed_places)
        for fd in {self.read_fd, self.write_fd}:
            revoke(fd)
            os.close(fd)
        self._on_closed(self)
        self._over.set()
