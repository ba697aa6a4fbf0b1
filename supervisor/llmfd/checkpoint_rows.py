"""The rows of checkpoints in their database, and its faults in words.

Writes rows and tells damaged ones.

Rules of this file.

1. The database may hold anything, under any type: a row is named by its ``rowid``, and
   each value is checked before it is used.
2. The hash in a row covers all the rest of it.
3. Every fault of the database is an ``FdError``.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from supervisor.llmfd.checkpoint_state import (
    is_count,
    is_key,
    is_text,
    is_time,
    match_checks,
    snapshots_in,
)
from supervisor.llmfd.errors import CORRUPT, FILE_OPERATION, NOT_FOUND, FdError
from supervisor.llmfd.own_checkpoints import NAMELESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from supervisor.llmfd.workspaces import WorkspaceSnapshot

MOST_SHOWN_CHARS = 40
"""Longest part of a damaged id that is shown: a true one has 21 characters."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS checkpoint (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL,
    label TEXT NOT NULL, fds INTEGER NOT NULL, bytes INTEGER NOT NULL,
    messages INTEGER NOT NULL, state BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS held (
    checkpoint TEXT NOT NULL, owner TEXT NOT NULL, key TEXT NOT NULL,
    size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS held_by_owner ON held (owner, key);
CREATE INDEX IF NOT EXISTS held_by_key ON held (key);
CREATE INDEX IF NOT EXISTS held_by_checkpoint ON held (checkpoint);
"""

COLUMNS = "id, created, label, fds, bytes, messages, state, hash"
"""The columns of a row but for its owner, by which it is found."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts of a checkpoint that its owner sees.

    Attributes:
        id: ``ckpt:HEX``.
        created: seconds since the epoch.
        label: given by the caller.
        fds: descriptors in it.
        size: bytes of their contents; shared ones count once.
        messages: messages of the conversation.
        snapshots: of the child's workspaces, made with it; part of the state.
    """

    id: str
    created: float
    label: str
    fds: int
    size: int
    messages: int
    snapshots: tuple[WorkspaceSnapshot, ...] = ()


_SUMMARY: dict[str, Callable[[object], bool]] = {
    "id": is_text,
    "created": is_time,
    "label": is_text,
    "fds": is_count,
    "size": is_count,
    "messages": is_count,
}


def row_of(owner: str, made: Summary, state: bytes) -> tuple[object, ...]:
    """Return the row of a checkpoint, in the order of ``COLUMNS``."""
    return (*_columns(made), state, _digest(owner, made, state))


def read_row(owner: str, row: Sequence[object]) -> tuple[Summary, bytes] | None:
    """Return the arguments of ``row_of``; None for a row that it did not make.

    Args:
        owner: has the checkpoint.
        row: values of any type, in the order of ``COLUMNS``.
    """
    *word_faults, state, digest = row
    values = dict(zip(_SUMMARY, word_faults, strict=True))
    if not match_checks(_SUMMARY, values) or not isinstance(state, bytes):
        return None
    made = Summary(**values, snapshots=snapshots_in(state))  # type: ignore[arg-type] # they were looked at
    return (made, state) if _digest(owner, made, state) == digest else None


def _columns(made: Summary) -> tuple[object, ...]:
    """Return the values with a column of their own."""
    return tuple(getattr(made, name) for name in _SUMMARY)


def _digest(owner: str, made: Summary, state: bytes) -> bytes:
    # Compatible with earlier programs: never changed.
    pairs = zip(_SUMMARY, _columns(made), strict=True)
    summary = ", ".join(f"{name}={value!r}" for name, value in pairs)
    said = f"({owner!r}, Summary({summary}))"
    return blake3(said.encode() + state).digest()


def print_id(value: object) -> str:
    """Return an id in printable form, whatever the database holds in its place."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_SHOWN_CHARS:
        return "(unreadable id)"
    return value if value.isprintable() else "(unreadable id)"


def decode_text(read: bytes) -> str:
    """Return a text of the database; different bytes give different texts."""
    return read.decode(errors="surrogateescape")


def find(
    database: sqlite3.Connection, columns: str, owner: str, checkpoint: str
) -> tuple[Any, ...]:
    """Return the row of a checkpoint of an owner, or of a nameless one.

    Raises:
        FdError: ``not_found``.
    """
    query = (
        f"SELECT {columns} FROM checkpoint"  # noqa: S608 - ours
        " WHERE (owner = ? OR owner GLOB ?) AND id = ?"
    )
    row: tuple[Any, ...] | None = None
    # A lone surrogate cannot be passed to SQLite.
    with contextlib.suppress(UnicodeEncodeError):
        row = database.execute(query, (owner, NAMELESS, checkpoint)).fetchone()
    if row is None:
        raise FdError(NOT_FOUND, f"Checkpoint {checkpoint} not found")
    return row


def delete_rows(database: sqlite3.Connection, doomed: list[int]) -> set[str]:
    """Delete checkpoints in the open transaction; return their contents' keys."""
    keys: set[str] = set()
    for row in doomed:
        rows = database.execute(
            "DELETE FROM held WHERE checkpoint ="
            " (SELECT id FROM checkpoint WHERE rowid = ?) RETURNING key",
            (row,),
        )
        # Only a valid key may become the name of a file.
        keys.update(key for (key,) in rows.fetchall() if is_key(key))
        database.execute("DELETE FROM checkpoint WHERE rowid = ?", (row,))
    return keys


def find_unheld(database: sqlite3.Connection, keys: set[str]) -> list[str]:
    """Return the contents that no checkpoint of any owner holds now."""
    look = "SELECT 1 FROM held WHERE key = ? LIMIT 1"
    return [key for key in keys if database.execute(look, (key,)).fetchone() is None]


def make_damaged_error(
    checkpoints: list[str], whole: Sequence[Summary] = ()
) -> FdError:
    """Return an error that names the damaged checkpoints and lists the others."""
    which = f"Checkpoint {checkpoints[0]} is"
    if len(checkpoints) > 1:
        which = f"Checkpoints {', '.join(checkpoints)} are"
    details = (
        "delete_checkpoint removes what is damaged; where it finds none, the operator of the"
        " host moves checkpoints.sqlite* away"
    )
    if whole:
        others = ", ".join(f"{made.id} ({made.label})" for made in whole)
        details += f". Whole, and can be restored: {others}"
    return FdError(CORRUPT, f"{which} damaged and cannot be restored", details)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one transaction; report precisely if the commit fails."""
    try:
        yield
    except BaseException:
        database.rollback()
        raise
    try:
        database.commit()
    except BaseException as why:
        database.rollback()
        if not isinstance(why, sqlite3.OperationalError):
            raise
        # The data may be on the disk although the last flush failed.
        text = f"Cannot keep a checkpoint: {why}"
        details = (
            "When the host is started again it may be there all the same, whole:"
            " list_checkpoints tells"
        )
        raise FdError(FILE_OPERATION, text, details) from None


@contextlib.contextmanager
def word_faults() -> Iterator[None]:
    """Turn faults of disk and database into ``FdError``."""
    try:
        yield
    except UnicodeDecodeError:
        # SQLite's message repeats names from the damaged file.
        text = "The checkpoints are damaged: names in the database are no text"
        raise FdError(CORRUPT, text, _REMEDY) from None
    except sqlite3.DatabaseError as why:
        if isinstance(why, sqlite3.OperationalError) and not _is_schema(why):
            raise FdError(FILE_OPERATION, f"Cannot use checkpoints: {why}") from None
        text = f"The checkpoints are damaged: {why}"
        raise FdError(CORRUPT, text, _REMEDY) from None
    except OSError as why:
        reason = os.strerror(why.errno or 5)
        raise FdError(FILE_OPERATION, f"Cannot use checkpoints: {reason}") from None


def _is_schema(why: sqlite3.OperationalError) -> bool:
    """Return whether a statement failed because the database has other tables."""
    return why.sqlite_errorcode & 0xFF == sqlite3.SQLITE_ERROR


_REMEDY = "The operator stops the host and moves checkpoints.sqlite* away"
"""The operator's remedy; a model has none, since nothing in the file can be trusted."""
