"""What goes wrong with an LLM fd: one error, told to the model as ``fd_error``."""

from __future__ import annotations

from supervisor.fsproxy.ports import ContentError

NOT_FOUND = "not_found"
INVALID_PAGE = "invalid_page"
INVALID_RANGE = "invalid_range"
INVALID_PARAMETER = "invalid_parameter"
FILE_OPERATION = "file_operation"
CORRUPT = "corrupt"
CONFLICT = "conflict"
AMBIGUOUS = "ambiguous"


class FdError(ContentError):
    """A call that cannot be done.

    Attributes:
        kind: one of the constants of this file.
        message: what went wrong, in one sentence.
        details: more of it; empty for none.
        fd: the descriptor that it is about, as answers print it; empty if none.
    """

    def __init__(
        self, kind: str, message: str, details: str = "", fd: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = _clipped(message)
        self.details = _clipped(details)
        self.fd = _clipped(fd)


MOST_SAID_CHARS = 4_000
"""What an error says of a parameter at most: it is repeated there, and may have 16 MiB."""


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_SAID_CHARS else f"{text[:MOST_SAID_CHARS]}..."


MOST_ANSWER_BYTES = 8 * 1024 * 1024
"""Longest text of one answer, beyond any model's context.  Escaped it may be five times as
long, and is copied three times on its way, each time with the interpreter held."""


def check_length(size: int, instead: str, fd: str = "") -> None:
    """Refuse what is too long for one answer.

    Args:
        size: bytes of text.
        instead: what to do.
        fd: as answers print it; empty if it is about none.

    Raises:
        FdError: ``invalid_parameter``.
    """
    if size > MOST_ANSWER_BYTES:
        text = f"{size} bytes are too long for one answer: {instead}"
        raise FdError(INVALID_PARAMETER, text, fd=fd)


class NotTextError(Exception):
    """Content is no text that XML 1.0 can hold: it is served as base64."""
