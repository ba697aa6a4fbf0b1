"""Messages between a node and the directory, and their versions.

A message from the directory carries its epoch, one from a node its session. Any of them
may be lost, doubled, delayed or overtaken: each names its session or incarnation, and a
reader ignores a message for one that is over.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

VERSION = "fleet-5"
"""The form of these messages, and of requests to actors and doors; another one is refused
by name (FL11)."""


class VersionError(Exception):
    """Two parts of the fleet cannot talk; the text names both versions."""


def check_version(
    part: str, theirs: str, ours: str = VERSION, refuser: str = "the directory"
) -> None:
    """Refuse a part of the fleet whose version is another one.

    Args:
        part: that asks.
        theirs: its version.
        ours: that of the part which refuses.
        refuser: that part.

    Raises:
        VersionError: it is.
    """
    if theirs != ours:
        raise VersionError(
            f"cannot admit {part}: its version is {theirs!r}, {refuser}'s is"
            f" {ours!r}; install one version everywhere"
        )


class Session(msgspec.Struct, frozen=True, array_like=True):
    """One membership of a node in the fleet; it ends with the lease.

    Attributes:
        ledger: id of the node's ledger, made with its file.
        number: counts up in that ledger with each session.
    """

    ledger: str
    number: int

    def __str__(self) -> str:
        return f"{self.ledger}.{self.number}"


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Anything that travels."""


class Base(msgspec.Struct, frozen=True):
    """A directory of one node in which a child works on any (FL10).

    Attributes:
        node: that has it; a child there works in it itself.
        path: of it there.
        digest: names its content; other nodes get it as a tar, once each.
        size_bytes: of that tar.
        packed_ns: when its packing began, by that node's clock of ctimes.
    """

    node: str
    path: str
    digest: str
    size_bytes: int
    packed_ns: int


class Program(msgspec.Struct, frozen=True):
    """The program of a child, in the words of its node's daemon.

    Attributes:
        workspace: a directory of the node, or a workspace of its configuration: the
            child gets one of its own there, of its own name.
        keeps_workspace: it stays after the child's end, if anything was changed in it.
        limits: as of ``--limit``; of two of a kind the smaller one counts.
        takes_input: its standard input is what is sent to it; else it is empty.
    """

    command: tuple[str, ...]
    policy: str | None = None
    restart: str = "no"
    env: dict[str, str] = {}
    cwd: str | None = None
    workspace: str | None = None
    keeps_workspace: bool = True
    limits: dict[str, str] = {}
    takes_input: bool = False
    base: Base | None = None


def workspace_name(child: str, incarnation: int, session: Session) -> str:
    """Return the name, on its node, of the workspace of a child that has a base.

    Each life has its own: with the session no other fleet's child ever had it there.
    """
    return f"{child}.{incarnation}-s{session.number}"


# From a node


class ChildReport(msgspec.Struct, frozen=True):
    """The end of one incarnation of a child on a node.

    Attributes:
        child: its id.
        incarnation: which of its lives.
        state: ``running``, ``ended``; ``failed``: its program cannot be started;
            ``refused``: nothing was started, and another node may be tried.
        pid: of its process.
        status: as a shell sees it, once it has ended.
        reason: why it failed, or was refused.
    """

    child: str
    incarnation: int
    state: str
    pid: int | None = None
    status: int | None = None
    reason: str = ""


class SliceReport(msgspec.Struct, frozen=True):
    """The cost of one slice until now: a total, never a difference (FL7.4).

    Attributes:
        slice: its id.
        spent: all that was settled in it.
        is_last: nothing is reserved in it, and nothing more will be.
    """

    slice: str
    spent: float
    is_last: bool


class RayPlace(msgspec.Struct, frozen=True):
    """The addresses and ports at which Ray of a node may listen.

    Attributes:
        addresses: of the node's machine, as texts.
        ports: first and last of each range.
    """

    addresses: tuple[str, ...]
    ports: tuple[tuple[int, int], ...]


class Join(_Message, frozen=True):
    """A node joins with a new session, or says again what runs in its session.

    A session is new only when nothing runs any more of the sessions before it.

    Attributes:
        number: of the attempt; the answer repeats it.
        children: those that run, and the ends that the directory has not confirmed.
        slices: all that the ledger holds.
        ray: of the node.
        fleet: in which the session is already; empty for a new session.
    """

    node: str
    session: Session
    number: int
    version: str
    labels: tuple[str, ...]
    capacity: int
    children: tuple[ChildReport, ...]
    slices: tuple[SliceReport, ...]
    ray: RayPlace | None = None
    fleet: str = ""


class Beat(_Message, frozen=True):
    """A node asks that its lease be renewed.

    Attributes:
        number: the answer repeats it.
        others: children that its daemon has beside those of the fleet.
        ray: digest of the nodes' Ray as it knows it.
    """

    node: str
    session: Session
    number: int
    others: int = 0
    ray: str = ""


class ChildNews(_Message, frozen=True):
    """A node tells of one child, until it is confirmed."""

    node: str
    session: Session
    report: ChildReport


class AskSlice(_Message, frozen=True):
    """A node asks for a slice; the same number is the same request (FL7.1)."""

    node: str
    session: Session
    account: str
    number: int
    worst: float


class SliceNews(_Message, frozen=True):
    """A node tells what slices have cost; it may belong to no session any more."""

    node: str
    ledger: str
    slices: tuple[SliceReport, ...]


class Leave(_Message, frozen=True):
    """A node goes; nothing of the fleet runs on it any more."""

    node: str
    session: Session


# From the directory


class Joined(_Message, frozen=True):
    """A node's session is in the store, and its lease has begun.

    Attributes:
        accounts: of the fleet; calls of its children are paid in slices of them.
        ray: of all nodes; no child of the fleet reaches it (FL9).
        fleet: id of the fleet, made with its store.
    """

    epoch: int
    session: Session
    number: int
    lease_s: float
    accounts: tuple[str, ...] = ()
    ray: tuple[RayPlace, ...] = ()
    fleet: str = ""


class Renewed(_Message, frozen=True):
    """A node's lease counts from now.

    Attributes:
        ray: of all nodes; None where the node knows it.
    """

    epoch: int
    session: Session
    number: int
    ray: tuple[RayPlace, ...] | None = None


class Refused(_Message, frozen=True):
    """A node's session is no member of the fleet; ``reason`` says why.

    Attributes:
        is_final: no session of this node would be, until an operator changes something.
        fleet: that refuses; a member of another one is not concerned.
    """

    epoch: int
    session: Session
    reason: str
    is_final: bool
    fleet: str = ""


class Start(_Message, frozen=True):
    """A child is to be started, once however often this comes (FL4)."""

    epoch: int
    session: Session
    child: str
    name: str
    incarnation: int
    program: Program


class End(_Message, frozen=True):
    """An incarnation of a child is to be ended, or never to be started."""

    epoch: int
    session: Session
    child: str
    incarnation: int
    signal: str = "TERM"


class Confirm(_Message, frozen=True):
    """The end of an incarnation is in the store."""

    epoch: int
    session: Session
    child: str
    incarnation: int


class SliceGranted(_Message, frozen=True):
    """A slice was taken off the account for this session."""

    epoch: int
    session: Session
    account: str
    number: int
    slice: str
    size: float
    window: str


class SliceRefused(_Message, frozen=True):
    """The account has no room for the request.

    Attributes:
        is_held: calls that go on hold it; there is room once they have ended.
    """

    epoch: int
    session: Session
    account: str
    number: int
    is_held: bool


class HandBack(_Message, frozen=True):
    """A slice is wanted elsewhere: its holder gives it back if it is idle."""

    epoch: int
    session: Session
    account: str
    slice: str


class SlicesSettled(_Message, frozen=True):
    """These slices are closed in the store; the ledger of the node may forget them."""

    epoch: int
    ledger: str
    slices: tuple[str, ...]


FromNode: TypeAlias = Join | Beat | ChildNews | AskSlice | SliceNews | Leave
FromDirectory: TypeAlias = (
    Joined
    | Renewed
    | Refused
    | Start
    | End
    | Confirm
    | SliceGranted
    | SliceRefused
    | HandBack
    | SlicesSettled
)
Message: TypeAlias = FromNode | FromDirectory

_ENCODER = msgspec.msgpack.Encoder()
_FROM_NODE: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_FROM_DIRECTORY: msgspec.msgpack.Decoder[FromDirectory] = msgspec.msgpack.Decoder(
    FromDirectory
)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Return the message of a node.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _FROM_NODE.decode(data)


def decode_from_directory(data: bytes) -> FromDirectory:
    """Return the message of the directory.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _FROM_DIRECTORY.decode(data)
