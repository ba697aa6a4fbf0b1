"""The ways to a child's root and grants: none by a link that a child may have made.

What it is: one check of places that are held already.  What it is not: the walls' own look
at links (``sandbox.links`` has the resolver, ``sandbox.paths`` what is seen).

Rule: a root and a grant are named by whoever runs the host, and are resolved anew at each
start.  What stands where a child or its tools may write may be their work: a link that
has come to stand in a grant's place would be a right to whatever it names.
"""

# ruff: noqa: PTH115 - what is asked for is text
from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from supervisor.here import working_directory
from supervisor.sandbox.links import LINKS, Links, holder
from vfs.hostio import other_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfs.places import Place


def check_ways(places: Mapping[str, Place], written: Iterable[str]) -> None:
    """Refuse places whose way goes by a link that a child may have made.

    Args:
        places: what is held, by the names of a child's root and grants.
        written: more directories in which children or tools may make links.

    Raises:
        OSError: ELOOP; the name is in ``filename``.
    """
    held = {path: _path_of(place) for path, place in places.items()}
    linked = [path for path in held if path != held[path]]
    if not linked:  # the usual
        return
    theirs = {held[path] for path, place in places.items() if place.write}
    theirs |= {Links((), tuple).walk(_absolute(path)).real for path in written}
    theirs -= {"", "/"}  # who may write everything gains nothing by a link
    links = Links((), tuple)
    links.theirs = tuple(name for real in theirs for name in (real, *other_names(real)))
    for path in linked:
        if _real(links, _absolute(path)) != held[path]:
            why = "a link on its way may be a child's; put there what it leads to"
            raise OSError(errno.ELOOP, why, path)


def _path_of(place: Place) -> str:
    """Return the path of what is held, as it is now."""
    (fd,) = place.backend.descriptors()
    path = os.readlink(f"/proc/self/fd/{fd}")
    return path if place.only is None else f"{path}/{os.fsdecode(place.only)}"


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
