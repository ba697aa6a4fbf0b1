"""The room for the logs of one child on the disk, and the files for that.

Rules of this file.

1. A file that is no longer needed becomes the spare one, and never changes hands
   between children.
2. Unused files are given up before a log is refused: the spare file, then the oldest
   finished log that has one. So it is where the host lacks descriptors, and where the
   disk is full and a log must be kept whole.
3. The content of a closed file is not needed: an error of it then (of a network file
   system, say) is no fault.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from hostlib.file_closing import close_file
from hostlib.unnamed_files import open_unnamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.toolexec.slots import Descriptors

LEAST_FILE_BYTES = 8 * 1024 * 1024
"""The length to which a file may grow although the child's quota is used up: with less,
a tool and its reader would wait for each other all the time."""

STEP_BYTES = 1024 * 1024
"""How much of the quota a growing file takes at a time."""


class Quota:
    """The room for the logs of one child on the disk, and the files for that.

    A file that is no longer needed becomes the spare one: it is written again from its
    beginning, which is up to ten times as quick as to have pages allocated anew.  It
    never changes hands between children.

    Args:
        limit_bytes: all of them together.
        make_room: gives a finished execution's file up; tells whether there was one.
        descriptors: those of the host.
    """

    def __init__(
        self,
        limit_bytes: int,
        make_room: Callable[[], bool],
        descriptors: Descriptors,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._make_room = make_room
        self._descriptors = descriptors
        self._spare: tuple[int, int] | None = None

    @property
    def spare(self) -> tuple[int, int] | None:
        """The spare file and the share that it has; None if there is none."""
        return self._spare

    def restore(self, used_bytes: int, spare: tuple[int, int] | None) -> None:
        """Have what the program before had taken, and its spare file."""
        self.used_bytes, self._spare = used_bytes, spare
        self._descriptors.hold(len(self.descriptors()))

    def take(self, size_bytes: int) -> bool:
        """Take a share; False if there is none."""
        while self.used_bytes + size_bytes > self.limit_bytes:
            if not self.give_up():
                return False
        self.used_bytes += size_bytes
        return True

    def give_up(self) -> bool:
        """Give up something that nobody uses; False if there is nothing."""
        return self.drop_spare() or self._make_room()

    def open_file(self, directory: str) -> tuple[int, int]:
        """Return a file without a name, and the share that has been taken for it.

        Raises:
            OSError: it cannot be made.
        """
        while self._spare is None and not self._descriptors.has(1):
            if not self._make_room():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if self._spare is None and self.used_bytes + STEP_BYTES > self.limit_bytes:
            # Its first step would push that out, and have as many pages made anew.
            self._make_room()
        spare, self._spare = self._spare, None
        if spare is None:
            spare = open_unnamed(directory), 0
            self._descriptors.hold(1)
        return spare

    def give_file(self, fd: int, share_bytes: int) -> None:
        """Give a file back with its share."""
        if share_bytes <= LEAST_FILE_BYTES:
            with suppress(OSError):
                os.close(fd)
            self.used_bytes -= share_bytes
            self._descriptors.hold(-1)
            return
        self.drop_spare()
        self._spare = fd, share_bytes

    def drop_spare(self) -> bool:
        """Close the spare file; tells whether there was one."""
        if self._spare is None:
            return False
        fd, share_bytes = self._spare
        self._spare = None
        self.used_bytes -= share_bytes
        self._descriptors.hold(-1)
        with suppress(OSError):
            close_file(fd)
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return (self._spare[0],) if self._spare is not None else ()
