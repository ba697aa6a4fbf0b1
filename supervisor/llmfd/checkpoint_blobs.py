"""The contents of checkpoints: files named by the hash of their bytes.

Writes them whole, tells whole ones from damaged ones, and removes them.

Rules of this file.

1. A file gets its name when all of it is on the disk: it is written beside, flushed and
   renamed.
2. A file that exists is hashed before it is trusted.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from blake3 import blake3

from supervisor.llmfd.spool import write_all
from supervisor.llmfd.store import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.llmfd.blob import Blob
    from supervisor.llmfd.store import Writer


class BlobFiles:
    """The files in one directory.

    Args:
        fd: the directory; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close the directory; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def write(self, blobs: dict[str, Blob]) -> None:
        """Write contents under their names, if they are not there.

        Raises:
            OSError: the disk refused; partial files are removed.
        """
        for name, blob in blobs.items():
            if not self._is_whole(name, blob):
                self._write(name, blob)
        os.fsync(self.fd)

    def _write(self, name: str, blob: Blob) -> None:
        partial_name = f"{name}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(partial_name, flags, 0o600, dir_fd=self.fd)
        try:
            for piece in blob.pieces():
                write_all(fd, piece)
            os.fsync(fd)
        except BaseException:
            os.unlink(partial_name, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)
        os.rename(partial_name, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def _is_whole(self, name: str, blob: Blob) -> bool:
        """Return whether an earlier checkpoint has left this content undamaged."""
        try:
            fd = self._open(name)
        except FileNotFoundError:
            return False
        digest = blake3()
        try:
            while piece := os.read(fd, STEP_BYTES):
                digest.update(piece)
        finally:
            os.close(fd)
        return digest.digest() == blob.key

    def read(self, name: str, writer: Writer) -> None:
        """Pass a content to a writer, whose digest shows damage.

        Raises:
            FileNotFoundError: there is none.
        """
        fd = self._open(name)
        try:
            while piece := os.read(fd, STEP_BYTES):
                writer.add(piece)
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)

    def remove(self, names: Iterable[str]) -> None:
        """Remove contents without a holder.

        A file that the disk refuses to remove stays: ``remove_all_but`` of the next
        host tries again, and no checkpoint needs it.
        """
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.fd)

    def remove_all_but(self, held: set[str]) -> None:
        """Remove partial files, and contents without a holder, of a killed host.

        Only regular files are removed: other things here were made by a user.
        """
        with os.scandir(self.fd) as entries:
            strays = [
                entry.name
                for entry in entries
                if entry.name not in held and entry.is_file(follow_symlinks=False)
            ]
        self.remove(strays)
