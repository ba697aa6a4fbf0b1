"""The payload of LLM_CHAT: the ends of its four parts, and the LFs between them.

Four byte strings follow the line, concatenated.  Some clients put an LF after each of
the first three and leave those out of the counts; three bytes of the payload show
whether a client does (spec L1).  ``ChatBody`` looks at them and keeps no payload.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself would cost a child 3 ms
if TYPE_CHECKING:
    from protocol import messages as m

PARTS = (b"input files", b"output files", b"prompt", b"preset")
"""The names of the parts in an error, in order (spec L2)."""

SEPARATORS = 3
"""How many LFs a separated payload has beyond its counts."""

_LF = 10


class ChatBody:
    """Follows one payload of LLM_CHAT, piece by piece.

    Args:
        lengths: of the four parts, as declared.

    Attributes:
        is_extended: the host has already added the separators to the declared length.
    """

    __slots__ = ("_hits", "_lengths", "_marks", "_seen", "is_extended")

    def __init__(self, lengths: tuple[int, ...]) -> None:
        inputs, outputs, prompt, preset = lengths
        self._lengths = lengths
        self._marks: tuple[int, ...] = ()
        if preset >= SEPARATORS:
            self._marks = (inputs, inputs + outputs + 1, inputs + outputs + prompt + 2)
        self._seen = 0
        self._hits = 0
        self.is_extended = False

    @classmethod
    def of(cls, request: m.Request) -> ChatBody | None:
        """Return a follower for an LLM_CHAT, refused or not; None for other requests."""
        return cls(request.parts) if request.parts else None

    @property
    def progress(self) -> tuple[tuple[int, ...], int, int]:
        """The arguments of ``resume`` that continue from here."""
        return self._lengths, self._seen, self._hits

    @classmethod
    def resume(cls, lengths: tuple[int, ...], seen: int, hits: int) -> ChatBody:
        """Return a follower that continues a payload whose beginning has passed."""
        body = cls(lengths)
        body._seen, body._hits = seen, hits
        return body

    def feed(self, piece: bytes | memoryview) -> None:
        """Look at the next bytes of the declared payload."""
        for mark in self._marks:
            at = mark - self._seen
            if 0 <= at < len(piece) and piece[at] == _LF:
                self._hits += 1
        self._seen += len(piece)

    @property
    def is_separated(self) -> bool:
        """Whether three more bytes belong to the payload; known once all was fed."""
        return self._hits == SEPARATORS

    @property
    def wants_more(self) -> bool:
        """Whether the three more bytes must still be added; known once all was fed."""
        return self.is_separated and not self.is_extended

    def split(self, data: bytes | memoryview) -> tuple[bytes, ...]:
        """Return the four parts of a complete payload."""
        gap = int(self.is_separated)
        parts = []
        start = 0
        for length in self._lengths:
            parts.append(bytes(data[start : start + length]))
            start += length + gap
        return tuple(parts)

    def first_incomplete(self) -> bytes:
        """Return the name of the first part that is not complete (spec L2)."""
        end = 0
        for name, length in zip(PARTS, self._lengths, strict=True):
            end += length
            if self._seen < end:
                return name
        return PARTS[-1]
