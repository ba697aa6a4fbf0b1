"""Errors shared by the handlers of requests, in the contract's words."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from protocol import echo, error, invalid
from supervisor.fleet.fence import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import FileRequest
    from supervisor.fsproxy.ports import Caller


OK = b"OK\n"
REPLACED = error(b"interrupted: the host was replaced by its next program; ask again")
UNAVAILABLE = error(b"VFS not available")
NOT_READABLE = b"file not open for reading: "
NOT_WRITABLE = b"file not open for writing: "


def refuse_fenced(check: Callable[[], None] | None) -> bytes | None:
    """Return the error for an effect that may not go out; None if it may (spec FL6).

    Args:
        check: raises FencedError if it may not; None for a child that is in no fleet.
    """
    if check is None:
        return None
    try:
        check()
    except FencedError as why:
        return error(b"fenced: " + echo(str(why).encode()))
    return None


def reason(why: OSError) -> bytes:
    """Return the system's text of an error, never a path (spec F6)."""
    return echo(os.strerror(why.errno or errno.EIO).encode())


def no_memory_error(why: OSError) -> bytes:
    """Return the error for a payload without memory or disk (W3)."""
    return error(b"failed to read data: " + reason(why))


def unknown(request: FileRequest) -> bytes:
    """Return the error for a fileno that the client does not have."""
    return invalid("fileno", request.token)


def denied(caller: Caller, what: str, name: bytes) -> bytes:
    """Report a denied access of a client, and return the error (A1)."""
    on_denied = caller.fs.on_denied
    if on_denied is not None:
        on_denied(caller.client, what, name)
    return error(b"VFS access denied: '" + echo(name) + b"'")


def unavailable(caller: Caller, what: str, name: bytes, claim: bool | None) -> bytes:
    """Return the error for a root that is gone (spec O4), and report the claim."""
    if claim and not caller.client.policy.top_level:
        denied(caller, what, name)
    return UNAVAILABLE


# Reasons for the end of a session; the first two are the contract's (spec S3).

EOF = "pipe EOF"
PROCESS_EXIT = "process exit"
SLOW = "deadline"
FAULT = "internal error"
