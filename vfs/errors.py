"""Errors of the VFS beside ``OSError``.

An ``OSError`` is an error of the operating system, and is answered with ``failed to ...:
REASON``.  These are refusals of the VFS itself.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class AccessDeniedError(Exception):
    """The client has no right to use the name in that way (spec O6, A3)."""


class TargetDeniedError(AccessDeniedError):
    """The client has no right to the new name of a RENAME (spec X1, A1)."""


@contextlib.contextmanager
def deny_as_target() -> Iterator[None]:
    """Turn an ``AccessDeniedError`` of a block into ``TargetDeniedError``."""
    try:
        yield
    except AccessDeniedError as why:
        raise TargetDeniedError from why


class UnavailableError(Exception):
    """The client's root is gone or was replaced (spec O4)."""


class RightsError(Exception):
    """A document of rights that cannot be applied; the text says why."""
