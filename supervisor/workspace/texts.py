"""The texts from which files of a workspace began, for a merge with the base.

Rules:
 1. A text is kept while the base still has what was seen. It is named by its content, so
    it stays the right one whatever becomes of the record that names it.
 2. The texts of a workspace and its forks lie in one directory among the sealed layers,
    so a fork copies none. Only a workspace that shares it with no other drops texts.
 3. A text is not synced. One that a power cut has damaged counts as not kept.

Spec WS11a.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.settings import disk_room

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.layers import LayeredTree
    from supervisor.workspace.record import BaseObject, Record

MAX_TEXT_BYTES = 1 << 20
_LOOK_BYTES = 8000
_NAME_BYTES = 16
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_text(content: bytes) -> bool:
    """Tell whether some content can be merged."""
    return len(content) <= MAX_TEXT_BYTES and b"\0" not in content


def rows_to_keep(rows: Sequence[Row], record: Record) -> list[Row]:
    """Return the rows whose base is unchanged and whose text is not kept."""
    found = []
    for row in rows:
        seen = record.get(row.path)
        if seen is None or seen.text or not row.is_edit or row.old is None:
            continue
        status = row.old.status
        if _is_seen(status, seen) and status.st_size <= MAX_TEXT_BYTES:
            found.append(row)
    return found


def keep_texts(
    directory: int, base: LayeredTree, rows: Sequence[Row], record: Record
) -> None:
    """Keep the texts of some rows, and name them in the record."""
    free, kept = disk_room(directory)
    room_bytes = free - kept
    for row in rows:
        seen = record[row.path]
        content = _read_as_seen(base, row, seen)
        if content is None or not is_text(content):
            continue
        room_bytes -= len(content)
        if kept and room_bytes < 0:  # some file systems have no bound to tell
            return  # without a kept text there is no merge, which a commit says
        try:
            name = _write(directory, content)
        except OSError as why:
            if why.errno not in _NO_ROOM:
                raise
            return
        record[row.path] = msgspec.structs.replace(seen, text=name)


def read_text(directory: int, name: bytes) -> bytes | None:
    """Return a kept text; None if it is not there whole."""
    try:
        fd = os.open(name.hex(), os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        content = file.read()
    return content if _name_of(content) == name else None


def drop_texts(directory: int, named: Collection[bytes]) -> None:
    """Remove the texts that no record names."""
    wanted = {name.hex() for name in named}
    for name in os.listdir(directory):
        if name not in wanted:
            os.unlink(name, dir_fd=directory)


def _is_seen(status: os.stat_result, seen: BaseObject) -> bool:
    """Tell whether a file of the base is the one that was seen."""
    now = (status.st_dev, status.st_ino, status.st_ctime_ns)
    return stat.S_ISREG(status.st_mode) and now == (
        seen.device,
        seen.inode,
        seen.ctime_ns,
    )


def _read_as_seen(base: LayeredTree, row: Row, seen: BaseObject) -> bytes | None:
    """Return a file's content if the base still has what was seen; else None."""
    if row.old is None:
        return None
    try:
        fd = base.open_file(row.old)
    except OSError:  # not there any more, or not to be read: others may have written it
        return None
    with open(fd, "rb") as file:
        content = file.read(_LOOK_BYTES)
        if is_text(content):  # most files that are none show it here
            content += file.read(MAX_TEXT_BYTES)
        return content if _is_seen(os.fstat(fd), seen) else None


def _name_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_NAME_BYTES).digest()


def _write(directory: int, content: bytes) -> bytes:
    """Write a text if it is not there; return what names it."""
    name = _name_of(content)
    text = name.hex()
    try:
        if os.stat(text, dir_fd=directory).st_size == len(content):
            return name
    except FileNotFoundError:
        pass
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(text, flags, 0o600, dir_fd=directory), "wb") as file:
        file.write(content)
    return name
