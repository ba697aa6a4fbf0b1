"""Checkpoints: the conversation and the descriptors of a process, kept as one.

    DIRECTORY/checkpoints.sqlite   what each checkpoint holds (SQLite, WAL)
    DIRECTORY/blobs/HEX            contents, by their BLAKE3

Rules of this file.

1. A checkpoint is there whole or not at all, whenever the host is killed: contents are
   written beside, put on the disk and named by one rename each; then one transaction
   says that the checkpoint is there.
2. What is read is checked against its hash.  What is damaged is ``corrupt``, never a
   text that nobody wrote.
3. A checkpoint belongs to an owner, who sees no other's.
4. It goes in the other order: one transaction says that it is gone, then the contents
   are removed that no checkpoint of any owner holds.  A host that is killed in between
   leaves contents that the next one removes.
5. Everything here waits for a disk: call it in a worker thread.  One lock; a host has
   one writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sqlite3
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

from vfs.content.checkpoint_blobs import BlobFiles
from vfs.content.checkpoint_state import state_of, table_of
from vfs.content.errors import CORRUPT, FILE_OPERATION, NOT_FOUND, FdError
from vfs.content.spool import descriptors_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfs.content.blob import Blob, Content
    from vfs.content.process import Process
    from vfs.content.store import Store

MOST_CHECKPOINTS = 1000
"""Checkpoints of one owner."""

DEFAULT_MOST_BYTES = 16 * 1024**3
"""Contents of one owner's checkpoints; what several hold counts once."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long checkpoints stay that nobody deletes.

    Attributes:
        count: of each owner the newest so many stay; 0 keeps all, and refuses the one
            that is too many (``MOST_CHECKPOINTS``).
        age_s: what is older goes, whoever's it is; 0 for never.
    """

    count: int = 0
    age_s: float = 0.0


_SCHEMA = """
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


@dataclass(frozen=True, slots=True)
class Summary:
    """What is told of a checkpoint.

    Attributes:
        id: ``ckpt:HEX``.
        created: seconds since the epoch.
        label: as it was given.
        fds: descriptors in it.
        size: bytes of their contents; what several share counts once.
        messages: messages of the conversation.
    """

    id: str
    created: float
    label: str
    fds: int
    size: int
    messages: int


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: made if it is missing, 0700.
        most_bytes: contents of one owner.
        retention: how long they stay; None: until they are deleted.

    Raises:
        OSError: the directory cannot be used, or another host uses it.
    """

    def __init__(
        self,
        directory: str,
        most_bytes: int = DEFAULT_MOST_BYTES,
        retention: Retention | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._retention = retention or Retention()
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._path = os.path.join(directory, "checkpoints.sqlite")
        os.makedirs(os.path.join(directory, "blobs"), mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fd = os.open(directory, flags)
        self._blobs = BlobFiles(-1)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blobs = BlobFiles(os.open("blobs", flags, dir_fd=self._fd))
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, SQLite's own among them."""
        own = set()
        if self._database is not None:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(self._path + suffix)
                    own.add((status.st_dev, status.st_ino))
        for fd in (self._fd, self._blobs.fd, *(fd for _, fd in descriptors_of(own))):
            if fd >= 0:
                yield fd, "checkpoints"

    def close(self) -> None:
        """Close the database; safe to call twice."""
        database, self._database = self._database, None
        if database is not None:
            database.close()
        self._blobs.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # The calls

    def save(self, process: Process, owner: str, label: str) -> Summary:
        """Keep a process as it is now.

        Raises:
            FdError: ``file_operation``, ``corrupt``.
        """
        with self._lock, _told():
            database = self._open()
            fds = list(process.table.fds.values())
            originals = [fd.content.original for fd in fds]
            blobs = {blob.key.hex(): blob for blob in originals}
            doomed = self._outlived(database, owner)
            self._check_room(database, owner, blobs, doomed)
            self._blobs.write(blobs)
            state = json.dumps(state_of(process)).encode()
            made = Summary(
                f"ckpt:{secrets.token_hex(8)}",
                time.time(),
                label,
                len(fds),
                sum(blob.size for blob in blobs.values()),
                len(process.messages),
            )
            digest = _digest(owner, made, state)
            with _together(database):
                database.execute(
                    "INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(made.id, owner, made.created, label, made.fds),
                        *(made.size, made.messages, state, digest),
                    ),
                )
                database.executemany(
                    "INSERT INTO held VALUES (?, ?, ?, ?)",
                    [(made.id, owner, key, blob.size) for key, blob in blobs.items()],
                )
                keys = _delete_rows(database, doomed)
            self._blobs.remove(_not_held(database, keys))
            return made

    def _outlived(self, database: sqlite3.Connection, owner: str) -> list[str]:
        """Return the ids of what is to go when this owner makes another one."""
        doomed = self._aged(database)
        count = self._retention.count
        if count:
            rows = database.execute(
                "SELECT id FROM checkpoint WHERE owner = ?"
                " ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?",
                (owner, count - 1),
            )
            doomed += [row[0] for row in rows.fetchall() if row[0] not in doomed]
        return doomed

    def _aged(self, database: sqlite3.Connection) -> list[str]:
        if not self._retention.age_s:
            return []
        rows = database.execute(
            "SELECT id FROM checkpoint WHERE created < ?",
            (time.time() - self._retention.age_s,),
        )
        return [row[0] for row in rows.fetchall()]

    def delete(self, owner: str, checkpoint: str) -> None:
        """Delete a checkpoint, and the contents that no other one holds.

        Raises:
            FdError: ``not_found``, ``file_operation``, ``corrupt``.
        """
        with self._lock, _told():
            database = self._open()
            row = database.execute(
                "SELECT 1 FROM checkpoint WHERE owner = ? AND id = ?",
                (owner, checkpoint),
            ).fetchone()
            if row is None:
                raise _not_found(checkpoint)
            self._delete(database, [checkpoint])

    def _delete(self, database: sqlite3.Connection, doomed: list[str]) -> None:
        with database:
            keys = _delete_rows(database, doomed)
        self._blobs.remove(_not_held(database, keys))

    def _check_room(
        self,
        database: sqlite3.Connection,
        owner: str,
        blobs: dict[str, Blob],
        doomed: list[str],
    ) -> None:
        rows = database.execute(
            "SELECT checkpoint, key, size FROM held WHERE owner = ?", (owner,)
        )
        sizes = {key: size for name, key, size in rows.fetchall() if name not in doomed}
        sizes.update({key: blob.size for key, blob in blobs.items()})
        names = database.execute("SELECT id FROM checkpoint WHERE owner = ?", (owner,))
        count = sum(name not in doomed for (name,) in names.fetchall())
        if count >= MOST_CHECKPOINTS or sum(sizes.values()) > self._most_bytes:
            text = "Cannot keep a checkpoint: Disk quota exceeded"
            raise FdError(FILE_OPERATION, text, "delete_checkpoint makes room")

    def all_of(self, owner: str) -> list[Summary]:
        """Return an owner's checkpoints, oldest first.

        Raises:
            FdError: ``file_operation``, ``corrupt``.
        """
        with self._lock, _told():
            rows = self._open().execute(
                "SELECT id, created, label, fds, bytes, messages FROM checkpoint"
                " WHERE owner = ? ORDER BY created, rowid",
                (owner,),
            )
            return [Summary(*row) for row in rows.fetchall()]

    def restore(self, process: Process, owner: str, checkpoint: str) -> Summary:
        """Make a process what it was; on any failure it stays what it is.

        Raises:
            FdError: ``not_found``, ``corrupt``, ``file_operation``.
        """
        with self._lock, _told():
            row = (
                self._open()
                .execute(
                    "SELECT id, created, label, fds, bytes, messages, state, hash"
                    " FROM checkpoint WHERE owner = ? AND id = ?",
                    (owner, checkpoint),
                )
                .fetchone()
            )
            if row is None:
                raise _not_found(checkpoint)
            was, state, digest = Summary(*row[:6]), row[6], row[7]
            if not isinstance(state, bytes) or _digest(owner, was, state) != digest:
                raise _damaged(checkpoint)
            document = json.loads(state)
            store = process.shared.store
            read = partial(self._content, store, checkpoint=checkpoint)
            table = table_of(store, document, read)
        try:
            process.table.take_over(table)
        finally:
            table.close()
        process.messages = document["messages"]
        process.program = document["program"]
        return was

    def _content(self, store: Store, key: str, checkpoint: str) -> Content:
        """Read a content back, the text of a binary one made anew."""
        writer = store.writer()
        try:
            self._blobs.read(key, writer)
            if writer.digest().hex() != key:
                raise _damaged(checkpoint)
            return writer.finish()
        except FileNotFoundError:
            raise _damaged(checkpoint) from None
        finally:
            writer.close()

    # The database

    def _open(self) -> sqlite3.Connection:
        if self._database is not None:
            return self._database
        if self._fd < 0:
            raise FdError(FILE_OPERATION, "Cannot use checkpoints: they are closed")
        database = sqlite3.connect(self._path, check_same_thread=False)
        try:
            os.chmod(self._path, 0o600)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.executescript(_SCHEMA)
            self._delete(database, self._aged(database))
            rows = database.execute("SELECT DISTINCT key FROM held")
            self._blobs.remove_all_but({key for (key,) in rows.fetchall()})
        except BaseException:
            database.close()
            raise
        self._database = database
        return database


def _digest(owner: str, made: Summary, state: bytes) -> bytes:
    """Return what tells whether a row is as it was written."""
    return blake3(repr((owner, made)).encode() + state).digest()


def _delete_rows(database: sqlite3.Connection, doomed: list[str]) -> set[str]:
    """Delete checkpoints in the transaction that is open; return what they held."""
    keys: set[str] = set()
    for checkpoint in doomed:
        rows = database.execute(
            "DELETE FROM held WHERE checkpoint = ? RETURNING key", (checkpoint,)
        )
        keys.update(key for (key,) in rows.fetchall())
        database.execute("DELETE FROM checkpoint WHERE id = ?", (checkpoint,))
    return keys


def _not_held(database: sqlite3.Connection, keys: set[str]) -> list[str]:
    """Return those of the contents that no checkpoint of anybody holds now."""
    look = "SELECT 1 FROM held WHERE key = ? LIMIT 1"
    return [key for key in keys if database.execute(look, (key,)).fetchone() is None]


def _not_found(checkpoint: str) -> FdError:
    return FdError(NOT_FOUND, f"Checkpoint {checkpoint} not found")


def _damaged(checkpoint: str) -> FdError:
    text = f"Checkpoint {checkpoint} is damaged and cannot be restored"
    return FdError(CORRUPT, text)


@contextlib.contextmanager
def _together(database: sqlite3.Connection) -> Iterator[None]:
    """Make one transaction of what is done; say precisely what a failed commit means."""
    try:
        yield
    except BaseException:
        database.rollback()
        raise
    try:
        database.commit()
    except sqlite3.OperationalError as why:
        database.rollback()
        # All of it may have reached the disk before the last flush failed.
        text = f"Cannot keep a checkpoint: {why}"
        details = (
            "When the host is started again it may be there all the same, whole:"
            " list_checkpoints tells"
        )
        raise FdError(FILE_OPERATION, text, details) from None


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Word what the disk or the database cannot do."""
    try:
        yield
    except sqlite3.OperationalError as why:
        raise FdError(FILE_OPERATION, f"Cannot use checkpoints: {why}") from None
    except sqlite3.DatabaseError as why:
        raise FdError(CORRUPT, f"The checkpoints are damaged: {why}") from None
    except OSError as why:
        reason = os.strerror(why.errno or 5)
        raise FdError(FILE_OPERATION, f"Cannot use checkpoints: {reason}") from None
