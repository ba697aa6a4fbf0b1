"""Errors of a child's requests: subclasses of ``OSError``, with errno if known.

Loaded by the first failure; ``vfs.client`` has the same names.

Rules of this file.

1. One class for each failure that a caller acts on.  If Python has a class for the errno
   (``FileNotFoundError``), it is a base class, so either can be caught.
2. The wire carries texts, not numbers.  The host's texts of failed system calls are those
   of strerror(3), so the same table gives the numbers.
"""

from __future__ import annotations

import errno
import os

from protocol import MODES
from protocol import messages as m

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Name: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

__all__ = [
    "AccessDeniedError",
    "ConnectionLostError",
    "ExistsError",
    "FsProxyError",
    "IsDirectoryError",
    "ModelCallError",
    "NoModelError",
    "NotAChildError",
    "NotDirectoryError",
    "NotFoundError",
    "QuotaExceededError",
    "TooLargeError",
    "UnknownCommandError",
    "UnsendableError",
    "connection_abandoned",
    "connection_lost",
    "deadlock",
    "from_reply",
    "no_way_to_attach",
    "not_a_child",
    "unknown_command",
    "unreadable",
    "unsendable",
    "unsendable_name",
]


class FsProxyError(OSError):
    """Base of all errors, and the class of a refusal without a class of its own.

    ``errno`` is None if the host's reason has no number.
    """


class NotFoundError(FsProxyError, FileNotFoundError):
    """The name does not exist."""


class ExistsError(FsProxyError, FileExistsError):
    """The name exists already."""


class IsDirectoryError(FsProxyError, IsADirectoryError):
    """The name is a directory."""


class NotDirectoryError(FsProxyError, NotADirectoryError):
    """A part of the name is no directory."""


class AccessDeniedError(FsProxyError, PermissionError):
    """The host's policy or the operating system does not permit it."""


class TooLargeError(FsProxyError):
    """A payload is above the host's cap; nothing of it was written.

    Attributes:
        limit_bytes: the host's cap; 0 if unknown.
    """

    limit_bytes = 0


class UnknownCommandError(FsProxyError, NotImplementedError):
    """The host speaks an older protocol, without this command (spec X1)."""


class NoModelError(FsProxyError):
    """The host has no model (spec L12)."""


class QuotaExceededError(FsProxyError):
    """The quota is used up, so no call can be made (spec L10)."""


class ModelCallError(FsProxyError):
    """The provider failed, or its answer cannot be used (spec L11, L15)."""


class UnsendableError(FsProxyError, ValueError):
    """A request line cannot carry this name, number or mode; nothing was sent."""


class ConnectionLostError(FsProxyError, ConnectionError):
    """The connection is gone, or the meaning of its next bytes is unknown."""


class NotAChildError(FsProxyError):
    """This process is no child of a host: its descriptors are not a door."""


_CLASSES: dict[int, type[FsProxyError]] = {
    errno.ENOENT: NotFoundError,
    errno.EEXIST: ExistsError,
    errno.EISDIR: IsDirectoryError,
    errno.ENOTDIR: NotDirectoryError,
    errno.EACCES: AccessDeniedError,
    errno.EPERM: AccessDeniedError,
    errno.EMSGSIZE: TooLargeError,
    errno.ENOSYS: UnknownCommandError,
}

_NUMBERS = {os.strerror(number): number for number in errno.errorcode}

# Beginnings of the host's texts about the model.
_MODEL_TEXTS: tuple[tuple[str, type[FsProxyError], int], ...] = (
    ("quota exceeded", QuotaExceededError, errno.EDQUOT),
    ("OpenAI API call failed", ModelCallError, errno.EREMOTEIO),
    ("LLM not available", NoModelError, errno.EOPNOTSUPP),
    ("LLM quota not available", NoModelError, errno.EOPNOTSUPP),
    ("LLM config not available", NoModelError, errno.EOPNOTSUPP),
)

# Beginnings of texts that name a file, for requests without a name of their own.
_WITH_A_NAME = ("VFS access denied: '", "failed to open file '")

# Beginnings of the host's own texts; the first that fits is used.
_OWN_TEXTS = (
    ("VFS access denied", errno.EACCES),
    ("VFS not available", errno.ESTALE),
    ("invalid fileno", errno.EBADF),
    ("file not open for", errno.EBADF),
    ("request line too long", errno.ENAMETOOLONG),
    ("invalid ", errno.EINVAL),
)


def from_reply(
    text: bytes, name: Name | None = None, second: Name | None = None
) -> FsProxyError:
    """Return the error of an ``ERROR`` reply.

    Args:
        text: the reply line after ``ERROR``.
        name: the caller's name, for a reply repeats at most 200 bytes of it (spec F6).
        second: the other name of a RENAME.
    """
    reason = text.decode("utf-8", "surrogateescape")
    for begin, kind, code in _MODEL_TEXTS:
        if reason.startswith(begin):
            return kind(code, reason)
    number, message = _meaning(reason)
    if number is None:
        return FsProxyError(message)
    if name is None and reason.startswith(_WITH_A_NAME):
        message = reason
    error = _CLASSES.get(number, FsProxyError)(number, message)
    if name is not None:
        error.filename = name
        if second is not None:
            error.filename2 = second
    if isinstance(error, TooLargeError):
        limit = reason.rpartition(" ")[2]
        error.limit_bytes = int(limit) if limit.isdecimal() else 0
    return error


def connection_lost(what: str) -> ConnectionLostError:
    """Return the error for a connection that cannot be used any more."""
    return ConnectionLostError(errno.ECONNRESET, what)


def connection_abandoned(fd: int) -> ConnectionLostError:
    """Return the error for a connection on which a process ended in a request."""
    return connection_lost(
        f"a process ended in the middle of a request on descriptor {fd}, which others"
        " share: it cannot be used any more; start the child anew"
    )


def deadlock() -> FsProxyError:
    """Return the error for a request inside a request of the same thread."""
    return FsProxyError(
        errno.EDEADLK,
        "this thread is in the middle of a request: a finalizer or a signal handler"
        " cannot make another; use attach() for it",
    )


def unsendable(request: m.Request, names: tuple[Name, ...]) -> UnsendableError:
    """Return the error for a value that no request line carries (spec F1, F5, O1, O3)."""
    if isinstance(request, m.Open) and request.mode not in MODES:
        modes = b", ".join(MODES).decode()
        text = f"{request.mode.decode()!r} is no mode; there are {modes}"
    elif names:
        return unsendable_name(names[0])
    else:
        text = "a number is negative or has more than 18 digits"
    return UnsendableError(errno.EINVAL, text)


def unsendable_name(name: Name) -> UnsendableError:
    """Return the error for a name that cannot be sent."""
    text = "a name that is empty, has LF, or blanks or CR at an end cannot be sent"
    error = UnsendableError(errno.EINVAL, text)
    error.filename = name
    return error


def not_a_child(what: str) -> NotAChildError:
    """Return the error for a process without a connection to a host."""
    if "FSPROXY_FD" in os.environ and "FSPROXY_SOCKET" not in os.environ:
        what = f"{what}, and there is no FSPROXY_SOCKET"
    return NotAChildError(
        errno.EBADF,
        f"{what}: this process is not the child of a host; start it with"
        " `sandhost run -- COMMAND`",
    )


def unknown_command(word: str) -> UnknownCommandError:
    """Return the error for a command that the host does not know; it was not sent."""
    return UnknownCommandError(errno.ENOSYS, _older(word))


def no_way_to_attach() -> UnknownCommandError:
    """Return the error for pipes without a socket for descriptors (spec N4)."""
    return UnknownCommandError(
        errno.ENOSYS,
        "the host gave no socket for descriptors (FSPROXY_FD=3,4 without a third"
        " number), so ATTACH cannot work",
    )


def no_descriptor_left() -> FsProxyError:
    """Return the error for an ATTACH without a descriptor left in this process."""
    return FsProxyError(
        errno.EMFILE,
        "the host attached a connection that this process has no descriptor for;"
        " close some, or raise its limit (ulimit -n)",
    )


def unreadable(what: str, body: bytes) -> FsProxyError:
    """Return the error for an answer that breaks the protocol."""
    return FsProxyError(
        errno.EPROTO, f"cannot read the answer to {what}: {body[:80]!r}"
    )


def _older(word: str) -> str:
    return f"the host does not know {word}: it speaks an older FS Proxy protocol"


def _meaning(reason: str) -> tuple[int | None, str]:
    if reason.startswith("failed to "):
        # REASON holds no colon; the name before it may.
        tail = reason.rpartition(": ")[2]
        if tail in _NUMBERS:
            return _NUMBERS[tail], tail
    if reason.startswith("unknown command"):
        return errno.ENOSYS, _older(reason.rpartition(": ")[2])
    if " exceeds limit " in reason:
        return errno.EMSGSIZE, reason
    for begin, number in _OWN_TEXTS:
        if reason.startswith(begin):
            message = begin if number in (errno.EACCES, errno.ESTALE) else reason
            return number, message
    return None, reason
