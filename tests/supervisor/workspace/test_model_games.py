"""Commits while a child works, as root and in a user namespace."""

import os

import pytest

from tests.helpers.rounds import LONG, ROUNDS
from tests.supervisor.workspace.model_games import play
from tests.supervisor.workspace.scene import run_as_a_user

pytestmark = pytest.mark.chaos

GAMES = ROUNDS // 5 if LONG else ROUNDS // 50


# spec WS11, WS12, WS16
def test_a_workspace_shows_what_its_children_did_whatever_became_of_commits() -> None:
    if os.geteuid() != 0:
        pytest.skip("an overlay mount with trusted attributes needs root")
    play(range(GAMES), has_user_marks=False)


# spec WS11, WS12, WS16
def test_a_users_workspace_shows_what_its_children_did() -> None:
    run_as_a_user("tests.supervisor.workspace.model_games", *map(str, range(GAMES)))
