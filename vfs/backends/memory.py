"""Files that live in this process's memory; nothing of them outlives the tree.

For children whose scratch must never reach a disk, and for tests: it passes the same
contract suite as the host's disk.  Links do not exist here.
"""

import errno
import os
import time
from collections.abc import Callable
from itertools import count

from vfs.backends.base import Backend, FileStatus, Mode
from vfs.hostio import Mount

_DEVICE = -1  # no real st_dev
_inodes = count(1)
_MEMORY = Mount("tmpfs")


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class _File:
    __slots__ = ("data", "inode", "mtime_ns")

    def __init__(self) -> None:
        self.data = bytearray()
        self.inode = next(_inodes)
        self.mtime_ns = time.time_ns()


class _Directory:
    __slots__ = ("entries", "inode", "mtime_ns")

    def __init__(self) -> None:
        self.entries: dict[bytes, _File | _Directory] = {}
        self.inode = next(_inodes)
        self.mtime_ns = time.time_ns()


class MemoryHandle:
    """An open file in memory; see ``base.Handle``."""

    __slots__ = ("_file", "_on_publish", "fd", "mount", "pread")

    def __init__(self, file: _File, on_publish: Callable[[], None] | None) -> None:
        self._file = file
        self._on_publish = on_publish
        self.fd = -1
        self.mount = _MEMORY
        self.pread: Callable[[int, int], bytes] = self.pread_wait

    def pread_wait(self, size: int, offset: int) -> bytes:
        return bytes(memoryview(self._file.data)[offset : offset + size])

    def pwrite(self, data: bytes | memoryview, offset: int) -> None:
        content = self._file.data
        gap = offset - len(content)
        if gap > 0 and len(data):
            content += bytes(gap)
        content[offset : offset + len(data)] = data
        self._file.mtime_ns = time.time_ns()

    def append(self, data: bytes | memoryview) -> int:
        self.pwrite(data, len(self._file.data))
        return len(self._file.data)

    def size(self) -> int:
        return len(self._file.data)

    def truncate(self, size: int) -> None:
        content = self._file.data
        if size < len(content):
            del content[size:]
        else:
            content += bytes(size - len(content))
        self._file.mtime_ns = time.time_ns()

    def sync(self) -> None:
        return None

    def publish(self, *, durable: bool) -> None:  # noqa: ARG002 - memory is not durable
        if self._on_publish is not None:
            self._on_publish()

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self._on_publish = None


class MemoryDirectory:
    """A directory tree in memory; see ``base.Backend``."""

    __slots__ = ("_root",)

    def __init__(self, root: _Directory | None = None) -> None:
        self._root = root or _Directory()

    def _walk(self, name: bytes) -> "_File | _Directory":
        if b"\0" in name:
            raise _error(errno.EINVAL)
        if len(name) >= 4096:
            raise _error(errno.ENAMETOOLONG)
        if name.startswith(b"/"):
            raise _error(errno.EXDEV)
        if not name:
            raise _error(errno.ENOENT)
        trail: list[_Directory] = []
        node: _File | _Directory = self._root
        for part in name.split(b"/"):
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR)
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not trail:
                    raise _error(errno.EXDEV)
                node = trail.pop()
                continue
            if len(part) > 255:
                raise _error(errno.ENAMETOOLONG)
            found = node.entries.get(part)
            if found is None:
                raise _error(errno.ENOENT)
            trail.append(node)
            node = found
        return node

    def _parent(self, name: bytes) -> tuple[_Directory, bytes]:
        head, _, last = name.rstrip(b"/").rpartition(b"/")
        if not last and name.startswith(b"/"):
            raise _error(errno.EXDEV)
        node = self._walk((b"/" if name.startswith(b"/") else b"") + (head or b"."))
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR)
        if last in (b"", b".", b".."):
            raise _error(errno.EINVAL)
        if len(last) > 255:
            raise _error(errno.ENAMETOOLONG)
        if b"\0" in last:
            raise _error(errno.EINVAL)
        return node, last

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
            parent, last = self._parent(name)
            if name.endswith(b"/"):
                raise _error(errno.EISDIR) from None
            node = parent.entries[last] = _File()
        else:
            if create and exclusive:
                raise _error(errno.EEXIST)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR)
        return MemoryHandle(node, None)

    def _open_staged(self, name: bytes) -> MemoryHandle:
        parent, last = self._parent(name)
        if isinstance(parent.entries.get(last), _Directory):
            raise _error(errno.EISDIR)
        file = _File()

        def publish() -> None:
            parent.entries[last] = file

        return MemoryHandle(file, publish)

    def stat(self, name: bytes) -> FileStatus:
        node = self._walk(name)
        if isinstance(node, _Directory):
            return FileStatus(0, node.mtime_ns, "directory")
        return FileStatus(len(node.data), node.mtime_ns, "file")

    def list(self, name: bytes) -> list[tuple[bytes, str]]:
        node = self._walk(name)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR)
        return sorted(
            (key, "directory" if isinstance(value, _Directory) else "file")
            for key, value in node.entries.items()
        )

    def make_directory(self, name: bytes) -> None:
        parent, last = self._parent(name)
        if last in parent.entries:
            raise _error(errno.EEXIST)
        parent.entries[last] = _Directory()

    def remove(self, name: bytes) -> int:
        parent, last = self._parent(name)
        node = parent.entries.get(last)
        if node is None:
            raise _error(errno.ENOENT)
        if isinstance(node, _Directory) and node.entries:
            raise _error(errno.ENOTEMPTY)
        del parent.entries[last]
        return 0 if isinstance(node, _Directory) else len(node.data)

    def rename(self, old: bytes, target: Backend, new: bytes) -> None:
        if not isinstance(target, MemoryDirectory):
            raise _error(errno.EXDEV)
        old_parent, old_last = self._parent(old)
        new_parent, new_last = target._parent(new)  # noqa: SLF001 - same class
        node = old_parent.entries.get(old_last)
        if node is None:
            raise _error(errno.ENOENT)
        there = new_parent.entries.get(new_last)
        if isinstance(there, _Directory):
            if not isinstance(node, _Directory):
                raise _error(errno.EISDIR)
            if there.entries:
                raise _error(errno.ENOTEMPTY)
        elif isinstance(node, _Directory):
            if there is not None:
                raise _error(errno.ENOTDIR)
            if _contains(node, new_parent):
                raise _error(errno.EINVAL)
        del old_parent.entries[old_last]
        new_parent.entries[new_last] = node

    def narrow(self, name: bytes) -> "MemoryDirectory":
        node = self._walk(name)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR)
        return MemoryDirectory(node)

    def identity(self) -> tuple[int, int]:
        return (_DEVICE, self._root.inode)

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        return None


def _contains(node: _Directory, wanted: _Directory) -> bool:
    if node is wanted:
        return True
    return any(
        _contains(entry, wanted)
        for entry in node.entries.values()
        if isinstance(entry, _Directory)
    )
