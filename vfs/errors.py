"""What can go wrong behind the door, as the dispatcher needs to tell it.

An ``OSError`` with an errno says what the operating system said and becomes
``failed to ...: REASON``; these two say what the operating system was never asked.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class AccessDeniedError(Exception):
    """The name is outside what the client may reach in that way (spec O6, A3)."""


class TargetDeniedError(AccessDeniedError):
    """Of the two names of a RENAME it is the new one (spec X1, A1)."""


@contextlib.contextmanager
def about_the_target() -> Iterator[None]:
    """Let a denial inside be one of the new name."""
    try:
        yield
    except AccessDeniedError as why:
        raise TargetDeniedError from why


class UnavailableError(Exception):
    """The client's root is gone or was replaced (spec O4)."""


class RightsError(Exception):
    """A document of rights that cannot be applied; the text says why."""


class HandoverError(Exception):
    """Something cannot be handed to the next program: nothing is, and the host goes on."""
