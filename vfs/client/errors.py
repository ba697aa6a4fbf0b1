"""What a child sees when a request fails: ``OSError``, with errno where there is one.

Loaded by the first failure, not by ``vfs.client``, which hands these names on.

Rules of this file.

1. One class for each thing that a caller acts on; where Python has a class for an errno
   (``FileNotFoundError``), ours is one of it too, so either can be caught.
2. The wire carries texts, not numbers.  The host's texts for failed system calls are
   those of strerror(3), so they are turned back by the same table.
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
    "abandoned",
    "deadlock",
    "from_reply",
    "lost",
    "no_way_to_attach",
    "not_a_child",
    "unknown_command",
    "unreadable",
    "unsendable",
    "unsendable_name",
]


class FsProxyError(OSError):
    """Base of all; itself for a refusal that has no class of its own.

    ``errno`` is None where the host's reason has no number.
    """


class NotFoundError(FsProxyError, FileNotFoundError):
    """There is nothing of that name."""


class ExistsError(FsProxyError, FileExistsError):
    """There is something of that name already."""


class IsDirectoryError(FsProxyError, IsADirectoryError):
    """The name stands for a directory."""


class NotDirectoryError(FsProxyError, NotADirectoryError):
    """A part of the name is no directory."""


class AccessDeniedError(FsProxyError, PermissionError):
    """The host's policy or the operating system does not permit it."""


class TooLargeError(FsProxyError):
    """A payload is above what the host takes at once; nothing of it was written.

    Attributes:
        limit_bytes: what the host takes, 0 if it did not say.
    """

    limit_bytes = 0


class UnknownCommandError(FsProxyError, NotImplementedError):
    """The host speaks an older protocol, without this command (spec X1)."""


class NoModelError(FsProxyError):
    """The host has no model (spec L12)."""


class QuotaExceededError(FsProxyError):
    """No call can be made: of the quota nothing is left (spec L10)."""


class ModelCallError(FsProxyError):
    """The provider failed, or answered what cannot be used (spec L11, L15)."""


class UnsendableError(FsProxyError, ValueError):
    """No request line can carry this name, number or mode; nothing was sent."""


class ConnectionLostError(FsProxyError, ConnectionError):
    """The connection is gone, or nobody can tell what its next bytes mean."""


class NotAChildError(FsProxyError):
    """This process has no host: its descriptors are not those of a child."""


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

# What it says of the model, by how it begins.
_MODEL_TEXTS: tuple[tuple[str, type[FsProxyError], int], ...] = (
    ("quota exceeded", QuotaExceededError, errno.EDQUOT),
    ("OpenAI API call failed", ModelCallError, errno.EREMOTEIO),
    ("LLM not available", NoModelError, errno.EOPNOTSUPP),
    ("LLM quota not available", NoModelError, errno.EOPNOTSUPP),
    ("LLM config not available", NoModelError, errno.EOPNOTSUPP),
)

# What says which of several names it is about, where the caller asked about no one alone.
_WITH_A_NAME = ("VFS access denied: '", "failed to open file '")

# What the host says of its own accord, by how it begins; the first that fits counts.
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
    """Return the error that an ``ERROR`` reply stands for.

    Args:
        text: the reply line behind ``ERROR``.
        name: what the caller asked about, as the caller spelt it: a reply repeats no
            more than 200 bytes of it (spec F6).
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


def lost(what: str) -> ConnectionLostError:
    """Return the error for a connection that cannot be used any more."""
    return ConnectionLostError(errno.ECONNRESET, what)


def abandoned(fd: int) -> ConnectionLostError:
    """Return the error for a connection that another process left in the middle."""
    return lost(
        f"a process ended in the middle of a request on descriptor {fd}, which others"
        " share: nobody can use it any more; start the child anew"
    )


def deadlock() -> FsProxyError:
    """Return the error for a request inside a request of the same thread."""
    return FsProxyError(
        errno.EDEADLK,
        "this thread is in the middle of a request: a finalizer or a signal handler"
        " cannot make another; use attach() for it",
    )


def unsendable(request: m.Request, names: tuple[Name, ...]) -> UnsendableError:
    """Return the error for what a request line cannot carry (spec F1, F5, O1, O3)."""
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
    """Return the error for a process without a host, or without a way to it."""
    if "FSPROXY_FD" in os.environ and "FSPROXY_SOCKET" not in os.environ:
        what = f"{what}, and there is no FSPROXY_SOCKET"
    return NotAChildError(
        errno.EBADF,
        f"{what}: this process is not the child of a host; start it with"
        " `sandhost run -- COMMAND`",
    )


def unknown_command(word: str) -> UnknownCommandError:
    """Return the error for a command that was not sent, as the host does not know it."""
    return UnknownCommandError(errno.ENOSYS, _older(word))


def no_way_to_attach() -> UnknownCommandError:
    """Return the error for pipes without a socket for descriptors (spec N4)."""
    return UnknownCommandError(
        errno.ENOSYS,
        "the host gave no socket for descriptors (FSPROXY_FD=3,4 without a third"
        " number), so ATTACH cannot work",
    )


def no_descriptor_left() -> FsProxyError:
    """Return the error for an ATTACH whose descriptor found no number here."""
    return FsProxyError(
        errno.EMFILE,
        "the host attached a connection that this process has no descriptor for;"
        " close some, or raise its limit (ulimit -n)",
    )


def unreadable(what: str, body: bytes) -> FsProxyError:
    """Return the error for an answer that is not what the protocol promises."""
    return FsProxyError(
        errno.EPROTO, f"cannot read the answer to {what}: {body[:80]!r}"
    )


def _older(word: str) -> str:
    return f"the host does not know {word}: it speaks an older FS Proxy protocol"


def _meaning(reason: str) -> tuple[int | None, str]:
    if reason.startswith("failed to "):
        # REASON holds no colon, whatever the name before it holds.
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
