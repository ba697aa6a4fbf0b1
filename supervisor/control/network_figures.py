"""The figures of a child's network, also of a child that has no names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.network.statistics import NetworkRow, NetworkStatistics

if TYPE_CHECKING:
    from supervisor.children.child import Child
    from supervisor.host import Host


def network_figures(host: Host, child: Child) -> dict[str, object]:
    """Return all figures of a child's network, also of one that has no names."""
    names = host.services.network
    figures = None if names is None else names.network_figures(child.id)
    if figures is not None:
        return figures
    spec = child.spec
    none: dict[str, object] = msgspec.to_builtins(
        NetworkStatistics(child.id, spec.name, spec.network)
    )
    return none


def network_row(host: Host, child: Child) -> dict[str, object]:
    """Return the fields of a child's network in a row of ``ps``."""
    names = host.services.network
    row = None if names is None else names.network_row(child.id)
    if row is not None:
        return row
    none: dict[str, object] = msgspec.to_builtins(NetworkRow(child.spec.network))
    return none
