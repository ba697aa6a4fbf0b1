"""A base, a workspace on it, and the kernel's own mount of it as the judge."""

from pathlib import Path

import pytest

from tests.supervisor.workspace.scene import Scene, scene_in


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Return a base with nothing in it and a workspace on it."""
    return scene_in(tmp_path)
