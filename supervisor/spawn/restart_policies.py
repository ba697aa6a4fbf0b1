"""Restart policies: whether a child that ended comes back.

A policy is one row here; configuration, commands and the fleet take it from this table.
It imports next to nothing, for each command line loads it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RESTART_RULES: Mapping[str, Callable[[int], bool]] = MappingProxyType(
    {
        "no": lambda _status: False,
        "on-failure": lambda status: status > 0,
        "always": lambda _status: True,
    }
)
"""Of each policy, whether a child that ended with such a status is started again."""

RESTARTS = tuple(_RESTART_RULES)
"""The names of all policies, as the configuration and the commands spell them."""

_KILLED = 128 + 9
"""Status of a child whose node was lost: the node's fence has killed it."""


def is_restarted(restart: str, status: int) -> bool:
    """Tell whether a child that ended is started again.

    Args:
        restart: a policy.
        status: of the child, as a shell sees it.
    """
    return _RESTART_RULES[restart](status)


def is_placed_again(restart: str) -> bool:
    """Tell whether a fleet child is placed again when its node is lost.

    One whose policy is none is not: its node has told that it cannot start.
    """
    return restart in _RESTART_RULES and is_restarted(restart, _KILLED)
