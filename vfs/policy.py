"""What a client may do: its root, its grants, its limits; and how it shrinks.

Rules of this file.

1. A right belongs to a connection and is fixed when the connection is made (spec A1).
   The only later change is ``narrowed``, which takes away (spec A5, I8).
2. A place (the root, or a grant) is a directory descriptor that the policy holds from
   the start.  A name's text only chooses *which* place is asked; whether the file is
   beneath that place is the kernel's answer (``paths``).  A wrong guess by text can
   therefore refuse too much, never allow too much.
3. What a client and everything nested in it use is charged to the client and to every
   ancestor in one step (``Ledger``, spec S7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from vfs.backends import Backend, HostDirectory
from vfs.errors import AccessDeniedError, RightsError, UnavailableError
from vfs.paths import DENIED

PUBLISH_DIRECT = "direct"
PUBLISH_ON_CLOSE = "on-close"
DURABILITY = ("none", "close", "write")


class Place:
    """A directory that names lie beneath, or one file in it.

    Args:
        backend: the held directory; the place owns it.
        prefixes: absolute texts by which names reach the place; the first one is the
            place's own path.
        only: the one entry that is granted; None grants everything beneath.
        read: may be read.
        write: may be written.
        relative: relative names that begin so lie here: empty for a root, None for a
            grant, the way from the root for a part of it.
        publish: when ``w`` and ``w+`` show: ``direct`` or ``on-close`` (spec A3b).
        durability: when fsync is paid: ``none``, ``close`` or ``write``.
    """

    __slots__ = (
        "backend",
        "durability",
        "identity",
        "only",
        "prefixes",
        "publish",
        "read",
        "relative",
        "write",
    )

    def __init__(  # noqa: PLR0913 - the fields of one place
        self,
        backend: Backend,
        prefixes: tuple[bytes, ...],
        *,
        only: bytes | None = None,
        read: bool = False,
        write: bool = False,
        relative: bytes | None = None,
        publish: str = PUBLISH_DIRECT,
        durability: str = "none",
    ) -> None:
        self.backend = backend
        self.prefixes = prefixes
        self.only = only
        self.read = read
        self.write = write
        self.relative = relative
        self.publish = publish
        self.durability = durability
        self.identity = backend.identity()

    def beneath(self, name: bytes) -> bytes | None:
        """Return what of ``name`` lies beneath this place by its text, else None."""
        if not name.startswith(b"/"):
            rest = _strip_prefix(name, self.relative)
        else:
            rest = None
            for prefix in self.prefixes:
                rest = _strip_prefix(name, prefix)
                if rest is not None:
                    break
        if rest is None or self.only is None:
            return rest
        return rest if rest == self.only else None


def _strip_prefix(name: bytes, prefix: bytes | None) -> bytes | None:
    if prefix is None:
        return None
    if prefix in (b"", b"/"):
        return name.lstrip(b"/") or b"."
    if name == prefix:
        return b"."
    if name.startswith(prefix + b"/"):
        return name[len(prefix) :].lstrip(b"/") or b"."
    return None


def open_place(
    path: str | bytes,
    *,
    read: bool = False,
    write: bool = False,
    relative: bytes | None = None,
    publish: str = PUBLISH_DIRECT,
    durability: str = "none",
) -> Place:
    """Resolve a path as the host sees it, once, and hold it (spec A3).

    A path that is no directory is held through its directory: a file that does not
    exist yet can be granted for writing, and one that is replaced stays granted.

    Raises:
        OSError: the path, or the directory of a file, cannot be reached.
    """
    given = os.path.abspath(os.fsencode(path))  # noqa: PTH100 - bytes, not resolved
    only = None
    directory = given
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        dir_fd = os.open(given, flags)
    except (NotADirectoryError, FileNotFoundError) as why:
        if isinstance(why, FileNotFoundError) and not write:
            raise
        directory, only = os.path.split(given)
        dir_fd = os.open(directory, flags)
    real = os.readlink(b"/proc/self/fd/%d" % dir_fd)
    prefixes = (directory,) if real == directory else (directory, real)
    return Place(
        HostDirectory(dir_fd),
        prefixes,
        only=only,
        read=read,
        write=write,
        relative=relative,
        publish=publish,
        durability=durability,
    )


class Ledger:
    """What one client and all beneath it have used of what they may.

    Args:
        parent: whose use this is part of.
        open_files: most open files at once; None is no bound of its own.
        clients: most clients at once.
        size_bytes: most that files may grow by.
        files: most files that may be made.
    """

    __slots__ = ("bounds_files", "bounds_size", "limits", "parent", "used")

    def __init__(
        self,
        parent: Ledger | None = None,
        *,
        open_files: int | None = None,
        clients: int | None = None,
        size_bytes: int | None = None,
        files: int | None = None,
    ) -> None:
        self.parent = parent
        self.limits = (open_files, clients, size_bytes, files)
        self.used = [0, 0, 0, 0]
        above = parent is not None
        self.bounds_size = size_bytes is not None or (above and parent.bounds_size)
        self.bounds_files = files is not None or (above and parent.bounds_files)

    def charge(self, kind: int, amount: int) -> bool:
        """Charge ``amount`` here and at every ancestor, or nowhere; tell whether.

        A negative amount gives back and is always taken.
        """
        node: Ledger | None = self
        if amount > 0:
            while node is not None:
                limit = node.limits[kind]
                if limit is not None and node.used[kind] + amount > limit:
                    return False
                node = node.parent
            node = self
        while node is not None:
            node.used[kind] += amount
            node = node.parent
        return True


OPEN_FILES, CLIENTS, SIZE_BYTES, FILES = range(4)
"""What a ledger counts."""


class Policy:
    """Everything a client may do with files.

    Args:
        top_level: the client may take the top-level view (spec A1).
        cwd_fd: where relative names of the top-level view start; owned by the caller.
        places: the root first, then the grants; owned by whoever made them.
        root: whose path must still name it at each use (spec O4); the first place.
    """

    __slots__ = ("host", "places", "root", "top_level")

    def __init__(
        self,
        places: tuple[Place, ...],
        *,
        top_level: bool = False,
        cwd_fd: int = -1,
        root: Place | None = None,
    ) -> None:
        self.top_level = top_level
        self.host = HostDirectory(cwd_fd, beneath=False)
        self.places = places
        self.root = root if root is not None else places[0] if places else None

    def check_available(self) -> None:
        """Raise ``UnavailableError`` if the root is gone or was replaced (spec O4)."""
        root = self.root
        if root is None or not root.prefixes:
            return
        try:
            status = os.stat(root.prefixes[0])
        except OSError:
            raise UnavailableError from None
        if (status.st_dev, status.st_ino) != root.identity:
            raise UnavailableError

    def candidates(
        self, name: bytes, *, read: bool, write: bool
    ) -> list[tuple[Place, bytes]]:
        """Return (place, rest of the name) of every place to ask, nearest first.

        Raises:
            AccessDeniedError: no place covers the name with these rights (spec A3).
        """
        found = []
        for place in self.places:
            if (read and not place.read) or (write and not place.write):
                continue
            rest = place.beneath(name)
            if rest is not None:
                found.append((place, rest))
        if not found:
            raise AccessDeniedError
        if len(found) > 1:
            found.sort(key=lambda pair: len(pair[1]))
        return found

    def narrowed(self, document: bytes) -> Policy:
        """Return a policy with at most these rights (spec A5).

        Args:
            document: JSON ``{"read": [...], "write": [...]}``; names given become the
                only places; an empty document only drops the top-level right.

        Raises:
            RightsError: the document is not of that form, or asks for what this policy
                does not have.
        """
        try:
            wanted = msgspec.json.decode(document, type=Rights)
        except msgspec.MsgspecError as why:
            raise RightsError(str(why)) from None
        if wanted.model is not None or wanted.quota is not None:
            raise RightsError("model and quota are not available yet")
        if wanted.read is None and wanted.write is None:
            return Policy(self.places, root=self.root)
        rights: dict[str, list[bool]] = {}
        for name in wanted.read or ():
            rights.setdefault(name, [False, False])[0] = True
        for name in wanted.write or ():
            rights.setdefault(name, [False, False])[1] = True
        places: list[Place] = []
        try:
            for name, (read, write) in rights.items():
                places.append(self._sub_place(name, read=read, write=write))
        except BaseException:
            close_places(places)
            raise
        return Policy(tuple(places), root=self.root)

    def _sub_place(self, text: str, *, read: bool, write: bool) -> Place:
        name = os.fsencode(text)
        if name != b"/":
            name = name.rstrip(b"/")
        if not name:
            raise RightsError("an empty name")
        try:
            found = self.candidates(name, read=read, write=write)
        except AccessDeniedError:
            raise RightsError(f"not within this client's rights: {text!r}") from None
        place, rest = found[0]
        only = None
        try:
            try:
                backend = place.backend.narrow(rest)
            except (NotADirectoryError, FileNotFoundError) as why:
                if isinstance(why, FileNotFoundError) and not write:
                    raise
                head, _, only = rest.rpartition(b"/")
                backend = place.backend.narrow(head or b".")
        except OSError as why:
            reason = "leads out" if why.errno in DENIED else os.strerror(why.errno or 0)
            raise RightsError(f"cannot narrow to {text!r}: {reason}") from None
        base = name if only is None else name[: -len(only)].rstrip(b"/")
        absolute = base.startswith(b"/")
        own = (base,) if absolute else ()
        if not absolute and place.prefixes:
            own = tuple(
                p + b"/" + base if base not in (b"", b".") else p
                for p in place.prefixes
            )
        relative = None if absolute else (b"" if base == b"." else base)
        return Place(
            backend,
            own,
            only=only,
            read=read,
            write=write,
            relative=relative,
            publish=place.publish,
            durability=place.durability,
        )


class Rights(msgspec.Struct, forbid_unknown_fields=True):
    """The document of ``NARROW``."""

    read: list[str] | None = None
    write: list[str] | None = None
    model: str | None = None
    quota: float | None = None


def close_places(places: Iterable[Place]) -> None:
    """Release the directories that the places hold."""
    for place in places:
        place.backend.close()
