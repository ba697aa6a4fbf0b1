"""Follows names link by link for the host, which may see more than a child.

1. A name is followed as by the kernel: part by part, ``..`` from its place, 40 links. All
   names of one child together take ``STEPS`` at most.
2. Each part is opened in its held directory: changes meanwhile lead no other way.
3. The host may be root and a link the child's. After such a link, only files that the
   child may read or sees anyhow are looked at, and the ways to them.
4. A directory is the child's under each of its names (kernel's mount table).
5. A link among the operator's named programs is the operator's.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from hostlib.linux.syscalls import open_exactly
from vfs.mounts import other_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

LINKS = 40
"""As many symbolic links as the kernel follows for one name."""

STEPS = 16_384
"""Parts of names that are looked at for one child: some 50 ms. A usual one takes 100."""

_LONGEST_PATH_BYTES = 4095

_MAY_BE_LINKS = frozenset({errno.ELOOP, errno.ENOTDIR})


class Walk(NamedTuple):
    """Where a name leads.

    Attributes:
        real: without links; "" if it leads nowhere, or where it may not be followed.
        hops: each file that its last part names, one link after the other.
        maker: the place of the child's in which the first link stands that the child may
            have made; "" if there is none.
        program: the link among the child's programs at which it ends, not followed; ""
            if it ends elsewhere.
    """

    real: str = ""
    hops: tuple[str, ...] = ()
    maker: str = ""
    program: str = ""


NOWHERE = Walk()


def holder(places: Iterable[str], path: str) -> str:
    """Return the nearest of some places that a path lies in; "" for none."""
    around = [p for p in places if p == path or path.startswith(p.rstrip("/") + "/")]
    return max(around, key=len, default="")


class Links:
    """The names of one child.

    Args:
        known: links that everybody sees, with their targets.
        seen: returns the places that the child sees at the moment.

    Attributes:
        followed: the known ones, and each that was followed, with its target.
        theirs: the places of the child's, by all of their names.
        readable: of these, those that it may read.
        programs: directories that no child may write, in which it finds programs.
    """

    def __init__(
        self, known: Iterable[tuple[str, str]], seen: Callable[[], Iterable[str]]
    ) -> None:
        self.followed = dict(known)
        self.theirs: tuple[str, ...] = ()
        self.readable: tuple[str, ...] = ()
        self.programs: tuple[str, ...] = ()
        self._list_seen = seen
        self.steps_left = STEPS

    def belong(self, places: Mapping[str, bool]) -> None:
        """Mark what the child may write: links in there may be the child's.

        They are marked in turn: links are not followed out of one that lies in another.

        Args:
            places: by their names: whether it may read them as well.
        """
        for path, is_readable in places.items():
            names = self.names(path)
            self.theirs += names
            if is_readable:
                self.readable += names

    def names(self, path: str) -> tuple[str, ...]:
        """Return all names of what a name leads to (rule 4); none of the top."""
        real = self.walk(path).real
        return (real, *sorted(other_names(real))) if real.strip("/") else ()

    def has_programs(self, path: str) -> None:
        """Add a directory in which the child finds its programs (rule 5).

        One that is the child's has none but the child's.
        """
        walk = self.walk(path)
        if walk.real and not walk.maker and not holder(self.theirs, walk.real):
            self.programs += (walk.real,)

    def walk(self, path: str, *, is_trusted: bool = False) -> Walk:
        """Follow an absolute name.

        Args:
            path: the name.
            is_trusted: links that may be the child's are followed as all others.
        """
        if not path.startswith("/") or "\0" in path:
            return NOWHERE
        path = "/" + path.lstrip("/")  # normpath keeps two
        if os.path.normpath(path) == path:
            # The usual: no link at all, in one call.
            try:
                os.close(open_exactly(os.fsencode(path)))
            except OSError as why:
                if why.errno not in _MAY_BE_LINKS:
                    return NOWHERE
            else:
                return Walk(path, (path,))
        theirs = self.theirs if not is_trusted else ()
        way = _Way(theirs, self._bounds, self.programs)
        try:
            walk = way.walk(path, self.steps_left)
        except OSError:  # it is not there; or links or steps are used up
            return NOWHERE
        finally:
            self.steps_left = way.steps
        self.followed.update(way.links)
        return walk

    def _bounds(self) -> _Bounds:
        return _Bounds((*self.readable, *self._list_seen()), self.followed)


class _Bounds:
    """Paths that may be looked at behind a link that may be the child's.

    Args:
        places: where it may lead.
        links: those that may be on the way.
    """

    def __init__(self, places: Iterable[str], links: Iterable[str]) -> None:
        places = tuple(places)
        self._places = frozenset(places)
        self._beneath = tuple(f"{place.rstrip('/')}/" for place in places)
        self._way = {"/", *places, *links}
        for path in tuple(self._way):
            above = path
            while above := above.rpartition("/")[0]:
                self._way.add(above)

    def has(self, place: str) -> bool:
        """Tell whether something lies where it may lead."""
        return place in self._places or place.startswith(self._beneath)

    def may_look_at(self, place: str) -> bool:
        """Tell whether something lies there, or on the way to it."""
        return place in self._way or self.has(place)


class _Way:
    """One name on its way.

    Args:
        theirs: where links may be the child's.
        bounds: returns what may be looked at behind one.
        programs: where links are none of the child's.
    """

    def __init__(
        self,
        theirs: tuple[str, ...],
        bounds: Callable[[], _Bounds],
        programs: Collection[str],
    ) -> None:
        self.links: dict[str, str] = {}
        self.steps = 0
        self._theirs = theirs
        self._make_bounds = bounds
        self._bounds: _Bounds | None = None
        self._programs = programs
        self._maker = self._program = ""
        self._here = ""  # of the directory that is held
        self._fd = -1
        self._trail: list[os.stat_result] = []
        self._hops: list[str] = []
        self._count = 0

    def walk(self, path: str, steps: int) -> Walk:
        """Go all the way, in no more than so many steps.

        Raises:
            OSError: it leads nowhere.
        """
        self.steps = steps
        left = _parts(path)
        self._to_the_top()
        try:
            while left:
                self._step(left)
        finally:
            os.close(self._fd)
        if self._program:
            return Walk("", tuple(self._hops), self._maker, self._program)
        real = self._here or "/"
        if self._hops[-1:] != [real]:
            self._hops.append(real)
        if self._bounds is not None and not self._bounds.has(real):
            raise OSError(errno.EXDEV, real)
        if len(os.fsencode(real)) > _LONGEST_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, real)
        return Walk(real, tuple(self._hops), self._maker)

    def _step(self, left: list[str]) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise OSError(errno.ELOOP, "too many steps")
        name = left.pop()
        if name == "..":
            place = self._here.rpartition("/")[0]
        else:
            place = f"{self._here}/{name}"
        if self._bounds is not None and not self._bounds.may_look_at(place or "/"):
            raise OSError(errno.EXDEV, place)
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=self._fd)
        found = os.fstat(fd)
        if stat.S_ISLNK(found.st_mode):
            self._follow(fd, place, left)
            return
        os.close(self._fd)
        self._fd, self._here = fd, place
        if name == "..":
            self._climb(found)
        else:
            self._trail.append(found)
        if not left:
            self._hops.append(place or "/")

    def _climb(self, found: os.stat_result) -> None:
        """Record what lies above: where the way came from, unless it was moved."""
        if len(self._trail) > 1:  # above the top is the top
            self._trail.pop()
        if not os.path.samestat(found, self._trail[-1]):
            raise OSError(errno.ESTALE, "moved while it was looked at")

    def _follow(self, link: int, place: str, left: list[str]) -> None:
        try:
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
        if not left:
            self._hops.append(place)
            if self._bounds is not None and self._is_program(place):
                self._program = place
                return
        self._count += 1
        if self._count > LINKS:
            raise OSError(errno.ELOOP, place)
        self.links[place] = target
        maker = "" if self._maker else holder(self._theirs, place)
        if maker:
            self._maker, self._bounds = maker, self._make_bounds()
        if target.startswith("/"):
            self._to_the_top()
        left += _parts(target)

    def _is_program(self, place: str) -> bool:
        directory = place.rpartition("/")[0]
        return directory in self._programs and not holder(self._theirs, place)

    def _to_the_top(self) -> None:
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._here = fd, ""
        self._trail = [os.fstat(fd)]  # from the top to the directory that is held


def _parts(path: str) -> list[str]:
    """Return the parts of a name, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
