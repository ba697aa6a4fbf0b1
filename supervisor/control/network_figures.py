"""The figures of a child's network, also of a child that has no names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.children.child import Child
    from supervisor.host import Host


def network_figures(host: Host, child: Child) -> dict[str, object]:
    """Return all figures of a child's network, also of one that has no names."""
    names = host.services.network
    figures = None if names is None else names.network_figures(child.id)
    if figures is not None:
        return figures
    return {
        "child_id": child.id,
        "name": child.spec.name,
        "mode": child.spec.network,
        "rules": [],
        "names": [],
        "refused": [],
        "published": [],
        "connections": 0,
        "open": 0,
        "bytes_in": 0,
        "bytes_out": 0,
    }


def network_row(host: Host, child: Child) -> dict[str, object]:
    """Return the fields of a child's network in a row of ``ps``."""
    names = host.services.network
    row = None if names is None else names.network_row(child.id)
    if row is not None:
        return row
    none = dict.fromkeys(("connections", "open", "bytes_in", "bytes_out", "refused"), 0)
    return {"mode": child.spec.network, "rules": [], **none, "published": []}
