"""Restart policies: which end of a child brings it back, here and elsewhere."""

import pytest

from supervisor.config.child import ChildSection, odd_restarts
from supervisor.spawn import restart_policies
from supervisor.spawn.restart_policies import (
    RESTARTS,
    is_placed_again,
    is_restarted,
    may_come_back,
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
    assert may_come_back(restart) is (after_success or after_failure)


def test_every_policy_is_tested_above() -> None:
    assert RESTARTS == ("no", "on-failure", "always")


# spec FL4: a program of a client that is not this version's has any words.
def test_a_child_of_an_unknown_policy_is_not_placed_again() -> None:
    assert not is_placed_again("sometimes")
    assert not may_come_back("sometimes")


def test_a_new_policy_is_one_row_and_its_endless_restarts_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {**restart_policies.RULES, "on-signal": lambda status: status > 128}
    monkeypatch.setattr(restart_policies, "RULES", rules)
    section = ChildSection(command=["false"], restart="on-signal", backoff="1h")
    assert may_come_back("on-signal")
    assert [key for key, _ in odd_restarts({"a": section})] == ["child.a.within"]
