"""A conversation's state for the hand-over, and its restoration.

Rules of this file.

1. Each request is answered once. If it waits for its client to take the answer, the
   rest of the answer is handed over. If it has had no effect yet (incomplete, or
   waiting for a turn), it is read again from its first byte. If the program before
   could not finish it in time, it gets an error.
2. Bytes are handed over, and no parser state but whether a line is too long.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hostlib.handover import HandoverError
from protocol import format_request
from protocol.chat import ChatBody
from supervisor.fsproxy.dispatch import HANDLERS
from supervisor.fsproxy.replies import REPLACED
from supervisor.fsproxy.transport import FileTransfer, TransferState
from vfs.filesystem import Client, ClientState, FileState
from vfs.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.fsproxy.session import Session
    from vfs.filesystem import Filesystem
    from vfs.handover import Numbered, Numbering

NO_POLICY = -1
"""The state of a conversation that has ended before its process."""


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


class SessionState(msgspec.Struct):
    """The state of a conversation, and of its client.

    Attributes:
        held: received and unparsed bytes, with all bytes of an incomplete message,
            which is read again.
        skipping: whether they belong to a line that was too long.
        body: a message with a parsed line.
        unsent: the rest of a reply.
        carried: (descriptor, reply) of an ATTACH.
        closed: the reason of its end; None if it is open.
        owns: its places, as numbers in ``Numbering.places``.
        reserved: bytes of its client's ledger that its WRITE reserves again.
    """

    client: ClientState
    dialect: int
    read_fd: int
    write_fd: int
    zero_copy: bool
    is_deep: bool
    requests: int
    files: list[FileState]
    nested: list[SessionState]
    owns: list[int] = []
    held: bytes = b""
    skipping: bool = False
    body: BodyState | None = None
    unsent: bytes = b""
    transfer: TransferState | None = None
    carried: tuple[int, bytes] | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    errors: int = 0
    closed: str | None = None
    reserved: int = 0


def is_at_work(session: Session) -> bool:
    """Return whether a job does work that ends by itself, or is about to begin."""
    return session.is_working and not _can_wait(session)


def _can_wait(session: Session) -> bool:
    """Return whether the next program can wait in place of a job."""
    waits = (
        session.outbound.unsent,
        session.outbound.transfer,
        session.outbound.redo,
        session.outbound.carried,
    )
    return any(wait is not None for wait in waits)


# Snapshot


def snapshot_session(session: Session, numbers: Numbering) -> SessionState:
    """Return the state of a conversation and those nested in it; changes nothing.

    Raises:
        HandoverError: a part of it cannot be handed over.
    """
    client, is_over = session.client, session.is_over
    places = () if is_over else session.narrowed_places  # closed by then
    owns = [numbers.number_owned_place(place) for place in places]
    policy = NO_POLICY if is_over else numbers.number_policy(client.policy)
    state = SessionState(
        client=client.snapshot(policy),
        dialect=session.dialect,
        read_fd=session.read_fd,
        write_fd=session.write_fd,
        zero_copy=session.outbound.zero_copy,
        is_deep=session.outbound.is_deep,
        requests=session.requests,
        files=[],
        nested=[snapshot_session(nested, numbers) for nested in session.nested],
        owns=owns,
        bytes_in=session.bytes_in,
        bytes_out=session.bytes_out,
        errors=session.errors,
        closed=session.why_closed if is_over else None,
    )
    if is_over:
        return state
    for file in client.files.values():
        place = None if file.place is None else numbers.number_place(file.place)
        taken = file.snapshot(place)
        numbers.fds.update(taken.descriptors())
        state.files.append(taken)
    snapshot_work(session, state)
    numbers.fds |= {session.read_fd, session.write_fd}
    if state.body is not None and state.body.spool >= 0:
        numbers.fds.add(state.body.spool)
    if state.carried is not None:
        numbers.fds.add(state.carried[0])
    return state


def snapshot_work(session: Session, state: SessionState) -> None:
    """Add the state of a conversation's work under way.

    Raises:
        HandoverError: its payload cannot be read back.
    """
    state.held, state.skipping = session.conn.unread()
    if session.inbound.reserved is not None:
        state.reserved = session.inbound.reserved[1]
    if session.outbound.unsent is not None:
        state.unsent = bytes(session.outbound.unsent)
    elif session.outbound.transfer is not None:
        state.transfer = session.outbound.transfer.snapshot()
    elif session.outbound.carried is not None:
        state.carried = session.outbound.carried
    elif session.outbound.redo is not None:
        state.held = session.outbound.redo() + state.held
    elif session.is_working:
        state.unsent = REPLACED
    elif session.conn.body_left:
        _snapshot_body(session, state)


def _snapshot_body(session: Session, state: SessionState) -> None:
    payload, chat = session.inbound.payload, session.inbound.chat
    if payload is None:
        state.body = BodyState(
            left=session.conn.body_left,
            reply=session.inbound.drain_reply or b"",
            chat=None if chat is None else ChatState(*chat.progress),
        )
        return
    if session.begun is None:
        raise HandoverError(f"client {session.client.id}: a payload of no request")
    line = format_request(session.begun, session.dialect)
    if payload.is_spooled and chat is None:
        got = payload.size - payload.left
        state.body = BodyState(line=line, spool=payload.spool, got=got)
        return
    try:  # that of a chat has to go by once more
        state.held = line + payload.read_received()
    except OSError as why:
        text = f"cannot read a payload back: {why.strerror}"
        raise HandoverError(text) from None


# Restoring


def restore_session(
    state: SessionState,
    parent: Session | None,
    numbered: Numbered,
    fs: Filesystem,
    open_session: Callable[[Client, tuple[int, int], int], Session],
) -> Session:
    """Return a restored conversation; `resume_session` continues it.

    Those nested in it are not restored.

    Args:
        state: of the program before.
        parent: the one above it; None for a child's own.
        numbered: all places and policies.
        fs: gets its client and files.
        open_session: makes one for a client with (read, write) descriptors and dialect.
    """
    is_over = state.closed is not None
    above = None if parent is None else parent.client
    policy = Policy(()) if is_over else numbered.policies[state.client.policy]
    client = Client.restore(state.client, policy, above)
    session = open_session(client, (state.read_fd, state.write_fd), state.dialect)
    session.parent = parent
    session.narrowed_places = tuple(numbered.places[n] for n in state.owns)
    if state.closed is not None:
        session.mark_over(state.closed)
        return session
    fs.enter(client)
    fs.hold(client, len(session.narrowed_places))
    for file in state.files:
        place = None if file.place is None else numbered.places[file.place]
        fs.restore_file(client, file, place)
    return session


def resume_session(session: Session, state: SessionState) -> None:
    """Continue the work under way of a restored session.

    Precondition: its files are in the tables. Its descriptors are in no epoll yet.
    """
    conn = session.conn
    session.outbound.zero_copy = state.zero_copy
    session.outbound.is_deep = state.is_deep
    session.requests = state.requests
    session.bytes_in = state.bytes_in
    session.outbound.bytes_out = state.bytes_out
    session.errors = state.errors
    session.client.ledger.size_bytes.charge(-state.reserved)
    if state.body is not None:
        _resume_body(session, state.body)
    else:
        conn.put_back(state.held, skipping=state.skipping)
    if state.unsent:
        session.start(partial(session.outbound.send, state.unsent))
    elif state.transfer is not None:
        file = session.files[state.transfer.fileno]
        transfer = FileTransfer(session.write_fd, file, state.transfer)
        session.start(partial(session.outbound.send_file, transfer))
    elif state.carried is None:
        session.pump.resume(session)


def _resume_body(session: Session, state: BodyState) -> None:
    conn = session.conn
    if not state.line:
        conn.extend_body(state.left)
        session.inbound.drain_reply = state.reply
        if state.chat is not None:
            session.inbound.chat = ChatBody.resume(*msgspec.structs.astuple(state.chat))
        return
    conn.put_back(state.line)
    message = conn.next_message()
    if message is None:
        raise HandoverError("a request of an unknown form was handed over")
    session.begun = message
    HANDLERS[type(message)](session, message)  # returns nothing: its body is incomplete
    session.inbound.adopt(state.spool, state.got)
    conn.body_received(state.got)
