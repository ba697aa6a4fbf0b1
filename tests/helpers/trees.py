"""Trees of files for tests: one of each backend, and what is done with them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.memory_directory import MemoryDirectory
from vfs.backends import (
    MODES,
    Backend,
    Handle,
    HostDirectory,
    MountDirectory,
)

SHM = Path("/dev/shm")
PROJECT = Path(__file__).parents[2]


def host_directory(path: Path) -> HostDirectory:
    """Hold a directory of the host."""
    return HostDirectory(os.open(path, os.O_PATH | os.O_DIRECTORY))


OPERATOR, CHILD = 1234, 77_777
"""Users whose numbers change places in the mount of ``mounted``."""


@pytest.fixture(scope="session")
def swapped_users() -> int:
    """Return the namespace of these two, made before anything counts descriptors."""
    from supervisor.spawn.launchpad.layers.owners import owners_of  # noqa: PLC0415

    return owners_of(CHILD, OPERATOR) if os.geteuid() == 0 else -1


def mounted(top: Path, users: int) -> MountDirectory:
    """Hold an overlay as a host that is root does; its base is ``top/base``."""
    from supervisor.sandbox.held_mount import hold_overlay  # noqa: PLC0415
    from supervisor.spawn.launchpad.layers.overlay import Layers  # noqa: PLC0415

    for name in ("base", "own", "own/upper", "own/work"):
        (top / name).mkdir(exist_ok=True)
    for name in ("base", "own/upper"):
        os.chown(top / name, OPERATOR, OPERATOR)
    base, own = (os.open(top / name, os.O_RDONLY) for name in ("base", "own"))
    try:
        with contextlib.closing(hold_overlay(Layers(base, own), users)) as held:
            return MountDirectory(held.copy(is_writable=True), CHILD)
    finally:
        os.close(base)
        os.close(own)


@pytest.fixture(params=["disk", "tmpfs", "memory", "mount"])
def tree(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    swapped_users: int,
    no_leaks: None,
) -> Iterator[Backend]:
    """Return an empty tree of each kind."""
    del no_leaks
    made: Backend
    if request.param == "memory":
        made = MemoryDirectory()
        yield made
    elif request.param == "tmpfs":
        if not os.access(SHM, os.W_OK):
            pytest.skip(f"{SHM} cannot be written")
        where = SHM / f"backends-{os.getpid()}"
        where.mkdir()
        made = host_directory(where)
        yield made
        subprocess.run(["rm", "-r", where], check=True)
    elif request.param == "mount":
        if os.geteuid() != 0:
            pytest.skip("it takes root to hold such a mount")
        made = mounted(tmp_path, swapped_users)
        yield made
    else:
        made = host_directory(tmp_path)
        yield made
    made.close()


def opened(tree: Backend, name: bytes, mode: bytes, *, staged: bool = False) -> Handle:
    """Open a file as OPEN does."""
    word = MODES[mode]
    handle = tree.open(name, word, create=word.creates, exclusive=False, staged=staged)
    if word.empties and not staged:
        handle.truncate(0)
    return handle


def put(tree: Backend, name: bytes, data: bytes) -> None:
    """Make a file."""
    handle = opened(tree, name, b"w")
    handle.pwrite(data, 0)
    handle.close()


def content(tree: Backend, name: bytes) -> bytes:
    """Return what a file holds."""
    handle = opened(tree, name, b"r")
    try:
        return handle.pread_wait(1 << 20, 0)
    finally:
        handle.close()


def names(tree: Backend, name: bytes = b".") -> list[bytes]:
    """Return the names in a directory."""
    return [entry for entry, _ in tree.list(name, 1000)]


@pytest.fixture
def host(tmp_path: Path, no_leaks: None) -> Iterator[HostDirectory]:
    """Return the test's directory, held."""
    del no_leaks
    made = host_directory(tmp_path)
    yield made
    made.close()
