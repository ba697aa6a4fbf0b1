"""What is mounted, as the kernel's table says it, and whether that has changed.

The kind of file system behind a device number, and the names that one directory has by
several mounts, for ``vfs.mounts``.

Rules of this file.

1. A file system without a disk has a number that is free again when it is unmounted: a
   ``proc`` may get that of a ``tmpfs`` that was there before.  So what is known of such a
   number is believed only while the table is the same (``is_passing``).
2. One descriptor of the table is held for as long as the process lives.  The kernel
   notes at each change of the table that its poller has not been told: to ask
   costs 0.3 us, to read the table 25 us and more.
3. What cannot be asked about is not believed: without the table nothing is known.

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
"""Who may have fewer needs this one to say so, and to clean up: a start takes 20."""

_READ_BYTES = 65_536

_OF_THE_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs"})
"""Where nobody makes names: the same everywhere, and nobody's who has one mounted."""


_KINDS_BY_MAGIC = {0x794C7630: "overlay"}
"""By ``f_type`` of fstatfs(2), which is one number for some kinds (ext2 to ext4)."""

_STATFS_BYTES = 256  # struct statfs has 120

_fstatfs = ctypes.CDLL(None).fstatfs
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)


def is_passing(device: int) -> bool:
    """Tell whether a device number is given to somebody else when it is unmounted.

    The number of a disk (one with a major number) is that disk's.
    """
    return os.major(device) == 0


class _Row(NamedTuple):
    """One mount.

    Attributes:
        ident: its number, as ``fdinfo`` has it.
        device: ``major:minor`` of its file system.
        top: what of the file system is mounted, as a path in there.
        place: where.
        may_write: it is not mounted read-only.
        kind: of file system.
    """

    ident: str
    device: str
    top: str
    place: str
    may_write: bool
    kind: str

    def rest_of(self, path: str) -> str:
        """Return what follows its place in a path that leads through it."""
        return path[len(self.place.rstrip("/")) :]

    def name_of(self, tree: str) -> str:
        """Return what a tree of its file system, or a part of it, is called by it."""
        if tree == self.top or tree.startswith(self.top + "/"):
            return self.place.rstrip("/") + tree[len(self.top) :]
        return self.place if self.top.startswith(tree + "/") else ""


class _Rows:
    """The table at one moment.

    Args:
        text: all of it.
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

    def around(self, path: str) -> Iterator[_Row]:
        """Yield what is mounted where a path leads through."""
        while True:
            yield from self.by_place.get(path or "/", ())
            if not path.strip("/"):
                return
            path = path.rpartition("/")[0]

    def beneath(self, path: str) -> Iterator[_Row]:
        """Yield what is mounted in a directory."""
        start = f"{path}/"
        for place in self.places[bisect_left(self.places, start) :]:
            if not place.startswith(start):
                return
            yield from self.by_place[place]


class MountTable:
    """The table of this process's mount namespace.

    Attributes:
        lock: held by the caller: a change is told to one only, and what was known has
            to be forgotten before another one asks.
    """

    def __init__(self) -> None:
        self.lock = ThreadLock()
        self._fd = -1
        self._poll = select.poll()
        self._rows: _Rows | None = None
        # At once: a program that counts its descriptors counts it from the beginning.
        self._open()

    def has_changed(self) -> bool:
        """Tell whether something was mounted or unmounted since the last time."""
        if self._fd < 0:
            self._open()
        elif not self._poll.poll(0):
            return False
        self._rows = None
        return True

    def kind_of(self, device: int, fd: int) -> str:
        """Return the kind of file system of a device number, or of an open file on it."""
        rows = self._known()
        named = rows.by_device.get(f"{os.major(device)}:{os.minor(device)}")
        if named:
            return named[0].kind
        if fd < 0:
            return UNKNOWN
        row = rows.by_ident.get(_mount_id_of(fd))
        return _kind_of_no_row(fd) if row is None else row.kind

    def other_names(self, path: str) -> frozenset[str]:
        """Return where else a directory can be found, and what is mounted in it.

        Args:
            path: absolute, without links.

        Returns:
            Names of it, of parts of it and of what can be written through it, by other
            mounts of the same; more where a mount lies beneath another one.
        """
        rows = self._known()
        trees = {(r.device, f"{r.top}{r.rest_of(path)}") for r in rows.around(path)}
        trees |= {
            (row.device, row.top)
            for row in rows.beneath(path)
            if row.may_write and row.kind not in _OF_THE_KERNEL
        }
        found = {
            other.name_of(top)
            for device, top in trees
            for other in rows.by_device[device]
        }
        # In the directory itself everything has its name; the top is everybody's.
        return frozenset(
            name
            for name in found
            if name != "/" and not f"{name}/".startswith(f"{path}/")
        ) - {""}

    def has_mounts_within(self, path: str) -> bool:
        """Tell whether something is mounted in a directory without links."""
        return any(True for _ in self._known().beneath(path))

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor that is held."""
        return (self._fd,) if self._fd >= 0 else ()

    def _open(self) -> None:
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FEWEST_DESCRIPTORS:
            return
        try:
            fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc here; or no descriptor at the moment
            return
        self._fd = fd
        self._poll.register(fd, select.POLLPRI)  # and POLLERR, which is always told

    def _known(self) -> _Rows:
        if self._rows is None:
            try:
                self._rows = _Rows(self._read())
            except OSError:
                return _Rows()
        return self._rows

    def _read(self) -> bytes:
        os.lseek(self._fd, 0, os.SEEK_SET)
        pieces = []
        while piece := os.read(self._fd, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)


def _row(line: bytes) -> _Row | None:
    fields = [os.fsdecode(_written_out(field)) for field in line.split()]
    if "-" not in fields[6:-1]:
        return None
    ident, _, device, top, place, options = fields[:6]
    kind = fields[fields.index("-", 6) + 1]
    may_write = "ro" not in (*options.split(","), *fields[-1].split(","))
    return _Row(ident, device, top.rstrip("/"), place, may_write, kind)


def _written_out(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field)


def _kind_of_no_row(fd: int) -> str:
    """Return the kind of a mount that is attached nowhere, or in another namespace."""
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
