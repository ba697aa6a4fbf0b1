"""A directory to stay in and one to reach for, and both ways to open beneath it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.linux.resolve import DENIED, open_beneath_kernel, open_beneath_walk

WAYS = (open_beneath_kernel, open_beneath_walk)
CREATE = os.O_WRONLY | os.O_CREAT
DIRECTORY = os.O_PATH | os.O_DIRECTORY


@pytest.fixture(params=WAYS, ids=["kernel", "walk"])
def way(request: pytest.FixtureRequest) -> object:
    """Return one of the two."""
    return request.param


class Tree:
    """A directory to stay in, and one beside it to reach for.

    Attributes:
        root: the directory.
        outside: the other one.
        fd: the root, held.
    """

    def __init__(self, where: Path) -> None:
        self.root = where / "root"
        self.outside = where / "outside"
        for directory in (self.root / "dir" / "deep", self.outside):
            directory.mkdir(parents=True)
        for name in ("root/file", "root/dir/deep/leaf", "outside/secret", "root-evil"):
            (where / name).write_text(name)
        self.fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY)

    def link(self, name: str, target: str | Path) -> None:
        """Make a symbolic link in the root."""
        (self.root / name).symlink_to(target)

    def answer(self, way: object, name: bytes, flags: int = os.O_RDONLY) -> str:
        """Return what came of an open: a path relative to the root, or an error."""
        return answer(way, self.fd, name, flags)


def answer(way: object, root: int, name: bytes, flags: int) -> str:
    """Return what came of an open: a path relative to the root, or an error."""
    assert callable(way)
    try:
        fd = way(root, name, flags)
    except OSError as why:
        return "denied" if why.errno in DENIED else errno.errorcode[why.errno or 0]
    try:
        assert not os.get_inheritable(fd)
        found = os.readlink(f"/proc/self/fd/{fd}")
        return os.path.relpath(found, os.readlink(f"/proc/self/fd/{root}"))
    finally:
        os.close(fd)


@pytest.fixture
def tree(tmp_path: Path, no_leaks: None) -> Iterator[Tree]:
    """Return a fresh tree."""
    del no_leaks
    made = Tree(tmp_path)
    yield made
    os.close(made.fd)
