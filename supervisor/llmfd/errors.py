"""The error of calls on LLM fds, shown to the model as ``fd_error``."""

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
        message: the failure, in one sentence.
        details: more of it; empty for none.
        fd: the descriptor in question, as answers print it; empty if none.
    """

    def __init__(
        self, kind: str, message: str, details: str = "", fd: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = _clip(message)
        self.details = _clip(details)
        self.fd = _clip(fd)


MOST_SAID_CHARS = 4_000
"""Longest part of a parameter in an error: parameters may have 16 MiB."""


def _clip(text: str) -> str:
    return text if len(text) <= MOST_SAID_CHARS else f"{text[:MOST_SAID_CHARS]}..."


MOST_ANSWER_BYTES = 8 * 1024 * 1024
"""Longest text of one answer, beyond any model's context. Escaped it may be five times
as long, and is copied three times, each time with the interpreter held."""


def check_length(size: int, instead: str, fd: str = "") -> None:
    """Refuse a text that is too long for one answer.

    Args:
        size: bytes of text.
        instead: the remedy.
        fd: as answers print it; empty for none.

    Raises:
        FdError: ``invalid_parameter``.
    """
    if size > MOST_ANSWER_BYTES:
        text = f"{size} bytes are too long for one answer: {instead}"
        raise FdError(INVALID_PARAMETER, text, fd=fd)


class NotTextError(Exception):
    """Content is no text that XML 1.0 can hold: it is served as base64."""
