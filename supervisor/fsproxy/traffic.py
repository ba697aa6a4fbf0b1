"""Traffic of sessions: sums for a child, over all that were and are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from supervisor.fsproxy.session import Session


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums of one or more sessions.

    Attributes:
        requests: number of answered ones.
        errors: number of error replies.
        bytes_in: received.
        bytes_out: sent.
        open_files: open now.
        last_error: the newest known error reply, for people; None without one.
    """

    requests: int = 0
    errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    open_files: int = 0
    last_error: str | None = None

    @classmethod
    def of(cls, session: Session) -> Self:
        """Return the traffic of one session."""
        error = session.last_error
        return cls(
            session.requests,
            session.errors,
            session.bytes_in,
            session.bytes_out,
            len(session.files),
            error.decode(errors="replace").strip() if error else None,
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests,
            self.errors + other.errors,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.open_files + other.open_files,
            other.last_error or self.last_error,
        )

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "open_files": self.open_files,
            "last_error": self.last_error,
        }
