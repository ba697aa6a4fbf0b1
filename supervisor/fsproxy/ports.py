"""The ports between sessions, services and children.

A service (the model, tools, LLM fds) knows a child as ``ChildView``, and a requesting
session as ``Caller``; a session knows services as ``Model`` and ``Contents``.

Rules of this file.

1. A child's environment is complete before its process exists: each service has added
   its variables by then.
2. A service's resources for a child are released in reverse order when the child has
   ended, after its sessions and before the host calls it gone.
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

    from supervisor.sandbox.plan import Walls, WantedWalls
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.loopback import LoopbackOrder
    from supervisor.spec import ChildSpec
    from vfs.clients import Client
    from vfs.filesystem import Filesystem
    from vfs.payload import MemoryReservation
    from vfs.places import Place
    from vfs.policy import Policy

LEAVE_S = 0.002
"""How long a call outlives its client: bytes of the provider until then are read, to be
charged (spec L10), and a dead child is cleaned up within 10 ms (spec S4)."""

TEXT_FORMS = 4
"""Copies of the text of a request to the model: decoded, in a message, and as JSON (twice,
once for measuring).  More is reserved when it is known."""

INLINE_BYTES = 64 * 1024
"""Longest document, piece or text that is parsed in the Trio thread."""


class Caller(Protocol):
    """A session whose request a service answers."""

    @property
    def fs(self) -> Filesystem:
        """Has its client's files."""
        ...

    @property
    def client(self) -> Client:
        """The client of the request."""
        ...

    def reserved_memory(self) -> MemoryReservation:
        """Return the request's reservation, held until its answer is taken."""
        ...

    def while_connected(
        self, leave_s: float = 0.0
    ) -> AbstractContextManager[trio.CancelScope]:
        """Run work while the client is there (spec L10)."""
        ...


class SessionView(Protocol):
    """A session of a child, and those nested in it."""

    @property
    def client(self) -> Client:
        """Its client."""
        ...

    @property
    def dialect(self) -> int:
        """1 or 2."""
        ...

    @property
    def nested(self) -> Sequence[SessionView]:
        """The sessions beneath it."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """The bytes by which the present WRITE may make a file grow."""
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
        """The description of the child."""
        ...

    @property
    def session(self) -> SessionView | None:
        """Its own session; None before it has one."""
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
    def wanted(self) -> WantedWalls | None:
        """The walls of it and of its tools; None before its start."""
        ...

    @property
    def walls(self) -> Walls:
        """The walls that it has; known once ``begun`` is set."""
        ...

    @property
    def begun(self) -> trio.Event:
        """Set when its process runs and its walls are known."""
        ...

    @property
    def threads(self) -> trio.CapacityLimiter | None:
        """Bounds the threads that look at its files; None for no bound."""
        ...

    def sessions(self) -> Iterator[SessionView]:
        """Yield its sessions, each before those nested in it."""
        ...

    def open_nested(
        self, policy: Policy, label: str
    ) -> tuple[SessionView, socket.socket]:
        """Return a new nested session, and its other end, which the caller owns.

        Raises:
            OSError: no descriptor, or no more clients, for this child (spec S7).
        """
        ...

    def carrying(self, carried: socket.socket) -> AbstractContextManager[None]:
        """Hold a socket while it or its copy is sent to a client; close it afterwards."""
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
        """Return the fields that identify it in a line of the log."""
        ...


class Service(Protocol):
    """One of the services."""

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> Mapping[str, str]:
        """Return the variables of a child that is about to be spawned.

        A service with one address on loopback for all children asks for it here
        (``ChildView.listen_within``).

        Args:
            child: its client exists, its process does not.
            stack: undoes it when the child has ended.

        Returns:
            Variables for the child's environment.

        Raises:
            OSError: a resource is missing; the child is not started.
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
"""The address of a service -> variables that belong to that address alone."""


def is_withheld(name: str, own: Collection[str]) -> bool:
    """Return whether a variable is a key whose address was set by a user.

    It is left out then: the program would send it to that address.

    Args:
        name: the service's variable.
        own: the names that were set for this program.
    """
    return any(name == key and address in own for address, key in KEYS.items())


class Doors(NamedTuple):
    """The way of a child's programs to the model's endpoint (spec MD1).

    Attributes:
        env: variables of the address, with the child's token.
        listener_fd: the host's on loopback of the child's net namespace; -1 for none.
    """

    env: Mapping[str, str]
    listener_fd: int


NO_NAMES = "network: this child has no network by name; leave the key out"
"""Answer to a child that narrows a network without rules."""


class NetworkFigure(NamedTuple):
    """The traffic between one child and one name.

    Attributes:
        child: its name, or its id.
        name: one with a rule of its own; ``(others)`` for all names of wider rules.
        bytes_in: bytes to the child.
    """

    child: str
    name: str
    connections: int
    bytes_in: int
    bytes_out: int


class Names(Service, Protocol):
    """The network by name.

    Attributes:
        connections_reset: the number that ended with the program before.
    """

    connections_reset: int

    def inner_fd(self, child_id: str) -> int:
        """Return a socket in the child's net namespace; -1 for none."""
        ...

    def has_network(self, child_id: str) -> bool:
        """Return whether a child has names."""
        ...

    def network_row(self, child_id: str) -> dict[str, object] | None:
        """Return a child's network in ``ps``; None if it has no names."""
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
            ValueError: the text has the reason; nothing was changed.
        """
        ...

    def narrowing(self, client: Client, rules: Sequence[str]) -> Callable[[], None]:
        """Return what leaves a client's child a part of its rules; nothing is changed.

        Raises:
            ValueError: it has one of them not, or no rules of its own.
        """
        ...

    def rules_of(self, client: Client) -> tuple[str, ...] | None:
        """Return the rules in force of a client's child.

        Returns:
            None if the child has none of its own. A nested client is told none: it may
            have a namespace of which the host does not know.
        """
        ...

    def granted_figures(self) -> Iterable[NetworkFigure]:
        """Yield the traffic between present children and names."""
        ...


class Model(Service, Protocol):
    """The model."""

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may grant to nested clients (spec A5)."""
        ...

    def limit(self, client: Client, quota: float) -> None:
        """Bound a client to so many weighted tokens; a limit only shrinks."""
        ...

    async def chat(
        self, caller: Caller, parts: tuple[bytes, ...], *, claim: bool
    ) -> bytes | None:
        """Return the answer to one LLM_CHAT (spec L1-L8); None if its client is gone.

        Args:
            caller: made the request.
            parts: input files, output files, prompt, preset.
            claim: the effective view, to which the client has the right.
        """
        ...

    def quota_text(self, client: Client) -> str:
        """Return the answer to a client's LLM_QUOTA (spec L9)."""
        ...

    def config_json(self) -> bytes:
        """Return the answer to LLM_CONFIG (spec L13)."""
        ...

    def doors_of(self, client: Client) -> Doors | None:
        """Return the way of a child's programs to the model; None if there is none.

        Args:
            client: the child's own.
        """
        ...

    def quota_rows(self) -> list[dict[str, object]]:
        """Return the spending of every account, the host's own first."""
        ...


class ContentError(Exception):
    """A call on contents that cannot be done; the text has the reason."""


class ContentCalls(Protocol):
    """The calls of one client on contents."""

    def is_for_caller_alone(self, name: str) -> bool:
        """Return whether a call may be long and is useless once its caller is gone."""
        ...

    async def call(self, name: str, /, *args: object, **kwargs: object) -> bytes:
        """Do a call and return its answer.

        Raises:
            ContentError: it cannot be done.
        """
        ...

    def has_begun(self, token: str) -> bool:
        """Return whether a token has an unfinished content."""
        ...

    async def put(self, token: str | None, piece: memoryview | bytes) -> str:
        """Add a piece; return its token, a new one for None.

        Raises:
            ContentError: there is no room, or no thread to write it.
        """
        ...


class Contents(Service, Protocol):
    """Large content as handles: LLM fds."""

    def client_attached(self, client: Client) -> None:
        """Give an attached client all that its parent has now."""
        ...

    def process_of(self, client: Client) -> ContentCalls:
        """Return the process of a client."""
        ...


class TokenAccount(NamedTuple):
    """One account of tokens.

    Attributes:
        name: for people.
        spent: so far, in the quota's unit.
        reserved: for calls under way.
        limit: most of both; None for no bound.
    """

    name: str
    spent: float
    reserved: float
    limit: float | None


@runtime_checkable
class Accounting(Protocol):
    """A service that keeps accounts, which the status page and the metrics show."""

    def accounts(self) -> Iterable[TokenAccount]:
        """Yield the host's accounts: a few, none of a single child."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A service that the next program of the same host can take over.

    A host with any other service is not replaced.
    """

    def rest(self) -> None:
        """Begin nothing more: new requests wait until ``resume``."""
        ...

    def resume(self) -> None:
        """Begin new work again: the host was not replaced."""
        ...

    def busy(self) -> str | None:
        """Return what must end before a hand-over; None if nothing must."""
        ...

    def interrupt(self) -> None:
        """End slow work with an error; called until nothing is busy."""
        ...

    def snapshot(self, stack: ExitStack) -> tuple[object, Collection[int]]:
        """Return its state as plain values, and descriptors; changes nothing.

        Args:
            stack: undoes preparations if the host is not replaced.

        Raises:
            HandoverError: a part of it has no form.
        """
        ...

    async def restore(self, state: object) -> None:
        """Restore the state of the program before; called before any child is restored."""
        ...

    async def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Restore a running child; ``stack`` as for ``child_starting``."""
        ...

    async def restore_rest(self) -> None:
        """Restore the rest, which needs several children: all are restored."""
        ...


@dataclass(slots=True)
class Services:
    """The offers of one host to its children beside files.

    Attributes:
        network: the network by name; called first, since its ports are fixed.
        llm: the gateway to the model.
        toolexec: runs tools.
        fds: large content as handles.
    """

    network: Names | None = None
    llm: Model | None = None
    toolexec: Service | None = None
    fds: Contents | None = None

    def __iter__(self) -> Iterator[Service]:
        """Yield the services that exist."""
        for service in (self.network, self.llm, self.toolexec, self.fds):
            if service is not None:
                yield service
