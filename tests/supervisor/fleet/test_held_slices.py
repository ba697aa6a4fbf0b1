"""The slices that a node holds.

Taken once, reserved in before a call, reported whole.
"""

from supervisor.fleet.held_slices import (
    HeldRow,
    HeldSlices,
    HeldState,
    LedgerRow,
    ReserveResult,
)
from supervisor.fleet.messages import (
    HandBack,
    Session,
    SliceGranted,
    SliceRefused,
    SliceReport,
)
from supervisor.fleet.step import Step


class Holder:
    """A node's slices in their first session."""

    def __init__(self, *rows: HeldRow) -> None:
        self.held = HeldSlices("a", LedgerRow("L1"), rows)
        self.session = self.held.begin_session(Step())
        self.step = Step()

    def reserve(self, call: str, worst: float, wall_s: float = 0.0) -> ReserveResult:
        """Reserve a call."""
        return self.held.reserve("t", call, worst, self.session, wall_s, self.step)

    def grant(
        self, number: int, size: float, window: str = "never", name: str = ""
    ) -> bool:
        """Grant a slice; return whether it is taken."""
        grant = SliceGranted(
            1, self.session, "t", number, name or f"t/{number}", size, window
        )
        return self.held.take(grant, self.session, self.step)

    def settle(self, call: str, cost: float) -> None:
        """End a call."""
        self.held.settle(call, cost, self.step)

    def states(self) -> dict[str, HeldState]:
        """Return the state of each slice."""
        return {row.id: row.state for row in self.held.rows()}


# spec FL7
def test_a_call_without_a_slice_asks_once() -> None:
    holder = Holder()
    assert holder.reserve("c1", 2.0) is ReserveResult.ASKED
    assert holder.reserve("c2", 2.0) is ReserveResult.ASKED
    assert [request.number for request in holder.held.asked()] == [1]
    assert len(holder.step.sends) == 1


# spec FL7
def test_a_call_is_reserved_in_the_ledger() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    assert holder.grant(1, 10.0)
    assert holder.reserve("c1", 2.0) is ReserveResult.YES
    row = holder.step.changes[-1].row
    assert isinstance(row, HeldRow)
    assert row.reserved == {"c1": 2.0}


# spec FL7
def test_a_slice_is_taken_once() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    assert holder.grant(1, 10.0)
    assert not holder.grant(1, 10.0)


# spec FL7
def test_a_slice_for_another_session_is_ignored() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    old = holder.session
    holder.session = holder.held.begin_session(Step())
    holder.reserve("c1", 2.0)
    grant = SliceGranted(1, old, "t", 2, "t/2", 10.0, "never")
    assert not holder.held.take(grant, holder.session, Step())
    other = SliceGranted(1, Session("L9", 2), "t", 2, "t/2", 10.0, "never")
    assert not holder.held.take(other, holder.session, Step())


# spec FL7
def test_a_refusal_ends_the_request_that_it_answers() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    stale = SliceRefused(1, holder.session, "t", 7, is_held=False)
    assert holder.held.refuse(stale, holder.session) is None
    answer = SliceRefused(1, holder.session, "t", 1, is_held=False)
    assert holder.held.refuse(answer, holder.session) is not None
    assert holder.held.asked() == ()


# spec FL7
def test_a_slice_that_is_too_small_retires_when_a_larger_one_is_asked_for() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.reserve("c1", 2.0)
    assert holder.reserve("c2", 9.0) is ReserveResult.ASKED
    assert holder.states() == {"t/1": HeldState.RETIRING}
    holder.settle("c1", 1.5)
    assert holder.held.reports() == (SliceReport("t/1", 1.5, is_last=True),)


# spec FL7
def test_the_last_report_waits_for_calls_in_flight() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.reserve("c1", 2.0)
    holder.held.stop(holder.step)
    assert not any(report.is_last for report in holder.held.inventory())
    holder.settle("c1", 1.0)
    assert holder.held.inventory() == (SliceReport("t/1", 1.0, is_last=True),)


# spec FL7
def test_a_last_report_is_told_until_it_is_settled() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.held.stop(holder.step)
    assert holder.held.reports() == holder.held.reports() != ()
    holder.held.forget(["t/1"], holder.step)
    assert holder.held.reports() == ()
    assert holder.step.changes[-1].row is None


# spec FL7
def test_an_idle_slice_is_handed_back_and_a_busy_one_reported() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.reserve("c1", 2.0)
    wish = HandBack(1, holder.session, "t", "t/1")
    holder.held.hand_back(wish, holder.step)
    assert holder.held.reports() == (SliceReport("t/1", 0.0, is_last=False),)
    holder.settle("c1", 1.0)
    holder.held.hand_back(wish, holder.step)
    assert holder.held.reports() == (SliceReport("t/1", 1.0, is_last=True),)


# spec FL7: else two nodes could take it from each other before either makes its call
def test_a_slice_that_was_just_taken_is_not_idle() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    wish = HandBack(1, holder.session, "t", "t/1")
    holder.held.hand_back(wish, holder.step)
    assert holder.states() == {"t/1": HeldState.OPEN}
    holder.held.tick()
    holder.held.tick()
    holder.held.hand_back(wish, holder.step)
    assert holder.states() == {"t/1": HeldState.CLOSED}


# spec FL7
def test_what_was_reserved_when_the_process_died_counts_as_spent() -> None:
    row = HeldRow("t/1", "t", Session("L1", 1), 10.0, "never", 3.0, {"c1": 2.0})
    held = HeldSlices("a", LedgerRow("L1", 1), [row])
    held.recover(Step())
    assert held.inventory() == (SliceReport("t/1", 5.0, is_last=True),)


# spec FL7
def test_a_slice_takes_no_calls_after_its_window() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0, "1970-01-01")
    for _ in range(2):
        holder.held.tick()
    assert holder.reserve("c1", 2.0, wall_s=86_400.0) is ReserveResult.ASKED
    assert holder.states() == {"t/1": HeldState.CLOSED}


# The directory's clock says which window is on. A node whose clock is ahead would ask again
# and again until then, and be given one slice after the other.
# spec FL7
def test_a_node_whose_clock_is_ahead_pays_a_call_with_what_it_was_given() -> None:
    holder = Holder()
    late_s = 86_400.0
    holder.reserve("c1", 2.0, late_s)
    holder.grant(1, 10.0, "1970-01-01")
    assert holder.reserve("c1", 2.0, late_s) is ReserveResult.YES
    assert holder.reserve("c2", 2.0, late_s) is ReserveResult.ASKED
    assert holder.states() == {"t/1": HeldState.RETIRING}


# spec FL7
def test_slices_of_an_earlier_session_take_no_calls() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.session = holder.held.begin_session(holder.step)
    assert holder.reserve("c1", 2.0) is ReserveResult.ASKED


# spec FL7
def test_a_call_that_was_never_sent_costs_nothing() -> None:
    holder = Holder()
    holder.reserve("c1", 2.0)
    holder.grant(1, 10.0)
    holder.reserve("c1", 2.0)
    holder.settle("c1", 0.0)
    holder.settle("c1", 2.0)
    (row,) = holder.held.rows()
    assert (row.settled, row.left) == (0.0, 10.0)
