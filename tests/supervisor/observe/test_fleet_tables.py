"""The tables of a fleet."""

import pytest

from supervisor.observe.fleet_tables import render_quota


@pytest.mark.parametrize(
    ("amount", "shown"), [(1_000_000.0, "1000000"), (827107.8369140625, "827107.84")]
)
def test_amounts_are_whole_or_in_cents(amount: float, shown: str) -> None:
    row = {"name": "tokens", "limit": amount, "spent": 0.0, "free": amount}
    _, line = render_quota([{**row, "window": "never", "slices": []}]).splitlines()
    assert line.split() == ["tokens", shown, "0", shown, "never", "0"]
