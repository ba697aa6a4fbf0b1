"""The records of a workspace and of its snapshots, each in a file.

A file's content is of ``record.save_record``. A snapshot's file is a link to the record of
the moment, and forks share both. When an upper goes away, what will be seen then is written
first, as ``record.next``; it takes the record's place when the upper has gone.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from supervisor.workspace.record import Record, load_record, save_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.workspace.store import WorkspaceDirectory

_RECORD = "record"
_NEXT_RECORD = "record.next"


class RecordFiles:
    """The records of one workspace.

    Args:
        directory: of the workspace.
    """

    def __init__(self, directory: WorkspaceDirectory) -> None:
        self._directory = directory

    def load(self) -> Record:
        """Return what the base had when the workspace first saw it."""
        return self._load(_RECORD) or {}

    def save(self, record: Record) -> None:
        """Keep what the base had."""
        self._directory.write(_RECORD, save_record(record))

    def load_for(self, label: str) -> Record | None:
        """Return what was seen when a snapshot was taken; None if nothing was kept."""
        return self._load(_name_for(label))

    def keep_for(self, label: str, record: Record | None) -> None:
        """Keep what was seen when a snapshot was taken.

        Args:
            label: of the snapshot.
            record: what was seen; None for what the record says now.
        """
        name = _name_for(label)
        self._directory.write(name, None if record is None else save_record(record))
        if record is None:
            own = self._directory.fd
            with contextlib.suppress(FileNotFoundError):
                os.link(_RECORD, name, src_dir_fd=own, dst_dir_fd=own)

    def drop_for(self, label: str) -> None:
        """Remove what was seen when a snapshot was taken."""
        self._directory.write(_name_for(label), None)

    def save_next(self, record: Record | None) -> None:
        """Keep what is seen once the upper has gone; None if that is what the record says."""
        data = None if record is None else save_record(record)
        self._directory.write(_NEXT_RECORD, data)

    def take_next(self) -> bool:
        """Put the next record in the place of the record; tell whether there was one."""
        own = self._directory.fd
        try:
            os.rename(_NEXT_RECORD, _RECORD, src_dir_fd=own, dst_dir_fd=own)
        except FileNotFoundError:
            return False
        return True

    def links_for_fork(
        self, labels: Iterable[str], record: Record | None
    ) -> dict[str, str]:
        """Return the files that a fork shares: name in the fork -> name here.

        Args:
            labels: of the snapshots.
            record: what the fork has seen; None for what was seen here.
        """
        links = {name: name for name in map(_name_for, labels)}
        if record is None:
            return links | {_RECORD: _RECORD}
        self.save_next(record)
        return links | {_RECORD: _NEXT_RECORD}

    def texts_named(self, labels: Iterable[str]) -> set[bytes]:
        """Return what names the kept texts, in the record and those of some snapshots."""
        found: set[bytes] = set()
        for name in (_RECORD, _NEXT_RECORD, *map(_name_for, labels)):
            record = self._load(name) or {}
            found.update(seen.text for seen in record.values())
        return found

    def _load(self, name: str) -> Record | None:
        data = self._directory.read(name)
        return None if data is None else load_record(data)


def _name_for(label: str) -> str:
    """Return the file that keeps what was seen when a snapshot was taken."""
    return f"seen-{label}"
