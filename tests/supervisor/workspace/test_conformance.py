"""The merged view answers calls as a plain directory does, for root and users."""

import os

import pytest

from tests.helpers.rounds import ROUNDS
from tests.supervisor.workspace.conformance import play
from tests.supervisor.workspace.scene import run_as_a_user

pytestmark = pytest.mark.chaos

STEPS = max(1000, ROUNDS)
"""With fewer some call never succeeds, and is not compared."""


# spec WS1, WS2, WS3b, WS10
def test_a_workspace_answers_as_a_plain_directory() -> None:
    if os.geteuid() != 0:
        pytest.skip("an overlay mount with trusted attributes needs root")
    play(0, STEPS, has_user_marks=False)


# spec WS3a, WS3b
def test_a_user_s_workspace_answers_as_a_plain_directory() -> None:
    run_as_a_user("tests.supervisor.workspace.conformance", "0", str(STEPS), "user")
