"""The pump of one execution: moves output from the pipe into the log.

Owns the reading end of the tool's pipe.

Rules of this file.

1. Output is logged as fast as the log takes it: the pipe is the backpressure.
2. After each piece other tasks have their turn, unless the pump had to wait anyhow.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from hostlib.linux.pipes import bytes_waiting, resize_pipe
from hostlib.readiness import wait_readable
from supervisor.toolexec.output.log import PIECE_BYTES
from supervisor.toolexec.output.stores import HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.toolexec.output.log import OutputLog

PIPE_BYTES = 524_288
"""Capacity of the pipe of a tool with much output: it prints while a piece is moved."""


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
        self._last_bytes: int | None = None
        self._waited = True

    async def run(self) -> None:
        """Log the output to its end.

        Raises:
            LogFullError: it must be kept whole, and does not fit.
        """
        if self._log.pending:  # read by the program before, and not kept
            await self._log.append(self._log.pending)
        has_much = False
        while data := await self._read():
            await self._log.append(data)
            if has_much:
                await self._log.wait_for_reader()
            elif len(data) >= HEAD_BYTES:
                has_much = True
                resize_pipe(self._pipe, PIPE_BYTES)

    async def discard_rest(self) -> None:
        """Read to the end and drop the bytes."""
        while await self._read():
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

    # Reading

    async def _read(self) -> bytes:
        """Return output of the tool; ``b""`` at the end."""
        while True:
            await self._take_turns()
            try:
                return os.read(self._pipe, self._allowed_size(PIECE_BYTES))
            except BlockingIOError:
                if not await self._wait_more():
                    return b""
            except OSError:  # EIO: the last holder of a terminal is gone
                return b""

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
