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

from typing import Any

import msgspec

from supervisor.children.child_state import ChildState  # noqa: TC001 - msgspec looks
from supervisor.spawn.launcher import RecordState  # noqa: TC001 - msgspec looks
from supervisor.spawn.launchpad import wire
from vfs.errors import HandoverError
from vfs.handover import (  # noqa: TC001 - msgspec looks
    CounterState,
    PlaceState,
    PolicyState,
)

VERSION = 3
"""Of the form below."""

LAUNCHPAD = wire.VERSION
"""Of what is said to a launchpad: it goes on with the program that it was started from."""


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
