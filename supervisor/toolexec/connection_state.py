"""What a connection of ToolExec is in the middle of: so that it can be gone on with.

A connection says by its moment how it is handed to the next program of the host: as what
it has received, as the reply that is under way, or not at all before it is further.
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
    """Where a connection is."""

    RECEIVING = "receiving"
    """Its request has not come whole, or nothing has been done for it."""

    BUSY = "busy"
    """It does what ends by itself."""

    WAITING = "waiting"
    """It waits for the end of its tool; nothing of the reply is sent."""

    STREAMING = "streaming"
    """Output is sent as it comes."""

    SENDING = "sending"
    """A whole output is being sent."""

    LAST = "last"
    """The last bytes of the reply are being sent."""

    REFUSED = "refused"
    """It was told why; what it still sends is read for a while, and forgotten."""


class Kind(Enum):
    """How the output of an execution is answered."""

    WHOLE = "whole"
    STREAM = "stream"
    HANDLE = "handle"
    NOTIFY = "notify"
    REPLAY = "replay"


class TaskState(msgspec.Struct):
    """See ``Task``; (child, number) names the execution, ``reader`` is where it is."""

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
    """The execution that a connection answers with.

    Attributes:
        execution: it.
        kind: how its output is answered.
        detach: it goes on when the client is gone.
        as_fd: the client takes a handle in place of a large output.
        moment: where that is.
        reader: sends its output, while it is streamed.
        before: sent before what begins at ``offset``, while all of it is sent.
        offset: everything of the output before it is sent, or with the kernel.
        after: sent after it.
    """

    execution: Execution
    kind: Kind
    detach: bool = False
    as_fd: bool = False
    moment: Moment = Moment.WAITING
    reader: ChunkedReader | None = None
    before: bytes = b""
    offset: int = 0
    after: bytes = b""

    def snapshot(self, child_id: str, number: int) -> TaskState:
        """Return it as ``restore`` takes it; its execution is named by the arguments."""
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
            state: what it has left.
            execution: the one that is named there.
            sock: of the client that is answered.
        """
        kind, moment = Kind(state.kind), Moment(state.moment)
        task = cls(execution, kind, state.detach, state.as_fd, moment)
        task.before, task.offset, task.after = state.before, state.offset, state.after
        log = execution.log
        if state.reader is not None:
            task.reader = ChunkedReader.at(log, sock, state.reader)
        elif kind is Kind.STREAM:
            head = chunked_head(execution.id)
            task.reader = ChunkedReader(log, sock, before=head)
        if task.reader is not None:
            log.readers.add(task.reader)  # it is attached when its turn comes
        return task
