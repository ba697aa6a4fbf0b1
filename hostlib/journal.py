"""The journal: the host's events, one JSON line each, in order.

Rules of this file.

1. One event is one ``write`` of one line to a file in append mode: lines of several
   writers do not mix, and the line is in the file when the call returns.
2. Names in events are text: bytes that are not UTF-8 are escaped, and JSON escapes
   control characters.  Content, tokens and prompts never come here.
3. Counters of events (``observe``) register a tap; a tap is quick and never fails.
4. The host works on if the journal cannot be written (the disk may be full).  It
   complains once, when writing begins to fail.  A torn line counts as lost, and a LF
   stands before the next one, also in a program that opens the file later.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.clock import timestamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.segments import Segments


_LF = 10

EVENTS = (
    "host.started",
    "host.stopping",
    "child.spawned",
    "child.signalled",
    "child.exited",
    "child.gone",
    "client.connected",
    "client.gone",
    "file.opened",
    "file.closed",
    "file.auto_closed",
    "security.denied",
    "security.left_out",
    "exec.started",
    "exec.ended",
    "exec.failed",
    "sidecar.started",
    "sidecar.ended",
    "sidecar.restarting",
    "host.ordered",
    "host.order_dropped",
    "host.reloaded",
    "host.replacing",
    "host.not_replaced",
    "host.replaced",
    "host.lagged",
    "child.restarting",
    "child.given_up",
    "child.condition",
    "child.limit",
    "child.held_back",
    "child.let_go",
    "child.overdue",
    "llm.called",
    "llm.dropped",
    "quota.denied",
    "network.refused",
    "network.failed",
    "network.reset",
    "network.changed",
    "network.narrowed",
    "workspace.opened",
    "workspace.closed",
    "workspace.changed",
    "workspace.file_opened",
    "workspace.file_written",
    "workspace.left_out",
    "workspace.limit",
    "workspace.committed",
    "workspace.conflict",
    "workspace.discarded",
    "workspace.snapshot",
    "workspace.restored",
)
"""The events that this host writes."""


class Journal:
    """Writes events to a file, if there is one.

    Args:
        fd: opened with O_APPEND; owned; -1 for no file.
        complain: called once when writing begins to fail.
        is_torn: the file does not end in a whole line.

    Attributes:
        taps: each is called with every event, also without a file.
        lost: number of events that could not be written.
    """

    def __init__(
        self, fd: int, complain: Callable[[str], None], *, is_torn: bool = False
    ) -> None:
        self._fd = fd
        self._complain = complain
        self._failing = False
        self._is_torn = is_torn
        self._encoder = msgspec.json.Encoder()
        self.taps: list[Callable[[str, dict[str, object]], None]] = []
        self.lost = 0

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._fd >= 0

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the journal holds."""
        return (self._fd,) if self._fd >= 0 else ()

    def write(self, event: str, **fields: object) -> None:
        """Write one event, and call the taps."""
        self.count(event, **fields)
        if not self.is_on:
            return
        line = self._encoder.encode(
            {"time": timestamp(time.time()), "event": event, **fields}
        )
        data = b"\n%b\n" % line if self._is_torn else line + b"\n"
        done, why = self._put(data)
        if done:
            self._is_torn = data[done - 1] != _LF
        self._note(why)

    def count(self, event: str, **fields: object) -> None:
        """Call the taps only, for an event that is too frequent to be written."""
        for tap in self.taps:
            tap(event, fields)

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        """Write one line; return the number of written bytes, and the error if any."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as why:
            return done, why
        return done, None

    def _note(self, why: OSError | None) -> None:
        """Complain once when writing begins to fail; count a lost event."""
        if why is not None and not self._failing:
            self._complain(f"cannot write the journal: {why.strerror}; going on")
        self._failing = why is not None
        self.lost += self._failing

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_LINKS_OF_SYSTEM = frozenset({"/dev", "/dev/fd", "/proc/self/fd"})
"""Directories in which no child can make a link such as ``/dev/stderr``."""


def open_journal(path: str | None, complain: Callable[[str], None]) -> Journal:
    """Open a journal for appending; no link is followed (attack 49).

    Raises:
        OSError: the file cannot be opened.
    """
    if path is None:
        return Journal(-1, complain)
    # O_NONBLOCK: a pipe without a reader is refused, and a full one is an error; neither
    # makes the host wait.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    flags |= os.O_NONBLOCK
    if os.path.dirname(path) not in _LINKS_OF_SYSTEM:
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as why:
        if why.errno != errno.ELOOP or not os.path.islink(path):
            raise
        text = "it is a link, which a child may have put there; name the file itself"
        raise OSError(errno.ELOOP, text, path) from None
    return Journal(fd, complain, is_torn=_ends_torn(fd))


def _ends_torn(fd: int) -> bool:
    """Return whether a file that is open for writing ends within a line."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the host may write the file, but not read it
        return False
    try:
        return os.pread(reading, 1, status.st_size - 1) != b"\n"
    finally:
        os.close(reading)


def text_of(name: bytes) -> str:
    """Return a name as text for an event (rule 2)."""
    return name.decode("utf-8", "backslashreplace")


# The daemon's journal: the same lines, in files that rotate. Followers (``sandhost
# events``) wait for ``changed`` and read the files by offset.

MAX_BYTES = 64 * 1024 * 1024
KEEP = 5
"""Full files beside the newest: some two million events."""


class SegmentJournal(Journal):
    """A journal in segments that rotate.

    Args:
        segments: its files; owned.
        complain: called once when writing begins to fail.
    """

    def __init__(self, segments: Segments, complain: Callable[[str], None]) -> None:
        last = segments.last_byte()
        super().__init__(-1, complain, is_torn=last not in {b"", b"\n"})
        self.segments = segments
        self._changed = trio.Event()
        self._is_taken = False
        self._is_open = True

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._is_open

    @property
    def changed(self) -> trio.Event:
        """An event that the next line sets; a follower gets it before it reads."""
        self._is_taken = True
        return self._changed

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the journal holds."""
        return self.segments.descriptors()

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        before = self.segments.end
        kept = self.segments.append(data)
        if self.segments.has_vanished:
            self.segments.has_vanished = False
            where = self.segments.directory
            self._complain(f"The journal's files vanished: begun anew in {where}")
        # Set even if no task waits yet: a follower that has it may be about to.
        if self._is_taken:
            self._is_taken = False
            self._changed.set()
            self._changed = trio.Event()
        return self.segments.end - before, None if kept else self.segments.failure

    def close(self) -> None:
        """Close the file."""
        self._is_open = False
        self.segments.close()
