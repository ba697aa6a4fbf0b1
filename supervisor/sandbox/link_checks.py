"""Checks that no link of a child leads to roots, grants or workspaces."""

# ruff: noqa: PTH115 - what is asked for is text
from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hostlib.paths import working_directory
from supervisor.sandbox.links import LINKS, Links, holder
from vfs.mounts import other_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def check_ways(held: Mapping[str, str], written: Iterable[str]) -> None:
    """Refuse what was reached by a link that a child may have made.

    Args:
        held: by the names of what is held, the paths that it has now.
        written: directories in which children or tools may make links.

    Raises:
        OSError: ELOOP; the name is in ``filename``.
    """
    linked = [path for path, real in held.items() if path != real]
    if not linked:  # the usual
        return
    theirs = {Links((), tuple).walk(_absolute(path)).real for path in written}
    theirs -= {"", "/"}  # a child that may write everything gains nothing by a link
    links = Links((), tuple)
    links.theirs = tuple(name for real in theirs for name in (real, *other_names(real)))
    for path in linked:
        if _real(links, _absolute(path)) != held[path]:
            why = "a link on its way may be a child's; put there what it leads to"
            raise OSError(errno.ELOOP, why, path)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{working_directory()}/{path}"


def _real(links: Links, path: str) -> str:
    """Return where a name leads without any link of a child's, "" if it needs one."""
    for _ in range(LINKS):
        walk = links.walk(path)
        if walk.real:
            return "" if walk.maker else walk.real
        # A file that is yet to be made, or a link to one.
        directory, name = os.path.split(path)
        above = links.walk(directory)
        if not above.real or above.maker:
            return ""
        path = f"{above.real}/{name}"
        try:
            target = os.readlink(path)
        except OSError:
            return path
        if holder(links.theirs, path):
            return ""
        path = target if target.startswith("/") else f"{above.real}/{target}"
    return ""
