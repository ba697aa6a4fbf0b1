"""Calls to each version of Landlock, of a played kernel (3.1)."""

import pytest

from supervisor.spawn.launchpad.layers import landlock

RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16}
"""How many rights over files each has; landlock(7)."""

RULESET = 99


@pytest.mark.parametrize("abi", RIGHTS)
def test_what_is_restricted_is_what_that_version_knows(
    abi: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def kernel(_number: int, *words: int) -> int:
        if words[-1] == 1:  # LANDLOCK_CREATE_RULESET_VERSION
            return abi
        said = landlock.RulesetAttributes.from_address(words[0])
        rights = (said.handled_access_fs, said.handled_access_net, said.scoped)
        asked.append((words[1], *rights))
        return RULESET

    monkeypatch.setattr(landlock, "system_call", kernel)
    assert landlock.create_ruleset(no_tcp=True) == RULESET
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    both = (1 << 2) - 1
    tcp, scopes = both if abi >= 4 else 0, both if abi >= 6 else 0
    assert asked == [(size, (1 << RIGHTS[abi]) - 1, tcp, scopes)]
