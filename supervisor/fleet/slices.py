"""A quota over many hosts: the root account and the slices given out (FL7).

Rules of this file.

1. A slice is taken off the account and stored before its grant is sent; the same request
   number is the same slice.
2. A slice is what its holder may still spend: time alone never gives it back. It ends by
   its holder's last report, by an inventory of the same ledger that has it no more, or is
   written off whole.
3. Reports are totals; the highest counts.
4. Invariant: spent + slices <= limit in each window, but for what a provider charges
   beyond a reservation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.fleet.step import Moment, Step

SHARE = 1 / 16
"""Part of what is left that a slice has at least: few requests, and room for others."""

HAND_BACK_S = 1.0
"""How long a request without room waits for idle slices to come back."""

ACCOUNT = "tokens"
"""The account of `[fleet.quota]`: weighted tokens of all nodes together."""

DAY, NEVER = "day", "never"
"""When spending is forgotten: at midnight UTC, or not at all."""

OPEN, LOST = "open", "lost"


def window_at(kind: str, wall_s: float) -> str:
    """Return the window that a time is in."""
    return time.strftime("%Y-%m-%d", time.gmtime(wall_s)) if kind == DAY else NEVER


class AccountRow(msgspec.Struct, frozen=True):
    """An account as it is stored.

    Attributes:
        limit: weighted tokens of a window.
        kind: of its windows.
        window: the one that is on.
        spent: of this window, in slices that are closed.
        slices: how many were made, for their ids.
        fleet: its id, for the same: a node may still hold slices of another one.
        is_open: calls are paid in slices of it.
    """

    name: str
    limit: float
    kind: str
    window: str
    spent: float = 0.0
    slices: int = 0
    fleet: str = ""
    is_open: bool = True

    @property
    def last_slice(self) -> str:
        """The id of the slice that was made last."""
        prefix = f"{self.fleet}." if self.fleet else ""
        return f"{self.name}/{prefix}{self.slices}"


class SliceRow(msgspec.Struct, frozen=True):
    """A slice that is not closed.

    Attributes:
        id: never used twice.
        size: the tokens that were taken off the account.
        spent: the highest total that was reported.
        window: its spending is this window's.
        state: ``open``, or ``lost`` with its node.
    """

    id: str
    account: str
    node: str
    session: Session
    number: int
    size: float
    window: str
    spent: float = 0.0
    state: str = OPEN

    @property
    def cost(self) -> float:
        """The amount that the account has lost: all of it, or charges beyond it."""
        return max(self.size, self.spent)


class RequestRow(msgspec.Struct, frozen=True):
    """The last request of a node, and its slice; no slice: it was refused."""

    session: Session
    number: int
    slice: str


@dataclass(slots=True)
class _Pending:
    """A request without room, until idle slices have come back or it is time."""

    request: AskSlice
    until_s: float
    unanswered: set[str]


class RootAccount:
    """One account of the fleet.

    Args:
        row: as it is stored, or new.
        slices: those that are not closed.
        requests: the last one of each node.
    """

    def __init__(
        self,
        row: AccountRow,
        slices: Iterable[SliceRow] = (),
        requests: Iterable[tuple[str, RequestRow]] = (),
    ) -> None:
        self.row = row
        self._slices = {one.id: one for one in slices}
        self._requests = dict(requests)
        self._pending: list[_Pending] = []

    @property
    def free(self) -> float:
        """The amount that may still be given out in the present window."""
        out = sum(one.cost for one in self.slices_on())
        return max(0.0, self.row.limit - self.row.spent - out)

    def slices(self) -> tuple[SliceRow, ...]:
        """Return the slices that are not closed, of whatever window."""
        return tuple(self._slices.values())

    def slices_on(self) -> tuple[SliceRow, ...]:
        """Return those of the window that is on."""
        return tuple(one for one in self._slices.values() if self._is_on(one))

    def set_rule(
        self, limit: float, kind: str, fleet: str, now: Moment, step: Step
    ) -> None:
        """Open it with a limit and windows; spent and given out amounts count on.

        Args:
            limit: weighted tokens of a window.
            kind: of its windows.
            fleet: in whose name slices are given from now on.
            now: the time.
            step: takes the change.
        """
        window = self.row.window
        if kind != self.row.kind:
            window = window_at(kind, now.wall_s)
            for one in self.slices_on():
                if one.window != NEVER:  # its holder takes calls until it has reported
                    self._put_slice(replace(one, window=window), step)
        row = replace(self.row, limit=limit, kind=kind, window=window, fleet=fleet)
        self._put_account(replace(row, is_open=True), step)

    def close(self, step: Step) -> None:
        """Let no call be paid in it; spent and given out amounts stay noted."""
        self._put_account(replace(self.row, is_open=False), step)

    def begin_window(self, now: Moment, step: Step) -> None:
        """Begin a new window if it is time; slices of the old one stay what they are."""
        window = window_at(self.row.kind, now.wall_s)
        # A wall clock that is set back begins no window again.
        if window > self.row.window:
            self._put_account(replace(self.row, window=window, spent=0.0), step)

    # Requests

    def ask(self, request: AskSlice, epoch: int, now: Moment, step: Step) -> None:
        """Grant a slice, refuse it, or ask first for idle ones to come back.

        Precondition: the session is the node's own, and it is up.
        """
        known = self._requests.get(request.node)
        if known is not None and known.session == request.session:
            if request.number < known.number:
                return
            if request.number == known.number:
                self._answer_again(request, known, epoch, step)
                return
        if any(_is_same(one.request, request) for one in self._pending):
            return
        self.begin_window(now, step)
        if self._grant(request, epoch, step):
            return
        idle = [one for one in self.slices_on() if one.state == OPEN]
        if not idle:
            self._refuse(request, epoch, step)
            return
        for one in idle:
            back = HandBack(epoch, one.session, self.row.name, one.id)
            step.send(one.node, back)
        until_s = now.clock_s + HAND_BACK_S
        self._pending.append(_Pending(request, until_s, {one.id for one in idle}))

    def _answer_again(
        self, request: AskSlice, known: RequestRow, epoch: int, step: Step
    ) -> None:
        if not known.slice:
            self._send_refusal(request, epoch, step)
        elif (one := self._slices.get(known.slice)) is not None:
            self._send_grant(one, epoch, step)
        # A slice that is closed was taken, or never will be: it is not granted again.

    def _grant(self, request: AskSlice, epoch: int, step: Step) -> bool:
        free = self.free
        if request.worst > free or free <= 0.0:
            return False
        row = replace(self.row, slices=self.row.slices + 1)
        one = SliceRow(
            row.last_slice,
            row.name,
            request.node,
            request.session,
            request.number,
            max(request.worst, free * SHARE),
            row.window,
        )
        self._put_account(row, step)
        self._put_slice(one, step)
        self._put_request(request, one.id, step)
        self._send_grant(one, epoch, step)
        return True

    def _refuse(self, request: AskSlice, epoch: int, step: Step) -> None:
        self._put_request(request, "", step)
        self._send_refusal(request, epoch, step)

    def _send_grant(self, one: SliceRow, epoch: int, step: Step) -> None:
        step.send(
            one.node,
            SliceGranted(
                epoch,
                one.session,
                one.account,
                one.number,
                one.id,
                one.size,
                one.window,
            ),
        )

    def _send_refusal(self, request: AskSlice, epoch: int, step: Step) -> None:
        step.send(
            request.node,
            SliceRefused(
                epoch,
                request.session,
                self.row.name,
                request.number,
                self._is_held(request.worst),
            ),
        )

    def _is_held(self, worst: float) -> bool:
        """Return whether slices that are out hold the room for a call."""
        spent = sum(
            one.spent if one.state == OPEN else one.cost for one in self.slices_on()
        )
        return worst <= self.row.limit - self.row.spent - spent

    def decide_pending(self, epoch: int, now: Moment, step: Step) -> None:
        """Grant or refuse requests whose idle slices have answered, or not in time."""
        waiting, self._pending = self._pending, []
        for one in waiting:
            if self._grant(one.request, epoch, step):
                continue
            if one.unanswered and now.clock_s < one.until_s:
                self._pending.append(one)
            else:
                self._refuse(one.request, epoch, step)

    # Returned slices

    def report(self, report: SliceReport, ledger: str, step: Step) -> None:
        """Count what a slice has cost; close it if that was its last report.

        A report comes from whatever session its holder has by now, by its ledger.
        """
        one = self._slices.get(report.slice)
        if one is None or one.session.ledger != ledger:
            return
        for pending in self._pending:
            pending.unanswered.discard(one.id)
        total = self._total(one, report)
        if report.is_last:
            self._close(one, total, step)
        elif total != one.spent:
            self._put_slice(replace(one, spent=total), step)

    def take_inventory(
        self,
        node: str,
        session: Session,
        held: frozenset[str],
        step: Step,
    ) -> None:
        """Compare what a node's ledger holds with what was given to its sessions.

        Slices of earlier sessions that it has not come back if the ledger is theirs:
        their grants were lost, and are ignored when they come. Of another ledger nothing
        is known: they are written off whole.
        """
        for one in self.slices():
            if one.node != node:
                continue
            if one.id in held:
                if one.state == LOST:
                    self._put_slice(replace(one, state=OPEN), step)
            elif self._is_earlier(one, session):
                is_back = self._is_of_ledger(one, session)
                self._close(one, one.spent if is_back else one.cost, step)

    def lose(self, node: str, step: Step) -> None:
        """Show a lost node's slices as lost; they count as spent until it reports."""
        self._pending = [one for one in self._pending if one.request.node != node]
        for one in self.slices():
            if one.node == node and one.state == OPEN:
                self._put_slice(replace(one, state=LOST), step)

    def write_off(self, node: str, step: Step) -> None:
        """Count a node's slices as spent for good (`fleet forget`)."""
        for one in self.slices():
            if one.node == node:
                self._close(one, one.cost, step)

    def holds(self, node: str) -> bool:
        """Return whether a node has slices that count in the window that is on."""
        return any(one.node == node for one in self.slices_on())

    def drop(self, node: str, step: Step) -> None:
        """Remove the rows of a node; precondition: it holds nothing that counts."""
        self.write_off(node, step)
        if self._requests.pop(node, None) is not None:
            step.put("requests", f"{self.row.name}/{node}", None)

    # Each of these is a rule of FL7 by itself.

    def _total(self, one: SliceRow, report: SliceReport) -> float:
        return max(one.spent, report.spent)

    def _is_earlier(self, one: SliceRow, session: Session) -> bool:
        return one.session != session

    def _is_of_ledger(self, one: SliceRow, session: Session) -> bool:
        return one.session.ledger == session.ledger

    def _is_on(self, one: SliceRow) -> bool:
        return one.window in (self.row.window, NEVER)

    # Rows

    def _close(self, one: SliceRow, cost: float, step: Step) -> None:
        del self._slices[one.id]
        step.put("slices", one.id, None)
        if self._is_on(one):
            spent = self.row.spent + cost
            self._put_account(replace(self.row, spent=spent), step)
        for pending in self._pending:
            pending.unanswered.discard(one.id)

    def _put_account(self, row: AccountRow, step: Step) -> None:
        self.row = row
        step.put("accounts", row.name, row)

    def _put_slice(self, one: SliceRow, step: Step) -> None:
        self._slices[one.id] = one
        step.put("slices", one.id, one)

    def _put_request(self, request: AskSlice, slice_id: str, step: Step) -> None:
        row = RequestRow(request.session, request.number, slice_id)
        self._requests[request.node] = row
        step.put("requests", f"{self.row.name}/{request.node}", row)


def fleet_of(slice_id: str) -> str:
    """Return the id of the fleet that gave a slice; nothing if it had none."""
    return slice_id.rpartition("/")[2].rpartition(".")[0]


def _is_same(one: AskSlice, other: AskSlice) -> bool:
    return (one.session, one.number) == (other.session, other.number)
