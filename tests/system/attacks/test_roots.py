"""Roots that are moved away, deleted or replaced while a child runs (attack 40)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.attack]


NOT_AVAILABLE = b"ERROR VFS not available"


def renamed(root: Path) -> None:
    root.rename(root.with_name("moved"))


def deleted(root: Path) -> None:
    shutil.rmtree(root)


def replaced(root: Path) -> None:
    renamed(root)
    root.mkdir()
    (root / "a").write_text("another's")


def replaced_by_a_link(root: Path) -> None:
    renamed(root)
    root.symlink_to("/etc")


def replaced_by_a_file(root: Path) -> None:
    renamed(root)
    root.write_text("no directory")


# attack 40, spec O4
@pytest.mark.parametrize(
    "change", [renamed, deleted, replaced, replaced_by_a_link, replaced_by_a_file]
)
@pytest.mark.parametrize("publish", ["direct", "on-close"])
async def test_a_root_that_is_not_what_it_was_is_not_available(
    stage: Stage, change: Callable[[Path], None], publish: str
) -> None:
    (stage.root / "a").write_text("mine")
    child = await stage.puppet(publish=publish)
    reading = await child.open(b"a")
    change(stage.root)
    for request in (
        b"OPEN a r false\n",
        b"OPEN passwd r false\n",
        b"OPEN new w false\n",
        b"STAT false a\n",
        b"LIST false .\n",
        b"MKDIR false d\n",
        b"REMOVE false a\n",
        b"RENAME false 1 1\nab",
    ):
        assert await child.ask(request) == NOT_AVAILABLE
    # Open files stay open, as for any process.
    assert await child.read(reading, 99) == b"mine"
    assert await child.ask(b"CLOSE %d\n" % reading) == b"OK"
    moved = stage.root.with_name("moved")
    if moved.exists():
        assert sorted(os.listdir(moved)) == ["a"]


# attack 40: nothing of a file that was being staged appears in the wrong place.
async def test_a_staged_file_appears_nowhere_else(stage: Stage) -> None:
    (stage.root / "a").write_text("old")
    child = await stage.puppet(publish="on-close")
    fileno = await child.open(b"a", b"w")
    await child.write(fileno, b"new")
    replaced(stage.root)
    await child.ask(b"CLOSE %d\n" % fileno)
    assert (stage.root / "a").read_text() == "another's"
    assert (stage.root.with_name("moved") / "a").read_text() in {"old", "new"}


# attack 40: a root that comes back serves again.
async def test_a_root_that_comes_back_is_available(stage: Stage) -> None:
    child = await stage.puppet()
    renamed(stage.root)
    assert await child.ask(b"OPEN a w false\n") == NOT_AVAILABLE
    stage.root.with_name("moved").rename(stage.root)
    await child.open(b"a", b"w")


# attack 40: the top-level view has no root to lose.
async def test_the_top_level_view_needs_no_root(stage: Stage) -> None:
    child = await stage.puppet(top_level=True)
    deleted(stage.root)
    await child.open(b"elsewhere", b"w", b"true")
    assert await child.ask(b"OPEN a w false\n") == NOT_AVAILABLE
