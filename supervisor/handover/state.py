"""The state that one host program hands to the next: bytes in a memory file.

Its form, its version, writing and reading it.

Rules of this file.

1. A descriptor is handed over as its number, which stays the same across exec(2).

2. A changed form that one of the two programs could not read has a new ``VERSION``. A
   new field has a default, and needs none.
3. Text that stands for bytes (arguments, names of files) travels as bytes: it may not
   be UTF-8.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hostlib.handover import HandoverError
from supervisor.children.child_state import ChildState  # noqa: TC001 - msgspec looks
from supervisor.spawn.launcher import RecordState  # noqa: TC001 - msgspec looks
from supervisor.spawn.launchpad import wire
from vfs.clients import CounterState  # noqa: TC001 - msgspec looks
from vfs.places import PlaceState  # noqa: TC001 - msgspec looks
from vfs.policy import PolicyState  # noqa: TC001 - msgspec looks

VERSION = 5
"""Version of the form below."""

LAUNCHPAD = wire.VERSION
"""Version of the messages to a launchpad, which keeps the program that it began
with."""


class HostState(msgspec.Struct):
    """The state of a host.

    Attributes:
        generation: the number of programs of this process before the reading one.
        more: the state of the host's surroundings, a daemon's, by name.
        services: the state of each service, by name.
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
    """Return the state that was encoded.

    Raises:
        HandoverError: the bytes are of another version, or no state.
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
    """Return the version that this program writes and reads, in one word."""
    return f"{VERSION}.{LAUNCHPAD}"
