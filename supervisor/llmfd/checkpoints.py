"""Checkpoints: the conversation and the descriptors of a process, kept as one.

    DIRECTORY/checkpoints.sqlite   the rows of the checkpoints (SQLite, WAL)
    DIRECTORY/blobs/HEX            their contents, by their BLAKE3
    DIRECTORY/contents/HEX         those of the store that are on the disk

1. A checkpoint is whole or missing, even after kill -9: contents are written first,
   then one transaction adds the row. Deleting goes the other way; the next host
   removes leftovers.
2. All that is read is checked against its hash; a damaged checkpoint is
   ``corrupt``.
3. An owner sees only its own checkpoints (``supervisor.llmfd.own_checkpoints``).
4. All calls wait for a disk: use a worker thread. One lock, one writer a host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sqlite3
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

from hostlib.database import open_database
from hostlib.linux.descriptors import descriptors_by_file
from hostlib.private_files import open_private
from hostlib.threads import ThreadLock
from supervisor.llmfd.blob_files import BlobFiles, make_part_name
from supervisor.llmfd.checkpoint_rows import (
    COLUMNS,
    SCHEMA,
    Summary,
    decode_text,
    delete_rows,
    find,
    find_unheld,
    make_damaged_error,
    print_id,
    read_row,
    row_of,
    transaction,
    word_faults,
)
from supervisor.llmfd.checkpoint_state import (
    is_count,
    is_key,
    read_state,
    snapshots_in,
    state_of,
    table_of,
)
from supervisor.llmfd.errors import FILE_OPERATION, FdError
from supervisor.llmfd.own_checkpoints import NAMELESS, NUMBERED
from supervisor.llmfd.store import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.blob import Blob, Content
    from supervisor.llmfd.checkpoint_state import CheckpointedProcess
    from supervisor.llmfd.store import Store
    from supervisor.llmfd.workspaces import WorkspaceSnapshot

MOST_CHECKPOINTS = 1000
"""Most checkpoints of one owner."""

DATABASE = "checkpoints.sqlite"

DEFAULT_MOST_BYTES = 16 * 1024**3
"""Most bytes of contents of one owner's checkpoints; shared ones count once."""


def new_checkpoint_id() -> str:
    """Return a new random id, which no other owner can guess."""
    return f"ckpt:{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long undeleted checkpoints are kept.

    Attributes:
        count: the newest ones of each owner that are kept; 0 keeps all, and refuses one
            more than ``MOST_CHECKPOINTS``.
        age_s: older ones are removed, of any owner; 0 for never.
    """

    count: int = 0
    age_s: float = 0.0


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: made if it is missing; closed to other users (0700).
        most_bytes: of contents of one owner.
        retention: how long they stay; None for ever.

    Attributes:
        most_bytes: as above.
        living: owners whose children run; of all other nameless owners together, as
            much is kept as of one owner.

    Raises:
        OSError: the directory cannot be used, or another host uses it.
    """

    def __init__(
        self,
        directory: str,
        most_bytes: int = DEFAULT_MOST_BYTES,
        retention: Retention | None = None,
    ) -> None:
        self.most_bytes = most_bytes
        self._retention = retention or Retention()
        self.living: set[str] = set()
        self._lock = ThreadLock()
        self._database: sqlite3.Connection | None = None
        self._path = os.path.join(directory, DATABASE)
        # Before its content: the mode of makedirs counts for the last name only.
        os.makedirs(directory, mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fd = os.open(directory, flags)
        try:
            self._lock_directory(directory)
            self._close_to_others(directory)
            self._blobs = BlobFiles(os.path.join(directory, "blobs"))
        except BaseException:
            os.close(self._fd)
            raise

    def _lock_directory(self, directory: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = (
                "another host keeps its checkpoints there; stop that one, or give this"
                " one another [host] state_dir"
            )
            raise OSError(errno.EAGAIN, text, directory) from None

    def _close_to_others(self, directory: str) -> None:
        """Close a directory that was made open to others: it holds conversations."""
        if not os.fstat(self._fd).st_mode & 0o077:
            return
        try:
            os.fchmod(self._fd, 0o700)
        except PermissionError:
            text = (
                "others may look into it, and only its owner can change that: chmod 700"
                " it, or name another [host] state_dir"
            )
            raise OSError(errno.EPERM, text, directory) from None

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, SQLite's own among them."""
        own = set()
        if self._database is not None:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(self._path + suffix)
                    own.add((status.st_dev, status.st_ino))
        for fd in (
            self._fd,
            self._blobs.fd,
            *(fd for _, fd in descriptors_by_file(own)),
        ):
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

    def save(
        self,
        process: CheckpointedProcess,
        owner: str,
        label: str,
        checkpoint: str = "",
        snapshots: tuple[WorkspaceSnapshot, ...] = (),
    ) -> Summary:
        """Save the present state of a process.

        Args:
            process: the saved one.
            owner: gets the checkpoint.
            label: the caller's name for it.
            checkpoint: its id, of ``new_checkpoint_id``; "" for a new one.
            snapshots: of the child's workspaces, made with it.

        Raises:
            FdError: ``file_operation``, ``corrupt``.
        """
        with self._lock, word_faults():
            database = self._open()
            fds = list(process.table.fds.values())
            originals = [fd.content.original for fd in fds]
            blobs = {blob.key.hex(): blob for blob in originals}
            doomed = self._find_outlived(database, owner)
            self._check_room(database, owner, blobs, doomed)
            with self._remove_on_failure(database, blobs):
                self._write(blobs)
                state = state_of(process, snapshots)
            made = Summary(
                checkpoint or new_checkpoint_id(),
                time.time(),
                label,
                len(fds),
                sum(blob.size for blob in blobs.values()),
                len(process.messages),
                snapshots,
            )
            with transaction(database):
                database.execute(
                    f"INSERT INTO checkpoint ({COLUMNS}, owner)"  # noqa: S608 - ours
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row_of(owner, made, state), owner),
                )
                database.executemany(
                    "INSERT INTO held VALUES (?, ?, ?, ?)",
                    [(made.id, owner, key, blob.size) for key, blob in blobs.items()],
                )
                keys = delete_rows(database, doomed)
            self._blobs.remove(find_unheld(database, keys))
            return made

    def _write(self, blobs: dict[str, Blob]) -> None:
        """Write contents under their names, if they are not there and whole.

        Raises:
            OSError: the disk refused.
        """
        files = self._blobs
        for name, blob in blobs.items():
            if self._is_whole(name, blob):
                continue
            part = make_part_name()
            try:
                files.append(part, b"")  # a content may be empty
                for piece in blob.pieces():
                    files.append(part, piece)
                files.flush(part)
                files.rename(part, name)
            except BaseException:
                files.remove([part])
                raise
        os.fsync(files.fd)

    def _is_whole(self, name: str, blob: Blob) -> bool:
        """Return whether an earlier checkpoint has left this content undamaged."""
        digest = blake3()
        try:
            for piece in self._blobs.pieces(name, STEP_BYTES):
                digest.update(piece)
        except FileNotFoundError:
            return False
        return digest.digest() == blob.key

    @contextlib.contextmanager
    def _remove_on_failure(
        self, database: sqlite3.Connection, blobs: dict[str, Blob]
    ) -> Iterator[None]:
        """Remove the contents of a checkpoint if it fails.

        Otherwise a full disk would have less room with each try. They stay if a commit
        fails: the row may be there when the host starts again.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._blobs.remove(find_unheld(database, set(blobs)))
            raise

    def _find_outlived(self, database: sqlite3.Connection, owner: str) -> list[int]:
        """Return the rows that are removed when this owner makes another checkpoint."""
        doomed = self._find_aged(database)
        doomed += [row for row in self._find_unclaimed(database) if row not in doomed]
        count = self._retention.count
        if count:
            rows = database.execute(
                "SELECT rowid FROM checkpoint WHERE owner = ?"
                " ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?",
                (owner, count - 1),
            )
            doomed += [row[0] for row in rows.fetchall() if row[0] not in doomed]
        return doomed

    def _find_aged(self, database: sqlite3.Connection) -> list[int]:
        if not self._retention.age_s:
            return []
        rows = database.execute(
            "SELECT rowid FROM checkpoint WHERE created < ?",
            (time.time() - self._retention.age_s,),
        )
        return [row[0] for row in rows.fetchall()]

    def _find_unclaimed(self, database: sqlite3.Connection) -> list[int]:
        """Return the rows of nameless children that are gone, beyond a bound."""
        rows = database.execute(
            "SELECT rowid, owner, bytes FROM checkpoint WHERE owner GLOB ?"
            " ORDER BY created DESC, rowid DESC",
            (NAMELESS,),
        )
        doomed, count, size = [], 0, 0
        for row, owner, size_bytes in rows.fetchall():
            if owner in self.living:
                continue
            count += 1
            size += size_bytes if is_count(size_bytes) else 0
            if count > MOST_CHECKPOINTS or size > self.most_bytes:
                doomed.append(row)
        return doomed

    def drop_numbered(self) -> int:
        """Delete checkpoints of older programs, named by start order; return how many.

        Their owners are unknown: that order begins again with each host.

        Raises:
            FdError: ``file_operation``, ``corrupt``.
        """
        with self._lock, word_faults():
            if not os.path.exists(self._path):
                return 0
            database = self._open()
            query = "SELECT rowid FROM checkpoint WHERE owner GLOB ?"
            doomed = [row for (row,) in database.execute(query, (NUMBERED,)).fetchall()]
            self._delete(database, doomed)
            return len(doomed)

    def delete(self, owner: str, checkpoint: str) -> tuple[WorkspaceSnapshot, ...]:
        """Delete a checkpoint, and the contents that no other one holds.

        Returns:
            The snapshots that it had.

        Raises:
            FdError: ``not_found``, ``file_operation``, ``corrupt``.
        """
        with self._lock, word_faults():
            database = self._open()
            row = find(database, "rowid, state", owner, checkpoint)
            self._delete(database, [row[0]])
            return snapshots_in(row[1]) if isinstance(row[1], bytes) else ()

    def _delete(self, database: sqlite3.Connection, doomed: list[int]) -> None:
        with database:
            keys = delete_rows(database, doomed)
        self._blobs.remove(find_unheld(database, keys))

    def _check_room(
        self,
        database: sqlite3.Connection,
        owner: str,
        blobs: dict[str, Blob],
        doomed: list[int],
    ) -> None:
        rows = database.execute(
            "SELECT checkpoint.rowid, held.checkpoint, key, size FROM held"
            " LEFT JOIN checkpoint ON checkpoint.id = held.checkpoint"
            " WHERE held.owner = ?",
            (owner,),
        )
        sizes: dict[str, int] = {}
        for row, checkpoint, key, size in rows.fetchall():
            if row in doomed:
                continue
            if not is_key(key) or not is_count(size):
                raise make_damaged_error([print_id(checkpoint)])
            sizes[key] = size
        sizes.update({key: blob.size for key, blob in blobs.items()})
        found = database.execute(
            "SELECT rowid FROM checkpoint WHERE owner = ?", (owner,)
        )
        count = sum(row not in doomed for (row,) in found.fetchall())
        if count >= MOST_CHECKPOINTS or sum(sizes.values()) > self.most_bytes:
            text = "Cannot keep a checkpoint: Disk quota exceeded"
            raise FdError(FILE_OPERATION, text, "delete_checkpoint makes room")

    def all_of(self, owner: str) -> list[Summary]:
        """Return an owner's checkpoints, oldest first.

        Raises:
            FdError: ``file_operation``, ``corrupt``.
        """
        with self._lock, word_faults():
            database = self._open()
            rows = database.execute(
                "SELECT rowid, id FROM checkpoint WHERE owner = ?"
                " ORDER BY created, rowid",
                (owner,),
            )
            found, broken = [], []
            # One by one: a state may be long, and sorting would hold them all.
            look = f"SELECT {COLUMNS} FROM checkpoint WHERE rowid = ?"  # noqa: S608
            for row, name in rows.fetchall():
                whole = database.execute(look, (row,)).fetchone()
                read = None if whole is None else read_row(owner, whole)
                if read is None:
                    broken.append(print_id(name))
                else:
                    found.append(read[0])
            if broken:
                raise make_damaged_error(broken, found)
            return found

    def look_at(self, owner: str, checkpoint: str) -> Summary:
        """Return the facts of one checkpoint.

        Raises:
            FdError: ``not_found``, ``corrupt``, ``file_operation``.
        """
        with self._lock, word_faults():
            return self._find(owner, checkpoint)[0]

    def _find(self, owner: str, checkpoint: str) -> tuple[Summary, bytes]:
        row = find(self._open(), f"owner, {COLUMNS}", owner, checkpoint)
        found = read_row(row[0], row[1:])
        # A damaged index may lead to the sound row of another one.
        if found is None or found[0].id != checkpoint:
            raise make_damaged_error([checkpoint])
        return found

    def restore(
        self, process: CheckpointedProcess, owner: str, checkpoint: str
    ) -> Summary:
        """Restore a process from a checkpoint; a failure changes nothing.

        Raises:
            FdError: ``not_found``, ``corrupt``, ``file_operation``.
        """
        with self._lock, word_faults():
            was, state = self._find(owner, checkpoint)
            kept = read_state(state)
            if kept is None:
                raise make_damaged_error([checkpoint])
            store = process.table.store
            read = partial(self._content, store, checkpoint=checkpoint)
            table = table_of(store, kept, read)
        try:
            process.table.adopt(table)
        finally:
            table.close()
        process.messages = kept.messages
        process.program = kept.program
        return was

    def _content(self, store: Store, key: str, checkpoint: str) -> Content:
        """Return the content of a key; the base64 of a binary one is made again."""
        writer = store.writer()
        try:
            for piece in self._blobs.pieces(key, STEP_BYTES):
                writer.add(piece)
            if writer.digest().hex() != key:
                raise make_damaged_error([checkpoint])
            return writer.finish()
        except FileNotFoundError:
            raise make_damaged_error([checkpoint]) from None
        finally:
            writer.close()

    # The database

    def _open(self) -> sqlite3.Connection:
        if self._database is not None:
            return self._database
        if self._fd < 0:
            raise FdError(FILE_OPERATION, "Cannot use checkpoints: they are closed")
        # SQLite follows links.
        os.close(open_private(DATABASE, self._fd))
        database = open_database(
            self._path, SCHEMA, synchronous="FULL", isolation_level="DEFERRED"
        )
        database.text_factory = decode_text
        try:
            doomed = {*self._find_aged(database), *self._find_unclaimed(database)}
            self._delete(database, list(doomed))
            rows = database.execute("SELECT DISTINCT key FROM held")
            self._blobs.remove_all_but({key for (key,) in rows.fetchall()})
        except BaseException:
            database.close()
            raise
        self._database = database
        return database
