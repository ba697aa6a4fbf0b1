"""Restart policies: whether a child that ended comes back.

A policy is one row here; configuration, commands and the fleet take it from this table.
It imports next to nothing, for each command line loads it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_COMES_BACK: Mapping[str, Callable[[int], bool]] = MappingProxyType(
    {
        "no": lambda _status: False,
        "on-failure": lambda status: status > 0,
        "always": lambda _status: True,
    }
)
"""Of each policy, whether a child that ended with such a status is started again."""

RESTARTS = tuple(_COMES_BACK)
"""The names of all policies, as the configuration and the commands spell them."""

_KILLED = 128 + 9
"""Status of a child whose node was lost: the node's fence has killed it."""


def comes_back(restart: str, status: int) -> bool:
    """Tell whether a child that ended is started again.

    Args:
        restart: a policy.
        status: of the child, as a shell sees it.
    """
    return _COMES_BACK[restart](status)


def comes_back_elsewhere(restart: str) -> bool:
    """Tell whether a fleet child is placed again when its node is lost.

    One whose policy is none is not: its node has told that it cannot start.
    """
    return restart in _COMES_BACK and comes_back(restart, _KILLED)
