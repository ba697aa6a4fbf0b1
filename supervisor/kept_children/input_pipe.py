"""The standard input of a child that is sent what it reads.

Rules of this file.

1. A piece is taken whole or not at all.
2. About ``MOST_WAITING_BYTES`` wait for the child; then its senders try again.
"""

from __future__ import annotations

import os

import trio

MOST_WAITING_BYTES = 1024 * 1024


class InputError(Exception):
    """A piece cannot be taken; the text says why."""


class ClosedInputError(InputError):
    """The child reads no more."""


class InputPipe:
    """The writing end of a child's standard input.

    Args:
        fd: owned.

    Attributes:
        taken: bytes of all pieces so far.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.taken = 0
        self._fd = fd
        self._waiting = bytearray()
        self._is_complete = False
        self._changed = trio.Event()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return () if self._fd < 0 else (self._fd,)

    def take(self, data: bytes, at: int | None, *, is_last: bool) -> bool:
        """Take a piece; return False if there is no room for it now.

        Args:
            data: the next input of the child.
            at: its offset in all input; None for a piece behind whatever is there. One
                that is there already is taken once.
            is_last: the child's input ends with it.

        Raises:
            ClosedInputError: no more is read.
            InputError: it does not follow on what was taken.
        """
        is_known = bool(data) or (is_last and self._is_complete)
        if is_known and at is not None and at + len(data) == self.taken:
            return True
        if self._fd < 0 or self._is_complete:
            raise ClosedInputError("it reads no more")
        if at is not None and at != self.taken:
            raise InputError(f"it has {self.taken} bytes, and these begin at {at}")
        if len(self._waiting) > MOST_WAITING_BYTES:
            return False
        self.taken += len(data)
        self._waiting += data
        self._is_complete = is_last
        self._changed.set()
        return True

    async def run(self) -> None:
        """Write to the child until its input is complete, or it reads no more."""
        try:
            while self._waiting or not self._is_complete:
                if not self._waiting:
                    self._changed = trio.Event()
                    await self._changed.wait()
                    continue
                try:
                    del self._waiting[: os.write(self._fd, self._waiting)]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._fd)
        except BrokenPipeError:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        fd, self._fd = self._fd, -1
        self._waiting.clear()
        if fd >= 0:
            os.close(fd)
