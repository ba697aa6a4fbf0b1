"""The merged view answers system calls as a plain directory does, for root and users."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.chaos.rounds import ROUNDS
from tests.supervisor.workspace.conformance import play

pytestmark = pytest.mark.chaos


# spec WS1, WS2, WS3b, WS10
def test_a_workspace_answers_as_a_plain_directory() -> None:
    if os.geteuid() != 0:
        pytest.skip("an overlay mount with trusted attributes needs root")
    play(0, ROUNDS, has_user_marks=False)


# spec WS3a, WS3b
def test_a_user_s_workspace_answers_as_a_plain_directory() -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare(1) is not installed")
    spaces = [unshare, "--user", "--map-root-user", "--mount"]
    if subprocess.run([*spaces, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    program = [sys.executable, "-m", "tests.supervisor.workspace.conformance"]
    done = subprocess.run(
        [*spaces, *program, "0", str(ROUNDS), "user"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
