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

The layers beneath are listed in ``session.base``.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol.chat import ChatBody
from supervisor.session.base import (
    EOF,
    FAULT,
    PROCESS_EXIT,
    RECEIVE_BYTES,
    SLOW,
    Job,
)
from supervisor.session.counts import INDEX
from supervisor.session.dispatch import HANDLERS, POSTHUMOUS
from supervisor.session.replies import REPLACED
from supervisor.session.sent import POLLS, Sending
from supervisor.session.transport import bytes_waiting, revoke
from vfs.policy import OPEN_FILES, close_places

if TYPE_CHECKING:
    from protocol.messages import Request

TURN_REQUESTS = 64
"""Requests of one client before the others get their turn: about half a millisecond."""

PIPELINED = 8
"""Requests of those that a client sent in advance which are answered in one turn."""

TURN_S = 0.0002
"""How long one client is answered before the others get their turn, where its requests are
such as take long: a large READ, a path of hundreds of names."""

TURN_PIECES = 8
"""Pieces of one client's payload or line that are taken before the others get their
turn: half a MiB of a payload, about 0.15 ms."""

_read = os.read
_write = os.write
_yield_core = os.sched_yield
_now_s = time.monotonic


class Session(Sending):
    """One client's conversation."""

    __slots__ = ()

    # The hot side

    def serve(  # noqa: C901, PLR0911, PLR0912, PLR0915 - the hot path, in one piece
        self, *, alone: bool
    ) -> bool:
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
        misses = 0
        turns = TURN_REQUESTS
        pieces = TURN_PIECES
        message = conn.next_message() if conn.pending else None
        until_s = _now_s() + TURN_S
        try:
            while True:
                if message is not None:
                    kind = self._kind = INDEX[type(message)]
                    self.counts.requests[kind] += 1
                    self.last_request = message
                    reply = HANDLERS[type(message)](self, message)
                else:
                    try:
                        if conn.body_left:
                            reply = self._receive_body()
                        else:
                            data = _read(read_fd, RECEIVE_BYTES)
                            self.bytes_in += len(data)
                            if not data:
                                self.close_soon(EOF)
                                return False
                            message = conn.receive_data(data)
                            if message is None:  # a part of a line
                                pieces -= 1
                                if pieces < 0:
                                    return False
                            continue
                    except BlockingIOError:
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
                    if turns <= TURN_REQUESTS - PIPELINED or _now_s() > until_s:
                        return True
                    message = conn.next_message()
                elif not alone or turns < 0 or _now_s() > until_s:
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
                self.closed_files = await self.fs.end_distant(
                    self.client, self.why_closed or EOF
                )
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
        self._release_memory()
        if not self._stop:
            self._suspended = False
            self.pump.resume(self)

    # The end

    async def _settle(self) -> None:
        """Do what a client that is gone had sent, as far as it is complete (spec S2).

        Who still holds the other end may go on sending: what comes from now on is not
        looked at.  Replies go nowhere (``sent``, rule 2).
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
                before = self.bytes_in  # a body may turn out to be longer meanwhile
                self._receive_body()
                left -= self.bytes_in - before
                if self.bytes_in == before:
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
            self.drain(b"", ChatBody.of(message))
            return
        self._kind = INDEX[type(message)]
        self.counts.requests[self._kind] += 1
        with contextlib.suppress(OSError):  # nobody takes the bytes of a READ
            HANDLERS[type(message)](self, message)

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
            stack.callback(self._release_memory)
            stack.callback(self.pump.forget, self)

    def _disconnect(self) -> None:
        self.client.ledger.charge(OPEN_FILES, -len(self.narrowed_places))
        self.closed_files += self.fs.disconnect(self.client, self.why_closed or EOF)
