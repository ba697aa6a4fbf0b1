"""The journal: what happened, one JSON line each, in order.

Rules of this file.

1. One event is one ``write`` of one line to a file in append mode: lines of several
   writers do not mix, and a line is there as soon as the call returns.
2. Names in events are text: what is not UTF-8 is escaped, control characters are JSON's
   business.  Content, tokens and prompts never come here.
3. Who counts events (``observe``) taps them; a tap takes no time and never fails.
4. A journal that cannot be written stops nothing: it is said once, and again when it
   works (the file may be on a full disk).  A line that is there in part is a line of its
   own, and counts as lost; the file itself says so to the program that opens it next.
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
    """Writes events to a file, or nowhere.

    Args:
        fd: opened with O_APPEND; owned; -1 for no file.
        complain: told once when writing begins to fail.
        is_torn: what was written last, by whomever, is no whole line.

    Attributes:
        taps: each is told every event, also where no file is.
        lost: events that could not be written.
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
        """Whether events go anywhere."""
        return self._fd >= 0

    def descriptors(self) -> tuple[int, ...]:
        """Return what the journal holds of the process's descriptors."""
        return (self._fd,) if self._fd >= 0 else ()

    def write(self, event: str, **fields: object) -> None:
        """Write one event."""
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
        """Tell the taps alone: what is one of too many to be written."""
        for tap in self.taps:
            tap(event, fields)

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        """Write one line; return how much of it is there, and why no more."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as why:
            return done, why
        return done, None

    def _note(self, why: OSError | None) -> None:
        """Say it once when writing begins to fail."""
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
"""Directories whose links no child can make: ``/dev/stderr`` is one of them."""


def open_journal(path: str | None, complain: Callable[[str], None]) -> Journal:
    """Open a journal for appending; no link is followed (attack 49).

    Raises:
        OSError: the file cannot be opened.
    """
    if path is None:
        return Journal(-1, complain)
    # A pipe that nobody reads is refused, and one that is full is a fault to be told:
    # neither holds the host up.
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
    """Tell whether a file that is opened to be written ends within a line."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # one that may only be written: nobody can look
        return False
    try:
        return os.pread(reading, 1, status.st_size - 1) != b"\n"
    finally:
        os.close(reading)


def text_of(name: bytes) -> str:
    """Return a name as events have it (rule 2)."""
    return name.decode("utf-8", "backslashreplace")


# The daemon's journal: the same lines as everywhere, in files that rotate.
#
# Each event is appended at once, as ``journal`` promises; the bell rings for those who
# follow (``sandhost events``) and read the files by offset.

MAX_BYTES = 64 * 1024 * 1024
KEEP = 5
"""Some two million events are kept."""


class SegmentJournal(Journal):
    """A journal in segments.

    Args:
        segments: where it is kept; owned.
        complain: told once when writing begins to fail.
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
        """Whether events go anywhere."""
        return self._is_open

    @property
    def changed(self) -> trio.Event:
        """An event that is set with the next line; take it before reading."""
        self._is_taken = True
        return self._changed

    def descriptors(self) -> tuple[int, ...]:
        """Return what the journal holds of the process's descriptors."""
        return self.segments.descriptors()

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        before = self.segments.end
        kept = self.segments.append(data)
        if self.segments.has_vanished:
            self.segments.has_vanished = False
            where = self.segments.directory
            self._complain(f"The journal's files vanished: begun anew in {where}")
        # Set although nobody waits yet: who has taken it may be about to.
        if self._is_taken:
            self._is_taken = False
            self._changed.set()
            self._changed = trio.Event()
        return self.segments.end - before, None if kept else self.segments.failure

    def close(self) -> None:
        """Close the file."""
        self._is_open = False
        self.segments.close()
