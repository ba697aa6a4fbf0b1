"""Lines that are likely to come, and lead straight to what answers them.

An OPEN, a READ or a WRITE that came before, the CLOSE of a file that is open: what such
a line parses to cannot change; nor, for those about a file, what the checks find while
the file stays open. An OPEN is looked at each time.

Rules of this file.

1. Closing a file forgets its lines.
2. Each line is noted once, and of OPENs and READs at most ``PREPARED_LINES``: what a
   client says over and over costs nothing more.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from protocol.limits import MEMO_LINE_BYTES
from supervisor.session.base import RECEIVE_BYTES
from supervisor.session.counts import ERROR, WRITE
from supervisor.session.sent import Sending

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import Open, Write
    from supervisor.session.base import Again, Reply

NO_FILE = 0
"""Stands for the file of an OPEN, which is about none yet: no fileno is 0 (spec O9)."""

PREPARED_LINES = 512
"""OPENs and READs that are known at once, 64 KiB of lines; with one more all of them are
forgotten. The CLOSE of each open file is known beside them."""

_read = os.read
_write = os.write
_yield_core = os.sched_yield


class Preparing(Sending):
    """The part of a session that knows lines by heart."""

    __slots__ = ()

    def prepare(self, line: bytes, fileno: int, again: Again) -> None:
        """Let a line lead straight to its answer for as long as a file stays open.

        Args:
            line: a whole request line, LF included; not prepared yet.
            fileno: the file that the answer is about.
            again: answers it.
        """
        if self.noted_lines >= PREPARED_LINES:
            for lines in self.lines_of.values():
                for one in lines:
                    self.prepared.pop(one, None)
            self.lines_of.clear()
            self.rows.clear()
            self.noted_lines = 0
        self.prepared[line] = again
        self.lines_of.setdefault(fileno, []).append(line)
        self.noted_lines += 1

    def line_of_open(self, request: Open) -> bytes | None:
        """Return the line of an OPEN; None if it is not to be prepared, or is already."""
        line = b"OPEN %b %b %b\n" % (
            request.name,
            request.mode,
            b"true" if request.flag else b"false",
        )
        # In dialect 1 the same words mean something else (spec O5).
        is_one = self.dialect == 2 and len(line) < MEMO_LINE_BYTES
        return line if is_one and line not in self.prepared else None

    def prepare_write(self, request: Write, again: Callable[[bytes], Reply]) -> None:
        """Let the line of a WRITE lead straight to the call that takes its payload."""
        self.write_line = b"WRITE %b %d\n" % (request.token, request.size)
        self.write_size = len(self.write_line) + request.size
        self.write_again = again
        self.write_fileno = request.fileno

    def forget(self, fileno: int) -> None:
        """Forget what lines about a file lead to: it is being closed."""
        lines = self.lines_of.pop(fileno, None)
        if lines is not None:
            self.noted_lines -= len(lines)
            for line in lines:
                self.prepared.pop(line, None)
                self.rows.pop(line, None)
        if fileno == self.write_fileno:
            self.forget_write()

    def serve_prepared(  # noqa: C901, PLR0912, PLR0915 - the hot path, in one piece
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
        counts = self.counts.requests
        got = -len(data)  # the caller has counted it
        given = 0
        first = rounds
        try:
            while True:
                size = len(data)
                got += size
                # Looked up each time: what was answered last may have closed its file.
                if (
                    size == self.write_size
                    and len(payload := data.removeprefix(self.write_line)) != size
                ):
                    reply = self.write_again(payload)
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
                before = data
                data = _read(read_fd, RECEIVE_BYTES)
                if kind == WRITE:
                    row = self.write_row
                elif data == before:
                    row = self.rows.get(data)
                else:
                    continue
                if row is not None:
                    rest, left = row(data, rounds)
                    first -= rounds - left
                    rounds = left
                    if rest is None:
                        return None
                    data = rest
        finally:
            self.requests += first - rounds
            self.bytes_in += got
            self.bytes_out += given

    def count_row(self, line: bytes, number: int, asked: int, told: int) -> None:
        """Count requests that a ``Row`` has answered.

        Args:
            line: of all of them.
            number: of requests.
            asked: bytes that each of them has.
            told: bytes that each reply has.
        """
        self.counts.requests[line[0]] += number
        self.requests += number
        self.bytes_in += number * asked
        self.bytes_out += number * told

    def send_rest(self, data: bytes, reply: bytes, sent: int) -> None:
        """Send what the client of a ``Row`` has not taken of its reply, when it does.

        Args:
            data: the request, which is counted here.
            reply: to it, whole.
            sent: how much of that was taken, bytes.
        """
        self._kind = data[0]
        self.counts.requests[self._kind] += 1
        self.bytes_in += len(data)
        self.bytes_out += sent
        self.start(partial(self.send, memoryview(reply)[sent:]))
