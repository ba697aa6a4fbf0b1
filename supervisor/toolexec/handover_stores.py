"""The parts of a log, handed over: files by their descriptors, memory as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.toolexec.logstores import File, Head, Note, Store, Window
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from supervisor.toolexec.logquota import Quota


class StoreState(msgspec.Struct):
    """See ``logstores``; ``data`` is what lies in memory, in the order of its place."""

    kind: str
    start: int
    data: bytes = b""
    fd: int = -1
    charged: int = 0
    ring_bytes: int = 0
    length: int = 0
    allowed: int = 0


def store_state(store: Store) -> StoreState:
    """Take a part of a log down.

    Raises:
        HandoverError: it is of a kind that has no form.
    """
    match store:
        case Head():
            return StoreState("head", store.start, bytes(store._data))
        case Window():
            return StoreState("window", store.start, bytes(store._ring))
        case Note():
            return StoreState("note", store.start, store._text)
        case File():
            return StoreState(
                "file",
                store.start,
                fd=store.fd,
                charged=store._charged,
                ring_bytes=store.ring_bytes,
                length=store._length,
                allowed=store._allowed,
            )
        case _:
            raise HandoverError(f"a log in a {type(store).__name__} stays here")


def store_from(left: StoreState, limit_bytes: int, quota: Quota) -> Store:
    """Return the part of a log that was taken down.

    Raises:
        HandoverError: this program knows no such part.
    """
    match left.kind:
        case "head":
            head = Head()
            head._data += left.data
            return head
        case "window":
            window = Window(left.start)
            window._ring[:] = left.data
            return window
        case "note":
            return Note(left.start, left.data)
        case "file":
            file = File(left.start, (left.fd, left.charged), limit_bytes, quota)
            file.ring_bytes = left.ring_bytes
            file._length, file._allowed = left.length, left.allowed
            return file
        case _:
            raise HandoverError(f"a log has a part of an unknown kind, {left.kind!r}")
