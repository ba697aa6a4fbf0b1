"""A conversation, taken down in the middle of whatever it does, and gone on with.

Rules of this file.

1. Each request is answered once.  One that waits for its client to take the answer is
   done: the rest of the answer is handed over.  One that has done nothing yet (it has
   not come whole, or waits for a turn) is read again from its first byte.  One that the
   program before could not finish in time gets an error.
2. No state of a parser is handed over, but whether it is in a line that is too long:
   the bytes are.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from protocol import format_request
from protocol.chat import ChatBody
from supervisor.fsproxy.dispatch import HANDLERS
from supervisor.fsproxy.replies import REPLACED
from supervisor.fsproxy.transport import FileTransfer
from supervisor.handover.state import BodyState, ChatState, TransferState
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from supervisor.fsproxy.session import Session
    from supervisor.handover.state import SessionState

PIECE_BYTES = 1024 * 1024
"""A spooled payload is read back in pieces of this size."""


def is_at_work(session: Session) -> bool:
    """Tell whether a job does what ends by itself, or is about to begin."""
    return session.is_working and not _can_wait(session)


def _can_wait(session: Session) -> bool:
    """Tell whether what a job waits for can be waited for by the next program."""
    waits = (
        session.outbound.unsent,
        session.outbound.transfer,
        session.outbound.redo,
        session.outbound.carried,
    )
    return any(wait is not None for wait in waits)


# Taking down


def note_work(session: Session, state: SessionState) -> None:
    """Take down what a conversation is in the middle of.

    Raises:
        HandoverError: its payload cannot be read back.
    """
    state.held, state.skipping = session.conn.held()
    if session.inbound.reserved is not None:
        state.reserved = session.inbound.reserved[1]
    if session.outbound.unsent is not None:
        state.unsent = bytes(session.outbound.unsent)
    elif session.outbound.transfer is not None:
        transfer = session.outbound.transfer
        state.transfer = TransferState(
            transfer._file.fileno, transfer._head, transfer._at, transfer._left
        )
    elif session.outbound.carried is not None:
        state.carried = session.outbound.carried
    elif session.outbound.redo is not None:
        state.held = session.outbound.redo() + state.held
    elif session.is_working:
        state.unsent = REPLACED
    elif session.conn.body_left:
        _note_body(session, state)


def _note_body(session: Session, state: SessionState) -> None:
    payload, chat = session.inbound.payload, session.inbound.chat
    if payload is None:
        state.body = BodyState(
            left=session.conn.body_left,
            reply=session.inbound.drain_reply or b"",
            chat=None if chat is None else _chat_state(chat),
        )
        return
    if session.begun is None:
        raise HandoverError(f"client {session.client.id}: a payload of no request")
    line = format_request(session.begun, session.dialect)
    got = payload.size - payload.left
    if not payload.is_spooled:
        state.held = line + bytes(payload._view[:got])
    elif chat is not None:  # it has to go by once more
        state.held = line + _read_back(payload._spool, got)
    else:
        state.body = BodyState(line=line, spool=payload._spool, got=got)


def _read_back(fd: int, size: int) -> bytes:
    starts = range(0, size, PIECE_BYTES)
    try:
        return b"".join(os.pread(fd, min(PIECE_BYTES, size - at), at) for at in starts)
    except OSError as why:
        text = f"cannot read a payload back: {why.strerror}"
        raise HandoverError(text) from None


def _chat_state(chat: ChatBody) -> ChatState:
    return ChatState(chat._lengths, chat._seen, chat._hits)


# Going on


def take_up(session: Session, state: SessionState) -> None:
    """Let a fresh session be what was taken down, and go on with what that did.

    Precondition: its files are in the tables.  Its descriptors are in no epoll yet.
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
        _take_up_body(session, state.body)
    else:
        conn.hold(state.held, skipping=state.skipping)
    if state.unsent:
        session.start(partial(session.outbound.send, state.unsent))
    elif state.transfer is not None:
        session.start(
            partial(session.outbound.send_file, _transfer(session, state.transfer))
        )
    elif state.carried is None:
        session.pump.resume(session)


def _transfer(session: Session, state: TransferState) -> FileTransfer:
    # Not by its class: the offset has moved already.
    transfer = FileTransfer.__new__(FileTransfer)
    transfer._to = session.write_fd
    transfer._file = file = session.files[state.fileno]
    transfer._fd = file.handle.fd
    transfer._head = state.head
    transfer._at = state.at
    transfer._left = state.left
    transfer.is_done = False
    return transfer


def _take_up_body(session: Session, state: BodyState) -> None:
    conn = session.conn
    if not state.line:
        conn.extend_body(state.left)
        session.inbound.drain_reply = state.reply
        if state.chat is not None:
            session.inbound.chat = chat = ChatBody(state.chat.lengths)
            chat._seen, chat._hits = state.chat.seen, state.chat.hits
        return
    conn.hold(state.line)
    message = conn.next_message()
    if message is None:
        raise HandoverError("a request of an unknown form was handed over")
    session.begun = message
    HANDLERS[type(message)](session, message)  # answers nothing: its body is to come
    session.inbound.adopt(state.spool, state.got)
    conn.body_received(state.got)
