"""The disk space for the logs of one child, and their files.

Rules of this file.

1. An unused file becomes the spare one, and never moves to another child.
2. Unused files are freed before a log is refused: the spare file, then the oldest
   finished log's. So it is where the host lacks descriptors, and on a full disk for a
   log that must be kept whole.
3. The content of a closed file is not needed: an error at its close (of a network file
   system) is ignored.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from hostlib.large_files import close_file
from hostlib.unnamed_files import open_unnamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.toolexec.slots import Descriptors

LEAST_FILE_BYTES = 8 * 1024 * 1024
"""Length to which a file may grow although the quota is used up: with less, a tool and
its reader would wait for each other all the time."""

STEP_BYTES = 1024 * 1024
"""Share of the quota that a growing file takes at a time."""


class LogQuota:
    """The disk space for the logs of one child, and their files.

    An unused file becomes the spare one: it is overwritten from its beginning, which is
    up to ten times as quick as new pages. It never moves to another child.

    Args:
        limit_bytes: for all of them together.
        make_room: frees a finished execution's file; returns whether there was one.
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
        """The spare file and its share; None if there is none."""
        return self._spare

    def restore(self, used_bytes: int, spare: tuple[int, int] | None) -> None:
        """Restore the share and the spare file of the program before."""
        self.used_bytes, self._spare = used_bytes, spare
        self._descriptors.hold(len(self.descriptors()))

    def take(self, size_bytes: int) -> bool:
        """Take a share; return False if none is left."""
        while self.used_bytes + size_bytes > self.limit_bytes:
            if not self.give_up():
                return False
        self.used_bytes += size_bytes
        return True

    def give_up(self) -> bool:
        """Free an unused file; return False if there is none."""
        return self.drop_spare() or self._make_room()

    def open_file(self, directory: str) -> tuple[int, int]:
        """Return an unnamed file and the share that was taken for it.

        Raises:
            OSError: it cannot be made.
        """
        while self._spare is None and not self._descriptors.has(1):
            if not self._make_room():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if self._spare is None and self.used_bytes + STEP_BYTES > self.limit_bytes:
            # Its first step would drop the spare file and make as many new pages.
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
        """Close the spare file; return whether there was one."""
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
        """Return its descriptors of the host."""
        return (self._spare[0],) if self._spare is not None else ()
