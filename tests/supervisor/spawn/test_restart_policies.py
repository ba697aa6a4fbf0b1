"""Restart policies: which end of a child brings it back, here and elsewhere."""

import pytest

from supervisor.spawn.restart_policies import (
    RESTARTS,
    is_placed_again,
    is_restarted,
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
    assert is_restarted(restart, 0) is after_success
    assert is_restarted(restart, 1) is after_failure
    assert is_placed_again(restart) is elsewhere


def test_every_policy_is_tested_above() -> None:
    assert RESTARTS == ("no", "on-failure", "always")


# spec FL4: a program of a client that is not this version's has any words.
def test_a_child_of_an_unknown_policy_is_not_placed_again() -> None:
    assert not is_placed_again("sometimes")
