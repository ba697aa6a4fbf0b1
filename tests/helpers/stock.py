"""Whom a launchpad keeps: its stock is no leftover of any child.

Told apart by their names, which only what has not become a program has: one in stock, or
on its way there, is called as below, and has at most one init of a pid namespace.
"""

import time
from pathlib import Path

from hostlib.linux import processes

PATIENCE_S = 30.0
"""A child in stock that is not wanted any more ends by itself, a moment later."""

_IN_STOCK = ("sandhost-stock", "sandhost-pad")
_INIT = "sandhost-init"


def names_beneath(launchpad: int) -> dict[int, str]:
    """Return the names of a launchpad's direct children, by pid."""
    found = {}
    for pid in processes.children_of(launchpad):
        try:
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def stock_of(launchpad: int) -> list[int]:
    """Return who waits for an order, without inits."""
    names = names_beneath(launchpad)
    return [pid for pid, name in names.items() if name in _IN_STOCK]


def strangers(launchpad: int) -> list[int]:
    """Return its direct children beside the stock: none, when no child lives."""
    names = names_beneath(launchpad)
    others = [pid for pid, name in names.items() if name not in (*_IN_STOCK, _INIT)]
    inits = [pid for pid, name in names.items() if name == _INIT]
    stock = len(names) - len(others) - len(inits)
    return [*others, *inits[stock:]]


def only_stock_beneath(launchpad: int) -> bool:
    """Whether, within some time, nobody but the stock is beneath a launchpad."""
    deadline_s = time.monotonic() + PATIENCE_S
    while strangers(launchpad):
        if time.monotonic() > deadline_s:
            return False
        # Not for something that tells: who was displaced ends when it is run again.
        time.sleep(0.001)
    return True
