"""A root with grants beside it, and what policies give of them, for tests."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vfs.backends import MODES
from vfs.clients import Client, OpenFile
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.places import Place, close_places, open_place
from vfs.policy import Policy

ALL_MODES = tuple(MODES)


class World:
    """A root with grants beside it, and clients of them.

    Attributes:
        where: the directory with `root`, `in` (readable), `out` (writable) and `else`.
        fs: the VFS.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self.fs = Filesystem()
        self.places: list[Place] = []
        for name in ("root", "in", "out", "else", "root-evil"):
            (where / name).mkdir()
            (where / name / "file").write_text(name)
        self.cwd = os.open(where, os.O_PATH | os.O_DIRECTORY)

    def place(self, name: str, **rules: object) -> Place:
        """Hold a place."""
        held = open_place(os.fspath(self.where / name), **rules)  # type: ignore[arg-type]
        self.places.append(held)
        return held

    def policy(self, *grants: Place, top_level: bool = False) -> Policy:
        """Return a policy of `root` and grants."""
        root = self.place("root", read=True, write=True, relative=b"")
        return Policy((root, *grants), top_level=top_level, cwd_fd=self.cwd)

    def client(self, policy: Policy) -> Client:
        """Connect a client."""
        return self.fs.connect(policy, Ledger(), "test")

    def name(self, name: str) -> bytes:
        """Return an absolute name as bytes."""
        return os.fsencode(self.where / name)

    def may(
        self, policy: Policy, name: bytes, mode: bytes, claim: bool | None = False
    ) -> str:
        """Return what an OPEN gives: "yes", "denied", "unavailable" or an errno."""
        client = self.client(policy)
        try:
            self.fs.open(client, name, mode, claim)
        except AccessDeniedError:
            return "denied"
        except UnavailableError:
            return "unavailable"
        except OSError as why:
            return errno.errorcode[why.errno or 0]
        finally:
            self.fs.disconnect(client, "test")
        return "yes"

    def which(self, policy: Policy, name: bytes) -> tuple[bytes, ...]:
        """Return the modes in which a name can be opened."""
        return tuple(m for m in ALL_MODES if self.may(policy, name, m) == "yes")

    def close(self) -> None:
        """Give everything back."""
        close_places(self.places)
        os.close(self.cwd)


@pytest.fixture
def world(tmp_path: Path, no_leaks: None) -> Iterator[World]:
    """Return a world."""
    del no_leaks
    made = World(tmp_path)
    yield made
    made.close()


async def close(fs: Filesystem, file: OpenFile, *, waiting: bool) -> None:
    """Close a file in one of the two ways."""
    if waiting:
        await fs.close_waiting(file)
    else:
        fs.close(file)
