"""Requests about the model: LLM_CHAT, LLM_QUOTA, LLM_CONFIG (spec L1-L15).

Rules of this file.

1. A host without ``[llm]`` answers as one (spec L12); the service is looked up at each
   request.
2. LLM_CHAT is a job that lasts only while its client is there (spec L10).
3. Checks run in the contract's order: encoding, preset, inputs, outputs, quota (L2).
4. The memory for it is reserved with its line, before any of its payload is kept.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hostlib.threads import in_thread
from protocol import error
from protocol import messages as m
from protocol.chat import ChatBody
from supervisor.fsproxy.ports import INLINE_BYTES, TEXT_FORMS
from supervisor.fsproxy.replies import denied, no_memory_error, reason

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from supervisor.fsproxy.session import Session

RECEIVED_FORMS = 2
"""Copies of a request as it was received, while it is split."""


def do_chat(session: Session, request: m.Chat) -> bytes | None:
    """LLM_CHAT."""
    chat = ChatBody(request.parts)
    is_top_level = request.flag and session.client.policy.top_level
    if request.flag and not is_top_level:
        denied(session, "LLM_CHAT", b"true")
    if session.services.llm is None:
        return session.inbound.drain(error(b"LLM not available"), chat)
    try:
        forms = RECEIVED_FORMS + TEXT_FORMS
        session.reserved_memory().resize(forms * sum(request.parts))
    except OSError as why:
        return session.inbound.drain(no_memory_error(why), chat)
    piece = session.conn.take_body()
    return session.inbound.collect(
        piece, partial(_chat_now, session, is_top_level, chat), chat
    )


def _chat_now(
    session: Session, is_top_level: bool, chat: ChatBody, data: bytes | memoryview
) -> bytes | None:
    # A view of the payload in a job would keep its memory.
    if len(data) <= INLINE_BYTES:
        session.start(partial(_chat, session, is_top_level, chat.split(data)))
    else:
        session.start(partial(_chat_long, session, is_top_level, chat))
    return None


async def _chat_long(
    session: Session, is_top_level: bool, chat: ChatBody
) -> bytes | None:
    try:
        parts = await in_thread(session.inbound.call_with_payload, chat.split)
    except BlockingIOError as why:  # no thread can be started
        return error(b"OpenAI API call failed: " + reason(why))
    return await _chat(session, is_top_level, parts)


def _chat(
    session: Session, is_top_level: bool, parts: tuple[bytes, ...]
) -> Awaitable[bytes | None]:
    """Return the service's work on a request, whose payload is not needed any more."""
    session.inbound.release_payload()
    service = session.services.llm
    if service is None:
        return _refuse_chat()
    return service.chat(session, parts, claim=is_top_level)


async def _refuse_chat() -> bytes:
    return error(b"LLM not available")  # the host is ending


def do_quota(session: Session, request: m.Quota) -> bytes | None:
    """LLM_QUOTA (spec L9)."""
    del request
    service = session.services.llm
    if service is None:
        return error(b"LLM quota not available")
    return b"OK %b\n" % service.quota_text(session.client).encode()


def do_config(session: Session, request: m.Config) -> bytes | None:
    """LLM_CONFIG (spec L13)."""
    del request
    service = session.services.llm
    if service is None:
        return error(b"LLM config not available")
    document = service.config_json()
    return b"OK %d\n%b" % (len(document), document)
