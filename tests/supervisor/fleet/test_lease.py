"""Leases: the node's deadline lies before the directory's, whatever the clocks do."""

import pytest

from supervisor.fleet.lease import (
    BEAT_S,
    LEASE_S,
    MARGIN_S,
    RETRY_S,
    SILENT_S,
    LeaseTable,
    NodeLease,
    Standing,
)


# spec FL5
def test_a_deadline_counts_from_before_the_question() -> None:
    lease = NodeLease()
    number = lease.begin(100.0)
    assert lease.renew(number) == 100.0 + LEASE_S - MARGIN_S


# spec FL5
def test_a_deadline_counts_for_nothing_until_it_is_armed() -> None:
    lease = NodeLease()
    deadline_s = lease.renew(lease.begin(100.0))
    assert deadline_s is not None
    assert not lease.is_held(100.0)
    lease.confirm(deadline_s)
    assert lease.is_held(deadline_s - 0.001)
    assert not lease.is_held(deadline_s)


# spec FL5
def test_a_late_answer_is_worth_what_its_own_question_was() -> None:
    lease = NodeLease()
    early, late = lease.begin(100.0), lease.begin(100.5)
    assert lease.renew(late) == 100.5 + LEASE_S - MARGIN_S
    lease.confirm(100.5 + LEASE_S - MARGIN_S)
    assert lease.renew(early) is None


# spec FL5
def test_an_answer_counts_once() -> None:
    lease = NodeLease()
    number = lease.begin(100.0)
    assert lease.renew(number) is not None
    assert lease.renew(number) is None


# spec FL5
def test_an_answer_to_nothing_that_was_asked_counts_for_nothing() -> None:
    assert NodeLease().renew(7) is None


# spec FL5
def test_a_beat_that_failed_is_tried_again_soon() -> None:
    lease = NodeLease()
    lease.begin(100.0)
    lease.fail(100.01)
    assert lease.next_s == pytest.approx(100.01 + RETRY_S)


# spec FL5
def test_beats_without_an_answer_are_tried_again_every_tenth_of_a_second() -> None:
    lease = NodeLease()
    lease.begin(100.0)
    now_s = lease.next_s
    lease.begin(now_s)
    assert lease.next_s == pytest.approx(now_s + RETRY_S)


# spec FL5
def test_after_an_answer_the_next_beat_is_a_second_after_the_question() -> None:
    lease = NodeLease()
    number = lease.begin(100.0)
    lease.renew(number)
    assert lease.next_s == 100.0 + BEAT_S


# spec FL5
def test_the_directory_counts_from_its_own_answer() -> None:
    leases = LeaseTable()
    leases.grant("a", 50.0)
    assert leases.standing("a", 50.0 + SILENT_S - 0.01) is Standing.HELD
    assert leases.standing("a", 50.0 + SILENT_S) is Standing.SILENT
    assert leases.standing("a", 50.0 + LEASE_S - 0.01) is Standing.SILENT
    assert leases.standing("a", 50.0 + LEASE_S) is Standing.OUT


# spec FL5
def test_a_node_without_a_lease_is_out() -> None:
    leases = LeaseTable()
    leases.grant("a", 50.0)
    leases.drop("a")
    assert leases.standing("a", 50.0) is Standing.OUT
