"""Random operations on a directory, for tests that compare two trees."""

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("a", "b", "c", "d e", 'f"q', "n\nl", os.fsdecode(b"\xff\xfe"))
CONTENTS = ("", "x\n", "hello\nworld\n", "q" * 100, "no newline\nat the end", "a\0b")
OPERATIONS = (
    "write", "write", "append", "mkdir", "remove", "remove_tree", "symlink", "chmod",
    "link", "truncate", "rename", "rename", "rename", "rename_directory",
    "rename_directory", "replace_directory",
)  # fmt: skip


def change(rng: random.Random, top: Path, count: int) -> None:
    """Do some random operations beneath a directory; those that fail do nothing."""
    for _ in range(count):
        with contextlib.suppress(OSError, shutil.Error):
            _one(rng, top)


def _one(rng: random.Random, top: Path) -> None:
    found = [Path(d) / n for d, ns, fs in os.walk(f"{top}/.") for n in (*ns, *fs)]
    found.sort()
    directories = [p for p in found if p.is_dir() and not p.is_symlink()]
    place = rng.choice([top, *directories]) / rng.choice(NAMES)
    target = rng.choice(found or [place])
    directory = rng.choice(directories or [place])
    content, mode = rng.choice(CONTENTS), rng.choice([0o755, 0o644, 0o700, 0o777])
    ways: dict[str, Callable[[], object]] = {
        "write": lambda: place.write_text(content),
        "append": lambda: _append(target),
        "mkdir": place.mkdir,
        "remove": target.unlink,
        "remove_tree": lambda: shutil.rmtree(target),
        "symlink": lambda: place.symlink_to(rng.choice(["a", "b", "c/d"])),
        "chmod": lambda: None if target.is_symlink() else target.chmod(mode),
        "link": lambda: os.link(target, place, follow_symlinks=False),
        "truncate": lambda: os.truncate(target, 1),
        "rename": lambda: target.rename(place),
        "rename_directory": lambda: directory.rename(place),
        "replace_directory": lambda: _replace(directory),
    }
    done: Callable[[], object] = ways[rng.choice(OPERATIONS)]
    done()


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


def _replace(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
