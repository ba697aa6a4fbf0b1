"""What the attacks get: a real host in each kind of walls, and the leak check.

What holds without walls is what the door alone stops; with them, the same has to hold.
"""

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.sandbox.plan import PROFILES, Profile, named
from tests.helpers.figures import tell
from tests.helpers.hosts import Stage, opened

__all__ = ["readable", "stage", "stage_or_bwrap", "tell", "walls", "why_no_bubblewrap"]

NAMESPACES = named(
    "namespaces", ["mountns", "pidns", "netns", "ipcns", "utsns", "userns"]
)
"""What bubblewrap gives, and nothing else."""

WALLS = {"none": PROFILES["none"], "auto": PROFILES["auto"], "namespaces": NAMESPACES}

BWRAP = (
    "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
    "--",
)  # fmt: skip
"""COMMAND in bubblewrap: what a user has who trusts that more than this program."""


@pytest.fixture(scope="session")
def why_no_bubblewrap() -> str:
    """Why it cannot be tried; empty if it can. Asked outside of any host, which reaps."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    tried = subprocess.run([*BWRAP, "true"], capture_output=True, check=False)
    said = tried.stderr.decode().strip()
    return f"bwrap cannot make namespaces here: {said}" if tried.returncode else ""


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


@pytest.fixture(params=[*WALLS, "bubblewrap"])
async def stage_or_bwrap(
    request: pytest.FixtureRequest, readable: Path, why_no_bubblewrap: str
) -> AsyncIterator[Stage]:
    """As `stage`; or without walls, and each child's program in bubblewrap."""
    async with opened(readable) as open_stage:
        if request.param != "bubblewrap":
            open_stage.sandbox = WALLS[request.param]
        elif why_no_bubblewrap:
            pytest.skip(why_no_bubblewrap)
        else:
            open_stage.wrapper = BWRAP
        yield open_stage
