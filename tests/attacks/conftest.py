"""What the attacks get: a real host in each kind of walls, and the leak check.

What holds without walls is what the door alone stops; with them, the same has to hold.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.sandbox import PROFILES, Profile, named
from tests.helpers.figures import tell
from tests.helpers.hosts import Stage, opened

__all__ = ["stage", "tell", "walls"]

NAMESPACES = named(
    "namespaces", ["mountns", "pidns", "netns", "ipcns", "utsns", "userns"]
)
"""What bubblewrap gives, and nothing else."""

WALLS = {"none": PROFILES["none"], "auto": PROFILES["auto"], "namespaces": NAMESPACES}


@pytest.fixture(params=list(WALLS))
def walls(request: pytest.FixtureRequest) -> Profile:
    """What the children of a test run in."""
    return WALLS[request.param]


@pytest.fixture
async def stage(tmp_path: Path, walls: Profile) -> AsyncIterator[Stage]:
    """A host with the settings that `run` has, and children behind these walls."""
    os.chmod(tmp_path, 0o755)
    async with opened(tmp_path) as open_stage:
        open_stage.sandbox = walls
        yield open_stage
