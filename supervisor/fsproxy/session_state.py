"""The state of a session for the hand-over.

Rules of its snapshot and restoration.

1. Each request is answered once. If it waits for its client to take the answer, the
   rest of the answer is handed over. If it has had no effect yet (incomplete, or
   waiting for a turn), it is read again from its first byte. If the program before
   could not finish it in time, it gets an error.
2. Bytes are handed over, and no parser state but whether a line is too long.
"""

from __future__ import annotations

import msgspec

from supervisor.fsproxy.transport import TransferState  # noqa: TC001 - msgspec looks
from vfs.clients import ClientState, FileState  # noqa: TC001 - msgspec looks

NO_POLICY = -1
"""The state of a session that has ended before its process."""


class ChatState(msgspec.Struct):
    """The progress of an LLM_CHAT's payload."""

    lengths: tuple[int, ...]
    seen: int
    hits: int


class BodyState(msgspec.Struct):
    """The state of an incomplete body.

    Attributes:
        line: the request, if its body is kept.
        spool: the descriptor of its file.
        got: bytes in that file.
        left: bytes still to come of a body that is not kept.
        reply: the reply then.
        chat: the parser of such a body.
    """

    line: bytes = b""
    spool: int = -1
    got: int = 0
    left: int = 0
    reply: bytes = b""
    chat: ChatState | None = None


class OutboundState(msgspec.Struct, kw_only=True):
    """The state of replies on their way; see ``Outbound``.

    Attributes:
        unsent: the rest of a reply.
        carried: (descriptor, reply) of an ATTACH.
    """

    zero_copy: bool
    is_deep: bool
    bytes_out: int = 0
    unsent: bytes = b""
    transfer: TransferState | None = None
    carried: tuple[int, bytes] | None = None


class SessionState(OutboundState, kw_only=True):
    """The state of a session, and of its client.

    Attributes:
        held: received and unparsed bytes, with all bytes of an incomplete message,
            which is read again.
        skipping: whether they belong to a line that was too long.
        body: a message with a parsed line.
        closed: the reason of its end; None if it is open.
        owns: its places, as numbers in ``Numbering.places``.
        reserved: bytes of its client's ledger that its WRITE reserves again.
    """

    client: ClientState
    dialect: int
    read_fd: int
    write_fd: int
    requests: int
    files: list[FileState]
    nested: list[SessionState]
    owns: list[int] = []
    held: bytes = b""
    skipping: bool = False
    body: BodyState | None = None
    bytes_in: int = 0
    errors: int = 0
    closed: str | None = None
    reserved: int = 0
