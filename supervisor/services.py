"""What a host offers its children beside files: the model, tools, LLM fds.

What it is: the seam between the life of a child and a service.  What it is not: a
service; each has a package of its own, which is imported when it is configured.

Rules of this file.

1. A child's environment is complete before its process exists: each service has said by
   then what the child finds there.
2. What a service holds for a child is released in reverse order when the child has
   ended, after its conversations and before the host calls it gone.
3. A host without services pays nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AsyncExitStack

    from supervisor.child import Child
    from supervisor.fds.service import FdService
    from vfs.clients import Client


class Service(Protocol):
    """One of them."""

    async def child_starting(
        self, child: Child, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Make ready for a child that is about to be spawned.

        Args:
            child: its client exists, its process does not.
            stack: takes what has to be undone when it has ended.

        Returns:
            Variables that the child finds in its environment.

        Raises:
            OSError: what it needs cannot be had; the child is not started.
        """
        ...

    def client_gone(self, client: Client) -> None:
        """Forget a client, a child's own or a nested one; called once for each."""
        ...


@dataclass(slots=True)
class Services:
    """What one host offers.

    Attributes:
        llm: the gateway to the model.
        toolexec: runs tools.
        fds: large content as handles.
    """

    llm: Service | None = None
    toolexec: Service | None = None
    fds: FdService | None = None

    def __iter__(self) -> Iterator[Service]:
        """Yield those that are there."""
        for field in fields(self):
            service = getattr(self, field.name)
            if service is not None:
                yield service
