"""A buffer that cuts received bytes into lines and payloads, in O(n).

Rules of this file.

1. A byte is copied at most twice, whatever the sizes of the pieces: once into the
   partial line it belongs to, once out as that line.  A line that lies whole in one
   piece is cut from it directly, and so are payload bytes.
2. A byte is searched for LF once: the search continues where it stopped.
3. At most one line's limit is held, plus the piece received last.
"""


class ReceiveBuffer:
    """Pieces in, lines and payload bytes out.

    Attributes:
        at: offset of the next unread byte in the piece received last.
        end: length of that piece.
    """

    __slots__ = ("_partial", "_piece", "at", "end")

    def __init__(self) -> None:
        self._piece = b""
        self.at = 0
        self.end = 0
        self._partial = bytearray()

    def __len__(self) -> int:
        """Return the number of held bytes."""
        return len(self._partial) + self.end - self.at

    def peek(self) -> bytes:
        """Return the held bytes, and keep them."""
        return bytes(self._partial) + self._piece[self.at :]

    def append(self, piece: bytes, start: int = 0) -> None:
        """Add a received piece, from ``start`` on."""
        if self.at < self.end:
            # Only a caller that feeds before it has drained comes here.
            piece = self._piece[self.at :] + piece[start:]
            start = 0
        self._piece = piece
        self.at = start
        self.end = len(piece)

    def take_line(self, limit: int) -> bytes | None:
        """Cut the next line off, without its LF.

        Args:
            limit: most bytes that the line may have.

        Returns:
            The line, or None while its LF has not come.

        Raises:
            OverflowError: there are more than ``limit`` bytes and no LF among them;
                they are dropped, and the caller continues with ``skip_line``.
        """
        piece = self._piece
        start = self.at
        end = piece.find(b"\n", start)
        partial = self._partial
        if end < 0:
            self.at = len(piece)
            if len(partial) + len(piece) - start > limit:
                partial.clear()
                raise OverflowError
            partial += memoryview(piece)[start:]
            return None
        if len(partial) + end - start > limit:
            partial.clear()
            self.at = end
            raise OverflowError
        self.at = end + 1
        if not partial:
            return piece[start:end]
        partial += memoryview(piece)[start:end]
        line = bytes(partial)
        partial.clear()
        return line

    def skip_line(self) -> bool:
        """Drop bytes up to and including LF; return whether the LF was among them."""
        end = self._piece.find(b"\n", self.at)
        self.at = len(self._piece) if end < 0 else end + 1
        return end >= 0

    def take(self, limit: int) -> bytes:
        """Remove and return up to ``limit`` payload bytes; empty when there are none."""
        start = self.at
        piece = self._piece[start : start + limit]
        self.at = start + len(piece)
        return piece
