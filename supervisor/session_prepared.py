"""Lines that are likely to come, and lead straight to what answers them.

A READ or WRITE that came before, the CLOSE of a file that is open: what such a line
parses to and what the checks find cannot change while the file stays open.

Rule of this file: closing a file forgets its lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.limits import MEMO_LINE_BYTES
from supervisor.session_sent import Sending

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import Open, Write
    from supervisor.session_base import Again, Reply

NO_FILE = 0
"""Stands for the file of a line that is about none: no fileno is 0 (spec O9)."""

PREPARED_LINES = 512
"""When the READs among the prepared lines are forgotten: beside the CLOSE of each file
that a client may have open by default there is room for as many READs."""


class Preparing(Sending):
    """The part of a session that knows lines by heart."""

    __slots__ = ()

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

    def forget(self, fileno: int) -> None:
        """Forget what lines about a file lead to: it is being closed."""
        if self.lines_of:
            for line in self.lines_of.pop(fileno, ()):
                self.prepared.pop(line, None)
        if fileno == self.write_fileno:
            self.write_size = -1
