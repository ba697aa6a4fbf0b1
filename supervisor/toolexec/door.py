"""A tool's FD 3, where its sidecar says that tools have one (``fd3 = true``).

1. It is a nested client of the child: its files count as the child's, and it has the
   child's rights, but never the host's view of files (spec A5).
2. The tool's process has the only other end; after the execution a process with that
   end gets no replies.

    async with open_door(child) as door:
        request = SpawnRequest(..., fds=(*stdio, *door.fds), env={**env, **door.env})
        process = await launcher.spawn(request)
        door.close_tools_end()
"""

from __future__ import annotations

from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from supervisor.fsproxy.replies import PROCESS_EXIT

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from supervisor.fsproxy.ports import ChildView, SessionView

NUMBER = 3


class ToolDoor:
    """A tool's end of its connection.

    Attributes:
        client_id: its nested client.
        env: the variables about it for the tool.
        fds: (descriptor, number in the tool), for a ``SpawnRequest``.
    """

    def __init__(
        self, client_id: str, theirs: socket.socket, dialect: int, stack: ExitStack
    ) -> None:
        self.client_id = client_id
        self.env = {
            "FSPROXY_FD": str(NUMBER),
            "FSPROXY_VERSION": str(dialect),
            "FSPROXY_TOP_LEVEL": "false",
        }
        self.fds = ((theirs.fileno(), NUMBER),)
        self._stack = stack

    def close_tools_end(self) -> None:
        """Close this side's copy of the tool's end, or EOF never comes (spec T2)."""
        self._stack.close()


@asynccontextmanager
async def open_door(child: ChildView) -> AsyncIterator[ToolDoor]:
    """Open a connection for one tool; it is closed with the block.

    Args:
        child: the running child of the tool.

    Raises:
        OSError: no descriptor, or no more clients, for this child (spec S7).
    """
    if child.session is None:
        raise RuntimeError("a child without a session has no tools")
    policy = child.session.client.policy.narrow(b"{}")
    session, theirs = child.open_nested(policy, "tool")
    try:
        with ExitStack() as stack:
            stack.enter_context(child.carrying(theirs))
            yield ToolDoor(session.client.id, theirs, session.dialect, stack)
    finally:
        await close_door(session)


async def close_door(session: SessionView) -> None:
    """Close a tool's session: the tool has ended."""
    # Bounded: a job may still be in a call into the kernel (I1).
    with trio.CancelScope(shield=True):
        await session.finish(PROCESS_EXIT)
