"""The two tables of the contract: clients and their open files (spec S1).

Rules of this file.

1. A fileno comes from one counter of the host and is never used again (I4, spec O9).
2. A client's own dictionary decides whose a number is: a number of another client is
   as unknown as one that never was (spec R2).
3. Both tables are read by name from outside; the names are the contract's.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

from protocol.limits import FIRST_FILENO

if TYPE_CHECKING:
    from vfs.ledger import Ledger
    from vfs.openfile import OpenFile
    from vfs.policy import Policy


class Client:
    """One connection.

    Attributes:
        id: unique in the host, for ever.
        pipe_id: names the connection's transport, for people.
        policy: what it may do.
        ledger: what it and everything nested in it have used.
        parent: the client it was attached by, None for a child's own connection.
        pid: the process it was made for; None for an attached one.
        files: its open files by number.
        held: descriptors of the host's that it costs beside those files.
    """

    __slots__ = (
        "connected_at",
        "files",
        "held",
        "id",
        "ledger",
        "nested",
        "parent",
        "pid",
        "pipe_id",
        "policy",
    )

    def __init__(
        self,
        client_id: str,
        pipe_id: str,
        policy: Policy,
        ledger: Ledger,
        parent: Client | None,
    ) -> None:
        self.id = client_id
        self.pipe_id = pipe_id
        self.policy = policy
        self.ledger = ledger
        self.parent = parent
        self.pid: int | None = None
        self.nested: list[Client] = []
        self.held = 0
        self.files: dict[int, OpenFile] = {}
        self.connected_at = time.time()

    def row(self) -> dict[str, object]:
        """Return the client as the contract's JSON object."""
        return {
            "id": self.id,
            "pipe_id": self.pipe_id,
            "open_files": sorted(self.files),
            "connected_at": timestamp(self.connected_at),
            "parent_id": self.parent.id if self.parent is not None else None,
            "pid": self.pid,
        }


class Tables:
    """All clients and all open files of one host.

    Attributes:
        filenos: numbers that no file has had (I4).
    """

    __slots__ = ("_client_ids", "clients", "filenos", "files")

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.files: dict[int, OpenFile] = {}
        self._client_ids = count(1)
        self.filenos = count(FIRST_FILENO)

    def new_client_id(self) -> str:
        """Return an id that no client has had."""
        return f"c{next(self._client_ids)}"

    def client_rows(self) -> list[dict[str, object]]:
        """Return the client table as JSON objects."""
        return [client.row() for client in self.clients.values()]

    def file_rows(self) -> list[dict[str, object]]:
        """Return the file table as JSON objects."""
        return [file_row(file) for file in self.files.values()]


def file_row(file: OpenFile) -> dict[str, object]:
    """Return an open file as the contract's JSON object.

    What of its name is not UTF-8 is escaped, as in events: two names stay two.
    """
    return {
        "fileno": file.fileno,
        "filename": file.name.decode(errors="backslashreplace"),
        "mode": file.mode.text,
        "client_id": file.client.id,
        "opened_at": timestamp(file.opened_at),
        "is_top_level": file.is_top_level,
        "offset": file.offset,
    }


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as RFC 3339 in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")
