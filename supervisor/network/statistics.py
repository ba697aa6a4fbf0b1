"""The figures of a child's network, in the form of `sandhost network NAME --json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from hostlib.clock import timestamp

if TYPE_CHECKING:
    from supervisor.network.refusals import RefusedName
    from supervisor.network.traffic import ConnectionCounts


class NameRow(msgspec.Struct, frozen=True):
    """Connections to one name; `bytes_in` is what the child got."""

    name: str
    port: int | None
    connections: int
    open: int
    bytes_in: int
    bytes_out: int


class RefusedRow(msgspec.Struct, frozen=True):
    """Refusals of one name.

    Attributes:
        port: None if DNS alone was asked.
        rule: the rule that would allow it, or the `!` rule; None without one.
        time: of the last refusal.
    """

    name: str
    port: int | None
    reason: str
    rule: str | None
    count: int
    time: str


class PublishedRow(msgspec.Struct, frozen=True):
    """A port of the child, and where the host's other programs reach it."""

    port: int
    address: str


class NetworkStatistics(msgspec.Struct, frozen=True):
    """All that is known of one child's network.

    Attributes:
        name: of the child.
        rules: as written.
        upstream: the proxy that looks names up, and judges their addresses or not; not
            set if the host does that (spec NET8).
        not_learned: uses beyond those that are noted; not set if there are none.
    """

    child_id: str
    name: str | None
    mode: str
    rules: tuple[str, ...] = ()
    names: tuple[NameRow, ...] = ()
    refused: tuple[RefusedRow, ...] = ()
    published: tuple[PublishedRow, ...] = ()
    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    upstream: str | UnsetType = UNSET
    not_learned: int | UnsetType = UNSET


class NetworkRow(msgspec.Struct, frozen=True):
    """The network of one child in a row of `ps`."""

    mode: str
    rules: tuple[str, ...] = ()
    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    published: tuple[PublishedRow, ...] = ()
    upstream: str | UnsetType = UNSET


def name_row(name: str, port: int | None, counts: ConnectionCounts) -> NameRow:
    """Return the row of a name and a port."""
    return NameRow(
        name,
        port,
        counts.connections,
        counts.open,
        counts.bytes_in,
        counts.bytes_out,
    )


def refused_row(row: RefusedName) -> RefusedRow:
    """Return the row of a refusal."""
    return RefusedRow(
        row.name, row.port, row.reason, row.rule, row.count, timestamp(row.time)
    )
