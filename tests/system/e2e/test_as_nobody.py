"""Differences of a host that is not root: its tests, by a user without rights.

Tests marked `nobody` run once more as that user, all of them in a few processes: that
user's installation is made, and the tests are collected, once for each.
"""

import tempfile
from pathlib import Path

import pytest

from tests.architecture.rules import marked_for_nobody
from tests.architecture.tree import ROOT
from tests.helpers.rounds import LONG
from tests.system.attacks.test_unprivileged import passed_by_nobody

PARTS = 2
"""Processes, so that more than one worker of the tests has some."""

OF_PROGRAMS = "tests/system/e2e/test_workspace_programs.py"
"""Its tests are skipped where a program that they run is not installed."""


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(590)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_host_that_is_not_root_gives_the_same(part: int) -> None:
    marked = dict(list(marked_for_nobody().items())[part::PARTS])
    if not LONG:  # they take the longest, and are the same programs
        marked.pop(OF_PROGRAMS, None)
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        passed = passed_by_nobody(
            Path(name), "-m", "nobody", *(f"{ROOT}/{file}" for file in marked)
        )
    wanted = {(file, test) for file, tests in marked.items() for test in tests}
    missed = wanted - {(file, test) for file, test, _ in passed}
    assert {pair for pair in missed if pair[0] != OF_PROGRAMS} == set()
