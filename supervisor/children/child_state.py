"""The handed-over state of a child whose process runs."""

from __future__ import annotations

from typing import Any

import msgspec

from hostlib.handover import HandoverError, bytes_as_text, text_as_bytes
from supervisor.fsproxy.session_state import SessionState  # noqa: TC001 - msgspec looks at it
from supervisor.fsproxy.traffic import Traffic
from supervisor.spec import ChildSpec


class WallsState(msgspec.Struct):
    """The walls of a child, and the resources taken for them; see ``sandbox``."""

    profile: str
    network: str
    applied: list[tuple[str, str]]
    missing: dict[str, str]
    init: int
    user: int | None
    groups: list[str]


class ChildState(msgspec.Struct):
    """A child whose process runs; times are seconds that are left.

    Attributes:
        past_traffic: of its nested sessions that are gone.
    """

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
    past_traffic: Traffic = Traffic()


def snapshot_spec(spec: ChildSpec) -> dict[bytes, object]:
    """Return a description of a child as plain values with bytes for text.

    Raises:
        HandoverError: a part of it has no plain form.
    """
    try:
        plain = text_as_bytes(msgspec.to_builtins(spec))
    except TypeError as why:
        raise HandoverError(f"cannot hand a child over: {why}") from None
    if not isinstance(plain, dict):
        raise HandoverError("cannot hand a child over: its description is no record")
    return plain


def restore_spec(plain: dict[bytes, Any]) -> ChildSpec:
    """Return the description that ``snapshot_spec`` made plain.

    Raises:
        HandoverError: this program knows no such child.
    """
    try:
        return msgspec.convert(bytes_as_text(plain), ChildSpec)
    except msgspec.ValidationError as why:
        raise HandoverError(f"a child of another kind: {why}") from None
