"""Restart policies: whether a child that ended comes back.

A policy is one row here; configuration, commands and the fleet take it from this table.
It imports next to nothing, for each command line loads it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RULES: Mapping[str, Callable[[int], bool]] = MappingProxyType(
    {
        "no": lambda _status: False,
        "on-failure": lambda status: status > 0,
        "always": lambda _status: True,
    }
)
"""Policies, each with a test whether a child with that exit status starts again."""

RESTARTS = tuple(RULES)
"""The names of all policies, as the configuration and the commands spell them."""

_STATUSES = range(256)
"""Every status that a shell sees."""

_KILLED = 128 + 9
"""Status of a child whose node was lost: the node's fence has killed it."""


def is_restarted(restart: str, status: int) -> bool:
    """Tell whether a child that ended is started again.

    Args:
        restart: a policy.
        status: of the child, as a shell sees it.
    """
    return RULES[restart](status)


def may_come_back(restart: str) -> bool:
    """Tell whether there is an end after which a child is started again.

    A word that is no policy brings none back.
    """
    return restart in RULES and any(map(RULES[restart], _STATUSES))


def is_placed_again(restart: str) -> bool:
    """Tell whether a fleet child is placed again when its node is lost.

    One whose policy is none is not: its node has told that it cannot start.
    """
    return restart in RULES and is_restarted(restart, _KILLED)
