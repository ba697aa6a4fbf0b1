"""The lists of a fleet as commands show them, as JSON too (spec FL3, Forms)."""

from __future__ import annotations

import msgspec

from supervisor.fleet.messages import Base  # noqa: TC001 - msgspec looks at it


class ShownNode(msgspec.Struct, frozen=True):
    """A node in `fleet ps --json`."""

    name: str
    state: str
    since: float
    reason: str
    session: str
    capacity: int
    labels: tuple[str, ...]
    version: str


class ShownChild(msgspec.Struct, frozen=True):
    """A child in `fleet ps --json`."""

    id: str
    name: str
    node: str | None
    state: str
    incarnation: int
    restart: str
    reason: str
    status: int | None
    pid: int | None


class ShownWorkspace(msgspec.Struct, frozen=True):
    """The workspace of a child that has a base: of its last life."""

    node: str
    name: str
    base: Base
    is_over: bool


class ShownFleet(msgspec.Struct, frozen=True):
    """The answer of `fleet ps --json`."""

    nodes: tuple[ShownNode, ...]
    children: tuple[ShownChild, ...]


class ShownSlice(msgspec.Struct, frozen=True):
    """A slice in `fleet quota --json`; ``left`` is its size less what was reported."""

    id: str
    node: str
    size: float
    left: float
    state: str


class ShownAccount(msgspec.Struct, frozen=True):
    """An account in `fleet quota --json`."""

    name: str
    limit: float
    spent: float
    free: float
    window: str
    slices: tuple[ShownSlice, ...]


class ShownQuota(msgspec.Struct, frozen=True):
    """The answer of `fleet quota --json`."""

    accounts: tuple[ShownAccount, ...]
