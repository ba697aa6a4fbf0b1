"""What the journal says of a child's network: once a minute for each name and port."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from supervisor.network.refusals import Failure, Refusals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostlib.journal import Journal
    from supervisor.network.hosts import Address
    from supervisor.network.reasons import Refused
    from supervisor.network.refusals import Row


class Notices:
    """Tells of one child.

    Args:
        journal: where events go.
        child_id: the child's.
    """

    def __init__(self, journal: Journal, child_id: str) -> None:
        self._journal = journal
        self._child_id = child_id
        self._refusals = Refusals()
        self._failures = Refusals()

    @property
    def refused(self) -> int:
        """How much was refused."""
        return len(self._refusals)

    def rows(self) -> tuple[Row, ...]:
        """Return what was refused, the oldest first."""
        return self._refusals.rows()

    def tell_refused(
        self, host: str | Address, port: int | None, refused: Refused
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
        """Tell that a host cannot be reached, if it is time.

        Args:
            host: what is allowed.
            port: of the connection.
            reason: the symbol of an error.
        """
        row = self._add(self._failures, host, port, Failure(reason))
        if row is not None:
            self._journal.write(
                "network.failed",
                child_id=self._child_id,
                name=row.name,
                port=row.port,
                reason=row.reason,
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
        refused: Refused | Failure,
    ) -> Row | None:
        return rows.add(
            str(host), port, refused, now_s=trio.current_time(), time=time.time()
        )
