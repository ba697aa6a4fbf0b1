"""The pump of one execution: moves output from the pipe into the log.

    run: read small pieces -> much output: move large ones (``splice``)

Owns the reading end of the tool's pipe.

Rules of this file.

1. Output is logged as fast as the log takes it: the pipe is the backpressure.
2. After each piece other tasks have their turn, unless the pump had to wait anyhow.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import trio

from hostlib.linux.pipes import bytes_waiting
from hostlib.readiness import wait_readable
from supervisor.toolexec.output.log import PIECE_BYTES
from supervisor.toolexec.output.splice import SPLICED_BYTES, Tap
from supervisor.toolexec.output.stores import HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.toolexec.output.log import OutputLog


class OutputPump:
    """Moves the output of one tool into its log.

    Args:
        pipe: its end of the tool's pipe or terminal, non-blocking; owned.
        log: gets the output.

    Attributes:
        has_ended: whether its output is complete; set by the execution.
    """

    def __init__(self, pipe: int, log: OutputLog) -> None:
        self.has_ended = False
        self._pipe = pipe
        self._log = log
        self._tap: Tap | None = None
        self._last_bytes: int | None = None
        self._waited = True

    async def run(self) -> None:
        """Log the output to its end.

        Raises:
            LogFullError: it must be kept whole, and does not fit.
        """
        if self._log.pending:  # read by the program before, and not kept
            await self._log.append(self._log.pending)
        while data := await self._read(HEAD_BYTES):
            await self._log.append(data)
            if len(data) == HEAD_BYTES:  # much output
                await self._run_on()
                return

    async def discard_rest(self) -> None:
        """Read to the end and drop the bytes."""
        while await self._read(HEAD_BYTES):
            pass

    def end_at_present(self) -> None:
        """Make the present content of the pipe the last: others hold it open for ever."""
        if not self.has_ended:
            self._last_bytes = bytes_waiting(self._pipe)
            trio.lowlevel.notify_closing(self._pipe)  # a waiting reader continues

    @property
    def pipe(self) -> int:
        """Return the descriptor of the tool's output; -1 when it is closed."""
        return self._pipe

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        if self._pipe >= 0:
            if not self.has_ended:  # a task may be waiting for it
                trio.lowlevel.notify_closing(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host."""
        if self._pipe >= 0:
            yield self._pipe, "tool's output"
        if self._tap is not None:
            for fd in self._tap.descriptors():
                yield fd, "tool's output, aside"

    # Much output

    async def _run_on(self) -> None:
        """Move the rest without copying it, or by a buffer where that fails."""
        with ExitStack() as stack:
            tap = None
            with suppress(OSError):  # a terminal, or no descriptor left
                tap = Tap(self._pipe)
                self._tap = tap
                stack.callback(self._close_tap, tap)
            buffer = bytearray(PIECE_BYTES)
            while True:
                moved = None if tap is None else await self._splice(tap)
                if moved is None:
                    moved = await self._read_into(buffer)
                    await self._log.append(memoryview(buffer)[:moved])
                if not moved:
                    return

    def _close_tap(self, tap: Tap) -> None:
        self._tap = None
        tap.close()

    async def _splice(self, tap: Tap) -> int | None:
        """Move a piece; return its size, 0 at the end, None if it must be copied."""
        while True:
            await self._take_turns()
            await self._log.wait_for_reader()
            size = SPLICED_BYTES
            if self._last_bytes is not None:
                size = min(size, self._last_bytes)
                if not size:
                    return 0
            try:
                moved = await self._log.append_from(tap, size)
            except BlockingIOError:
                if not await self._wait_more():
                    return 0
            else:
                if moved and self._last_bytes is not None:
                    self._last_bytes = max(0, self._last_bytes - moved)
                return moved

    # Reading

    async def _read(self, size: int) -> bytes:
        """Return output of the tool; ``b""`` at the end."""
        while True:
            await self._take_turns()
            try:
                return os.read(self._pipe, self._allowed_size(size))
            except BlockingIOError:
                if not await self._wait_more():
                    return b""
            except OSError:  # EIO: the last holder of a terminal is gone
                return b""

    async def _read_into(self, buffer: bytearray) -> int:
        while True:
            await self._take_turns()
            allowed = self._allowed_size(len(buffer))
            try:
                return os.readv(self._pipe, [memoryview(buffer)[:allowed]])
            except BlockingIOError:
                if not await self._wait_more():
                    return 0
            except OSError:
                return 0

    async def _take_turns(self) -> None:
        """Let other tasks run: a tool with endless output is one of many."""
        if not self._waited:
            await trio.lowlevel.checkpoint()
        self._waited = False

    def _allowed_size(self, size: int) -> int:
        if self._last_bytes is None:
            return size
        size = min(size, self._last_bytes)
        self._last_bytes -= size
        return size

    async def _wait_more(self) -> bool:
        """Wait for output; return False if further output is not wanted."""
        if self._last_bytes is not None:
            return False
        self._waited = True
        # Not a cancel scope: one would be made for each wait.
        with suppress(trio.ClosedResourceError):
            await wait_readable(self._pipe)
        return True
