"""An audit's events in the journal: files that a child opened and changed (WS20).

Rules of this file.

1. A child can open and change as many files as it likes: of either kind ``BURST``
   events are written at once, then ``PER_S`` a second, and of what is changed at its
   end ``MOST_CHANGES``. Events that are left out are counted and told.
2. Paths are relative to the base. The kernel has them from the opener's root, or from
   the mount's top when the mounts of a child that has ended are gone.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import trio

from hostlib.event_rate import EventRate
from hostlib.readiness import wait_readable
from hostlib.threads import in_thread
from supervisor.workspace.open_watch import read_opened, watch_mount
from supervisor.workspace.verbs import diff_row, path_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostlib.journal import Journal
    from supervisor.workspace.changes import Row
    from supervisor.workspace.open_watch import OpenedFile
    from supervisor.workspace.use import WorkspaceUse

BURST = 1000
PER_S = 10.0
"""Of opens, and of files written: a day of it is 200 MB of journal."""

MOST_CHANGES = 10_000
"""Rows that are written at a child's end; a tenth of a second of the host."""

PAUSE_S = 0.05
"""Between two reads: 5,000 opens a second are read; what comes on top of the kernel's
queue (16,384) is lost, and that is told."""

DRAIN_TIMEOUT_S = 5.0
"""Longest read of what is left when the child has ended."""

_TOGETHER = 100
"""Events that are written between two checkpoints: about 1 ms."""


def watch_word(index: int) -> str:
    """Return what the watch of a child's workspace is called among its descriptors."""
    return f"workspace opens {index}"


def watch_use(use: WorkspaceUse, mount: int) -> tuple[int, str]:
    """Watch what is opened in a workspace.

    Args:
        use: the workspace.
        mount: a descriptor of its mount; -1 where the child makes that.

    Returns:
        A descriptor of ``watch_mount`` and "", or -1 and what an operator is to be
        told.
    """
    if use.mode == "read-only":
        return -1, ""  # nothing is opened to be written
    if use.mode == "direct":
        text = f"cannot audit workspace {use.name}: mode 'direct' writes to the base"
        return -1, f"{text}; use the mode 'review'"
    why = "children share it"
    if mount < 0:
        why = "it takes a host that is root"
    elif not use.is_shared:
        try:
            return watch_mount(mount), ""
        except OSError as error:
            why = f"the kernel gives no fanotify ({error.strerror})"
    text = f"cannot tell each open in workspace {use.name}: {why}"
    return -1, f"{text}; the journal tells at the end what was changed"


class WorkspaceAudit:
    """Tells the journal which files of one workspace a child opens and has changed.

    Args:
        journal: where events go.
        child_id: whose they are.
        use: the workspace.
        watch: a descriptor of ``watch_mount``, somebody else's; -1 if there is none.
    """

    def __init__(
        self, journal: Journal, child_id: str, use: WorkspaceUse, watch: int = -1
    ) -> None:
        self._journal = journal
        self._about = {"child_id": child_id, "workspace": use.name}
        self._top = os.fsencode(use.base) + b"/"
        self._watch = watch
        self._opened = EventRate(BURST, PER_S)
        self._written = EventRate(BURST, PER_S)
        self._unknown = 0
        self._is_overflowed = False

    async def tell_opens(self) -> None:
        """Tell each open, until cancelled."""
        while self._watch >= 0:
            await wait_readable(self._watch)
            await self._tell_batch()
            await trio.sleep(PAUSE_S)

    async def finish_opens(self) -> None:
        """Tell what was opened until now, when nobody opens anything any more."""
        if self._watch < 0:
            return
        is_last = False
        with trio.move_on_after(DRAIN_TIMEOUT_S, shield=True):
            while not is_last:
                is_last = await self._tell_batch()
        self._is_overflowed |= not is_last
        self.report_omitted()

    async def _tell_batch(self) -> bool:
        """Tell what one read brings; return whether nothing more was there."""
        batch = await in_thread(read_opened, self._watch)
        self._unknown += batch.unknown
        self._is_overflowed |= batch.is_overflowed
        for file in batch.files:
            if file.is_open:
                self._tell("workspace.file_opened", file, self._opened)
            if file.is_written:
                self._tell("workspace.file_written", file, self._written)
        return batch.is_last

    def _tell(self, event: str, file: OpenedFile, rate: EventRate) -> None:
        if not rate.take(time.monotonic()):
            return
        self.report_omitted()
        path = path_fields("path", file.path.removeprefix(self._top).lstrip(b"/"))
        self._journal.write(event, **self._about, **path, pid=file.pid)

    def report_omitted(self) -> None:
        """Tell how many opens were left out so far: what comes next counts anew."""
        opened, written = self._opened.left_out, self._written.left_out
        if opened or written or self._unknown or self._is_overflowed:
            self._journal.write(
                "workspace.left_out",
                **self._about,
                opened=opened,
                written=written,
                unknown=self._unknown,
                overflowed=self._is_overflowed,
            )
        self._opened.left_out = self._written.left_out = self._unknown = 0
        self._is_overflowed = False

    async def tell_changes(self, rows: Sequence[Row]) -> None:
        """Tell what was changed, as ``workspace diff`` has it."""
        for number, row in enumerate(rows[:MOST_CHANGES], 1):
            self._journal.write("workspace.changed", **self._about, **diff_row(row))
            if number % _TOGETHER == 0:
                await trio.lowlevel.checkpoint()
        left_out = len(rows) - MOST_CHANGES
        if left_out > 0:
            self._journal.write("workspace.left_out", **self._about, changed=left_out)
