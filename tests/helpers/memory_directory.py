"""A directory in this process's memory: no disk, and faults at will.

It passes the same contract suite as the host's directories.  Links do not exist here.
"""

from __future__ import annotations

import errno
import os
import time
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

from hostlib.linux.resolve import check_name
from vfs.backends.base import Backend, FileStatus, Mode, RemovedEntry
from vfs.errors import AccessDeniedError, deny_as_target
from vfs.mounts import Mount

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_LIMIT_BYTES = 64 * 1024 * 1024
"""Most that all files of a tree hold together: it is the host's own memory (I9)."""

_DEVICE = -1  # no real st_dev
_NAME_MAX = 255
_NO_ENTRY: Final = (b"", b".", b"..")
_inodes = count(1)
_Node: TypeAlias = "_File | _Directory"
_MEMORY = Mount("tmpfs")


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class _Space:
    """How much a tree holds, and how much it may; shared by all of it."""

    __slots__ = ("left",)

    def __init__(self, limit_bytes: int) -> None:
        self.left = limit_bytes


class _File:
    __slots__ = ("data", "inode", "links", "mtime_ns", "space")

    def __init__(self, space: _Space) -> None:
        self.data = bytearray()
        self.links = 0
        self.inode = next(_inodes)
        self.mtime_ns = time.time_ns()
        self.space = space

    def __del__(self) -> None:
        self.space.left += len(self.data)

    def resize(self, size: int) -> None:
        """Set the size, all or nothing.

        Raises:
            OSError: ``ENOSPC``: the tree may not hold so much.
        """
        growth = size - len(self.data)
        if growth > self.space.left:
            raise _error(errno.ENOSPC)
        if growth > 0:
            self.data += bytes(growth)
        else:
            del self.data[size:]
        self.space.left -= growth
        self.mtime_ns = time.time_ns()


class _Directory:
    __slots__ = ("entries", "inode", "mtime_ns")

    def __init__(self) -> None:
        self.entries: dict[bytes, _Node] = {}
        self.inode = next(_inodes)
        self.mtime_ns = time.time_ns()

    def put(self, name: bytes, node: _Node) -> None:
        """Enter a node, in place of what had the name."""
        self.drop(name)
        self.entries[name] = node
        if isinstance(node, _File):
            node.links = 1

    def drop(self, name: bytes) -> None:
        """Strike a name out, if there is one."""
        node = self.entries.pop(name, None)
        if isinstance(node, _File):
            node.links = 0


class MemoryHandle:
    """An open file in memory; see ``base.Handle``."""

    __slots__ = ("_file", "_on_publish", "_replaces", "fd", "mount")

    def __init__(
        self,
        file: _File,
        on_publish: Callable[[], RemovedEntry | None] | None,
        replaces: Callable[[], bool] = lambda: True,
    ) -> None:
        self._file = file
        self._on_publish = on_publish
        self._replaces = replaces
        self.fd = -1
        self.mount = _MEMORY

    def pread(self, size: int, offset: int) -> bytes:
        return self.pread_wait(size, offset)

    def pread_wait(self, size: int, offset: int) -> bytes:
        return bytes(memoryview(self._file.data)[offset : offset + size])

    def pwrite(self, data: bytes | memoryview, offset: int) -> None:
        if not data:
            return
        file = self._file
        end = offset + len(data)
        if end > len(file.data):
            file.resize(end)
        file.data[offset:end] = data
        file.mtime_ns = time.time_ns()

    def append(self, data: bytes | memoryview) -> int:
        self.pwrite(data, len(self._file.data))
        return len(self._file.data)

    def cut_off(self, end: int, old_end: int) -> None:
        if end > old_end and self.size() == end:
            self._file.resize(old_end)

    def size(self) -> int:
        return len(self._file.data)

    def truncate(self, size: int) -> None:
        self._file.resize(size)

    def sync(self) -> None:
        return None

    def publish(self, *, durable: bool) -> RemovedEntry | None:
        del durable  # memory never is
        return None if self._on_publish is None else self._on_publish()

    def will_replace(self) -> bool:
        return self._replaces()

    def identity(self) -> tuple[int, int]:
        return (_DEVICE, self._file.inode)

    def links(self) -> int:
        return self._file.links

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self._on_publish = None

    def drop(self) -> None:
        self.close()


class MemoryDirectory:
    """A directory tree in memory; see ``base.Backend``.

    Args:
        limit_bytes: most that its files hold together.
    """

    __slots__ = ("space", "top")

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.top = _Directory()
        self.space = _Space(limit_bytes)

    def _walk(self, name: bytes) -> _Node:
        _check_name(name)
        trail: list[_Directory] = []
        node: _Node = self.top
        for part in name.split(b"/"):
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR)
            if part == b"..":
                if not trail:
                    raise AccessDeniedError
                node = trail.pop()
            elif part not in _NO_ENTRY:
                trail.append(node)
                node = _enter(node, part)
        return node

    def _directory(self, name: bytes) -> _Directory:
        node = self._walk(name)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR)
        return node

    def entry(self, name: bytes, code: int = errno.EINVAL) -> tuple[_Directory, bytes]:
        """Return the directory of a name, and the last component.

        Args:
            name: of the entry to be made, removed, renamed or replaced.
            code: the errno for a last component that is no entry to make.
        """
        _check_name(name)
        head, _, last = name.rstrip(b"/").rpartition(b"/")
        directory = self._directory(head or b".")
        if last in _NO_ENTRY:
            raise _error(code)
        if len(last) > _NAME_MAX:
            raise _error(errno.ENAMETOOLONG)
        return directory, last

    def open(
        self, name: bytes, mode: Mode, *, create: bool, exclusive: bool, staged: bool
    ) -> MemoryHandle:
        del mode  # memory knows no permissions
        if staged:
            return self._open_staged(name)
        try:
            node = self._walk(name)
        except FileNotFoundError:
            if not create:
                raise
            directory, last = self.entry(name)
            if name.endswith(b"/"):
                raise _error(errno.EISDIR) from None
            node = _File(self.space)
            directory.put(last, node)
        else:
            if create and exclusive:
                raise _error(errno.EEXIST)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR)
        return MemoryHandle(node, None)

    def _open_staged(self, name: bytes) -> MemoryHandle:
        directory, last = self.entry(name, errno.EISDIR)
        if name.endswith(b"/") or isinstance(directory.entries.get(last), _Directory):
            raise _error(errno.EISDIR)
        file = _File(self.space)

        def publish() -> RemovedEntry | None:
            there = directory.entries.get(last)
            if isinstance(there, _Directory):
                raise _error(errno.EISDIR)
            directory.put(last, file)
            return _removed(there)

        return MemoryHandle(file, publish, lambda: last in directory.entries)

    def stat(self, name: bytes) -> FileStatus:
        node = self._walk(name)
        if isinstance(node, _Directory):
            return FileStatus(0, node.mtime_ns, "directory")
        return FileStatus(len(node.data), node.mtime_ns, "file")

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        entries = self._directory(name).entries
        if len(entries) > limit:
            raise _error(errno.EOVERFLOW)
        return sorted(
            (key, "directory" if isinstance(value, _Directory) else "file")
            for key, value in entries.items()
        )

    def make_directory(self, name: bytes) -> None:
        directory, last = self.entry(name)
        if last in directory.entries:
            raise _error(errno.EEXIST)
        directory.put(last, _Directory())

    def remove(self, name: bytes) -> RemovedEntry:
        directory, last = self.entry(name)
        node = _enter(directory, last)
        _check_slash(name, node)
        if isinstance(node, _Directory) and node.entries:
            raise _error(errno.ENOTEMPTY)
        directory.drop(last)
        return _removed(node) or RemovedEntry(0, (_DEVICE, node.inode), False)

    def rename(self, old: bytes, target: Backend, new: bytes) -> RemovedEntry | None:
        if type(target) is not MemoryDirectory:
            raise _error(errno.EXDEV)
        directory, last = self.entry(old)
        with deny_as_target():
            new_directory, new_last = target.entry(new)
        node = _enter(directory, last)
        _check_slash(old, node)
        _check_slash(new, node)
        there = new_directory.entries.get(new_last)
        if there is node:
            return None
        _check_replaceable(node, there)
        if isinstance(node, _Directory) and _contains(node, new_directory):
            raise _error(errno.EINVAL)
        directory.drop(last)
        new_directory.put(new_last, node)
        return _removed(there)

    def sync_entry(self, name: bytes) -> None:
        del name

    def narrow(
        self, name: bytes, *, create: bool
    ) -> tuple[MemoryDirectory, bytes | None]:
        try:
            node = self._walk(name)
        except FileNotFoundError:
            if not create:
                raise
        else:
            if isinstance(node, _Directory):
                return self._part(node), None
        directory, last = self.entry(name)
        return self._part(directory), last

    def _part(self, directory: _Directory) -> MemoryDirectory:
        part = MemoryDirectory()
        part.top = directory
        part.space = self.space
        return part

    @property
    def is_lasting(self) -> bool:
        return True

    @property
    def is_distant(self) -> bool:
        return False

    def identity(self) -> tuple[int, int]:
        return (_DEVICE, self.top.inode)

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        return None


def _removed(node: _Node | None) -> RemovedEntry | None:
    if not isinstance(node, _File):
        return None
    return RemovedEntry(len(node.data), (_DEVICE, node.inode), True)


def _check_name(name: bytes) -> None:
    check_name(name)
    if name.startswith(b"/"):
        raise AccessDeniedError


def _enter(directory: _Directory, part: bytes) -> _Node:
    if len(part) > _NAME_MAX:
        raise _error(errno.ENAMETOOLONG)
    found = directory.entries.get(part)
    if found is None:
        raise _error(errno.ENOENT)
    return found


def _check_slash(name: bytes, node: _Node) -> None:
    if name.endswith(b"/") and not isinstance(node, _Directory):
        raise _error(errno.ENOTDIR)


def _check_replaceable(node: _Node, there: _Node | None) -> None:
    """Raise what rename(2) raises where one kind would replace another."""
    if isinstance(there, _Directory):
        if not isinstance(node, _Directory):
            raise _error(errno.EISDIR)
        if there.entries:
            raise _error(errno.ENOTEMPTY)
    elif there is not None and isinstance(node, _Directory):
        raise _error(errno.ENOTDIR)


def _contains(node: _Directory, wanted: _Directory) -> bool:
    if node is wanted:
        return True
    return any(
        _contains(entry, wanted)
        for entry in node.entries.values()
        if isinstance(entry, _Directory)
    )
