"""Random turns of operator, child and commits, as root and in a user namespace."""

import os

import pytest

from tests.helpers.rounds import LONG, ROUNDS
from tests.supervisor.workspace.interleavings import play
from tests.supervisor.workspace.scene import run_as_a_user

PARTS = 2
GAMES = ROUNDS if LONG else ROUNDS // 10

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150 + GAMES // 4)]


def seeds_of(part: int) -> list[int]:
    """Return the seeds of the games of one part."""
    return [*range(part, GAMES, PARTS)]


# spec WS3c, WS10, WS11, WS12a
@pytest.mark.parametrize("part", range(PARTS))
def test_no_line_of_the_operator_or_of_the_child_is_lost(part: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("an overlay mount with trusted attributes needs root")
    play(seeds_of(part), has_user_marks=False)


# spec WS3a, WS3c, WS10, WS11
@pytest.mark.parametrize("part", range(PARTS))
def test_no_line_is_lost_where_the_mount_is_a_user_s(part: int) -> None:
    seeds = map(str, seeds_of(part))
    run_as_a_user("tests.supervisor.workspace.interleavings", *seeds)
