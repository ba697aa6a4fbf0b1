"""The LLM fds, handed from one program of a host to the next, with their clients.

What it is: whose processes and conversations they are.  What it is not: their forms
(``vfs.content.handover``).

Rules of this file.

1. A client's table is there before the client is served.
2. Checkpoints are on the disk; the next program opens them again.  Where they live as
   long as the host, their directory is handed over by its name.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec

from vfs.content.handover import (
    Entering,
    Leaving,
    ProcessState,
    SharedState,
    StoreState,
)
from vfs.content.owners import owner_of
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from supervisor.fds.service import FdService
    from supervisor.session.ports import ChildView
    from vfs.content import Process
    from vfs.filesystem import Client


class KeptState(msgspec.Struct):
    """A conversation that is kept for a client under a name."""

    client: str
    name: str
    process: ProcessState
    size_chars: int


class FdsState(msgspec.Struct):
    """All of them.

    Attributes:
        temporary: the directory of the checkpoints that ends with the host, if any.
        contents: what is kept, once.
        shared: what the processes of a child share.
        processes: by client.
        kept: conversations.
    """

    temporary: str | None
    contents: StoreState
    shared: list[SharedState]
    processes: dict[str, ProcessState]
    kept: list[KeptState]


def busy(service: FdService) -> str | None:
    """Say what has to end first."""
    processes = [*service.processes.values(), *(one[2] for one in _kept(service))]
    if any(process.is_at_work for process in processes):
        return "an LLM fd is being used"
    return None


def hand_over(service: FdService, stack: ExitStack) -> tuple[object, set[int]]:
    """Return all of them as plain values, and their descriptors.

    Args:
        service: the LLM fds.
        stack: takes the file in memory, which is of no use if nothing comes of it.
    """
    leaving = Leaving(service.store)
    stack.callback(os.close, leaving.memory_fd)
    try:
        contents = leaving.contents()
        processes = {
            name: leaving.process(process)
            for name, process in service.processes.items()
        }
        kept = [
            KeptState(client_id, name, leaving.process(process), size)
            for client_id, name, process, size in _kept(service)
        ]
    except OSError as why:
        text = f"cannot hand contents over: {why.strerror}; restart the host instead"
        raise HandoverError(text) from None
    state = FdsState(service.temporary, contents, leaving.shared, processes, kept)
    # JSON of the standard library: it has a form for a lone surrogate.
    return json.dumps(msgspec.to_builtins(state)).encode(), leaving.fds


def _kept(service: FdService) -> list[tuple[str, str, Process, int]]:
    conversations = service.conversations
    return [] if conversations is None else list(conversations.kept.all())


def read(left: object) -> FdsState | None:
    """Return what was handed over; None if nothing was.

    Raises:
        HandoverError: it is another program's.
    """
    if left is None:
        return None
    try:
        if not isinstance(left, bytes):
            raise HandoverError("cannot take the LLM fds over: they are no document")
        return msgspec.convert(json.loads(left), FdsState)
    except (ValueError, msgspec.ValidationError) as why:
        raise HandoverError(f"cannot take the LLM fds over: {why}") from None


def take_over(service: FdService, left: FdsState) -> Entering:
    """Hold the contents, until every table that knows them is there."""
    return Entering(service.store, left.contents, left.shared, service.make_shared)


def enter(
    service: FdService, left: FdsState, entering: Entering, child: ChildView
) -> None:
    """Go on with the tables and conversations of a child's clients."""
    for session in child.sessions():
        client = session.client
        process = left.processes.get(client.id)
        if process is not None:
            entered = service.enter(client, entering.process(process))
            service.show_workspaces(child, entered)
            if child.spec.account is not None:  # also if an older program left it
                entered.shared.owner = owner_of(child.spec.account)
        for one in left.kept:
            if one.client == client.id:
                _keep(service, client, one, entering.process(one.process))


def _keep(
    service: FdService, client: Client, left: KeptState, process: Process
) -> None:
    conversations = service.conversations
    if conversations is None:  # no model is configured any more
        process.close()
        return
    service.adopt(client, process)
    conversations.kept.keep(client, left.name, process, left.size_chars)
