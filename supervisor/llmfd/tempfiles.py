"""Temporary files that the processes of one child share: writable, with versions.

A version counts the writes. A writer may name the version that it has read; if another
has written since, the write is refused (``conflict``). They end with the child.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import CONFLICT, FILE_OPERATION, NOT_FOUND, FdError
from supervisor.llmfd.release import give_back

if TYPE_CHECKING:
    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.store import Store

MOST_FILES = 10_000
"""Most temporary files of one child."""


@dataclass(slots=True)
class TempFile:
    """A temporary file.

    Attributes:
        id: ``temp:N``.
        version: 1, and one more with each write.
        content: its present content.
    """

    id: str
    version: int
    content: Content


class TempFilesState(msgspec.Struct):
    """See ``TempFiles``; files are (id, version, keys of the content's blobs)."""

    made: int
    files: list[tuple[str, int, list[bytes]]]


class TempFiles:
    """The temporary files of one child.

    Args:
        store: keeps the contents.
        allowance: charged for them; None if there is no bound.
    """

    def __init__(self, store: Store, allowance: Allowance | None) -> None:
        self._files: dict[str, TempFile] = {}
        self._made = 0
        self._store = store
        self._allowance = allowance
        self._lock = ThreadLock()

    def create(self, content: Content) -> TempFile:
        """Make a file of a content that the caller holds.

        Raises:
            FdError: ``file_operation``: there are too many, or too much.
        """
        with self._lock:
            try:
                self._check_count()
                self._admit(content)
            except FdError:
                self._store.drop(content)
                raise
            self._made += 1
            file = TempFile(f"temp:{self._made}", 1, content)
            self._files[file.id] = file
            return file

    def hold(self, file_id: str) -> tuple[TempFile, Content]:
        """Return a file and its content, held against other processes' writes.

        Raises:
            FdError: ``not_found``.
        """
        with self._lock:
            file = self._find(file_id)
            found = replace(file)  # the version of this content
            return found, self._store.hold(file.content)

    def write(self, file_id: str, content: Content, version: int | None) -> TempFile:
        """Replace the content of a file by one that the caller holds.

        Args:
            file_id: the file.
            content: the new one.
            version: the one that the writer has read; None for any.

        Raises:
            FdError: ``not_found``, ``conflict``, ``file_operation``.
        """
        with self._lock:
            try:
                file = self._file_at(file_id, version)
                self._admit(content)
            except FdError:
                self._store.drop(content)
                raise
            self._give_up(file.content)
            file.content = content
            file.version += 1
            return file

    def _check_count(self) -> None:
        if len(self._files) >= MOST_FILES:
            text = f"Cannot create: {MOST_FILES} temporary files are there"
            raise FdError(FILE_OPERATION, text)

    def _find(self, file_id: str) -> TempFile:
        found = self._files.get(file_id)
        if found is None:
            raise FdError(NOT_FOUND, f"Temporary file {file_id} not found")
        return found

    def _file_at(self, file_id: str, version: int | None) -> TempFile:
        file = self._find(file_id)
        if version is not None and version != file.version:
            text = f"Temporary file {file_id} has changed"
            details = f"Expected version: {version}, current: {file.version}"
            raise FdError(CONFLICT, text, details)
        return file

    def delete(self, file_id: str) -> None:
        """Remove a file.

        Raises:
            FdError: ``not_found``.
        """
        with self._lock:
            file = self._find(file_id)
            del self._files[file_id]
            self._give_up(file.content)

    def close(self) -> None:
        """Remove all files, many in a thread."""
        with self._lock:
            contents = [file.content for file in self._files.values()]
            self._files = {}
        give_back(self._store, self._allowance, contents)

    def snapshot(self) -> TempFilesState:
        """Return them as ``restore`` takes them."""
        files = [
            (file.id, file.version, file.content.keys) for file in self._files.values()
        ]
        return TempFilesState(self._made, files)

    def restore(self, state: TempFilesState) -> None:
        """Restore the files of the program before."""
        self._made = state.made
        for file_id, version, keys in state.files:
            content = self._store.content(keys)
            self._files[file_id] = TempFile(file_id, version, content)
            if self._allowance is not None:
                self._allowance.hold_again((content,))

    def _admit(self, content: Content) -> None:
        if self._allowance is not None:
            self._allowance.hold(content)

    def _give_up(self, content: Content) -> None:
        if self._allowance is not None:
            self._allowance.drop((content,))
        self._store.drop(content)
