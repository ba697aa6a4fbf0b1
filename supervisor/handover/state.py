"""What one host program hands to the next: its state, as bytes in a file in memory.

The form, its version, writing and reading it.

Rules of this file.

1. A descriptor is its number: it stays the same across exec(2), which is all that a
   hand-over of descriptors takes.
2. A form that is changed so that the program before cannot read it, or the other way
   round, has a new ``VERSION``.  A field that is added has a default, and is none.
3. Text that stands for bytes (arguments, names of files) travels as bytes: what is not
   UTF-8 is no string on the wire.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from supervisor.spawn.launchpad import wire
from vfs.errors import HandoverError
from vfs.handover import (  # noqa: TC001 - msgspec looks at them
    ClientState,
    CounterState,
    FileState,
    PlaceState,
    PolicyState,
)

VERSION = 3
"""Of the form below."""

LAUNCHPAD = wire.VERSION
"""Of what is said to a launchpad: it goes on with the program that it was started from."""


class ChatState(msgspec.Struct):
    """How far the payload of an LLM_CHAT has gone by."""

    lengths: tuple[int, ...]
    seen: int
    hits: int


class BodyState(msgspec.Struct):
    """A body that has not come whole.

    Attributes:
        line: the request, if what came of its body is kept.
        spool: the descriptor of the file where it is kept.
        got: bytes of it that are in that file.
        left: bytes still to come of a body that is not kept.
        reply: what is answered then.
        chat: follows such a body.
    """

    line: bytes = b""
    spool: int = -1
    got: int = 0
    left: int = 0
    reply: bytes = b""
    chat: ChatState | None = None


class TransferState(msgspec.Struct):
    """The rest of a READ on its way from a file; see ``FileTransfer``."""

    fileno: int
    head: bytes
    at: int
    left: int


class SessionState(msgspec.Struct):
    """A conversation, and the client whose it is.

    Attributes:
        held: bytes that were received and not looked at: a message that has begun is
            among them from its first byte on, and is read again.
        skipping: they belong to a line that was too long.
        body: a message of which the line was looked at.
        unsent: of a reply, what the client has not taken.
        carried: (descriptor, reply) of an ATTACH.
        closed: why it is over; None for one that is not.
        owns: places that it holds, as numbers in ``HostState.places``.
        reserved: bytes of its client's ledger that its WRITE reserves, and will again.
    """

    client: ClientState
    dialect: int
    read_fd: int
    write_fd: int
    zero_copy: bool
    is_deep: bool
    requests: int
    files: list[FileState]
    nested: list[SessionState]
    owns: list[int] = []
    held: bytes = b""
    skipping: bool = False
    body: BodyState | None = None
    unsent: bytes = b""
    transfer: TransferState | None = None
    carried: tuple[int, bytes] | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    errors: int = 0
    closed: str | None = None
    reserved: int = 0


class WallsState(msgspec.Struct):
    """What a child runs in, and what was taken for that; see ``sandbox``."""

    profile: str
    network: str
    applied: list[tuple[str, str]]
    missing: dict[str, str]
    init: int
    user: int | None
    groups: list[str]


class ChildState(msgspec.Struct):
    """A child whose process runs; times are seconds that are left."""

    id: str
    spec: dict[bytes, Any]
    state: str
    timed_out: bool
    timeout_s: float | None
    grace_s: float
    ident: int
    pid: int
    create_time: int
    pidfd: int
    session: SessionState
    places: list[int]
    side_fd: int = -1
    held: dict[int, str] = {}
    walls: WallsState | None = None
    door_fd: int = -1
    door_name: str = ""


class RecordState(msgspec.Struct, array_like=True):
    """What the launchpad has said of a process; see ``launcher``."""

    ident: int
    abandoned: bool
    status: tuple[int | None, int | None, float, float, int] | None


class HostState(msgspec.Struct):
    """A host.

    Attributes:
        generation: programs that this process was before the one that reads this.
        more: what surrounds the host: a daemon's own state, by its name.
        services: what each service handed over, by its name.
        service_fds: the descriptors of each.
        fds: every descriptor that is handed over.
    """

    generation: int
    launchpad_pid: int
    launchpad_pidfd: int
    launchpad_fd: int
    last_ident: int
    next_child: int
    counters: CounterState
    records: list[RecordState]
    places: list[PlaceState]
    policies: list[PolicyState]
    children: list[ChildState]
    more: dict[str, Any] = {}
    services: dict[str, Any] = {}
    service_fds: dict[str, list[int]] = {}
    fds: list[int] = []


class _Envelope(msgspec.Struct):
    version: int
    launchpad: int
    body: msgspec.Raw


def encode(state: HostState) -> bytes:
    """Return a state as bytes.

    Raises:
        HandoverError: something in it has no form on the wire.
    """
    encoder = msgspec.msgpack.Encoder()
    try:
        body = msgspec.Raw(encoder.encode(state))
    except (TypeError, ValueError, UnicodeEncodeError) as why:
        raise HandoverError(f"cannot hand the host over: {why}") from None
    return encoder.encode(_Envelope(VERSION, LAUNCHPAD, body))


def decode(data: bytes) -> HostState:
    """Return the state that bytes stand for.

    Raises:
        HandoverError: they are of another version, or no state at all.
    """
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        if (envelope.version, envelope.launchpad) != (VERSION, LAUNCHPAD):
            said = f"{envelope.version}.{envelope.launchpad}"
            text = f"a state of version {said}; this program takes {versions()}"
            raise HandoverError(f"cannot take the host over: {text}")
        return msgspec.msgpack.decode(envelope.body, type=HostState)
    except msgspec.MsgspecError as why:
        raise HandoverError(f"cannot take the host over: {why}") from None


def versions() -> str:
    """Return what this program writes and reads, in one word."""
    return f"{VERSION}.{LAUNCHPAD}"


def text_as_bytes(value: object) -> object:
    """Return a plain structure with bytes for text (rule 3)."""
    match value:
        case str():
            return os.fsencode(value)
        case dict():
            return {text_as_bytes(k): text_as_bytes(v) for k, v in value.items()}
        case list() | tuple():
            return [text_as_bytes(item) for item in value]
        case _:
            return value


def bytes_as_text(value: object) -> object:
    """Return what ``text_as_bytes`` was given, with lists for tuples."""
    match value:
        case bytes():
            return os.fsdecode(value)
        case dict():
            return {bytes_as_text(k): bytes_as_text(v) for k, v in value.items()}
        case list():
            return [bytes_as_text(item) for item in value]
        case _:
            return value
