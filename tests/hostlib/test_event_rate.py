"""Rates of events: a burst, then so many a second, by a clock of the caller's."""

from hostlib.event_rate import EventRate


def test_a_rate_earns_parts_of_an_event() -> None:
    rate = EventRate(burst=2, per_s=1)
    taken = [rate.take(at) for at in (0, 0, 0, 0.5, 0.9, 1.25, 1.25, 2.25)]
    assert taken == [True, True, False, False, False, True, False, True]
    assert rate.left_out == 4


def test_a_rate_is_full_at_first_and_never_more_than_full() -> None:
    rate = EventRate(burst=3, per_s=10)
    assert not rate.is_used_up(100.0)
    assert [rate.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert rate.is_used_up(100.0)
    assert not rate.is_used_up(100.125)
    assert [rate.take(999.0) for _ in range(4)] == [True, True, True, False]
