"""How long chaos lasts.

`CHAOS_ROUNDS`, 400 in the short form, 10,000 in the long.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "400"))
"""Rounds of random kill -9 of children."""

LONG = ROUNDS >= 10_000
"""Whether this is the long form."""

HOST_KILLS = 200 if LONG else 10
"""Rounds of random kill -9 of the host."""

SEED = int(os.environ.get("CHAOS_SEED", "0")) or None
"""The seed of the choices; a failing run prints its own, to be run again."""

SERVE_KILLS = 200 if LONG else 8
"""Rounds of random kill -9 of the daemon."""

FLEET_KILLS = int(os.environ.get("CHAOS_FLEET_KILLS", "200"))
"""Kills of machines of a fleet, in the long form; fewer for a run in parts."""

LONG_ALONE = (
    pytest.mark.chaos,
    pytest.mark.skipif(not LONG, reason="for the long form (CHAOS_ROUNDS=10000)"),
)
"""Marks of a test, or of one of its rows, that is run in the long form alone."""


def some_of(rows: Iterable[T], step: int = 2) -> list[T]:
    """Return each `step`-th row in the short form, all of them in the long one."""
    return list(rows)[:: 1 if LONG else step]
