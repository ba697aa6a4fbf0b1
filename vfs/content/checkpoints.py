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
4. Everything here waits for a disk: call it in a worker thread.  One lock; a host has
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
from typing import TYPE_CHECKING

from blake3 import blake3

from vfs.content.errors import CORRUPT, FILE_OPERATION, NOT_FOUND, FdError
from vfs.content.store import PIECE_BYTES, descriptors_of
from vfs.content.table import FdNumber, FdTable, LlmFd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.content.arguments import Json
    from vfs.content.blob import Blob, Content
    from vfs.content.process import Process
    from vfs.content.store import Store, Writer

    _Reader = Callable[[Store, str, str], Content]

MOST_CHECKPOINTS = 1000
"""Checkpoints of one owner."""

DEFAULT_MOST_BYTES = 16 * 1024**3
"""Contents of one owner's checkpoints; what several hold counts once."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS checkpoint (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL,
    label TEXT NOT NULL, fds INTEGER NOT NULL, bytes INTEGER NOT NULL,
    messages INTEGER NOT NULL, state BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS held (
    checkpoint TEXT NOT NULL, owner TEXT NOT NULL, key TEXT NOT NULL,
    size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS held_by_owner ON held (owner, key);
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

    Raises:
        OSError: the directory cannot be used, or another host uses it.
    """

    def __init__(self, directory: str, most_bytes: int = DEFAULT_MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._path = os.path.join(directory, "checkpoints.sqlite")
        os.makedirs(os.path.join(directory, "blobs"), mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fd = os.open(directory, flags)
        self._blobs_fd = -1
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blobs_fd = os.open("blobs", flags, dir_fd=self._fd)
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
        for fd in (self._fd, self._blobs_fd, *descriptors_of(own).values()):
            if fd >= 0:
                yield fd, "checkpoints"

    def close(self) -> None:
        """Close the database; safe to call twice."""
        database, self._database = self._database, None
        if database is not None:
            database.close()
        for fd in (self._blobs_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._blobs_fd = -1

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
            self._check_room(database, owner, blobs)
            for name, blob in blobs.items():
                self._write_blob(name, blob)
            os.fsync(self._blobs_fd)
            state = json.dumps(_state(process)).encode()
            made = Summary(
                f"ckpt:{secrets.token_hex(8)}",
                time.time(),
                label,
                len(fds),
                sum(blob.size for blob in blobs.values()),
                len(process.messages),
            )
            digest = _digest(owner, made, state)
            with database:
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
            return made

    def _check_room(
        self, database: sqlite3.Connection, owner: str, blobs: dict[str, Blob]
    ) -> None:
        rows = database.execute(
            "SELECT DISTINCT key, size FROM held WHERE owner = ?", (owner,)
        )
        sizes = dict(rows.fetchall())
        sizes.update({key: blob.size for key, blob in blobs.items()})
        (count,) = database.execute(
            "SELECT count(*) FROM checkpoint WHERE owner = ?", (owner,)
        ).fetchone()
        if count >= MOST_CHECKPOINTS or sum(sizes.values()) > self._most_bytes:
            text = "Cannot keep a checkpoint: Disk quota exceeded"
            raise FdError(FILE_OPERATION, text)

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
                raise FdError(NOT_FOUND, f"Checkpoint {checkpoint} not found")
            was, state, digest = Summary(*row[:6]), row[6], row[7]
            if not isinstance(state, bytes) or _digest(owner, was, state) != digest:
                raise _damaged(checkpoint)
            document = json.loads(state)
            table = self._table(process.shared.store, document, checkpoint)
        try:
            process.table.take_over(table)
        finally:
            table.close()
        process.messages = document["messages"]
        process.program = document["program"]
        return was

    def _table(self, store: Store, document: dict[str, Json], name: str) -> FdTable:
        """Return the descriptors of a checkpoint, their contents held."""
        table = FdTable(store)
        contents: dict[str, Content] = {}
        try:
            for row in document["fds"]:  # type: ignore[union-attr]
                _enter(table, store, row, contents, self._content, name)  # type: ignore[arg-type]
        except BaseException:
            table.close()
            raise
        finally:
            for content in contents.values():
                store.drop(content)
        table.next_number = document["next"]  # type: ignore[assignment]
        return table

    def _content(self, store: Store, key: str, checkpoint: str) -> Content:
        """Read a content back, the text of a binary one made anew."""
        writer = store.writer()
        try:
            self._copy(key, writer, checkpoint)
            if writer.digest().hex() != key:
                raise _damaged(checkpoint)
            return writer.finish()
        finally:
            writer.close()

    def _copy(self, key: str, writer: Writer, checkpoint: str) -> None:
        try:
            fd = os.open(key, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._blobs_fd)
        except FileNotFoundError:
            raise _damaged(checkpoint) from None
        try:
            while piece := os.read(fd, PIECE_BYTES):
                writer.add(piece)
        finally:
            os.close(fd)

    # The files

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
            self._remove_strays(database)
        except BaseException:
            database.close()
            raise
        self._database = database
        return database

    def _remove_strays(self, database: sqlite3.Connection) -> None:
        """Remove contents that no checkpoint came to hold: a host was killed."""
        rows = database.execute("SELECT DISTINCT key FROM held")
        held = {key for (key,) in rows.fetchall()}
        with os.scandir(self._blobs_fd) as entries:
            strays = [entry.name for entry in entries if entry.name not in held]
        for name in strays:
            os.unlink(name, dir_fd=self._blobs_fd)

    def _write_blob(self, name: str, blob: Blob) -> None:
        if self._is_whole(name, blob):
            return
        partial = f"{name}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(partial, flags, 0o600, dir_fd=self._blobs_fd)
        try:
            for start in range(0, blob.size, PIECE_BYTES):
                piece = memoryview(blob.data[start : start + PIECE_BYTES])
                while piece:
                    piece = piece[os.write(fd, piece) :]
            os.fsync(fd)
        except BaseException:
            os.unlink(partial, dir_fd=self._blobs_fd)
            raise
        finally:
            os.close(fd)
        os.rename(partial, name, src_dir_fd=self._blobs_fd, dst_dir_fd=self._blobs_fd)

    def _is_whole(self, name: str, blob: Blob) -> bool:
        """Tell whether an earlier checkpoint has left this content, undamaged."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._blobs_fd)
        except FileNotFoundError:
            return False
        digest = blake3()
        try:
            while piece := os.read(fd, PIECE_BYTES):
                digest.update(piece)
        finally:
            os.close(fd)
        return digest.digest() == blob.key


def _enter(
    table: FdTable,
    store: Store,
    row: dict[str, Json],
    contents: dict[str, Content],
    read: _Reader,
    checkpoint: str,
) -> None:
    key = str(row["key"])
    content = contents.get(key)
    if content is None:
        content = contents[key] = read(store, key, checkpoint)
    page_size = int(str(row["page_size"]))
    content.text.pages(page_size)
    sections: dict[str, list[int]] = row["sections"]  # type: ignore[assignment]
    table.enter(
        LlmFd(
            FdNumber(int(str(row["number"]))),
            store.hold(content),
            page_size,
            str(row["source"]),
            float(str(row["created"])),
            str(row["name"]),
            {ref: (first, last) for ref, (first, last) in sections.items()},
        )
    )


def _state(process: Process) -> dict[str, object]:
    return {
        "next": process.table.next_number,
        "messages": process.messages,
        "program": process.program,
        "fds": [
            {
                "number": fd.number,
                "key": fd.content.original.key.hex(),
                "page_size": fd.page_size,
                "source": fd.source,
                "created": fd.created,
                "name": fd.name,
                "sections": fd.sections,
            }
            for fd in process.table.fds.values()
        ],
    }


def _digest(owner: str, made: Summary, state: bytes) -> bytes:
    """Return what tells whether a row is as it was written."""
    return blake3(repr((owner, made)).encode() + state).digest()


def _damaged(checkpoint: str) -> FdError:
    text = f"Checkpoint {checkpoint} is damaged and cannot be restored"
    return FdError(CORRUPT, text)


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
