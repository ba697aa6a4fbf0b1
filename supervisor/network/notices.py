"""Events about a child's network: one a minute for each name and port."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import trio

from supervisor.network.refusals import Failure, Refusals, RefusalsState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostlib.journal import Journal
    from supervisor.network.hosts import Address
    from supervisor.network.reasons import NetworkRefusal
    from supervisor.network.refusals import RefusedName


class NoticesState(msgspec.Struct):
    """The state for a hand-over: refusals and failures."""

    refused: RefusalsState
    failed: RefusalsState


class Notices:
    """Tells of one child."""

    def __init__(
        self, journal: Journal, child_id: str, state: NoticesState | None = None
    ) -> None:
        self._journal = journal
        self._child_id = child_id
        now_s = trio.current_time()
        self._refusals = Refusals(None if state is None else state.refused, now_s)
        self._failures = Refusals(None if state is None else state.failed, now_s)

    def snapshot(self) -> NoticesState:
        """Return what is handed over."""
        now_s = trio.current_time()
        refused, failed = (
            rows.snapshot(now_s) for rows in (self._refusals, self._failures)
        )
        return NoticesState(refused, failed)

    @property
    def refused(self) -> int:
        """How much was refused."""
        return len(self._refusals)

    def rows(self) -> tuple[RefusedName, ...]:
        """Return what was refused, the oldest first."""
        return self._refusals.rows()

    def tell_refused(
        self, host: str | Address, port: int | None, refused: NetworkRefusal
    ) -> None:
        """Count a refusal, and tell of it if it is time (spec NET11)."""
        row = self._add(self._refusals, host, port, refused)
        if row is not None:
            self._journal.write(
                "network.refused",
                child_id=self._child_id,
                name=row.name,
                port=row.port,
                reason=row.reason,
                rule=row.rule,
            )

    def tell_failed(self, host: str | Address, port: int, reason: str) -> None:
        """Tell that a host cannot be reached, if it is time."""
        row = self._add(self._failures, host, port, Failure(reason))
        if row is not None:
            self._journal.write(
                "network.failed",
                child_id=self._child_id,
                name=row.name,
                port=row.port,
                reason=row.reason,
            )

    def tell_reset(self, count: int) -> None:
        """Tell how many connections ended with the host's program before."""
        self._journal.write("network.reset", child_id=self._child_id, connections=count)

    def tell_narrowed(self, rules: Sequence[str]) -> None:
        """Tell that the child has given rules up (spec NET2)."""
        self._journal.write(
            "network.narrowed", child_id=self._child_id, rules=list(rules)
        )

    def tell_changed(
        self, allow: Sequence[str], deny: Sequence[str], *, cut: bool
    ) -> None:
        """Tell that the child's rules were changed (spec NET12)."""
        self._journal.write(
            "network.changed",
            child_id=self._child_id,
            allow=list(allow),
            deny=list(deny),
            cut=cut,
        )

    @staticmethod
    def _add(
        rows: Refusals,
        host: str | Address,
        port: int | None,
        refused: NetworkRefusal | Failure,
    ) -> RefusedName | None:
        return rows.add(
            str(host), port, refused, now_s=trio.current_time(), time=time.time()
        )
