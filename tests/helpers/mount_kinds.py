"""File systems of another kind than they are."""

import os
from pathlib import Path

import pytest

from hostlib.linux.mount_table import MountTable
from vfs import mounts


def set_kind(monkeypatch: pytest.MonkeyPatch, path: Path, kind: str) -> None:
    """Have the mount of a path taken for one of a kind, also when mounts change."""
    theirs = os.stat(path).st_dev
    kind_of = MountTable.kind_of

    def changed(table: MountTable, device: int, fd: int) -> str:
        return kind if device == theirs else kind_of(table, device, fd)

    monkeypatch.setattr(MountTable, "kind_of", changed)
    monkeypatch.setitem(mounts.MOUNTS, theirs, mounts.Mount(kind))
