"""The execution of a connection's reply, and the stage of the reply.

The stage decides how a connection is handed over: by its received bytes, by its reply,
or not yet; another program of this host can continue from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from supervisor.toolexec.http_heads import chunked_head
from supervisor.toolexec.output.chunks import ChunkedReader

if TYPE_CHECKING:
    import socket

    from supervisor.toolexec.execution import Execution


class Moment(Enum):
    """The stage of a connection."""

    RECEIVING = "receiving"
    """Its request is not whole, or not begun."""

    BUSY = "busy"
    """It does a step that ends by itself."""

    WAITING = "waiting"
    """It waits for the end of its tool; no part of the reply is sent."""

    STREAMING = "streaming"
    """Output is sent as it comes."""

    SENDING = "sending"
    """A whole output is being sent."""

    LAST = "last"
    """The last bytes of the reply are being sent."""

    REFUSED = "refused"
    """The refusal was sent; further input is read and dropped for a while."""


class ReplyForm(Enum):
    """The form of an execution's reply."""

    WHOLE = "whole"
    STREAM = "stream"
    HANDLE = "handle"
    NOTIFY = "notify"
    REPLAY = "replay"


class TaskState(msgspec.Struct):
    """The state of a ``Task``; (child, number) names the execution."""

    child: str
    number: int
    kind: str
    detach: bool
    as_fd: bool
    moment: str
    reader: tuple[int, bytes, int, bytes] | None
    before: bytes
    offset: int
    after: bytes


@dataclass(slots=True)
class Task:
    """The execution of a connection's reply.

    Attributes:
        execution: the replied one.
        kind: the form of the reply.
        detach: whether it goes on without the client.
        as_fd: whether the client takes a handle for a large output.
        moment: the stage of the reply.
        reader: sends a streamed output.
        before: sent before the bytes at ``offset``, for a whole output.
        offset: all output before it is sent, or in the kernel.
        after: sent after it.
    """

    execution: Execution
    kind: ReplyForm
    detach: bool = False
    as_fd: bool = False
    moment: Moment = Moment.WAITING
    reader: ChunkedReader | None = None
    before: bytes = b""
    offset: int = 0
    after: bytes = b""

    def snapshot(self, child_id: str, number: int) -> TaskState:
        """Return its state for ``restore``; the arguments name its execution."""
        is_streaming = self.moment is Moment.STREAMING and self.reader is not None
        return TaskState(
            child=child_id,
            number=number,
            kind=self.kind.value,
            detach=self.detach,
            as_fd=self.as_fd,
            moment=self.moment.value,
            reader=self.reader.held() if is_streaming and self.reader else None,
            before=self.before,
            offset=self.offset,
            after=self.after,
        )

    @classmethod
    def restore(
        cls, state: TaskState, execution: Execution, sock: socket.socket
    ) -> Task:
        """Return the task of the program before.

        Args:
            state: its state.
            execution: the named one.
            sock: of the client.
        """
        kind, moment = ReplyForm(state.kind), Moment(state.moment)
        task = cls(execution, kind, state.detach, state.as_fd, moment)
        task.before, task.offset, task.after = state.before, state.offset, state.after
        log = execution.log
        if state.reader is not None:
            task.reader = ChunkedReader.at(log, sock, state.reader)
        elif kind is ReplyForm.STREAM:
            head = chunked_head(execution.id)
            task.reader = ChunkedReader(log, sock, before=head)
        if task.reader is not None:
            log.readers.add(task.reader)  # attached when its turn comes
        return task
