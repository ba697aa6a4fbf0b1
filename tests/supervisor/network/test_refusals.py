"""Refusals are told once a minute, and counted in few rows."""

from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.refusals import MAX_ROWS, OTHERS, Refusals

NO_RULE = NetworkRefusal(Reason.NO_RULE, "a.test:443")


# spec NET11: once per name, port and minute.
def test_a_refusal_is_told_once_a_minute() -> None:
    refusals = Refusals()

    def is_told(now_s: float, name: str = "a.test", port: int | None = 443) -> bool:
        return refusals.add(name, port, NO_RULE, now_s=now_s, time=now_s) is not None

    assert is_told(100.0)
    assert not is_told(100.0)
    assert not is_told(159.9)
    assert is_told(100.0, port=None)
    assert is_told(100.0, port=80)
    assert is_told(100.0, name="b.test")
    assert is_told(160.0)
    assert not is_told(161.0)
    assert len(refusals) == 8


def test_a_row_has_the_last_refusal_and_their_number() -> None:
    refusals = Refusals()
    refusals.add("a.test", 443, NO_RULE, now_s=1, time=1000.0)
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!a.test")
    refusals.add("a.test", 443, by_rule, now_s=2, time=1001.0)
    (row,) = refusals.rows()
    assert (row.name, row.port, row.count, row.time) == ("a.test", 443, 2, 1001.0)
    assert (row.reason, row.rule) == (Reason.REFUSED_BY_RULE, "!a.test")


# spec NET11: 256 rows, then one for all others.
# attack 60
def test_a_child_that_asks_for_ten_thousand_names_has_257_rows() -> None:
    refusals = Refusals()
    told = 0
    for number in range(10_000):
        refused = NetworkRefusal(Reason.NO_RULE, f"n{number}.test:443")
        row = refusals.add(f"n{number}.test", None, refused, now_s=0, time=number)
        told += row is not None
    rows = refusals.rows()
    assert told == len(rows) == MAX_ROWS + 1 == 257
    last = rows[-1]
    assert (last.name, last.port, last.rule) == (OTHERS, None, None)
    assert last.count == 10_000 - MAX_ROWS
    assert last.time == 9_999
    assert len(refusals) == 10_000
    # A name that has its row keeps it.
    refusals.add("n3.test", None, NO_RULE, now_s=0, time=0)
    assert refusals.rows()[3].count == 2


# attack 23: a name is told on one line, and not at any length.
def test_a_name_is_fit_for_one_line() -> None:
    refusals = Refusals()
    row = refusals.add("a\n" + "b" * 1000, None, NO_RULE, now_s=0, time=0)
    assert row is not None
    assert row.name.isprintable()
    assert len(row.name) <= 253
