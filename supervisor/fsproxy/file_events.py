"""Events about open files, as the VFS reports them: in the journal and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.journal import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.journal import Journal
    from vfs.filesystem import Client, OpenFile


class FileEvents:
    """Turns what the VFS reports into events and log lines (spec S3).

    Args:
        journal: where events go.
        child_of: the id of the child behind a client.
        log: takes a level, a line and its fields.
    """

    def __init__(
        self,
        journal: Journal,
        child_of: Callable[[Client], str],
        log: Callable[..., None],
    ) -> None:
        self._journal = journal
        self._child_of = child_of
        self._log = log

    def file_opened(self, file: OpenFile) -> None:
        """Report an OPEN."""
        self._write("file.opened", file, mode=file.mode.text)

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Report the end of an open file; ``why`` where its client did not ask."""
        if why is None:
            self._write("file.closed", file)
            return
        self._log(
            "INFO",
            f"Auto-closed fileno {file.fileno} for client {file.client.id} ({why})",
            child_id=self._child_of(file.client),
            client_id=file.client.id,
            fileno=file.fileno,
            filename=text_of(file.name),
            reason=why,
        )
        self._write("file.auto_closed", file, reason=why)

    def _write(self, event: str, file: OpenFile, **fields: object) -> None:
        if not self._journal.is_on:
            return
        client = file.client
        self._journal.write(
            event,
            child_id=self._child_of(client),
            client_id=client.id,
            fileno=file.fileno,
            filename=text_of(file.name),
            **fields,
        )
