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
4. Whatever goes wrong with the transport closes the session, once (spec S2); so does
   a fault of this program in a request: it costs that client, not the host.
5. A line that is likely to come is *prepared*: a READ or WRITE that came before, the
   CLOSE of a file that is open.  What it parses to and what the checks find cannot
   change while the file stays open, so its bytes lead straight to what answers it.
   Closing a file forgets its lines.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol import HostConnection, error
from protocol.chat import SEPARATORS, ChatBody
from protocol.limits import MEMO_LINE_BYTES
from supervisor.counts import ERROR, INDEX
from supervisor.dispatch import HANDLERS, POSTHUMOUS
from supervisor.replies import REPLACED, reason
from supervisor.services import Services
from supervisor.transport import (
    FileTransfer,
    bytes_unread,
    bytes_waiting,
    deepen,
    revoke,
)
from vfs.hostio import in_thread
from vfs.policy import OPEN_FILES, close_places

if TYPE_CHECKING:
    from protocol.messages import Open, Request, Write
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

TURN_PIECES = 32
"""Pieces of one client's payload or line that are taken before the others get their
turn: 2 MiB of a payload, about half a millisecond."""

POLLS = 2
"""Times that the core is yielded and polled after a reply before the pump parks."""

EOF = "pipe EOF"
PROCESS_EXIT = "process exit"
SLOW = "deadline"
FAULT = "internal error"
"""Why a session closed; the first two are the contract's words (spec S3)."""


Reply = bytes | None
"""What a handler returns: the reply, or None when it comes later."""

Again = Callable[[], Reply]
"""Answers a prepared line."""

NO_FILE = 0
"""Stands for the file of a line that is about none: no fileno is 0 (spec O9)."""

PREPARED_LINES = 512
"""When the READs among the prepared lines are forgotten: beside the CLOSE of each file
that a client may have open by default there is room for as many READs."""


def _not_prepared(data: bytes) -> Reply:
    raise RuntimeError(f"no WRITE is prepared, and {len(data)} bytes came for one")


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
        services: what the host offers beside files.

    Attributes:
        files: the client's open files, looked up by every request.
        bytes_in: received from it.
        bytes_out: sent to it.
        errors: replies that were errors.
        last_error: the last of them.
        begun: the last request whose body had not come whole with its line.
        unsent: of a reply, what the client has not taken; None while none waits.
        transfer: of a READ, likewise.
        redo: makes the bytes of a request that waits and has done nothing yet.
        carried: (descriptor, reply) of an ATTACH that the client has not taken.
        reserved: (file, bytes) that a WRITE which has begun may add to it.
    """

    __slots__ = (
        "_chat",
        "_drain_reply",
        "_finish",
        "_holding",
        "_interrupted",
        "_is_deep",
        "_job",
        "_kind",
        "_on_closed",
        "_over",
        "_payload",
        "_stop",
        "_suspended",
        "_waiting",
        "_wake",
        "begun",
        "budget",
        "bytes_in",
        "bytes_out",
        "carried",
        "client",
        "closed_files",
        "conn",
        "counts",
        "deadline_s",
        "dialect",
        "errors",
        "failure",
        "files",
        "fs",
        "last_error",
        "last_request",
        "lines_of",
        "max_write_bytes",
        "narrowed_places",
        "nested",
        "on_attach",
        "parent",
        "prepared",
        "pump",
        "read_fd",
        "redo",
        "requests",
        "reserved",
        "services",
        "transfer",
        "unsent",
        "why_closed",
        "write_again",
        "write_fd",
        "write_fileno",
        "write_line",
        "write_size",
        "zero_copy",
    )

    def __init__(  # noqa: PLR0913, PLR0915 - the parts of one conversation
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
        services: Services | None = None,
    ) -> None:
        self.pump = pump
        self.fs = fs
        self.services = Services() if services is None else services
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
        self.parent: Session | None = None
        self._on_closed = on_closed
        self.on_attach: Callable[[Session], Awaitable[bytes | None]] | None = None
        self.zero_copy = False
        self.requests = 0
        self.counts = pump.counts
        self.bytes_in = 0
        self.bytes_out = 0
        self.errors = 0
        self.last_error = b""
        self._kind = 0
        self.prepared: dict[bytes, Again] = {}
        self.lines_of: dict[int, list[bytes]] = {}
        self.write_fileno = -1
        self.write_line = b""
        self.write_size = -1
        self.write_again: Callable[[bytes], Reply] = _not_prepared
        self.last_request: object = None
        self.begun: Request | None = None
        self.unsent: memoryview | None = None
        self.transfer: FileTransfer | None = None
        self.redo: Callable[[], bytes] | None = None
        self.carried: tuple[int, bytes] | None = None
        self.narrowed_places: tuple[Place, ...] = ()
        self.why_closed: str | None = None
        self.reserved: tuple[OpenFile, int] | None = None
        self._payload: Payload | None = None
        self._finish: Callable[[bytes | memoryview], bytes | None] | None = None
        self._drain_reply: bytes | None = None
        self._chat: ChatBody | None = None
        self._job: Job | None = None
        self._waiting: trio.CancelScope | None = None
        self._holding: tuple[trio.CancelScope, float] | None = None
        self._interrupted = False
        self._wake = trio.Event()
        self._over = trio.Event()
        self._stop = False
        self._suspended = False
        self._is_deep = False
        self.failure: Exception | None = None
        self.closed_files: list[int] = []

    # The hot side

    def serve_one(self) -> bool:  # noqa: C901 - the hot path of a crowd
        """Answer one request of one client among many: ``serve``, or less than that.

        What is prepared is answered here, with the fewest steps; with many clients
        this process is what all of them wait for.

        Returns:
            Whether requests are left over that this turn did not get to.
        """
        conn = self.conn
        if conn.body_left or not conn.idle:
            return self.serve(alone=False)
        try:
            data = _read(self.read_fd, RECEIVE_BYTES)
            again = self.prepared.get(data)
            if again is None:
                return self.serve(alone=False, data=data)
            self.bytes_in += len(data)
            self.counts.requests[data[0]] += 1
            reply = again()
            if reply is None:
                self._kind = data[0]
                return False
            if reply[0] == ERROR:
                self.note_error(reply, data[0])
            try:
                sent = _write(self.write_fd, reply)
            except BlockingIOError:
                sent = 0
            self.bytes_out += sent
            if sent != len(reply):
                self.start(partial(self.send, memoryview(reply)[sent:]))
                return False
            self.requests += 1
        except BlockingIOError:
            return False
        except OSError as why:
            self.close_soon(EOF, why)
        except Exception as why:  # noqa: BLE001 - a fault here costs one client
            self.close_soon(FAULT, why)
        return False

    def serve(  # noqa: C901, PLR0911, PLR0912, PLR0915 - the hot path, in one piece
        self, *, alone: bool, data: bytes | None = None
    ) -> bool:
        """Answer what has come, without waiting.

        Args:
            alone: no other client is active, so the core may be yielded to this one
                after a reply: its next request then comes without a wake-up.
            data: what was received already, at the start of a message.

        Returns:
            Whether requests are left over that this turn did not get to.
        """
        conn = self.conn
        read_fd = self.read_fd
        write_fd = self.write_fd
        prepared = self.prepared
        misses = 0
        turns = TURN_REQUESTS
        pieces = TURN_PIECES
        message = conn.next_message() if conn.pending else None
        try:
            while True:
                if message is not None:
                    kind = self._kind = INDEX[type(message)]
                    self.counts.requests[kind] += 1
                    reply = HANDLERS[type(message)](self, message)
                else:
                    try:
                        if conn.body_left:
                            reply = self._receive_body()
                        else:
                            if data is None:
                                data = _read(read_fd, RECEIVE_BYTES)
                            size = len(data)
                            self.bytes_in += size
                            if conn.idle and (
                                size == self.write_size
                                or (size < MEMO_LINE_BYTES and data in prepared)
                            ):
                                rest = self._serve_prepared(
                                    data, TURN_REQUESTS if alone else 1
                                )
                                if rest is None:
                                    return False
                                data = rest
                            if not data:
                                self.close_soon(EOF)
                                return False
                            message = conn.receive_data(data)
                            data = None
                            if message is None:  # a part of a line
                                pieces -= 1
                                if pieces < 0:
                                    return False
                            continue
                    except BlockingIOError:
                        data = None  # what came before is answered
                        misses += 1
                        if misses > POLLS or not alone:
                            return False
                        _yield_core()
                        continue
                if reply is None:
                    if message is not None:
                        self.begun = message
                    pieces -= 1
                    if self._suspended or pieces < 0:
                        return False
                    message = None  # its body is on the way
                    continue
                if reply[:1] == b"E":
                    self.note_error(reply, self._kind)
                try:
                    sent = _write(write_fd, reply)
                except BlockingIOError:
                    sent = 0
                self.bytes_out += sent
                if sent != len(reply):
                    self.start(partial(self.send, memoryview(reply)[sent:]))
                    return False
                turns -= 1
                if conn.pending:
                    if turns < 0:
                        return True
                    message = conn.next_message()
                elif not alone or turns < 0:
                    return False  # epoll tells when there is more
                else:
                    message = None
                    misses = 0
                    _yield_core()
        except OSError as why:
            # Everything but EINTR, which the interpreter retries, is fatal (spec S2).
            self.close_soon(EOF, why)
            return False
        except Exception as why:  # noqa: BLE001 - a fault here costs one client
            self.close_soon(FAULT, why)
            return False
        finally:
            self.requests += TURN_REQUESTS - turns

    def _serve_prepared(  # noqa: C901, PLR0915 - the hot path, in one piece
        self, data: bytes, rounds: int
    ) -> bytes | None:
        """Answer prepared requests for as long as one follows the other.

        Args:
            data: what was received last.
            rounds: most requests to answer.

        Returns:
            What was received last and is not prepared; None if all was answered, or
            the session was handed to its task.

        Raises:
            BlockingIOError: nothing has come since the last reply.
        """
        read_fd = self.read_fd
        write_fd = self.write_fd
        prepared = self.prepared
        write_line = self.write_line
        write_size = self.write_size
        write_again = self.write_again
        head = len(write_line)
        counts = self.counts.requests
        got = -len(data)  # the caller has counted it
        given = 0
        first = rounds
        try:
            while True:
                size = len(data)
                got += size
                if size == write_size and data.startswith(write_line):
                    reply = write_again(data[head:])
                elif (
                    size < MEMO_LINE_BYTES and (again := prepared.get(data)) is not None
                ):
                    reply = again()
                else:
                    return data
                kind = data[0]
                counts[kind] += 1
                if reply is None:
                    self._kind = kind
                    return None
                if reply[0] == ERROR:
                    self.note_error(reply, kind)
                try:
                    sent = _write(write_fd, reply)
                except BlockingIOError:
                    sent = 0
                given += sent
                if sent != len(reply):
                    self.start(partial(self.send, memoryview(reply)[sent:]))
                    return None
                rounds -= 1
                if not rounds:
                    return None
                _yield_core()
                data = _read(read_fd, RECEIVE_BYTES)
        finally:
            self.requests += first - rounds
            self.bytes_in += got
            self.bytes_out += given

    def _receive_body(self) -> bytes | None:
        """Receive some of a body; return the reply once it is complete."""
        conn = self.conn
        payload = self._payload
        if payload is None:
            space = self.budget.scratch[: conn.body_left]
        else:
            space = payload.space()
            if self._chat is not None:  # it has room for separators
                space = space[: conn.body_left]
        count = os.readv(self.read_fd, [space])
        if not count:
            what = b"data: unexpected EOF"
            if self._chat is not None:
                what = self._chat.incomplete() + b" data"
            self._send_last(error(b"failed to read " + what))
            self.close_soon(EOF)
            return None
        self.bytes_in += count
        conn.body_received(count)
        if self._chat is not None:
            self._chat.feed(space[:count])
        if payload is not None:
            try:
                payload.advance(count)
            except OSError as why:
                self._refuse_payload(why)
        return None if conn.body_left else self._end_body()

    def _end_body(self) -> bytes | None:
        chat = self._chat
        if chat is not None:
            if chat.is_separated and not chat.is_extended:
                self._extend(chat)
                if self.conn.body_left:
                    return None
            self._chat = None
        finish, self._finish = self._finish, None
        if self._payload is None:
            reply, self._drain_reply = self._drain_reply, None
            return reply
        if finish is None:
            raise RuntimeError("a body without an end")
        try:
            reply = finish(self._payload.view())
        finally:
            if self._job is None:
                self._drop_payload()
        return reply

    def _extend(self, chat: ChatBody) -> None:
        """Go on with the separators that an LLM_CHAT has not counted (spec L1)."""
        chat.is_extended = True
        self.conn.extend_body(SEPARATORS)
        piece = self.conn.take_body()
        if self._payload is not None and piece:
            try:
                self._payload.add(piece)
            except OSError as why:
                self._refuse_payload(why)

    def payload_done(self) -> None:
        """Give the memory of the payload back before the job that got it ends."""
        self._drop_payload()

    def release_growth(self) -> None:
        """Give back what the header of a WRITE has reserved, or what came of it."""
        if self.reserved is not None:
            (file, growth), self.reserved = self.reserved, None
            file.give_back(growth)

    def _drop_payload(self) -> None:
        self.release_growth()
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.close()

    # What handlers call

    def collect(
        self,
        piece: bytes,
        finish: Callable[[bytes | memoryview], bytes | None],
        chat: ChatBody | None = None,
    ) -> bytes | None:
        """Receive the rest of the current body, then call ``finish`` with all of it.

        Args:
            piece: what ``take_body`` gave of it so far.
            finish: answers the request, or starts a job and returns None.
            chat: follows the body of an LLM_CHAT, which may be longer than declared.
        """
        spare = 0
        if chat is not None:
            chat.feed(piece)
            spare = SEPARATORS
            if not self.conn.body_left and chat.is_separated:
                chat.is_extended = True
                self.conn.extend_body(SEPARATORS)
                piece += self.conn.take_body()
        left = self.conn.body_left
        if not left:
            return finish(piece)
        self._chat = chat
        self._finish = finish
        try:
            self._payload = self.budget.begin(len(piece) + left + spare)
            if piece:
                self._payload.add(piece)
        except OSError as why:
            self._refuse_payload(why)
        return None

    def _refuse_payload(self, why: OSError) -> None:
        """Drain a payload for which there is no room, neither in memory nor on disk."""
        self._drop_payload()
        self._finish = None
        self._drain_reply = error(b"failed to read data: " + reason(why))

    def drain(self, reply: bytes, chat: ChatBody | None = None) -> bytes | None:
        """Take the whole body of the current message off the line, then reply (W4).

        Args:
            reply: what is sent then.
            chat: follows the body of an LLM_CHAT, which may be longer than declared.
        """
        self._chat = chat
        piece = self.conn.take_body()
        if chat is not None:
            chat.feed(piece)
        self._drain_reply = reply
        return None if self.conn.body_left else self._end_body()

    def prepare(self, line: bytes, fileno: int, again: Again) -> None:
        """Let a line lead straight to its answer for as long as a file stays open.

        Args:
            line: a whole request line, LF included.
            fileno: the file that the answer is about.
            again: answers it.
        """
        if len(self.prepared) >= PREPARED_LINES:
            for lines in self.lines_of.values():
                for one in lines:
                    self.prepared.pop(one, None)
            self.lines_of.clear()
        self.prepared[line] = again
        self.lines_of.setdefault(fileno, []).append(line)

    def prepare_open(self, request: Open, again: Again) -> None:
        """Let the line of an OPEN lead straight to what answers it: it is parsed already."""
        line = b"OPEN %b %b %b\n" % (
            request.name,
            request.mode,
            b"true" if request.flag else b"false",
        )
        # In dialect 1 the same words mean something else (spec O5).
        if self.dialect == 2 and len(line) < MEMO_LINE_BYTES:
            self.prepare(line, NO_FILE, again)

    def prepare_write(self, request: Write, again: Callable[[bytes], Reply]) -> None:
        """Let the line of a WRITE lead straight to the call that takes its payload."""
        self.write_line = b"WRITE %b %d\n" % (request.token, request.size)
        self.write_size = len(self.write_line) + request.size
        self.write_again = again
        self.write_fileno = request.fileno

    def note_error(self, reply: bytes | memoryview, kind: int) -> None:
        """Take note that a request of this kind is answered with an error."""
        self.counts.errors[kind] += 1
        self.errors += 1
        self.last_error = bytes(reply)

    def forget(self, fileno: int) -> None:
        """Forget what lines about a file lead to: it is being closed."""
        if self.lines_of:
            for line in self.lines_of.pop(fileno, ()):
                self.prepared.pop(line, None)
        if fileno == self.write_fileno:
            self.write_size = -1

    def start(self, job: Job) -> None:
        """Hand the current request to the session's own task."""
        self._job = job
        self._suspended = True
        self.pump.suspend(self)
        self._wake.set()

    @property
    def is_closing(self) -> bool:
        """Whether it is being cleaned up: it is to end, and has not yet."""
        return self._stop and not self._over.is_set()

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
            # Bounded: what is still done are calls into the kernel (I1).
            with trio.CancelScope(shield=True):
                if self.why_closed in (EOF, PROCESS_EXIT):
                    await self._settle()
                for nested in tuple(self.nested):
                    await nested.finish(self.why_closed or EOF)
            self._clean_up()

    async def _run_job(self, job: Job) -> None:
        kind = self._kind
        begun_s = time.monotonic()
        try:
            reply = await job()
            if reply is None and self._interrupted and not self._stop:
                reply = REPLACED
            if reply is not None:
                if reply[:1] == b"E":
                    self.note_error(reply, kind)
                await self.send(reply)
        except trio.TooSlowError:
            self.close_soon(SLOW)
        except OSError as why:
            self.close_soon(EOF, why)
        except Exception as why:  # noqa: BLE001 - a fault here costs one client
            self.close_soon(FAULT, why)
        self._job = None
        self._interrupted = False
        self.requests += 1
        self.counts.took(self.counts.jobs, kind, time.monotonic() - begun_s)
        self._drop_payload()
        if not self._stop:
            self._suspended = False
            self.pump.resume(self)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Bound a wait for the client to take something (spec F8).

        Raises:
            TooSlowError: the deadline has passed, or the client is gone: nobody waits
                for a process that shares its descriptor.
        """
        with trio.fail_after(self.deadline_s) as scope:
            self._waiting = scope
            if self._stop:
                scope.cancel()
            try:
                yield
            finally:
                self._waiting = None

    @contextlib.contextmanager
    def while_connected(self, leave_s: float = 0.0) -> Iterator[trio.CancelScope]:
        """Run work of a job only for as long as its client is there (spec L10).

        The end of the process, of the session, or of both directions of the connection
        cancels it; a client that has only stopped sending is waited for.  For a client
        that is gone already nothing begins.

        Args:
            leave_s: the scope is left so many seconds after the client.
        """
        with trio.CancelScope() as scope:
            self._holding = (scope, leave_s)
            if self._stop:
                scope.cancel()
            else:
                self.pump.watch_hangup(self)
            try:
                yield scope
            finally:
                self._holding = None
                self.pump.ignore_hangup(self)

    def interrupt(self) -> None:
        """End work that waits for a service, as if its client were gone (``handover``).

        Its client is there, and gets an error.
        """
        if self._holding is not None:
            self._interrupted = True
            self._holding[0].cancel()

    async def send(self, reply: bytes | memoryview) -> None:
        """Send a reply that did not fit at once, within the deadline (spec F8)."""
        self.unsent = memoryview(reply)
        try:
            with self.patience():
                while self.unsent:
                    try:
                        sent = _write(self.write_fd, self.unsent)
                        self.bytes_out += sent
                        self.unsent = self.unsent[sent:]
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(self.write_fd)
        finally:
            self.unsent = None

    def send_file(self, file: OpenFile, size: int) -> bytes | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them."""
        transfer = FileTransfer(self.write_fd, file, size)
        self.bytes_out += transfer.left  # of which a client that ends may take less
        self.zero_copy = True
        self.write_size = -1  # a WRITE has to look at what this READ lends
        if not self._is_deep:
            self._is_deep = True
            deepen(self.write_fd)
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

    async def _send_file_waiting(self, transfer: FileTransfer) -> bytes | None:
        try:
            await in_thread(transfer.load, share=self.client.ledger.threads)
        except OSError as why:
            transfer.give_up()
            return error(b"failed to read: " + reason(why))
        await self._send_file(transfer)
        return None

    async def _send_file(self, transfer: FileTransfer) -> None:
        self.transfer = transfer
        try:
            with self.patience():
                while not transfer.is_done:
                    if transfer.push():
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_writable(self.write_fd)
        finally:
            self.transfer = None

    async def wait_taken(self, redo: Callable[[], bytes]) -> None:
        """Wait until the client has taken the bytes of files that READs lent it.

        Args:
            redo: makes the bytes of the request that waits for this, payload included.
        """
        self.redo = redo
        try:
            with trio.fail_after(self.deadline_s):
                while self.zero_copy and not self._stop and bytes_unread(self.write_fd):  # noqa: ASYNC110
                    # No event tells that a socket's queue is empty; clients that send a
                    # WRITE before they read a reply are rare enough to look.
                    await trio.sleep(0.001)
            self.zero_copy = False
        finally:
            self.redo = None

    def narrow(self, document: bytes) -> None:
        """Give up rights for good (spec A5).

        Raises:
            RightsError: the document does not narrow what the client has.
        """
        client, llm = self.client, self.services.llm
        models = None if llm is None else llm.models_of(client)
        policy = client.policy.narrowed(document, client.ledger, models)
        if llm is not None and policy.quota is not None:
            llm.limit(client, policy.quota)
        self.narrowed_places += tuple(
            place for place in policy.places if place not in self.client.policy.places
        )
        self.client.policy = policy

    @property
    def is_over(self) -> bool:
        """Whether everything of it was given back."""
        return self._over.is_set()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors, with a word for each."""
        if self._over.is_set():
            return
        yield self.read_fd, "connection"
        yield self.write_fd, "connection"
        if self._payload is not None:
            for fd in self._payload.descriptors():
                yield fd, "payload"
        for place in self.narrowed_places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"

    # The end

    def close_soon(self, why: str, failure: Exception | None = None) -> None:
        """Stop serving; the session's task cleans up.  The first reason counts."""
        if self.why_closed is None:
            self.why_closed = why
            self.failure = failure
        if failure is not None:
            # Frames that are kept with it would hold parts of the payload's memory.
            traceback.clear_frames(failure.__traceback__)
        self._stop = True
        self._suspended = True
        self.pump.suspend(self)
        if self._waiting is not None:
            self._waiting.cancel()
        if self._holding is not None:
            scope, leave_s = self._holding
            scope.deadline = min(scope.deadline, trio.current_time() + leave_s)
        self._wake.set()

    def be_over(self, why: str) -> None:
        """Be a session that was over before this program began (``handover``)."""
        self.why_closed = why
        self._stop = self._suspended = True
        self._over.set()

    async def finish(self, why: str) -> None:
        """End the session of a process that has ended, and wait for its clean-up.

        A job in flight is waited for, never abandoned (I1).
        """
        self.close_soon(why)
        await self._over.wait()

    async def _settle(self) -> None:
        """Do what a client that is gone had sent, as far as it is complete (spec S2).

        Who still holds the other end may go on sending: what comes from now on is not
        looked at.  Replies go nowhere.
        """
        left = bytes_waiting(self.read_fd)
        while True:
            if self._job is not None:
                await self._run_job(self._job)
            try:
                left = self._do_sent(left)
            except OSError:
                return  # a reset connection holds nothing more
            except Exception as why:  # noqa: BLE001 - a fault here costs one client
                self.failure = why
                return
            if self._job is None:
                return

    def _do_sent(self, left: int) -> int:
        """Do what was sent until a job begins; return the bytes that still wait.

        Args:
            left: of what waits in the kernel, how many bytes count.
        """
        conn = self.conn
        message = conn.next_message() if conn.pending else None
        while True:
            if message is not None:
                self._do_posthumously(message)
            elif left <= 0:
                return 0
            elif conn.body_left:
                before = conn.body_left
                self._receive_body()
                left -= before - conn.body_left
                if conn.body_left == before:
                    return 0
            else:
                data = _read(self.read_fd, min(RECEIVE_BYTES, left))
                left -= len(data)
                self.bytes_in += len(data)
                message = conn.receive_data(data)
                if not data:
                    return 0
                continue
            if self._job is not None:
                return left
            message = conn.next_message() if conn.pending else None

    def _do_posthumously(self, message: Request) -> None:
        if type(message) not in POSTHUMOUS:
            self.drain(b"")
            return
        self._kind = INDEX[type(message)]
        self.counts.requests[self._kind] += 1
        with contextlib.suppress(OSError):  # nobody takes the bytes of a READ
            HANDLERS[type(message)](self, message)

    def _send_last(self, reply: bytes) -> None:
        with contextlib.suppress(OSError):
            _write(self.write_fd, reply)

    def _clean_up(self) -> None:
        """Give everything back, in reverse order of acquisition; runs once."""
        self._stop = True
        with contextlib.ExitStack() as stack:  # each step, whatever became of another
            stack.callback(self._over.set)
            stack.callback(self._on_closed, self)
            if self.parent is not None:
                stack.callback(self.parent.nested.remove, self)
            for fd in {self.read_fd, self.write_fd}:
                stack.callback(os.close, fd)
                stack.callback(revoke, fd)
            stack.callback(close_places, self.narrowed_places)
            stack.callback(self._disconnect)
            stack.callback(self._drop_payload)
            stack.callback(self.pump.forget, self)

    def _disconnect(self) -> None:
        self.client.ledger.charge(OPEN_FILES, -len(self.narrowed_places))
        self.closed_files = self.fs.disconnect(self.client, self.why_closed or EOF)
