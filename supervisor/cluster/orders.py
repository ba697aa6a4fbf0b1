"""The order and the outcome of `setup`; apart, so that a command needs no Ray."""

from __future__ import annotations

import msgspec

from supervisor.cluster.names import PORT
from supervisor.fleet.lease import LEASE_S
from supervisor.fleet.messages import RayPlace  # noqa: TC001 - msgspec reads it
from supervisor.fleet.slices import DAY


class NodeOrder(msgspec.Struct, frozen=True):
    """All that a node actor is made with.

    Attributes:
        node: its name.
        labels: of the node, which children may need.
        control: the daemon's control socket.
        directory: of the node, in the daemon's state directory.
        is_head: the fleet's directory is here, and ends with the node's Ray.
        ray: where the node's Ray may listen.
    """

    node: str
    labels: tuple[str, ...]
    control: str
    directory: str
    is_head: bool = False
    ray: RayPlace | None = None


class DirectoryOrder(msgspec.Struct, frozen=True):
    """All that the directory actor is made with.

    Attributes:
        store: directory of the store, or the address of a PostgreSQL.
        lease_s: L.
        max_tokens: limit of the fleet's account; None for no account.
        window: of the account: `day` or `never`.
        resource: of Ray's, that the nodes have to which it may move; None: it stays.
    """

    store: str
    lease_s: float = LEASE_S
    max_tokens: float | None = None
    window: str = DAY
    resource: str | None = None


class SetupOrder(msgspec.Struct, frozen=True):
    """A node that is to be made.

    Attributes:
        node: its name and its daemon.
        token_file: of the fleet.
        bind: address of Ray here.
        address: of the head; None to be the head.
        port: of the head that is to be.
        ports: first and last of those that Ray uses here; None for any.
        capacity: children that the daemon takes, for others to see.
        head: of the fleet that is to be; None to join one.
        resource: of Ray's: a directory that needs it may move here.
    """

    node: NodeOrder
    token_file: str
    bind: str
    address: str | None = None
    port: int = PORT
    ports: tuple[int, int] | None = None
    capacity: int = 0
    head: DirectoryOrder | None = None
    resource: str | None = None


class SetupOutcome(msgspec.Struct, frozen=True):
    """The result of an order.

    Attributes:
        address: of the fleet's head; None: nothing was made.
        error: why.
        open_ports: those that listen on every address of this machine.
        note: a hint about Ray here for the operator.
    """

    address: str | None = None
    error: str = ""
    open_ports: tuple[int, ...] = ()
    note: str = ""
