"""Syntax trees of the files: not collected from, and forgotten afterwards."""

import gc
from pathlib import Path

import pytest

from tests.architecture.tree import parsed


# They are two million objects, which a full collection looks through: most of the time of
# these tests, and of all those after them that have the collector run.
def pytest_runtest_setup() -> None:
    """Turn the garbage collector off."""
    gc.disable()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Forget the trees and turn it on again if the next test is of another directory."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        parsed.cache_clear()
        gc.enable()
