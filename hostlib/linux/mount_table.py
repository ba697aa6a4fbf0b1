"""The kernel's mount table: kinds of file systems, and other paths of a directory.

Rules of this file.

1. A device number without a disk is reused after an unmount: a ``proc`` may get that of
   an earlier ``tmpfs``.  So its kind is valid only while the table does not change
   (``is_passing``).
2. One descriptor of the table is held for the life of the process: polling it for a
   change costs 0.3 us, reading the table 25 us and more.
3. Without the table nothing is known about mounts.

Sources: proc(5) for mountinfo, poll(2), statfs(2).
"""

import ctypes
import os
import re
import resource
import select
import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from hostlib.threads import ThreadLock

UNKNOWN = "unknown"
"""The kind of a file system that the table does not name."""

FEWEST_DESCRIPTORS = 32
"""A process with fewer descriptors does without the table: a start takes 20, and an error
must still be reported."""

_READ_BYTES = 65_536

_OF_THE_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs"})
"""Kinds in which programs make no names: their contents are the same in each mount."""


_KINDS_BY_MAGIC = {0x794C7630: "overlay"}
"""``f_type`` of fstatfs(2) -> kind; some kinds share a number (ext2 to ext4)."""

_STATFS_BYTES = 256  # struct statfs has 120

_fstatfs = ctypes.CDLL(None).fstatfs
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)


def is_passing(device: int) -> bool:
    """Return whether a device number may be reused after an unmount.

    The number of a disk (with a major number) is not.
    """
    return os.major(device) == 0


class _Row(NamedTuple):
    """One mount.

    Attributes:
        ident: its number in ``fdinfo``.
        device: ``major:minor`` of its file system.
        top: the mounted directory, as a path in the file system.
        place: the path of the mount point.
        may_write: it is not mounted read-only.
        kind: the kind of file system.
    """

    ident: str
    device: str
    top: str
    place: str
    may_write: bool
    kind: str

    def rest_of(self, path: str) -> str:
        """Return the part of a path behind this mount point."""
        return path[len(self.place.rstrip("/")) :]

    def name_of(self, tree: str) -> str:
        """Return the path through this mount of a tree of its file system, or ""."""
        if tree == self.top or tree.startswith(self.top + "/"):
            return self.place.rstrip("/") + tree[len(self.top) :]
        return self.place if self.top.startswith(tree + "/") else ""


class _Rows:
    """The table at one moment.

    Args:
        text: the whole table.
    """

    def __init__(self, text: bytes = b"") -> None:
        rows = [row for line in text.splitlines() if (row := _row(line)) is not None]
        self.by_ident = {row.ident: row for row in rows}
        self.by_device: dict[str, list[_Row]] = {}
        self.by_place: dict[str, list[_Row]] = {}
        for row in rows:
            self.by_device.setdefault(row.device, []).append(row)
            self.by_place.setdefault(row.place, []).append(row)
        self.places = sorted(self.by_place)

    def mounts_on(self, path: str) -> Iterator[_Row]:
        """Yield the mounts at a path and at its parents."""
        while True:
            yield from self.by_place.get(path or "/", ())
            if not path.strip("/"):
                return
            path = path.rpartition("/")[0]

    def mounts_beneath(self, path: str) -> Iterator[_Row]:
        """Yield the mounts in a directory, at any depth."""
        start = f"{path}/"
        for place in self.places[bisect_left(self.places, start) :]:
            if not place.startswith(start):
                return
            yield from self.by_place[place]


class MountTable:
    """The table of this process's mount namespace.

    Attributes:
        lock: held by the caller: only one call of ``has_changed`` sees a change, and the
            caller must drop its caches before another thread asks.
    """

    def __init__(self) -> None:
        self.lock = ThreadLock()
        self._fd = -1
        self._poll = select.poll()
        self._rows: _Rows | None = None
        # At once, so that counts of this process's descriptors always include it.
        self._open()

    def has_changed(self) -> bool:
        """Return whether a mount changed since the last call."""
        if self._fd < 0:
            self._open()
        elif not self._poll.poll(0):
            return False
        self._rows = None
        return True

    def kind_of(self, device: int, fd: int) -> str:
        """Return the kind of file system of a device number, or of an open file on it."""
        rows = self._load()
        named = rows.by_device.get(f"{os.major(device)}:{os.minor(device)}")
        if named:
            return named[0].kind
        if fd < 0:
            return UNKNOWN
        row = rows.by_ident.get(_mount_id_of(fd))
        return _kind_by_statfs(fd) if row is None else row.kind

    def other_names(self, path: str) -> frozenset[str]:
        """Return the other paths of a directory and of the mounts in it.

        Args:
            path: absolute, without links.

        Returns:
            Paths by other mounts of the same file systems: of the directory, of parts of
            it and of writable mounts in it; some too many if mounts lie on each other.
        """
        rows = self._load()
        trees = {(r.device, f"{r.top}{r.rest_of(path)}") for r in rows.mounts_on(path)}
        trees |= {
            (row.device, row.top)
            for row in rows.mounts_beneath(path)
            if row.may_write and row.kind not in _OF_THE_KERNEL
        }
        found = {
            other.name_of(top)
            for device, top in trees
            for other in rows.by_device[device]
        }
        # Leave out paths in the directory itself, and the root.
        return frozenset(
            name
            for name in found
            if name != "/" and not f"{name}/".startswith(f"{path}/")
        ) - {""}

    def has_mounts_within(self, path: str) -> bool:
        """Return whether there are mounts in a directory (a path without links)."""
        return any(True for _ in self._load().mounts_beneath(path))

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor of the table, if it is held."""
        return (self._fd,) if self._fd >= 0 else ()

    def _open(self) -> None:
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FEWEST_DESCRIPTORS:
            return
        try:
            fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc here; or no descriptor at the moment
            return
        self._fd = fd
        self._poll.register(fd, select.POLLPRI)  # POLLERR is always reported

    def _load(self) -> _Rows:
        if self._rows is None:
            try:
                self._rows = _Rows(self.read())
            except OSError:
                return _Rows()
        return self._rows

    def read(self) -> bytes:
        """Return the table's text of now."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        pieces = []
        while piece := os.read(self._fd, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)


def _row(line: bytes) -> _Row | None:
    fields = [os.fsdecode(_unescape(field)) for field in line.split()]
    if "-" not in fields[6:-1]:
        return None
    ident, _, device, top, place, options = fields[:6]
    kind = fields[fields.index("-", 6) + 1]
    may_write = "ro" not in (*options.split(","), *fields[-1].split(","))
    return _Row(ident, device, top.rstrip("/"), place, may_write, kind)


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field)


def _kind_by_statfs(fd: int) -> str:
    """Return the kind of a mount that is detached, or in another namespace."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _fstatfs(fd, found):
        return UNKNOWN
    (magic,) = struct.unpack_from("q", found)
    return _KINDS_BY_MAGIC.get(magic, UNKNOWN)


def _mount_id_of(fd: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("mnt_id:"):
                    return line.split()[1]
    except OSError:
        pass
    return ""
