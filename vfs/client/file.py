"""A file of the host as an ``io.RawIOBase``, so that csv, json, zipfile work on it.

The offset is kept by the host, one a handle (spec P1), and no command tells it, so it
is counted here.  Where it cannot be counted (after a write in an append mode) and where
the end is asked for, it is looked up.
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

    class Requests(Protocol):
        """What a file asks of its client; each is as ``vfs.client.Client`` says."""

        def readinto(self, fileno: int, buffer: WriteableBuffer) -> int:
            """Read with one READ into memory; return how many bytes came."""

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
            """Have the next request close the file."""


_FIRST_GUESS_BYTES = 65_536
"""Where the search for the end of a file begins: most end before."""


class ProxyFile(io.RawIOBase):
    """One open file; made by ``Client.open_file``.

    ``seek`` needs a host that knows SEEK, ``truncate`` one that knows TRUNCATE; with
    another they raise ``UnknownCommandError``.  A file that is dropped without
    ``close()`` is closed by the client's next request: a finalizer may run in the
    middle of one.

    Attributes:
        name: as it was opened.
        mode: the wire's mode.
        proxy_fileno: the host's number; ``fileno()`` raises, for no descriptor of this
            process has it.
    """

    def __init__(
        self,
        client: Requests,
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
        """Tell whether the mode reads."""
        return self.mode not in ("w", "a")

    def writable(self) -> bool:
        """Tell whether the mode writes."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """Tell True: a host that cannot says so when asked."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read at the offset into memory; 0 is the end."""
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
            self._position = None  # pieces before the one that failed may be there
            raise
        if self.mode[0] == "a":
            self._position = None  # at the end, wherever others have moved it
        elif self._position is not None:
            self._position += written
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the offset and return it, in bytes from the start.

        Raises:
            io.UnsupportedOperation: from the end, in mode ``w``: what its file holds
                cannot be seen before it is closed.
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
            self._client.seek(self.proxy_fileno, end)  # looking for it moved it
            self._position = end
        return end

    def truncate(self, size: int | None = None, /) -> int:
        """Set the file's size; None: the offset.  The offset stays."""
        self._check(writes=True)
        size = self.tell() if size is None else size
        self._client.truncate(self.proxy_fileno, size)
        return size

    def close(self) -> None:
        """Close the file; the second time nothing happens."""
        if not self.closed:
            try:
                super().close()
            finally:
                self._client.close(self.proxy_fileno)

    def __del__(self) -> None:
        """Leave the number to the client's next request."""
        if not self.closed:
            self._client.abandon(self.proxy_fileno)

    def _end(self) -> int:
        """Return the file's size; moves the offset of a handle that reads.

        A handle that reads is asked itself, by halving: its name may stand for another
        file by now.  There are 60 requests at most.  A handle in mode ``a`` cannot be
        asked, its name can.
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
