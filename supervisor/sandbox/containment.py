"""What keeps a child in its groups of processes, so that these keep its limits.

Layers of which each set is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_HOLDING = (
    {"landlock", "seccomp"},
    {"landlock", "mountns"},
    {"mountns", "uid"},
    {"mountns", "pidns", "seccomp"},
)
"""Layers of which each set keeps a child in its groups; fewer leave it a way to their files:
by name, by clone3(2) with what it may not open, by another process's ``root`` in ``/proc``,
or by a mount of its own in a user namespace."""

HOLDERS = "landlock with seccomp or mountns, mountns with uid, or mountns with pidns and seccomp"
"""The same, in words."""


def is_held(layers: Collection[str]) -> bool:
    """Tell whether who is in these layers cannot leave its groups, nor change what they keep."""
    return any(holding <= set(layers) for holding in _HOLDING)
