"""Calls of fleet children, paid from the slices of their node (FL7).

Rules of this file.

1. A reservation is in the node's ledger before `reserve` returns, so before its call is
   sent. The cost of a call is written later: until then its worst case counts.
2. A call without room waits for a slice, as long as `SLICE_S`; the directory's answer
   wakes all that wait, and each tries again or is refused.
"""

from __future__ import annotations

import sqlite3
from itertools import count
from typing import TYPE_CHECKING

import trio

from supervisor.fleet.fence import FencedError, UnpaidError
from supervisor.fleet.held_slices import ReserveResult
from supervisor.fleet.slices import ACCOUNT
from supervisor.fleet.step import StaleEpochError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from supervisor.fleet.node import CallsDecided, Node, NodeStep
    from supervisor.fleet.step import Moment

SLICE_S = 5.0
"""Longest wait for a slice: a restart of the directory, and a second attempt."""


class _Decision:
    """The next answer of the directory to those that wait.

    Attributes:
        is_there: set when it has come.
        refused_from: see `CallsDecided`.
        is_held: the same.
    """

    def __init__(self) -> None:
        self.is_there = trio.Event()
        self.refused_from: float | None = None
        self.is_held = False


class SlicePayer:
    """Pays calls of fleet children; see `fence.Payer`.

    Args:
        node: returns the node; None before there is one.
        clocks: tells the time.
        add: has a step stored and carried out.
        flush: returns when all steps so far are, or raises what it cannot.
    """

    def __init__(
        self,
        node: Callable[[], Node | None],
        clocks: Callable[[], Moment],
        add: Callable[[NodeStep], None],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self._node = node
        self._clocks = clocks
        self._add = add
        self._flush = flush
        self._decision = _Decision()
        self._numbers = count(1)

    def decide(self, action: CallsDecided) -> None:
        """Wake all that wait for a slice."""
        decision, self._decision = self._decision, _Decision()
        decision.refused_from = action.refused_from
        decision.is_held = action.is_held
        decision.is_there.set()

    async def reserve(self, worst: float) -> str | None:
        """Reserve a call's worst case; see `fence.Payer`."""
        node = self._node()
        if node is None:
            raise FencedError(
                "cannot pay a call: this host is in no fleet any more; spawn the child again"
            )
        if ACCOUNT not in node.accounts:
            return None
        call = str(next(self._numbers))
        with trio.move_on_after(SLICE_S):
            while not await self._has_reserved(node, call, worst):
                pass
            return call
        raise UnpaidError(
            "cannot pay a call: the directory of the fleet does not answer within"
            f" {SLICE_S:g} s; try again"
        )

    async def _has_reserved(self, node: Node, call: str, worst: float) -> bool:
        """Reserve, or wait for an answer of the directory after which to try again."""
        decision = self._decision
        outcome, step = node.reserve(ACCOUNT, call, worst, self._clocks())
        self._add(step)
        try:
            await self._flush()
        except (sqlite3.Error, StaleEpochError, OSError) as why:
            self.settle(call, 0.0)
            raise UnpaidError(
                f"cannot pay a call: the node's ledger cannot be written: {why}; make"
                " room for it, or start the daemon again"
            ) from None
        except BaseException:
            self.settle(call, 0.0)
            raise
        if outcome is ReserveResult.YES:
            return True
        await decision.is_there.wait()
        if decision.refused_from is not None and worst >= decision.refused_from:
            raise UnpaidError(
                "cannot pay a call: the fleet's account has no room; raise its limit, or wait",
                is_refused=True,
                is_held=decision.is_held,
            )
        return False

    def settle(self, call: str, cost: float) -> None:
        """Count what a call cost; 0 if it was never sent."""
        node = self._node()
        if node is not None:
            self._add(node.settle(call, cost))
