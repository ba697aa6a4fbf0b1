"""Requests about the connection itself, and lines that did not parse."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from protocol import COMMANDS, echo, error, invalid, limits
from protocol.chat import ChatBody
from supervisor.fsproxy.handlers.names import body, name_field
from supervisor.fsproxy.replies import OK, reason
from vfs import names
from vfs.errors import RightsError
from vfs.policy import names_in

if TYPE_CHECKING:
    from protocol import messages as m
    from supervisor.fsproxy.session import Session


def do_ping(session: Session, request: m.Request) -> bytes | None:
    """PING (spec X1)."""
    del session, request
    return OK


def do_caps(session: Session, request: m.Request) -> bytes | None:
    """CAPS (spec X1)."""
    del request
    policy = session.client.policy
    grants = [
        {
            **name_field(place.prefixes[0]),
            "read": place.read,
            "write": place.write,
        }
        for place in policy.places
        if place.prefixes and place is not policy.root
    ]
    rights: dict[str, object] = {"top_level": policy.top_level, "grants": grants}
    network = session.services.network
    rules = None if network is None else network.rules_of(session.client)
    if rules is not None:
        rights["network"] = rules
    bounds = {
        "line": limits.MAX_LINE_BYTES,
        "read": limits.MAX_READ_BYTES,
        "write": session.max_write_bytes,
    }
    return body(
        {
            "version": 2,
            "commands": sorted(word.decode() for word in COMMANDS),
            "limits": bounds,
            "rights": rights,
        }
    )


def do_attach(session: Session, request: m.Request) -> bytes | None:
    """ATTACH (spec N4)."""
    del request
    if session.on_attach is None:
        return error(b"ATTACH not available")
    session.start(partial(session.on_attach, session))
    return None


def do_narrow(session: Session, request: m.Request) -> bytes | None:
    """NARROW (spec A5)."""
    if request.body > limits.MAX_NARROW_BYTES:
        text = b"%d exceeds limit %d" % (request.body, limits.MAX_NARROW_BYTES)
        return session.inbound.drain(invalid("size", text))
    return session.inbound.collect(
        session.conn.take_body(), partial(_narrow_now, session)
    )


def _narrow_now(session: Session, document: bytes | memoryview) -> bytes | None:
    # A job, so that others have a turn between two documents.
    session.start(partial(_narrow, session, bytes(document)))
    return None


async def _narrow(session: Session, document: bytes) -> bytes:
    client = session.client
    try:
        if client.policy.is_distant:
            for name in names_in(document):
                await names.wait_reachable(client, name)
        session.narrow(document)
    except OSError as why:  # no thread can be started
        return error(b"invalid rights: " + reason(why))
    except RightsError as why:
        return error(b"invalid rights: " + echo(str(why).encode()))
    return OK


def do_refuse(session: Session, request: m.Refusal) -> bytes | None:
    """Return the error of a line that did not parse; it follows earlier replies."""
    token = request.token
    reply = request.reply
    if token is not None and int(token) not in session.files:
        reply = invalid("fileno", token)
    if not request.body:
        return reply
    return session.inbound.drain(reply, ChatBody.of(request))
