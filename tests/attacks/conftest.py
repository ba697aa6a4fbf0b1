"""What the attacks get: a real host in each kind of walls, and the leak check.

What holds without walls is what the door alone stops; with them, the same has to hold.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.sandbox import PROFILES, Profile, named
from tests.helpers.figures import tell
from tests.helpers.hosts import Stage, opened

__all__ = ["readable", "stage", "tell", "walls"]

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
def readable(tmp_path: Path) -> Path:
    """A directory for tests that others than its owner may enter."""
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
async def stage(readable: Path, walls: Profile) -> AsyncIterator[Stage]:
    """A host with the settings that `run` has, and children behind these walls."""
    async with opened(readable) as open_stage:
        open_stage.sandbox = walls
        yield open_stage
