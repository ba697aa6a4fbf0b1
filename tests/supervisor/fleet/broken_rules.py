"""The parts of the quota with one rule of FL7 left out each.

The simulation finds them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from supervisor.fleet.directory import RESEND_S, Directory
from supervisor.fleet.held_slices import HeldRow, HeldSlices, HeldState, ReserveResult
from supervisor.fleet.messages import (
    Session,
    SliceGranted,
    SliceReport,
    SlicesSettled,
)
from supervisor.fleet.slices import RootAccount, SliceRow
from supervisor.fleet.states import ChildEvent, ChildState
from supervisor.fleet.step import Moment, Step
from tests.supervisor.fleet.simulation import BackByClock, Rules


class _AllSessions(RootAccount):
    """An inventory is compared with slices of the session itself, too."""

    def _is_earlier(self, one: SliceRow, session: Session) -> bool:
        return True


class _NoLedgerId(RootAccount):
    """An inventory of another ledger counts as one of the same."""

    def _is_of_ledger(self, one: SliceRow, session: Session) -> bool:
        return True


class _NoInventory(RootAccount):
    """A join says nothing of slices whose grants were lost."""

    def take_inventory(
        self, node: str, session: Session, held: frozenset[str], step: Step
    ) -> None:
        """Compare nothing."""


class _Differences(RootAccount):
    """Reports are added up."""

    def _total(self, one: SliceRow, report: SliceReport) -> float:
        return one.spent + report.spent


class _TellsDifferences(HeldSlices):
    """Reports say what was settled since the one before."""

    def _report(self, row: HeldRow) -> SliceReport:
        told: dict[str, float] = self.__dict__.setdefault("told_of", {})
        news = row.settled - told.get(row.id, 0.0)
        told[row.id] = row.settled
        return SliceReport(row.id, news, row.state is HeldState.CLOSED)


class _Forgotten(HeldSlices):
    """Reservations of a dead process count as never spent."""

    def _recovered(self, row: HeldRow) -> HeldRow:
        return replace(row, reserved={}, state=HeldState.CLOSED)


class _LastTooEarly(HeldSlices):
    """The last report goes out while calls are in flight."""

    def _retired(self, row: HeldRow) -> HeldRow:
        return replace(row, state=HeldState.CLOSED)


class _TakenTwice(HeldSlices):
    """A grant is taken whenever it comes."""

    def _is_expected(self, grant: SliceGranted, session: Session) -> bool:
        return grant.session == session


class _NoEndOfWindows(HeldSlices):
    """A slice takes calls after the end of its window."""

    def reserve(
        self,
        account: str,
        call: str,
        worst: float,
        session: Session,
        wall_s: float,
        step: Step,
    ) -> ReserveResult:
        """Reserve as at the beginning of time."""
        return super().reserve(account, call, worst, session, 0.0, step)


class _SpentInTheNextWindow(RootAccount):
    """Slices of a window that has ended count in the next one."""

    def _is_on(self, one: SliceRow) -> bool:
        return True


class _SettlesForOthers(Directory):
    """Slices of another fleet are confirmed, too."""

    def _slice_news(
        self, node: str, ledger: str, reports: tuple[SliceReport, ...], step: Step
    ) -> None:
        super()._slice_news(node, ledger, reports, step)
        ended = tuple(report.slice for report in reports if report.is_last)
        step.send(node, SlicesSettled(self.epoch, ledger, ended))


class _TriesElsewhere(Directory):
    """An order without an answer is tried on another node."""

    def _send_again(self, now: Moment, step: Step) -> None:
        for child_id, sent_s in tuple(self._sent.items()):
            row = self._children.get(child_id)
            is_placing = row is not None and row.state is ChildState.PLACING
            if row is not None and is_placing and now.clock_s - sent_s > RESEND_S:
                self._on_child(row, ChildEvent.LOSE_AGAIN, step)
        super()._send_again(now, step)


class _OwnLeaseAlone(Directory):
    """A node has the lease of the directory that is, whatever it was told before."""

    def _grant_lease(self, name: str, now: Moment) -> None:
        self._leases.grant(name, now.clock_s)


BROKEN: Mapping[str, Rules] = MappingProxyType(
    {
        "back by the root's clock": Rules(account=BackByClock, back_after_s=0.0),
        "back by the root's clock, with grace": Rules(
            account=BackByClock, back_after_s=5.0
        ),
        "inventory over all sessions": Rules(account=_AllSessions),
        "ledger without an id": Rules(account=_NoLedgerId),
        "reservation not written": Rules(stores_reservations=False),
        "reservation forgotten by a crash": Rules(held=_Forgotten),
        "last report with calls in flight": Rules(held=_LastTooEarly),
        "differences instead of totals": Rules(_Differences, _TellsDifferences),
        "a grant taken twice": Rules(held=_TakenTwice),
        "no inventory": Rules(account=_NoInventory),
        "calls after the end of a window": Rules(held=_NoEndOfWindows),
        "spending of the next window": Rules(account=_SpentInTheNextWindow),
        "slices of another fleet settled": Rules(directory=_SettlesForOthers),
    }
)
"""Rules of FL7: what is left out, and what decides instead."""

BROKEN_LIVES: Mapping[str, Rules] = MappingProxyType(
    {
        "no timer in the kernel": Rules(has_timer=False),
        "tried elsewhere without an answer": Rules(directory=_TriesElsewhere),
        "a directory's own lease alone": Rules(directory=_OwnLeaseAlone),
    }
)
"""Rules of FL4, FL5 and FL6, as well."""
