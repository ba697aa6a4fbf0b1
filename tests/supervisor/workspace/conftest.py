"""A base, a workspace on it, and the kernel's own mount of it as the judge."""

import os
from pathlib import Path

import pytest

from tests.supervisor.workspace.scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Return a base with nothing in it and a workspace on it; needs root for the mount."""
    if os.geteuid() != 0:
        pytest.skip("an overlay mount with trusted attributes needs root")
    return Scene(tmp_path)
