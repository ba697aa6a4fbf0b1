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

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from contextlib import AsyncExitStack, ExitStack

    from supervisor.child import Child
    from supervisor.fds.service import FdService
    from vfs.clients import Client


class Service(Protocol):
    """One of them."""

    async def child_starting(
        self, child: Child, stack: AsyncExitStack
    ) -> Mapping[str, str]:
        """Make ready for a child that is about to be spawned.

        What is to be reached on loopback by an address that is the same for all children
        is asked for here (``Child.listen_within``).

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


KEYS = {
    "OPENAI_BASE_URL": "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL": "ANTHROPIC_AUTH_TOKEN",
    "AIFO_TOOLEEXEC_URL": "AIFO_TOOLEEXEC_TOKEN",
}
"""Address that a service sets -> what it sets for that alone."""


def is_withheld(name: str, own: Collection[str]) -> bool:
    """Tell whether a variable is a key whose address was set by somebody else.

    It is not set beside that: the program would send it there.

    Args:
        name: what a service offers.
        own: what was set for this program.
    """
    return any(name == key and address in own for address, key in KEYS.items())


class Doors(NamedTuple):
    """How a child's programs reach the model's endpoint (spec MD1).

    Attributes:
        env: variables that say so, the child's token among them.
        listener_fd: the host's on loopback of the child's net namespace; -1 for none.
    """

    env: Mapping[str, str]
    listener_fd: int


class ModelService(Service, Protocol):
    """The model, as a conversation sees it whose rights shrink (spec A5)."""

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may leave to those nested in it."""
        ...

    def limit(self, client: Client, quota: float) -> None:
        """Hold a client to so many weighted tokens; a limit only shrinks."""
        ...

    def doors_of(self, client: Client) -> Doors | None:
        """Return how programs reach the model for a child; None if they cannot.

        Args:
            client: the child's own.
        """
        ...

    def quota_rows(self) -> list[dict[str, object]]:
        """Return what every account has spent, the host's own first."""
        ...


class Account(NamedTuple):
    """One account of tokens.

    Attributes:
        name: for people.
        spent: so far, in the quota's own unit.
        reserved: for calls under way.
        limit: most of both; None without a bound.
    """

    name: str
    spent: float
    reserved: float
    limit: float | None


@runtime_checkable
class Accounting(Protocol):
    """A service that keeps accounts, which the status page and the metrics show."""

    def accounts(self) -> Iterable[Account]:
        """Yield the host's accounts: a few, none of a single child."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A service that the next program of the same host can take over.

    A host with a service that cannot is not replaced while it has one.
    """

    def rest(self) -> None:
        """Begin nothing more: whoever asks for something waits until ``go_on``."""
        ...

    def go_on(self) -> None:
        """Go on: the host was not replaced."""
        ...

    def busy(self) -> str | None:
        """Say what has to end before it can be handed over; None if nothing has."""
        ...

    def interrupt(self) -> None:
        """Let end with an error what takes long; called until nothing is busy."""
        ...

    def hand_over(self, stack: ExitStack) -> tuple[object, Collection[int]]:
        """Return its state as plain values, and its descriptors; change nothing.

        Args:
            stack: undoes what had to be made for that, if the host is not replaced.

        Raises:
            HandoverError: a part of it has no form.
        """
        ...

    async def take_over(self, state: object) -> None:
        """Be what the program before took down; called before children are there."""
        ...

    async def child_entered(self, child: Child, stack: AsyncExitStack) -> None:
        """Take a child that runs already; ``stack`` as for ``child_starting``."""
        ...

    async def all_entered(self) -> None:
        """Go on with what takes more than one child: all of them are there."""
        ...


@dataclass(slots=True)
class Services:
    """What one host offers.

    Attributes:
        llm: the gateway to the model.
        toolexec: runs tools.
        fds: large content as handles.
    """

    llm: ModelService | None = None
    toolexec: Service | None = None
    fds: FdService | None = None

    def __iter__(self) -> Iterator[Service]:
        """Yield those that are there."""
        for service in (self.llm, self.toolexec, self.fds):
            if service is not None:
                yield service
