"""What ToolExec is when one program of a host hands it to the next: the records.

What it is: plain values, as they travel.  What it is not: how they come about and what
is made of them (``handover``); sidecars (``handover_sidecars``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from supervisor.spawned import ProcessState  # noqa: TC001 - msgspec
from supervisor.toolexec.handover_stores import StoreState  # noqa: TC001 - msgspec
from vfs.handover import state_from


class LogState(msgspec.Struct):
    """See ``OutputLog``; ``pending`` was read from the pipe and is not kept yet."""

    start: int
    end: int
    is_finished: bool
    note_at: int
    keep_all: bool
    is_discarded: bool
    stores: list[StoreState]
    pending: bytes = b""


class ExecutionState(msgspec.Struct):
    """See ``Execution``; times are seconds that are left or have passed.

    Attributes:
        where: ``live``, ``kept``, or empty: only a reader knows it any more.
        line: what its tool is told of signals by; -1 for none.
        passed: the limit that it is killed for; empty for none.
    """

    id: str
    key: str
    tool: bytes
    where: str
    log: LogState
    code: int | None
    timed_out: bool
    fault: str | None
    process: ProcessState | None = None
    pipe: int = -1
    timeout_s: float = 0.0
    climbs: list[tuple[str, float]] = []
    door_client: str = ""
    line: int = -1
    passed: str = ""


class ChildState(msgspec.Struct):
    """The executions of a child, its token, its socket, and its share of the disk."""

    id: str
    token: str
    listener_fd: int
    path: bytes
    executions: list[ExecutionState]
    used_bytes: int
    spare: tuple[int, int] | None


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


class ConnectionState(msgspec.Struct):
    """A connection.

    Attributes:
        server: the child whose socket it came by; empty: the shared one of ``number``.
        received: what has come of its request, if nothing was done for it.
        unsent: of what is being sent.
        is_refused: it was told why, and may only send on.
    """

    server: str
    number: int
    fd: int
    received: bytes = b""
    unsent: bytes = b""
    task: TaskState | None = None
    is_refused: bool = False


class ToolExecState(msgspec.Struct):
    """All of it.

    Attributes:
        shared: the listeners that all children may come to.
        sidecars: see ``handover_sidecars``.
    """

    shared: list[int]
    children: list[ChildState]
    connections: list[ConnectionState]
    sidecars: Any = None


def read(left: object) -> ToolExecState | None:
    """Return what was handed over; None if nothing was.

    Raises:
        HandoverError: it is another program's.
    """
    if left is None:
        return None
    return state_from(left, ToolExecState, "the tools")
