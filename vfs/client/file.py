"""A file of the host as an ``io.RawIOBase``, for csv, json, zipfile.

The host keeps one offset a handle (spec P1), and no command returns it, so it is counted
here.  If it cannot be counted (after a write in an append mode), or the end is needed, it
is searched for.
"""

from __future__ import annotations

import io
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from _typeshed import ReadableBuffer, WriteableBuffer

    from vfs.client.decode import Status
    from vfs.client.errors import Name

    class FileRequests(Protocol):
        """The methods of ``vfs.client.Client`` that a file uses."""

        def readinto(self, fileno: int, buffer: WriteableBuffer) -> int:
            """Read with one READ into a buffer; return the number of bytes."""

        def read(self, fileno: int, size: int) -> bytes:
            """Read with one READ."""

        def read_all(self, fileno: int) -> bytes:
            """Read to the end of the file."""

        def write(self, fileno: int, data: ReadableBuffer) -> int:
            """Write everything and return its size in bytes."""

        def seek(self, fileno: int, offset: int) -> int:
            """Set the offset and return it."""

        def truncate(self, fileno: int, size: int) -> None:
            """Set the file's size."""

        def stat(self, name: Name, top_level: bool | None = None) -> Status:
            """Return size, time and kind of a name."""

        def close(self, fileno: int) -> None:
            """Close the file."""

        def abandon(self, fileno: int) -> None:
            """Let the next request close the file."""


_FIRST_GUESS_BYTES = 65_536
"""First offset of the search for the end of a file: most files are shorter."""


class ProxyFile(io.RawIOBase):
    """One open file; made by ``Client.open_file``.

    ``seek`` and ``truncate`` raise ``UnknownCommandError`` if the host does not know SEEK
    or TRUNCATE.  A file that is dropped without ``close()`` is closed by the client's next
    request, since a finalizer may run in the middle of one.

    Attributes:
        name: the name with which it was opened.
        mode: the wire's mode.
        proxy_fileno: the host's number; ``fileno()`` raises, for it is no descriptor of
            this process.
    """

    def __init__(
        self,
        client: FileRequests,
        proxy_fileno: int,
        name: Name,
        mode: str,
        top_level: bool | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.mode = mode
        self.proxy_fileno = proxy_fileno
        self._client = client
        self._top_level = top_level
        self._position: int | None = None if mode == "a" else 0

    def __repr__(self) -> str:
        return f"<ProxyFile {self.proxy_fileno} name={self.name!r} mode={self.mode!r}>"

    def readable(self) -> bool:
        """Return whether the mode reads."""
        return self.mode not in ("w", "a")

    def writable(self) -> bool:
        """Return whether the mode writes."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """Return True; ``seek`` raises if the host cannot."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read at the offset into a buffer; return the number of bytes, 0 at the end."""
        self._check(reads=True)
        count = self._client.readinto(self.proxy_fileno, buffer)
        if self._position is not None:
            self._position += count
        return count

    def readall(self) -> bytes:
        """Read from the offset to the end."""
        self._check(reads=True)
        data = self._client.read_all(self.proxy_fileno)
        if self._position is not None:
            self._position += len(data)
        return data

    def write(self, data: ReadableBuffer, /) -> int:
        """Write everything at the offset, in append modes at the end."""
        self._check(writes=True)
        try:
            written = self._client.write(self.proxy_fileno, data)
        except BaseException:
            self._position = None  # earlier pieces may have been written
            raise
        if self.mode[0] == "a":
            self._position = None  # at the end, which other writers may have moved
        elif self._position is not None:
            self._position += written
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the offset and return it, in bytes from the start.

        Raises:
            io.UnsupportedOperation: from the end, in mode ``w``: the content cannot be
                seen before the file is closed.
        """
        self._check()
        if whence == os.SEEK_CUR:
            offset += self.tell()
        elif whence == os.SEEK_END:
            offset += self._end()
        elif whence != os.SEEK_SET:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        if offset < 0:
            raise ValueError(f"negative seek position {offset}")
        self._position = self._client.seek(self.proxy_fileno, offset)
        return self._position

    def tell(self) -> int:
        """Return the offset, in bytes from the start."""
        self._check()
        if self._position is not None:
            return self._position
        if self.mode[0] != "a":
            raise io.UnsupportedOperation("the offset is unknown since a failed write")
        end = self._end()
        if self.readable():
            self._client.seek(self.proxy_fileno, end)  # the search moved the offset
            self._position = end
        return end

    def truncate(self, size: int | None = None, /) -> int:
        """Set the file's size, by default to the offset, which stays."""
        self._check(writes=True)
        size = self.tell() if size is None else size
        self._client.truncate(self.proxy_fileno, size)
        return size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            try:
                super().close()
            finally:
                self._client.close(self.proxy_fileno)

    def __del__(self) -> None:
        """Let the client's next request close the number."""
        if not self.closed:
            self._client.abandon(self.proxy_fileno)

    def _end(self) -> int:
        """Return the file's size; moves the offset of a handle that reads.

        For a handle that reads, the end is found by bisection with at most 60 requests:
        its name may be another file by now.  For a handle in mode ``a`` the name is
        looked up.
        """
        if not self.readable():
            if self.mode == "w":
                raise io.UnsupportedOperation("mode w cannot tell where the file ends")
            return self._client.stat(self.name, self._top_level).size
        if not self._has_byte_at(0):
            return 0
        inside, beyond = 0, _FIRST_GUESS_BYTES
        while self._has_byte_at(beyond):
            inside, beyond = beyond, beyond * 2
        while beyond - inside > 1:
            middle = (inside + beyond) // 2
            if self._has_byte_at(middle):
                inside = middle
            else:
                beyond = middle
        return beyond

    def _has_byte_at(self, offset: int) -> bool:
        self._client.seek(self.proxy_fileno, offset)
        self._position = None
        return bool(self._client.read(self.proxy_fileno, 1))

    def _check(self, *, reads: bool = False, writes: bool = False) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if reads and not self.readable():
            raise io.UnsupportedOperation(f"not open for reading: mode {self.mode}")
        if writes and not self.writable():
            raise io.UnsupportedOperation(f"not open for writing: mode {self.mode}")
