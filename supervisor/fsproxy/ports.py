"""The ports between conversations, services and children: who may ask whom for what.

A service (the model, tools, LLM fds) knows a child as ``ChildView``, and who asks it as
``Caller``; a conversation knows services as ``Model`` and ``Contents``.

Rules of this file.

1. A child's environment is complete before its process exists: each service has said by
   then what the child finds there.
2. A service's resources for a child are released in reverse order when the child has
   ended, after its conversations and before the host calls it gone.
3. A host without services pays nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import socket
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import AbstractContextManager, AsyncExitStack, ExitStack

    import trio

    from supervisor.sandbox.plan import Walls, Wanted
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.loopback import LoopbackOrder
    from supervisor.spec import ChildSpec
    from vfs.clients import Client
    from vfs.filesystem import Filesystem
    from vfs.payload import Reservation
    from vfs.policy import Place, Policy


class Caller(Protocol):
    """A conversation whose request a service answers."""

    @property
    def fs(self) -> Filesystem:
        """Where its client's files are."""
        ...

    @property
    def client(self) -> Client:
        """The client whose request it is."""
        ...

    def reserved_memory(self) -> Reservation:
        """Return what the request reserves until its answer is taken."""
        ...

    def while_connected(
        self, leave_s: float = 0.0
    ) -> AbstractContextManager[trio.CancelScope]:
        """Run work only for as long as the client is there (spec L10)."""
        ...


class Conversation(Protocol):
    """A conversation of a child, and what is nested in it."""

    @property
    def client(self) -> Client:
        """With whom it is."""
        ...

    @property
    def dialect(self) -> int:
        """1 or 2."""
        ...

    @property
    def nested(self) -> Sequence[Conversation]:
        """Those beneath it."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes by which a WRITE that has begun may make a file grow."""
        ...

    async def finish(self, why: str) -> None:
        """End it, and wait for its clean-up."""
        ...


class ChildView(Protocol):
    """A child, as services know it."""

    @property
    def id(self) -> str:
        """Unique in the host."""
        ...

    @property
    def spec(self) -> ChildSpec:
        """The request for it."""
        ...

    @property
    def session(self) -> Conversation | None:
        """Its own conversation; None before it has one."""
        ...

    @property
    def launcher(self) -> Launcher:
        """Starts its process, and what is run for it."""
        ...

    @property
    def places(self) -> tuple[Place, ...]:
        """Its root and grants."""
        ...

    @property
    def wanted(self) -> Wanted | None:
        """The walls of it and of its tools; None before its start."""
        ...

    @property
    def walls(self) -> Walls:
        """The walls that it has, once it runs."""
        ...

    @property
    def threads(self) -> trio.CapacityLimiter | None:
        """The bound on threads that look at its files; None: no bound."""
        ...

    def sessions(self) -> Iterator[Conversation]:
        """Yield its conversations, each before those nested in it."""
        ...

    def open_nested(
        self, policy: Policy, label: str
    ) -> tuple[Conversation, socket.socket]:
        """Make one more conversation; return it, and its other end, the caller's.

        Raises:
            OSError: no descriptor, or no more clients, for this child (spec S7).
        """
        ...

    def carrying(self, carried: socket.socket) -> AbstractContextManager[None]:
        """Hold a socket while it, or something through it, is handed on; close it."""
        ...

    def listen_within(
        self,
        port: int,
        serve: Callable[[socket.socket], None],
        stack: AsyncExitStack,
    ) -> int:
        """Listen on loopback of its net namespace, if it will have one; return the port."""
        ...

    def make_within(
        self,
        order: LoopbackOrder,
        serve: Callable[[list[socket.socket], bool], None],
        stack: AsyncExitStack,
    ) -> None:
        """Make sockets, addresses and routes in its net namespace, or start no child."""
        ...

    def log_fields(self) -> dict[str, object]:
        """Return what tells it in a line of the log."""
        ...


class Service(Protocol):
    """One of the services."""

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> Mapping[str, str]:
        """Make ready for a child that is about to be spawned.

        A service with one address on loopback for all children asks for it here
        (``ChildView.listen_within``).

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


class NetworkFigure(NamedTuple):
    """What went between one child and one name.

    Attributes:
        child: its name, or its id.
        name: one that a rule of the child grants by itself; ``(others)`` for all that
            wider rules grant.
        bytes_in: what the child got.
    """

    child: str
    name: str
    connections: int
    bytes_in: int
    bytes_out: int


class Names(Service, Protocol):
    """The network by name.

    Attributes:
        connections_reset: those that ended with the host's program before.
    """

    connections_reset: int

    def inner_fd(self, child_id: str) -> int:
        """Return a socket of the net namespace that it serves of a child; -1 for none."""
        ...

    def has_network(self, child_id: str) -> bool:
        """Tell whether a child has names."""
        ...

    def network_row(self, child_id: str) -> dict[str, object] | None:
        """Return what ``ps`` tells of a child's network; None if it has no names."""
        ...

    def network_figures(
        self, child_id: str, most: int | None = None
    ) -> dict[str, object] | None:
        """Return the figures of a child's network; None if it has no names.

        Args:
            child_id: of a child.
            most: names, and refusals, the newest; None for all.
        """
        ...

    def learned_rules(self, child_id: str) -> tuple[str, ...] | None:
        """Return the rules that would have sufficed; None if a child does not learn."""
        ...

    async def change_network(
        self, child_id: str, allow: Sequence[str], deny: Sequence[str], *, cut: bool
    ) -> None:
        """Change the rules of a child that has names.

        Raises:
            ValueError: nothing is changed, for the reason in the text.
        """
        ...

    def granted_figures(self) -> Iterable[NetworkFigure]:
        """Yield what went between the children that are there and names."""
        ...


class Model(Service, Protocol):
    """The model."""

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may leave to those nested in it (spec A5)."""
        ...

    def limit(self, client: Client, quota: float) -> None:
        """Hold a client to so many weighted tokens; a limit only shrinks."""
        ...

    async def chat(
        self, caller: Caller, parts: tuple[bytes, ...], *, claim: bool
    ) -> bytes | None:
        """Answer one LLM_CHAT (spec L1-L8); None: its client is gone.

        Args:
            caller: whose request it is.
            parts: input files, output files, prompt, preset.
            claim: the effective view, which the client has the right to.
        """
        ...

    def quota_text(self, client: Client) -> str:
        """Return what LLM_QUOTA answers a client (spec L9)."""
        ...

    def config_json(self) -> bytes:
        """Return what LLM_CONFIG answers (spec L13)."""
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


class ContentError(Exception):
    """A call on contents that cannot be done; the text says why."""


class ContentCalls(Protocol):
    """The calls of one client on contents."""

    def is_for_caller_alone(self, name: str) -> bool:
        """Tell whether a call may take long and is of no use once its caller has gone."""
        ...

    async def call(self, name: str, /, *args: object, **kwargs: object) -> bytes:
        """Do a call and return its answer.

        Raises:
            ContentError: it cannot be done.
        """
        ...

    def has_begun(self, token: str) -> bool:
        """Tell whether content is being put in under a token."""
        ...

    async def put(self, token: str | None, piece: memoryview | bytes) -> str:
        """Take in a piece; return the token that it is under, a new one for None.

        Raises:
            ContentError: there is no room, or no thread to write it.
        """
        ...


class Contents(Service, Protocol):
    """Large content as handles: LLM fds."""

    def client_attached(self, client: Client) -> None:
        """Give a client that was just attached what its parent has now."""
        ...

    def process_of(self, client: Client) -> ContentCalls:
        """Return the process of a client."""
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
        """Begin nothing more: who asks for something waits until ``go_on``."""
        ...

    def go_on(self) -> None:
        """Go on: the host was not replaced."""
        ...

    def busy(self) -> str | None:
        """Return what has to end before it can be handed over; None if nothing has."""
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

    async def child_entered(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Take a child that runs already; ``stack`` as for ``child_starting``."""
        ...

    async def all_entered(self) -> None:
        """Go on with what takes more than one child: all of them are there."""
        ...


@dataclass(slots=True)
class Services:
    """The offers of one host to its children beside files.

    Attributes:
        network: the network by name; its ports are fixed, so that it is asked first.
        llm: the gateway to the model.
        toolexec: runs tools.
        fds: large content as handles.
    """

    network: Names | None = None
    llm: Model | None = None
    toolexec: Service | None = None
    fds: Contents | None = None

    def __iter__(self) -> Iterator[Service]:
        """Yield those that are there."""
        for service in (self.network, self.llm, self.toolexec, self.fds):
            if service is not None:
                yield service
