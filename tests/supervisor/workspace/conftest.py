"""A base, a workspace on it, and the kernel's own mount of it as the judge."""

import os
from pathlib import Path

import pytest

from tests.supervisor.workspace.scene import Scene, is_in_user_namespace


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Return a base with nothing in it and a workspace on it; needs root for the mount.

    Root of a user namespace makes the mount as a host does that is not root.
    """
    if os.geteuid() != 0:
        pytest.skip("an overlay mount needs root, be it of a user namespace")
    return Scene(tmp_path, has_user_marks=is_in_user_namespace())
