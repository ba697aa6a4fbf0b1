"""Bases of workspaces that travel: packed here for others, and those of others.

Rules of this file.

1. A base is named by the SHA-256 of its tar. It is there whole or not at all: it is made
   under another name, synced, and renamed.
2. A base that no workspace and no child uses goes when more than so many are kept, the
   one that was used longest ago first. Half made ones go at the start.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from supervisor.fleet.messages import Base
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.directory import COPIES

_PACKED = "fleet-packed"
_TAR, _PATHS, _TREE, _SIZE = "tar", "paths", "tree", "size"
_NEW = ".new-"
_DIGEST_CHARS = 64

_FILE_CLOCK = 5
"""CLOCK_REALTIME_COARSE, as files' times have it: clock_gettime(2)."""


class BaseError(Exception):
    """A base cannot be packed, sent or used; the text says why and what to do."""


class PeerError(BaseError):
    """Another node is not reached, or refuses; it may be tried again."""


class BaseRow(msgspec.Struct, frozen=True):
    """A base of another node that is kept here, when the last one had come."""

    digest: str
    size_bytes: int
    is_used: bool


class IncomingBase:
    """A tar that comes from another node; its methods block.

    Args:
        base: the base that it is to become.
        directory: in which it becomes that.

    Raises:
        OSError: it cannot be kept.
    """

    def __init__(self, base: Base, directory: Path) -> None:
        self.base = base
        self.directory = directory
        self.file = (directory / _TAR).open("x+b")
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        """Take a piece.

        Raises:
            BaseError: there is more than was announced.
            OSError: it cannot be kept.
        """
        self._size_bytes += len(data)
        if self._size_bytes > self.base.size_bytes:
            raise BaseError(f"cannot take base {self.base.digest}: it is too long")
        self._digest.update(data)
        self.file.write(data)

    def check(self) -> None:
        """Refuse what is not the base.

        Raises:
            PeerError: a part is missing, or it is something else.
        """
        if self._digest.hexdigest() != self.base.digest:
            raise PeerError(
                f"cannot take base {self.base.digest}: what node {self.base.node!r} sent"
                " is another content, or not all of it"
            )


class Bases:
    """The bases of one daemon; its methods block.

    Args:
        state_dir: has them, and the workspaces.
        max_bytes: of one.
        kept: how many are kept that nothing uses, packed and unpacked ones apart.
    """

    def __init__(self, state_dir: str, max_bytes: int, kept: int) -> None:
        self.state_dir = state_dir
        self._packed = Path(state_dir, _PACKED)
        self._unpacked = Path(state_dir, COPIES)
        self._max_bytes = max_bytes
        self._kept = kept

    def open(self) -> list[BaseRow]:
        """Remove what was half made; return what is there.

        Raises:
            OSError: its directories cannot be used.
        """
        for where in (self._packed, self._unpacked):
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in where.iterdir():
                if path.name.startswith(_NEW):
                    _remove(path)
        # Without links, as workspaces have the paths of their bases.
        top = os.open(self._unpacked, os.O_PATH | os.O_CLOEXEC)
        self._unpacked = Path(os.readlink(f"/proc/self/fd/{top}"))  # noqa: PTH115
        os.close(top)
        return self.sweep(frozenset())

    # On the node that has the directory

    def pack(self, path: str, node: str) -> Base:
        """Pack a directory; one with the same content is not packed twice.

        Raises:
            BaseError: it is no directory, too large, or has special files.
        """
        from supervisor.workspace.directory import WorkspaceError  # noqa: PLC0415 - seldom

        new = _new_path(self._packed)
        try:
            new.mkdir(mode=0o700)
            try:
                return self._pack(path, node, new)
            finally:
                _remove(new)
        except WorkspaceError as why:
            raise BaseError(str(why)) from None
        except OSError as why:
            text = f"cannot pack {path!r}: {why.strerror}"
            raise BaseError(f"{text}; name a directory that can be read") from None

    def _pack(self, path: str, node: str, new: Path) -> Base:
        from supervisor.workspace.archive import pack_tree  # noqa: PLC0415 - as above
        from supervisor.workspace.run import find_base  # noqa: PLC0415 - as above

        packed_ns = time.clock_gettime_ns(_FILE_CLOCK)
        real = find_base(path, self.state_dir)
        top = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with (new / _TAR).open("xb") as file:
                paths = pack_tree(top, file, self._max_bytes)
        finally:
            os.close(top)
        with (new / _TAR).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (new / _PATHS).write_bytes(b"\0".join(paths))
        size = (new / _TAR).stat().st_size
        _name(new, self._packed / digest)
        self._drop([one for one in _by_age(self._packed) if one.name != digest])
        return Base(node, real, digest, size, packed_ns)

    def open_packed(self, digest: str) -> IO[bytes]:
        """Open the tar of a base that was packed here.

        Raises:
            BaseError: it is not kept any more.
        """
        return self._open(digest, _TAR)

    def paths_of(self, digest: str) -> frozenset[bytes]:
        """Return the paths in a base that was packed here.

        Raises:
            BaseError: it is not kept any more.
        """
        with self._open(digest, _PATHS) as file:
            return frozenset(file.read().split(b"\0"))

    def _open(self, digest: str, name: str) -> IO[bytes]:
        try:
            _check(digest)
            os.utime(self._packed / digest)
            return (self._packed / digest / name).open("rb")
        except OSError as why:
            raise BaseError(
                f"cannot open base {digest}: {why.strerror}; it is not kept any more:"
                " start the child anew"
            ) from None

    def open_unnamed(self) -> IO[bytes]:
        """Open a file without a name, for changes that come from another node.

        Raises:
            BaseError: there is no room for it.
        """
        try:
            return tempfile.TemporaryFile(dir=self._packed)
        except OSError as why:
            raise BaseError(
                f"cannot take changes: {why.strerror}; make room in the daemon's"
                " state_dir"
            ) from None

    # On other nodes

    def find(self, digest: str) -> str | None:
        """Return the directory of a base that is here; None if it is not."""
        _check(digest)
        path = self._unpacked / digest
        with suppress(FileNotFoundError):
            os.utime(path)
            return str(path / _TREE)
        return None

    def begin(self, base: Base) -> IncomingBase:
        """Return what takes a base as it comes; `finish` or `give_up` is to follow.

        Raises:
            BaseError: it is too large for this node.
            OSError: it cannot be kept.
        """
        _check(base.digest)
        if base.size_bytes > self._max_bytes:
            raise BaseError(
                f"cannot take base {base.digest}: it has {base.size_bytes} bytes; raise"
                f" base_size in [fleet] of this node, which is {self._max_bytes}"
            )
        new = _new_path(self._unpacked)
        new.mkdir(mode=0o700)
        return IncomingBase(base, new)

    def finish(self, incoming: IncomingBase) -> None:
        """Keep what has come whole.

        Raises:
            BaseError: it is not the base.
            OSError: it cannot be kept.
        """
        from supervisor.workspace.archive import unpack_tree  # noqa: PLC0415 - seldom
        from supervisor.workspace.directory import WorkspaceError  # noqa: PLC0415

        incoming.check()
        base, new = incoming.base, incoming.directory
        incoming.file.seek(0)
        (new / _TREE).mkdir(mode=0o700)
        top = os.open(new / _TREE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            unpack_tree(incoming.file, top)
        except WorkspaceError as why:
            raise BaseError(str(why)) from None
        finally:
            os.close(top)
        (new / _TAR).unlink()
        (new / _SIZE).write_text(str(base.size_bytes), encoding="ascii")
        _name(new, self._unpacked / base.digest)

    def give_up(self, incoming: IncomingBase) -> None:
        """Remove what has not become a base.

        Raises:
            OSError: it cannot be removed.
        """
        incoming.file.close()
        _remove(incoming.directory)

    def sweep(self, held: frozenset[str]) -> list[BaseRow]:
        """Remove bases beyond those that are kept; return those that are left.

        Args:
            held: digests of those that children use now.
        """
        from supervisor.workspace.directory import read_bases  # noqa: PLC0415 - seldom

        used = set(read_bases(self.state_dir))
        found = _by_age(self._unpacked)
        in_use = {
            path
            for path in found
            if path.name in held or os.fsencode(path / _TREE) in used
        }
        self._drop([path for path in found if path not in in_use])
        return [
            BaseRow(path.name, _size_of(path), path in in_use)
            for path in _by_age(self._unpacked)
        ]

    def _drop(self, unused: list[Path]) -> None:
        """Remove the oldest of some that nothing uses, beyond those that are kept."""
        for path in unused[: max(0, len(unused) - self._kept)]:
            gone = _new_path(path.parent)
            with suppress(FileNotFoundError):
                path.rename(gone)
                _remove(gone)


def _new_path(where: Path) -> Path:
    return where / f"{_NEW}{secrets.token_hex(8)}"


def _name(new: Path, path: Path) -> None:
    """Rename a whole directory into place, on the disk; an existing one stays."""
    from supervisor.workspace.linux import sync_file_system  # noqa: PLC0415 - seldom

    top = os.open(new.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file_system(top)
        try:
            new.rename(path)
        except OSError as why:
            if why.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
        os.utime(path)
        os.fsync(top)
    finally:
        os.close(top)


def _by_age(where: Path) -> list[Path]:
    """Return the whole ones in a directory, the one used longest ago first."""
    found = []
    for path in where.iterdir():
        if not path.name.startswith(_NEW):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _size_of(path: Path) -> int:
    try:
        return int((path / _SIZE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _check(digest: str) -> None:
    """Refuse what no tar is named.

    Raises:
        BaseError: it is such.
    """
    if len(digest) != _DIGEST_CHARS or not digest.isalnum():
        raise BaseError(f"cannot use base {digest!r}: it is no SHA-256")


def _remove(path: Path) -> None:
    """Remove a directory, if it is there."""
    why = remove_tree(path)
    if why is not None and not isinstance(why, FileNotFoundError):
        raise why
