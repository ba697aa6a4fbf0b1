"""The root account: slices given once, closed by holders, not by time alone."""

import pytest

from supervisor.fleet.messages import (
    AskSlice,
    HandBack,
    Session,
    SliceGranted,
    SliceRefused,
    SliceReport,
)
from supervisor.fleet.slices import DAY, HAND_BACK_S, NEVER, AccountRow, RootAccount
from supervisor.fleet.step import Moment, Step

OLD, NEW, OTHER = Session("L1", 1), Session("L1", 2), Session("L9", 1)
NOW = Moment(50.0, 0.0)


def account(limit: float = 160.0, kind: str = NEVER) -> RootAccount:
    """Return an account of which nothing is spent."""
    window = "1970-01-01" if kind == DAY else NEVER
    return RootAccount(AccountRow("t", limit, kind, window))


def ask(
    root: RootAccount,
    number: int = 1,
    worst: float = 1.0,
    node: str = "a",
    session: Session = OLD,
) -> list[object]:
    """Return what is sent when a node asks for a slice."""
    step = Step()
    root.ask(AskSlice(node, session, "t", number, worst), 1, NOW, step)
    return [send.message for send in step.sends]


def granted(messages: list[object]) -> SliceGranted:
    """Return the only message, a grant."""
    (message,) = messages
    assert isinstance(message, SliceGranted)
    return message


def report(
    root: RootAccount, slice_id: str, spent: float, *, is_last: bool = False
) -> None:
    """Let a holder with the first ledger tell what a slice has cost."""
    root.report(SliceReport(slice_id, spent, is_last), "L1", Step())


# spec FL7
@pytest.mark.parametrize(("worst", "size"), [(1.0, 10.0), (25.0, 25.0)])
def test_a_slice_is_the_worst_case_or_a_sixteenth_of_what_is_left(
    worst: float, size: float
) -> None:
    root = account(160.0)
    assert granted(ask(root, worst=worst)).size == size
    assert root.free == 160.0 - size


# spec FL7
def test_a_slice_is_stored_with_what_it_takes_off_the_account() -> None:
    root, step = account(), Step()
    root.ask(AskSlice("a", OLD, "t", 1, 1.0), 1, NOW, step)
    assert {change.table for change in step.changes} == {
        "accounts",
        "slices",
        "requests",
    }


# spec FL7
def test_the_same_request_is_the_same_slice() -> None:
    root = account()
    assert granted(ask(root)).slice == granted(ask(root)).slice
    assert len(root.slices()) == 1


# spec FL7
def test_a_request_that_was_overtaken_gets_nothing() -> None:
    root = account()
    ask(root, number=2)
    assert ask(root, number=1) == []


# spec FL7
def test_a_slice_that_is_closed_is_not_granted_again() -> None:
    root = account()
    report(root, granted(ask(root)).slice, 3.0, is_last=True)
    assert ask(root) == []


# spec FL7
def test_a_refusal_is_repeated_for_the_same_request() -> None:
    root = account(10.0)
    assert isinstance(ask(root, worst=11.0)[0], SliceRefused)
    root.set_rule(100.0, NEVER, "", NOW, Step())
    assert isinstance(ask(root, worst=11.0)[0], SliceRefused)
    assert granted(ask(root, number=2, worst=11.0)).size == 11.0


# spec FL7
def test_idle_slices_are_asked_back_once_before_a_refusal() -> None:
    root = account(10.0)
    idle = granted(ask(root, worst=9.0))
    messages = ask(root, worst=5.0, node="b", session=OTHER)
    assert messages == [HandBack(1, OLD, "t", idle.slice)]
    assert ask(root, worst=5.0, node="b", session=OTHER) == []
    report(root, idle.slice, 2.0, is_last=True)
    step = Step()
    root.decide_pending(1, NOW, step)
    assert granted([send.message for send in step.sends]).size == 5.0
    assert root.free == 3.0


# spec FL7
@pytest.mark.parametrize("answers", [True, False])
def test_a_request_is_refused_when_the_holders_have_answered_or_not_in_time(
    answers: bool,
) -> None:
    root = account(10.0)
    busy = granted(ask(root, worst=9.0))
    ask(root, worst=5.0, node="b", session=OTHER)
    now, step = NOW, Step()
    root.decide_pending(1, now, step)
    assert not step.sends
    if answers:
        report(root, busy.slice, 0.0)
    else:
        now = Moment(NOW.clock_s + HAND_BACK_S, 0.0)
    root.decide_pending(1, now, step)
    assert [type(send.message) for send in step.sends] == [SliceRefused]


# spec FL7, MD6: the first is worth another attempt, the other is not.
def test_a_refusal_tells_whether_calls_hold_the_room() -> None:
    root = account(10.0)
    busy = granted(ask(root, worst=9.0))
    refusals = []
    for number, total in enumerate((4.0, 6.0), 1):
        ask(root, number, worst=5.0, node="b", session=OTHER)
        report(root, busy.slice, total)
        step = Step()
        root.decide_pending(1, NOW, step)
        refusals += [send.message for send in step.sends]
    assert [one.is_held for one in refusals if isinstance(one, SliceRefused)] == [
        True,
        False,
    ]


# spec FL7
def test_the_highest_total_counts() -> None:
    root = account(160.0)
    one = granted(ask(root)).slice
    report(root, one, 4.0)
    report(root, one, 2.0)
    assert root.slices()[0].spent == 4.0
    report(root, one, 3.0, is_last=True)
    assert root.row.spent == 4.0
    assert root.free == 156.0


# spec FL7
def test_a_report_of_another_ledger_is_ignored() -> None:
    root = account()
    one = granted(ask(root)).slice
    root.report(SliceReport(one, 1.0, is_last=True), "L9", Step())
    assert len(root.slices()) == 1


# spec FL7
def test_what_a_provider_charges_beyond_the_reservation_is_counted() -> None:
    root = account(160.0)
    report(root, granted(ask(root)).slice, 30.0)
    assert root.free == 130.0


# spec FL7
def test_a_lost_nodes_slice_counts_as_spent_whatever_time_it_is() -> None:
    root = account(160.0)
    ask(root)
    root.lose("a", Step())
    root.decide_pending(1, Moment(1e9, 0.0), Step())
    assert root.free == 150.0
    assert root.slices()[0].state == "lost"


# spec FL7
def test_a_lost_nodes_slice_is_written_off_for_good() -> None:
    root = account(160.0)
    one = granted(ask(root)).slice
    root.write_off("a", Step())
    report(root, one, 1.0, is_last=True)
    assert root.slices() == ()
    assert root.row.spent == 10.0


# spec FL7
def test_a_node_is_dropped_with_what_counts_no_more() -> None:
    root, step = account(160.0, DAY), Step()
    one = granted(ask(root)).slice
    root.lose("a", Step())
    assert root.holds("a")
    root.begin_window(Moment(0.0, 86_400.0), Step())
    assert not root.holds("a")
    root.drop("a", step)
    rows = [(change.table, change.key, change.row) for change in step.changes]
    assert rows == [("slices", one, None), ("requests", "t/a", None)]
    assert root.free == 160.0
    root.drop("b", step)
    assert len(step.changes) == 2


# spec FL7
def test_a_slice_whose_grant_was_lost_comes_back_with_the_same_ledger() -> None:
    root = account(160.0)
    ask(root)
    root.take_inventory("a", NEW, frozenset(), Step())
    assert root.free == 160.0


# spec FL7
def test_a_slice_is_written_off_with_another_ledger() -> None:
    root = account(160.0)
    ask(root)
    root.take_inventory("a", OTHER, frozenset(), Step())
    assert (root.slices(), root.free) == ((), 150.0)


# spec FL7
def test_an_inventory_says_nothing_of_its_own_session() -> None:
    root = account(160.0)
    ask(root)
    root.take_inventory("a", OLD, frozenset(), Step())
    assert len(root.slices()) == 1


# spec FL7
def test_a_slice_that_the_ledger_has_stays_open_after_a_join() -> None:
    root = account(160.0)
    one = granted(ask(root)).slice
    root.lose("a", Step())
    root.take_inventory("a", NEW, frozenset({one}), Step())
    assert root.slices()[0].state == "open"


# spec FL7
def test_the_spending_of_a_slice_is_its_own_windows() -> None:
    root = account(160.0, DAY)
    one = granted(ask(root)).slice
    root.begin_window(Moment(0.0, 86_400.0), Step())
    assert root.row.window == "1970-01-02"
    assert root.free == 160.0
    report(root, one, 5.0, is_last=True)
    assert (root.row.spent, root.slices()) == (0.0, ())


# spec FL7: `[fleet.quota]` says another window, and `up` runs again on the same store.
@pytest.mark.parametrize(
    ("before", "kind", "window"), [(DAY, NEVER, NEVER), (NEVER, DAY, "1970-01-01")]
)
def test_an_account_takes_another_kind_of_window_with_what_is_spent(
    before: str, kind: str, window: str
) -> None:
    root, step = account(160.0, before), Step()
    report(root, granted(ask(root)).slice, 5.0, is_last=True)
    out = granted(ask(root, number=2)).size
    root.set_rule(160.0, kind, "one", NOW, step)
    assert (root.row.kind, root.row.window) == (kind, window)
    # A slice without a window stays one: its holder knows no other.
    tables = {"accounts", "slices"} if kind == NEVER else {"accounts"}
    assert {change.table for change in step.changes} == tables
    stored = [change.row for change in step.changes if change.table == "slices"]
    assert stored == (list(root.slices()) if kind == NEVER else [])
    assert {one.window for one in root.slices()} == {NEVER}
    assert root.free == 160.0 - 5.0 - out
    root.begin_window(Moment(0.0, 86_400.0), Step())
    # The holder of a slice without a window takes calls in it on the next day, too.
    assert root.free == 160.0 - out - (5.0 if kind == NEVER else 0.0)


# spec FL7
def test_a_wall_clock_that_is_set_back_begins_no_window_again() -> None:
    root = account(160.0, DAY)
    root.begin_window(Moment(0.0, 86_400.0), Step())
    report(root, granted(ask(root)).slice, 5.0, is_last=True)
    root.begin_window(Moment(1.0, 86_399.0), Step())
    assert root.row.spent == 5.0
