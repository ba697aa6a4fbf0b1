"""Extended attributes of what lies in a layer: overlayfs's own, and a program's.

overlayfs keeps its marks in attributes.  Where a program gives an object an attribute that
is named like a mark, the kernel keeps it in the layer under an escaped name.

Source: Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts".
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TRUSTED_MARKS, USER_MARKS = b"trusted.overlay.", b"user.overlay."
"""Prefixes of overlayfs's attributes, for root and with ``userxattr``."""

_USER = os.fsdecode(USER_MARKS)
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_NO_ACL = frozenset({errno.ENODATA, errno.EOPNOTSUPP})


def own_marks() -> bytes:
    """Return how the names begin in layers that this process's user makes."""
    return TRUSTED_MARKS if os.geteuid() == 0 else USER_MARKS


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


def read_acls(of: int | str) -> dict[str, bytes]:
    """Return the access lists of an object, by the names of their attributes.

    Args:
        of: as of ``attribute_names``.
    """
    found = {}
    for name in _ACLS:
        try:
            found[name] = os.getxattr(of, name)
        except OSError as why:
            if why.errno not in _NO_ACL:
                raise
    return found


def set_acls(fd: int, acls: Mapping[str, bytes]) -> None:
    """Give an object access lists, and take those from it that are not among them."""
    for name in _ACLS:
        if name in acls:
            os.setxattr(fd, name, acls[name])
        else:
            with contextlib.suppress(OSError):  # there is none
                os.removexattr(fd, name)


def is_escaped(name: str, marks: str = _USER) -> bool:
    """Tell whether an attribute is a program's own, with an escaped name."""
    return name.startswith(f"{marks}overlay.")


def program_attributes(fd: int) -> Iterator[tuple[str, str]]:
    """Yield attributes that are no user marks, sorted: in the layer, and unescaped."""
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
