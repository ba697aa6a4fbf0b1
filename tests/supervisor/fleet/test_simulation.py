"""The whole fleet under faults.

The rules hold, and without one of them they do not.

The long form runs 10,000 seeds, and 2,000 for each rule that is left out.
"""

from collections.abc import Callable

import pytest

from tests.helpers.rounds import LONG, LONG_ALONE
from tests.supervisor.fleet.broken_rules import BROKEN, BROKEN_LIVES
from tests.supervisor.fleet.simulation import violation

SEEDS = 10_000 if LONG else 20
BROKEN_SEEDS = 2_000

FEW = 150
"""Seeds of which one at least finds what was left out."""


# spec FL4, FL5, FL6 and FL7; I3
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_the_rules_hold_under_faults() -> None:
    found = {
        seed: text for seed in range(SEEDS) if (text := violation(seed)) is not None
    }
    assert not found


# spec FL4, FL6 and FL7
@pytest.mark.slow
@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_LIVES])
def test_a_rule_that_is_left_out_is_found(name: str) -> None:
    rules = {**BROKEN, **BROKEN_LIVES}[name]
    assert any(violation(seed, rules) is not None for seed in range(FEW))


# spec FL7
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=LONG_ALONE) for name in (*BROKEN, *BROKEN_LIVES)],
)
def test_a_rule_that_is_left_out_is_found_often(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    rules = {**BROKEN, **BROKEN_LIVES}[name]
    found = sum(violation(seed, rules) is not None for seed in range(BROKEN_SEEDS))
    record_property(name, found)
    assert found > BROKEN_SEEDS / 100
