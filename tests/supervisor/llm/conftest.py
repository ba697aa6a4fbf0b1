"""Fixtures of the model's tests: a host without processes that has a model."""

from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stage import Stage, open_model_stage


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Return the official library of Messages.

    It is a quarter of what each worker would import to collect all tests.
    """
    return import_module("anthropic")


@pytest.fixture
async def stage(tmp_path: Path, no_leaks: None) -> AsyncIterator[Stage]:
    """Return a host with a model and without a limit."""
    del no_leaks
    async with open_model_stage(tmp_path) as opened:
        yield opened
