"""The slices that a node holds, and its calls' reservations in them (FL7).

Rules of this file.

1. A slice is taken once: by the session, the ledger and the request that asked for it.
2. A reservation is in the ledger before its call is sent; at the death of the process,
   reserved amounts count as spent.
3. A slice that was just taken is not idle: the call that it was asked for comes next.
4. The last report of a slice goes out when nothing is reserved in it and nothing more
   will be; the ledger keeps the slice until the directory has it closed.
5. At most one slice of an account takes new calls.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from supervisor.fleet.messages import (
    AskSlice,
    HandBack,
    Session,
    SliceGranted,
    SliceRefused,
    SliceReport,
)
from supervisor.fleet.slices import DAY, NEVER, window_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.fleet.step import Step


FRESH_TICKS = 2
"""Ticks after which a slice without its call counts as idle."""


class HeldState(Enum):
    """Whether a slice takes calls."""

    OPEN = "open"
    RETIRING = "retiring"  # no new ones; those under way end
    CLOSED = "closed"  # only its last report is left


class HeldRow(msgspec.Struct, frozen=True):
    """A slice in the ledger.

    Attributes:
        settled: the cost of calls that have ended.
        reserved: the most that those under way may cost, by call.
    """

    id: str
    account: str
    session: Session
    size: float
    window: str
    settled: float = 0.0
    reserved: dict[str, float] = {}
    state: HeldState = HeldState.OPEN

    @property
    def left(self) -> float:
        """The tokens that new calls may reserve."""
        if self.state is not HeldState.OPEN:
            return 0.0
        return max(0.0, self.size - self.settled - sum(self.reserved.values()))


class LedgerRow(msgspec.Struct, frozen=True):
    """The ledger's own row.

    Attributes:
        id: made with the file.
        sessions: how many were begun.
        requests: how many slices were asked for.
    """

    id: str
    sessions: int = 0
    requests: int = 0


class ReserveResult(Enum):
    """The result of a call's request to reserve."""

    YES = "yes"  # it may be sent once the change is stored
    ASKED = "asked"  # the directory answers with a slice, or refuses


class HeldSlices:
    """The slices of all accounts that one node holds.

    Args:
        node: its name.
        ledger: the ledger's own row.
        rows: of the ledger; a process that died has left reservations in them.

    Attributes:
        node: as above.
        ledger: as above.
    """

    def __init__(
        self, node: str, ledger: LedgerRow, rows: Iterable[HeldRow] = ()
    ) -> None:
        self.ledger = ledger
        self.node = node
        self._rows = {row.id: row for row in rows}
        self._asked: dict[str, AskSlice] = {}
        self._calls: dict[str, str] = {}  # call -> slice
        self._told: dict[str, float] = {}  # the last reports
        self._fresh: dict[str, int] = {}  # slice -> ticks until it can be idle

    def rows(self) -> tuple[HeldRow, ...]:
        """Return all that the ledger has."""
        return tuple(self._rows.values())

    def recover(self, step: Step) -> None:
        """Count as spent what a process that died had reserved; close its slices."""
        for row in self.rows():
            self._put(self._recovered(row), step)

    def begin_session(self, step: Step) -> Session:
        """Return a session that no message of before belongs to.

        Slices of earlier ones take no new calls: their grants may have been doubled.
        """
        self.stop(step)
        self._put_ledger(replace(self.ledger, sessions=self.ledger.sessions + 1), step)
        return Session(self.ledger.id, self.ledger.sessions)

    def stop(self, step: Step) -> None:
        """Take no new calls: the session is over."""
        self._asked.clear()
        for row in self.rows():
            self._retire(row, step)

    # Calls

    def reserve(
        self,
        account: str,
        call: str,
        worst: float,
        session: Session,
        wall_s: float,
        step: Step,
    ) -> ReserveResult:
        """Reserve a call's worst case, or ask for a slice that it fits into.

        Precondition: the node's lease is held.
        """
        for row in self.rows():
            if row.account != account or row.state is not HeldState.OPEN:
                continue
            # The directory's clock has said its window, a moment ago if it is fresh.
            if row.id not in self._fresh and _is_over(row, wall_s):
                self._retire(row, step)
            elif row.left >= worst > 0.0 or row.left > worst == 0.0:
                reserved = {**row.reserved, call: worst}
                self._put(replace(row, reserved=reserved), step)
                self._calls[call] = row.id
                self._fresh.pop(row.id, None)
                return ReserveResult.YES
        if account not in self._asked:
            for row in self.rows():
                if row.account == account:
                    self._retire(row, step)
            number = self.ledger.requests + 1
            self._put_ledger(replace(self.ledger, requests=number), step)
            self._asked[account] = AskSlice(self.node, session, account, number, worst)
            step.send(self.node, self._asked[account])
        return ReserveResult.ASKED

    def settle(self, call: str, cost: float, step: Step) -> None:
        """End a call's reservation and count what it cost; 0 if it was never sent."""
        row = self._rows.get(self._calls.pop(call, ""))
        if row is None:
            return
        reserved = {name: n for name, n in row.reserved.items() if name != call}
        row = replace(row, reserved=reserved, settled=row.settled + cost)
        if row.state is HeldState.RETIRING and not reserved:
            row = replace(row, state=HeldState.CLOSED)
        self._put(row, step)

    # Messages of the directory

    def take(self, grant: SliceGranted, session: Session, step: Step) -> bool:
        """Take a slice, once, by what asked for it; return whether it was taken."""
        if not self._is_expected(grant, session):
            return False
        self._asked.pop(grant.account, None)
        row = HeldRow(grant.slice, grant.account, session, grant.size, grant.window)
        self._put(row, step)
        self._fresh[row.id] = FRESH_TICKS
        return True

    def refuse(self, refusal: SliceRefused, session: Session) -> AskSlice | None:
        """Return the request that a refusal answers; None if it is not the last one."""
        asked = self._asked.get(refusal.account)
        if asked is None or asked.number != refusal.number:
            return None
        if asked.session != session:
            return None
        del self._asked[refusal.account]
        return asked

    def hand_back(self, wish: HandBack, step: Step) -> None:
        """Close a slice that is wanted elsewhere if it is idle; report it in any case."""
        row = self._rows.get(wish.slice)
        if row is None:
            return
        if not row.reserved and wish.slice not in self._fresh:
            self._retire(row, step)
        self._told.pop(wish.slice, None)

    def forget(self, slices: Iterable[str], step: Step) -> None:
        """Forget closed slices that the directory has closed as well."""
        for name in slices:
            row = self._rows.get(name)
            if row is not None and row.state is HeldState.CLOSED:
                del self._rows[name]
                self._told.pop(name, None)
                step.put("held", name, None)

    # Reports

    def tick(self) -> None:
        """Let a slice that no call was reserved in become idle: due once a second."""
        self._fresh = {name: n - 1 for name, n in self._fresh.items() if n > 1}

    def asked(self) -> tuple[AskSlice, ...]:
        """Return requests without an answer, to be sent again."""
        return tuple(self._asked.values())

    def inventory(self) -> tuple[SliceReport, ...]:
        """Return all that the ledger holds, for a join."""
        return tuple(self._report(row) for row in self.rows())

    def reports(self) -> tuple[SliceReport, ...]:
        """Return what is to be told: totals that have changed, all last reports."""
        found = []
        for row in self.rows():
            is_news = self._told.get(row.id) != row.settled
            if is_news or row.state is HeldState.CLOSED:
                found.append(self._report(row))
                self._told[row.id] = row.settled
        return tuple(found)

    # Each of these is a rule of FL7 by itself.

    def _report(self, row: HeldRow) -> SliceReport:
        return SliceReport(row.id, row.settled, row.state is HeldState.CLOSED)

    def _is_expected(self, grant: SliceGranted, session: Session) -> bool:
        asked = self._asked.get(grant.account)
        if asked is None or asked.number != grant.number:
            return False
        return grant.session == session == asked.session

    def _recovered(self, row: HeldRow) -> HeldRow:
        spent = row.settled + sum(row.reserved.values())
        return replace(row, settled=spent, reserved={}, state=HeldState.CLOSED)

    def _retired(self, row: HeldRow) -> HeldRow:
        state = HeldState.RETIRING if row.reserved else HeldState.CLOSED
        return replace(row, state=state)

    # Rows

    def _retire(self, row: HeldRow, step: Step) -> None:
        if row.state is HeldState.OPEN:
            self._put(self._retired(row), step)

    def _put(self, row: HeldRow, step: Step) -> None:
        self._rows[row.id] = row
        step.put("held", row.id, row)

    def _put_ledger(self, row: LedgerRow, step: Step) -> None:
        self.ledger = row
        step.put("ledger", "", row)


def _is_over(row: HeldRow, wall_s: float) -> bool:
    """Return whether a slice's window has ended."""
    return row.window != NEVER and window_at(DAY, wall_s) > row.window
