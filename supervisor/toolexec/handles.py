"""Long output as an LLM fd (``X-Sandhost-Fd: 1``).

    finished log --pieces--> the child's contents -> <fd_result>

Rules of this file.

1. Output with no more characters than the LLM fds show at once is sent as it is; so is
   output without room there, which the host's log says. Asking loses nothing.
2. The output moves in pieces: it is never whole in memory.
3. The host's note (a time-out) is no output, and not in the handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from supervisor.fsproxy.ports import ChildView
    from supervisor.toolexec.execution import Execution
    from vfs.clients import Client

PIECE_BYTES = 1024 * 1024
"""Bytes of one piece: long enough that a thread hop costs nothing beside it."""


class Contents(Protocol):
    """The LLM fds of a host, as far as they are used here."""

    @property
    def most_shown(self) -> int:
        """Characters that are shown at once."""
        ...

    def is_call(self, name: str) -> bool:
        """Return whether a tool of this name is one of their own."""
        ...

    async def wrap_pieces(
        self, client: Client, read: Callable[[], Awaitable[bytes]], source: str
    ) -> bytes | None:
        """Keep an output; return the answer of ``wrap_output``, None without a client."""
        ...


async def make_handle(
    contents: Contents,
    log: Callable[..., None],
    child: ChildView,
    execution: Execution,
) -> bytes | None:
    """Return the ``fd_result`` of an output; None to send it as it is.

    Args:
        contents: keep it.
        log: takes a level, a line and its fields.
        child: asks for it.
        execution: finished.

    Raises:
        OSError: the log cannot be read.

    Cancellation: the pieces so far are freed.
    """
    tool = execution.tool
    # An output has at least as many bytes as characters. Answers of the LLM fd
    # calls are cut already, so tools with their names are not handled here.
    is_short = execution.output_end <= contents.most_shown
    if is_short or child.session is None or contents.is_call(tool):
        return None
    client, source = child.session.client, f"tool:{tool}"
    answer = await contents.wrap_pieces(client, _reader(execution), source)
    if answer is not None and answer.startswith(b"<fd_result "):
        return answer
    if answer is not None and answer.startswith(b"<fd_error"):
        text = f"exec {execution.id}: no handle for its output: {answer.decode()}"
        who = {"child_id": child.id, "client_id": client.id}
        log("INFO", f"toolexec: {text}", **who, exec=execution.id)
    return None


def _reader(execution: Execution) -> Callable[[], Awaitable[bytes]]:
    offset = 0

    async def read() -> bytes:
        nonlocal offset
        size = min(PIECE_BYTES, execution.output_end - offset)
        piece = await execution.log.read(offset, size) if size else b""
        offset += len(piece)
        return piece

    return read
