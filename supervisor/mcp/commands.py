"""The tool exec of ``sandhost mcp --files``: one command of a shell, to its end.

Rules of this file.

1. A command ends with all processes beneath it: when its shell ends, at its time limit,
   and when the session ends in any way (``launchpad``).
2. Memory is bounded: the beginning and the end of its output are kept.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import msgspec
import trio

from supervisor.mcp.files import McpToolError, Path
from supervisor.spawn.process import ExitStatus
from supervisor.spawn.request import SpawnError, SpawnRequest

if TYPE_CHECKING:
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.process import SpawnedProcess

HEAD_BYTES = TAIL_BYTES = 15_000
"""Bytes of the beginning, and of the end, that are kept; together one answer."""

TIMEOUT_S, MOST_TIMEOUT_S = 120.0, 3600.0
"""The usual time limit, and the longest."""

AT_ONCE = 8
"""Most commands at the same time; a further one waits."""

END_S = 5.0
"""Longest wait for killed processes; one that is stuck in the kernel takes longer."""

_SHELL = "/bin/sh"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Exec(msgspec.Struct, forbid_unknown_fields=True):
    """Run a command by /bin/sh; return its output and status.

    It has no input. Processes that it leaves in the background end with it.
    """

    command: Annotated[str, msgspec.Meta(min_length=1)]
    cwd: Path = "."
    timeout_s: Annotated[
        float, msgspec.Meta(gt=0, le=MOST_TIMEOUT_S, description="Then it is ended.")
    ] = TIMEOUT_S


class KeptOutput:
    """The beginning and the end of an output."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, piece: bytes) -> None:
        """Add a piece."""
        room = HEAD_BYTES - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > TAIL_BYTES:
            self._left_out += len(self._tail) - TAIL_BYTES
            del self._tail[:-TAIL_BYTES]

    def text(self) -> str:
        """Return the text; the omitted middle is named by its size."""
        between = f"\n[{self._left_out} bytes left out]\n" if self._left_out else ""
        head, tail = (b.decode(errors="replace") for b in (self._head, self._tail))
        if not between:
            return bytes(self._head + self._tail).decode(errors="replace")
        return f"{head}{between}{tail}"


class Commands:
    """Runs commands, a few at the same time.

    Args:
        launcher: its launchpad ends the processes of a command, and all commands with
            this program.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._slots = trio.CapacityLimiter(AT_ONCE)

    async def run(self, asked: Exec) -> str:
        """Run a command; return its output and, as the last line, its end.

        Raises:
            McpToolError: it cannot be started, or its time is up.
            LaunchpadLost: no command can be run any more.

        Cancellation: it is ended, with all beneath it.
        """
        async with self._slots:
            process, output = await self._start(asked)
            kept, status = KeptOutput(), ExitStatus()
            try:
                with trio.move_on_after(asked.timeout_s) as patience:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_take_in, output, kept)
                        status = await process.wait_exit()
                        await process.wait_swept()  # then no process holds the output
            finally:
                with trio.move_on_after(END_S, shield=True):
                    await process.signal_tree(signal.SIGKILL)
                    await process.wait_exit()
                    await process.wait_swept()
                process.close()
                await trio.aclose_forcefully(output)
        said = kept.text()
        said += "" if not said or said.endswith("\n") else "\n"
        if patience.cancelled_caught:
            how = "give a longer timeout_s, or a shorter command"
            raise McpToolError(
                f"{said}[ended: its {asked.timeout_s:g} s were up; {how}]"
            )
        if status.signal is not None:
            return f"{said}[killed by signal {status.signal}]"
        return f"{said}[exit status {status.code}]"

    async def _start(
        self, asked: Exec
    ) -> tuple[SpawnedProcess, trio.lowlevel.FdStream]:
        """Start a command; return its process and the pipe of its output."""
        with ExitStack() as stack:

            def held(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            try:
                cwd_fd = held(os.open(asked.cwd, _DIRECTORY))
                null = held(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                reader, writer = os.pipe2(os.O_CLOEXEC)
                held(writer)
                output = trio.lowlevel.FdStream(reader)
            except (OSError, ValueError) as why:
                raise _make_start_error(
                    asked, getattr(why, "strerror", None) or why
                ) from None
            request = SpawnRequest(
                executable=_SHELL,
                argv=(_SHELL, "-c", asked.command),
                env=dict(os.environ),
                cwd_fd=cwd_fd,
                fds=((null, 0), (writer, 1), (writer, 2)),
            )
            try:
                return await self._launcher.spawn(request), output
            except BaseException as why:
                await trio.aclose_forcefully(output)
                if isinstance(why, SpawnError):
                    raise _make_start_error(asked, why.reason) from None
                raise


async def _take_in(output: trio.lowlevel.FdStream, kept: KeptOutput) -> None:
    async for piece in output:
        kept.add(bytes(piece))


def _make_start_error(asked: Exec, why: object) -> McpToolError:
    how = "name a directory that is there as cwd, or a shorter command"
    return McpToolError(f"cannot run a command in {asked.cwd!r}: {why}; {how}")
