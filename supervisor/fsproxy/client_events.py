"""Clients in the journal and the log: open files (spec S3), denials (spec A1).

Rules of this file.

1. A child names files as it likes: a denial has ``NAME_CHARS`` of the name and the
   length of all of it; of many denials ``BURST`` are written at once, then ``PER_S`` a
   second.
2. Omitted events are counted in ``security.left_out``, with the next written denial,
   and at the latest when the child is gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hostlib.event_rate import EventRate
from hostlib.journal import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.journal import Journal
    from vfs.clients import Client, OpenFile

NAME_CHARS = 256
"""Characters of a name that identify it; a line of the wire may have 64 KiB."""

BURST = 100
"""More than a program makes by mistake before it gives up."""

PER_S = 1.0
"""Rate afterwards: a day of it is 20 MB of journal, and no other child's events are
lost."""


class ClientEvents:
    """Writes the VFS's reports about clients, each event with its child.

    Args:
        journal: where events go.
        child_of: returns the id of a client's child.
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
        self._rates: dict[str, EventRate] = {}

    def file_opened(self, file: OpenFile) -> None:
        """Report an OPEN."""
        self._write("file.opened", file, mode=file.mode.text)

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Report the end of an open file; ``why`` if its client did not ask for it."""
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

    def denied(self, client: Client, what: str, name: bytes) -> None:
        """Report a denied access of a client (spec A1)."""
        child_id = self._child_of(client)
        rate = self._rates.setdefault(child_id, EventRate(BURST, PER_S))
        if not rate.take(time.monotonic()):
            self._journal.count("security.denied", command=what)
            return
        self._tell_left_out_of(child_id)
        # A character has 4 bytes at most: no kept character is cut.
        shown = text_of(name[: 4 * NAME_CHARS])[:NAME_CHARS]
        fields: dict[str, object] = {
            "child_id": child_id,
            "client_id": client.id,
            "command": what,
            "filename": shown,
        }
        if len(name) > NAME_CHARS:
            fields["filename_bytes"] = len(name)
        self._log("WARNING", f"Denied {what} for client {client.id}", **fields)
        self._journal.write("security.denied", **fields)

    def forget(self, child_id: str) -> None:
        """Write the number of omitted events of a child that is gone."""
        self._tell_left_out_of(child_id)
        self._rates.pop(child_id, None)

    def report_omitted(self) -> None:
        """Write the numbers of events omitted so far; start counting again."""
        for child_id in self._rates:
            self._tell_left_out_of(child_id)

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

    def _tell_left_out_of(self, child_id: str) -> None:
        rate = self._rates.get(child_id)
        if rate is None or not rate.left_out:
            return
        text = f"{rate.left_out} more denials of {child_id} were left out"
        self._log("WARNING", text, child_id=child_id, denials=rate.left_out)
        self._journal.write(
            "security.left_out", child_id=child_id, denials=rate.left_out
        )
        rate.left_out = 0
