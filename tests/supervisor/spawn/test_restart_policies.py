"""Restart policies: which end of a child brings it back, here and elsewhere."""

import pytest

from supervisor.spawn.restart_policies import (
    RESTARTS,
    comes_back,
    comes_back_elsewhere,
)


@pytest.mark.parametrize(
    ("restart", "after_success", "after_failure", "elsewhere"),
    [
        ("no", False, False, False),
        ("on-failure", False, True, True),
        ("always", True, True, True),
    ],
)
def test_a_policy_says_which_ends_bring_a_child_back(
    restart: str, after_success: bool, after_failure: bool, elsewhere: bool
) -> None:
    assert comes_back(restart, 0) is after_success
    assert comes_back(restart, 1) is after_failure
    assert comes_back_elsewhere(restart) is elsewhere


def test_every_policy_is_tested_above() -> None:
    assert RESTARTS == ("no", "on-failure", "always")


# spec FL4: a program of a client that is not this version's has any words.
def test_a_child_of_an_unknown_policy_is_not_placed_again() -> None:
    assert not comes_back_elsewhere("sometimes")
