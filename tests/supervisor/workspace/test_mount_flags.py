"""A workspace of a base on a mount with flags of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.workspace.scene import Scene

EXECUTE = """
import os, subprocess, sys
from pathlib import Path
from tests.supervisor.workspace.scene import Scene, write

flags, top, has_user_marks = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
scene = Scene(top, has_user_marks=has_user_marks)
command = ["mount", "-t", "tmpfs", "-o", flags, "tmpfs", scene.base]
subprocess.run(command, check=True)
write(scene.base / "old", "#!/bin/sh\\n", 0o755)
scene.make()
with scene.run() as view:
    write(view / "new", "#!/bin/sh\\n", 0o755)
    for name in ("old", "new"):
        try:
            print(name, subprocess.run([view / name]).returncode)
        except PermissionError:
            print(name, "refused")
"""


# spec WS1
@pytest.mark.slow
@pytest.mark.parametrize("has_user_marks", [False, True])
@pytest.mark.parametrize(
    ("flags", "said"), [("noexec", "refused"), ("nosuid,nodev", "0")]
)
def test_a_view_executes_nothing_where_its_base_does_not(
    scene: Scene, flags: str, said: str, *, has_user_marks: bool
) -> None:
    top = Path(__file__).parents[3]
    script = [sys.executable, "-c", EXECUTE, flags, str(scene.top), str(has_user_marks)]
    done = subprocess.run(
        ["unshare", "--mount", *script],
        cwd=top,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[:2] == [f"old {said}", f"new {said}"]
