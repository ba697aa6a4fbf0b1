"""Patches of large or odd files: their memory, and their notes."""

import os
import subprocess
import sys

import pytest

from supervisor.workspace.terminal_patch import show_patch
from tests.architecture.tree import ROOT
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.scene import Scene, tree_of, write

pytestmark = pytest.mark.slow

MIB = 1 << 20
TIB = 1 << 40

SIZES = {
    "lines": (32 if LONG else 8) * MIB,
    "random": (32 if LONG else 4) * MIB,
    "sparse": (1024 if LONG else 32) * MIB,
}

PEAKS = """
import re, sys
from pathlib import Path
from supervisor.workspace.selection import Patterns
from supervisor.workspace.workspace import Workspace

state, plain, binary, exported = sys.argv[1:]

def write(target, **how):
    with Workspace(state, "w") as workspace, open(target, "wb") as file:
        file.writelines(workspace.patch(**how))
    tell()

def tell():
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

write(plain, patterns=Patterns(["small"]), binary=True)
write(plain)
write(binary, binary=True)
with Workspace(state, "w") as workspace:
    workspace.export(exported)
tell()
"""


# spec WS8, WS14, attack 56
@pytest.mark.chaos
def test_a_patch_takes_little_memory(scene: Scene) -> None:
    (scene.base / "random").write_bytes(b"\0")
    scene.make()
    with scene.run() as top:
        write(top / "small")
        (top / "lines").write_bytes(b"\n" * SIZES["lines"])
        with (top / "random").open("wb") as file:
            for _ in range(SIZES["random"] // MIB):
                file.write(b"\0" + os.urandom(MIB - 1))
        with (top / "sparse").open("wb") as file:
            file.write(b"\0")
            file.truncate(SIZES["sparse"])
        seen = None if LONG else tree_of(top)
    targets = [scene.top / name for name in ("plain", "binary", "made.patch")]
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(scene.state), *map(str, targets)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    usual, *peaks = (int(line) for line in done.stdout.split())
    assert len(peaks) == 3
    assert max(peaks) < usual + 16 * 1024, peaks
    assert targets[1].read_bytes() == targets[2].read_bytes()
    if seen is not None:
        subprocess.run(["git", "apply", targets[1]], cwd=scene.base, check=True)
        assert tree_of(scene.base) == seen


# spec WS8, attack 56
def test_texts_that_git_would_need_much_memory_for_are_named(scene: Scene) -> None:
    (scene.base / "lines").write_bytes(b"\n" * MIB)
    (scene.base / "few").write_bytes((b"x" * 99 + b"\n") * 15_000)
    scene.make()
    with scene.run() as top:
        for name in ("lines", "few"):
            with (top / name).open("ab") as file:
                file.write(b"end\n")
        seen = tree_of(top)
    with scene.open() as workspace:
        patch = b"".join(workspace.patch())
        binary = b"".join(workspace.patch(binary=True))
    assert b"Binary files a/lines and b/lines differ\n" in patch
    assert b"@@ -14998,3 +14998,4 @@" in patch
    subprocess.run(["git", "apply", "-"], cwd=scene.base, input=binary, check=True)
    assert tree_of(scene.base) == seen


def test_a_line_that_goes_on_in_the_next_piece_has_one_colour() -> None:
    pieces = iter([b"+one\n+tw", b"-o\n-\xe2\x82", b"\xac three"])
    green, red, end = b"\x1b[32m", b"\x1b[31m", b"\x1b[0m"
    assert list(show_patch(pieces, coloured=True)) == [
        green + b"+one" + end + b"\n" + green + b"+tw" + end,
        b"-o\n" + red + b"-" + end,
        b"\xe2\x82\xac three",
        b"",
    ]


# spec WS8, attack 56
def test_a_sparse_tebibyte_is_not_read_to_be_named(scene: Scene) -> None:
    for name in ("mode", "grown"):
        with (scene.base / name).open("wb") as file:
            file.write(b"head")
            file.truncate(TIB)
    scene.make()
    with scene.run() as top:
        (top / "mode").chmod(0o755)
        with (top / "grown").open("ab") as file:
            file.write(b"more")
        with (top / "new").open("wb") as file:
            file.truncate(TIB)
    with scene.open() as workspace:
        patch = b"".join(workspace.patch())
    assert patch.decode() == (
        "diff --git a/grown b/grown\n"
        "Binary files a/grown and b/grown differ\n"
        "diff --git a/mode b/mode\n"
        "old mode 100644\nnew mode 100755\n"
        "diff --git a/new b/new\n"
        "new file mode 100644\n"
        "Binary files /dev/null and b/new differ\n"
    )
