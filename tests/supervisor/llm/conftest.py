"""Fixtures of the model's tests: a host without processes that has a model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helpers.stage import Stage, open_model_stage


@pytest.fixture
async def stage(tmp_path: Path, no_leaks: None) -> AsyncIterator[Stage]:
    """Return a host with a model and without a limit."""
    del no_leaks
    async with open_model_stage(tmp_path) as opened:
        yield opened
