"""Opening SQLite files of the host.

A connection is used by one thread at a time, and not always by the same one.
"""

from __future__ import annotations

import sqlite3
from typing import Literal

BUSY_S = 5.0
"""How long a change waits for another process that writes."""


def open_database(
    path: str,
    schema: str,
    *,
    synchronous: Literal["NORMAL", "FULL"],
    isolation_level: Literal["DEFERRED"] | None = None,
) -> sqlite3.Connection:
    """Return a connection to a file, which is made if it is not there.

    Args:
        path: the file; it must be private already, for SQLite follows links.
        schema: statements that make what is not there.
        synchronous: FULL where a change must outlive a loss of power once it is
            committed; NORMAL where that may lose the last ones.
        isolation_level: None where transactions are begun by hand.

    Raises:
        sqlite3.Error: the file cannot be used.
    """
    database = sqlite3.connect(
        path,
        timeout=BUSY_S,
        check_same_thread=False,
        isolation_level=isolation_level,
    )
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        database.executescript(schema)
    except BaseException:
        database.close()
        raise
    return database
