"""The handed-over state of a kept child.

A child continues under the section that started it; changes in the configuration that
the next program reads apply afterwards, as in a reload.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hostlib.handover import HandoverError, bytes_as_text
from supervisor.children.specs import ChildOptions
from supervisor.config.child import ChildSection
from supervisor.sandbox.scratch import ScratchState  # noqa: TC001 - msgspec looks at it
from supervisor.spawn.restarts import RestartsState  # noqa: TC001 - as above


class KeptChildState(msgspec.Struct):
    """A kept child.

    Attributes:
        section, options: its description, as plain values with bytes for text.
        output_fd, error_fd: its pipes; -1 for one that it has closed, and for stderr of
            a child that an older program started, which has one pipe for both.
        child_id: of its process; None between two.
        wait_s: until the restart that is due.
    """

    name: str
    section: Any
    options: Any
    phase: str
    reason: str | None
    status: int | None
    configured: bool
    restarts: RestartsState
    dropped_bytes: int
    child_id: str | None = None
    scratch: ScratchState | None = None
    output_fd: int = -1
    error_fd: int = -1
    wait_s: float = 0.0

    def plan(self) -> tuple[ChildSection, ChildOptions]:
        """Return its section and options.

        Raises:
            HandoverError: this program knows no such child.
        """
        try:
            return (
                msgspec.convert(bytes_as_text(self.section), ChildSection),
                msgspec.convert(bytes_as_text(self.options), ChildOptions),
            )
        except msgspec.ValidationError as why:
            text = f"cannot take child {self.name} over: {why}"
            raise HandoverError(text) from None

    def descriptors(self) -> set[int]:
        """Return the descriptors that are handed over with it."""
        if self.scratch is None:
            return set()
        return {self.scratch.fd, self.output_fd, self.error_fd} - {-1}
