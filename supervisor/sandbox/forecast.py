"""The outcome of a profile here, as far as it is known before a start.

For ``check-config``, and for what has to be refused at a start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostlib.linux.namespace_counts import explain_refusal, is_disabled
from supervisor.sandbox.plan import KEEP_NETWORK, NAMESPACES, NEEDS_MOUNTNS

if TYPE_CHECKING:
    from supervisor.sandbox.plan import Profile


def foreseen(profile: Profile) -> frozenset[str]:
    """Return its layers without those that this user or machine cannot have."""
    layers = profile.layers
    if os.geteuid() != 0:
        layers -= {"uid"}
        if "userns" not in layers or is_disabled("userns"):
            layers -= set(NAMESPACES)
    layers -= {layer for layer in NAMESPACES if is_disabled(layer)}
    return layers if "mountns" in layers else layers - set(NEEDS_MOUNTNS)


def keeps_network(profile: Profile) -> bool:
    """Tell whether something keeps the network ``none``; of ``none`` itself all know."""
    return not profile.layers or bool(foreseen(profile) & KEEP_NETWORK)


def no_netns(profile: Profile) -> tuple[str, str]:
    """Return why a profile that has the layer netns has none here, and what to do.

    Returns:
        Half a sentence each, the second up to what may be added instead; both empty if it
        is not foreseen.
    """
    is_root = os.geteuid() == 0
    if not is_root and "userns" not in profile.layers:
        return "where the host is not root the layer netns takes userns", "add that or"
    for layer in ("netns",) if is_root else ("userns", "netns"):
        if is_disabled(layer):
            return explain_refusal(layer)[0], "raise it, or add"
    return "", ""
