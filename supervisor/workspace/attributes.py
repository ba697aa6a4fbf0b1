"""Extended attributes of what lies in a layer: overlayfs's own, and a program's.

overlayfs keeps its marks in attributes.  Where a program gives an object an attribute that
is named like a mark, the kernel keeps it in the layer under an escaped name.

Source: Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts".
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TRUSTED_MARKS, USER_MARKS = b"trusted.overlay.", b"user.overlay."
"""How the names of overlayfs's attributes begin, for root and with ``userxattr``."""

_USER = os.fsdecode(USER_MARKS)


def attribute_names(of: int | str) -> list[str]:
    """Return the names of an object's attributes; none where there cannot be any.

    Args:
        of: a descriptor that may be read, or a path.
    """
    try:
        return os.listxattr(of)
    except OSError as why:
        if why.errno != errno.EOPNOTSUPP:
            raise
        return []


def is_escaped(name: str, marks: str = _USER) -> bool:
    """Tell whether an attribute is a program's own, with an escaped name."""
    return name.startswith(f"{marks}overlay.")


def program_attributes(fd: int) -> Iterator[tuple[str, str]]:
    """Yield what is not a user mark, sorted: the name in the layer, and without escape."""
    for name in sorted(attribute_names(fd)):
        if is_escaped(name):
            yield name, _USER + name.removeprefix(f"{_USER}overlay.")
        elif not name.startswith(_USER):
            yield name, name


def user_attributes(fd: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and value of what programs have set, as a commit brings it along."""
    for name, own_name in program_attributes(fd):
        if name.startswith("user."):
            yield own_name, os.getxattr(fd, name)
