"""What is handed over of a host's LLM fds, as plain forms: see ``handover``."""

from __future__ import annotations

from typing import Any

import msgspec

Piece = tuple[int, int]
"""(offset, size) in the file in memory."""


class BlobState(msgspec.Struct):
    """See ``Blob``.

    Attributes:
        data: where it is in the file in memory, if it is there.
        fd: the file that is it; -1 for none.
        slot: (slot size, number), if it lies in one.
        newlines, starts, ends_line: see ``TextIndex``; None for what is no text.
        tables: (page size, where the starts of its pages are).
    """

    key: str
    size: int
    data: Piece | None
    fd: int
    slot: tuple[int, int] | None
    newlines: Piece | None
    starts: Piece | None
    ends_line: bool
    tables: list[tuple[int, Piece]]


class FdState(msgspec.Struct):
    """See ``LlmFd``; ``blobs`` are the keys of its content."""

    number: int
    blobs: list[str]
    page_size: int
    source: str
    created: float
    name: str
    sections: dict[str, tuple[int, int]]
    language: str


class WriterState(msgspec.Struct):
    """What was put in under a token so far: in memory, in the file ``fd``, or in a slot."""

    token: str
    size: int
    pieces: list[Piece]
    fd: int
    slot: tuple[int, int] | None = None


class ProcessState(msgspec.Struct):
    """See ``Process``; ``shared`` is a number."""

    shared: int
    fds: list[FdState]
    next_number: int
    messages: Any
    program: str
    claim: bool
    depth: int
    writers: list[WriterState]
    put_contents: int
    checkpoints_seen: list[str] | None = None
    checkpoints_made: list[str] = []


class SharedState(msgspec.Struct):
    """What the processes of one child share; files are (id, version, keys)."""

    owner: str
    made: int
    files: list[tuple[str, int, list[str]]]


class SlotsState(msgspec.Struct):
    """See ``SlotFile``."""

    slot_bytes: int
    fd: int
    count: int
    free: list[int]


class StoreState(msgspec.Struct):
    """Contents, and where they are."""

    memory_fd: int
    slots: list[SlotsState]
    blobs: list[BlobState]
