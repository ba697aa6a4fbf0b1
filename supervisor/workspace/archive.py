"""A directory, or a layer over one, as a tar for another machine, and back.

Rules:
 1. A tar is the same for the same tree: names are sorted, times are whole seconds.
 2. Nothing but files, directories and links goes in: a socket, a pipe or a device is
    refused by its name.
 3. No link is followed on the way out: each directory is opened beneath the top.
 4. Owners and extended attributes stay behind.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from typing import IO, NamedTuple

from hostlib.linux.files import closing_fd, open_directory
from hostlib.linux.syscalls import open_exactly
from supervisor.workspace.copier import NEW_FILE
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.export import WHITEOUT, add_node, open_tar
from supervisor.workspace.layers import LayeredTree, split, walk_sorted
from supervisor.workspace.linux import held_entry, set_owner

_PACKED = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})
_HEADERS_BYTES = 1024
"""Bytes of a file's header, and of the padding of its last block."""


def pack_tree(top: int, file: IO[bytes], max_bytes: int) -> list[bytes]:
    """Write a directory as a tar; return the paths in it.

    Args:
        top: a descriptor of the directory.
        file: opened for writing.
        max_bytes: of the longest tar.

    Raises:
        WorkspaceError: it is too large, or has something that no tar brings back.
        OSError: something cannot be read or written.
    """
    tree = LayeredTree((top,))
    links: dict[tuple[int, int], bytes] = {}
    paths = []
    with open_tar(file) as tar:
        for node in walk_sorted(tree, tree.top()):
            name = os.fsdecode(node.path)
            if node.kind not in _PACKED:
                text = f"cannot pack {name!r}: it is no file, directory or link"
                raise WorkspaceError(f"{text}; remove it")
            size = node.status.st_size if node.kind == stat.S_IFREG else 0
            if file.tell() + size + _HEADERS_BYTES > max_bytes:
                text = (
                    f"cannot pack {name!r}: all would have more than {max_bytes} bytes"
                )
                raise WorkspaceError(f"{text}; use less, or raise [fleet] base_size")
            add_node(tar, tree, node, links)
            paths.append(node.path)
    return paths


def unpack_tree(file: IO[bytes], top: int) -> None:
    """Write what `pack_tree` has packed into an empty directory.

    Args:
        file: opened for reading.
        top: a descriptor of the directory.

    Raises:
        WorkspaceError: it is no such tar.
        OSError: something cannot be written.
    """
    _Unpacker(top).unpack(file)


def unpack_layer(file: IO[bytes], top: int, base: int) -> list[bytes]:
    """Write a tar in the form of an OCI layer into an empty upper; return its paths.

    Those that it removes are not among them. Set-user-ID files stay such, for a commit
    guards them.

    Args:
        file: opened for reading.
        top: a descriptor of the upper.
        base: of what the upper lies on: what is there already keeps its owner.

    Raises:
        WorkspaceError: it is no such tar.
        OSError: something cannot be written.
    """
    unpacker = _Unpacker(top, base)
    unpacker.unpack(file)
    return unpacker.paths


class _Directory(NamedTuple):
    """A directory that gets its mode and time once all is in it."""

    path: bytes
    mode: int
    mtime_s: float


class _Unpacker:
    """One tar on its way into a directory.

    Args:
        top: a descriptor of it.
        base: of what a layer lies on; None for a tree, which is this process's own.
    """

    def __init__(self, top: int, base: int | None = None) -> None:
        self.paths: list[bytes] = []
        self._top = top
        self._base = base
        self._modes = 0o777 if base is None else 0o7777
        self._directories: list[_Directory] = []

    def unpack(self, file: IO[bytes]) -> None:
        """Write all that is in the tar."""
        try:
            with tarfile.open(
                fileobj=file, mode="r|", encoding="utf-8", errors="surrogateescape"
            ) as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined] # it keeps them
                    self._put(tar, member)
        except (tarfile.TarError, ValueError, OverflowError) as why:
            raise WorkspaceError(f"cannot unpack: {why}; send it again") from None
        for directory in reversed(self._directories):
            with closing_fd(open_directory(directory.path, self._top)) as fd:
                os.fchmod(fd, directory.mode)
                os.utime(fd, (directory.mtime_s, directory.mtime_s))

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = os.fsencode(member.name)
        if path == b".":
            self._note_directory(b"", member)
            return
        if not {b"", b".", b".."}.isdisjoint(path.split(b"/")):
            raise _refused(member, "it leads elsewhere")
        parent, name = split(path)
        with closing_fd(self._open_parent(parent)) as directory:
            if self._base is not None and name.startswith(WHITEOUT):
                os.mknod(name.removeprefix(WHITEOUT), stat.S_IFCHR, dir_fd=directory)
            else:
                self._make(tar, member, name, directory)
                self._finish(member, path, name, directory)
                self.paths.append(path)

    def _open_parent(self, parent: bytes) -> int:
        """Open a directory; one of a layer that has no entry is made as the base's."""
        try:
            return open_directory(parent, self._top)
        except FileNotFoundError:
            if self._base is None:
                raise
        status = _status_in(self._base, parent)
        if status is None:
            raise WorkspaceError(
                f"cannot bring back what is in {os.fsdecode(parent)!r}: the base has no"
                " such directory any more; put it back"
            )
        above, name = split(parent)
        with closing_fd(self._open_parent(above)) as directory:
            os.mkdir(name, 0o700, dir_fd=directory)
            self._give(name, directory, parent)
        mode = stat.S_IMODE(status.st_mode)
        self._directories.append(_Directory(parent, mode, status.st_mtime))
        return open_directory(parent, self._top)

    def _make(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: bytes, directory: int
    ) -> None:
        if member.isdir():
            os.mkdir(name, 0o700, dir_fd=directory)
        elif member.issym():
            os.symlink(os.fsencode(member.linkname), name, dir_fd=directory)
        elif member.islnk():
            self._link(member, name, directory)
        elif member.isfifo() and self._base is not None:
            os.mkfifo(name, 0o600, dir_fd=directory)
        elif member.isreg() and member.sparse is None:
            content = tar.extractfile(member)
            if content is None:
                raise _refused(member, "it has no content")
            with open(os.open(name, NEW_FILE, 0o600, dir_fd=directory), "wb") as file:
                shutil.copyfileobj(content, file)
        else:
            raise _refused(member, "it is no file, directory or link")

    def _link(self, member: tarfile.TarInfo, name: bytes, directory: int) -> None:
        parent, other = split(os.fsencode(member.linkname))
        with closing_fd(open_directory(parent, self._top)) as source:
            os.link(
                other,
                name,
                src_dir_fd=source,
                dst_dir_fd=directory,
                follow_symlinks=False,
            )

    def _finish(
        self, member: tarfile.TarInfo, path: bytes, name: bytes, directory: int
    ) -> None:
        """Give what was made its owner, mode and time; a directory the last two later."""
        if member.islnk():
            return
        self._give(name, directory, path)
        if member.isdir():
            self._note_directory(path, member)
            return
        if not member.issym():
            os.chmod(name, member.mode & self._modes, dir_fd=directory)
        times = (member.mtime, member.mtime)
        os.utime(name, times, dir_fd=directory, follow_symlinks=False)

    def _give(self, name: bytes, directory: int, path: bytes) -> None:
        """Give a new object of a layer the owner of the base's, or of the base's top."""
        if self._base is None:
            return
        status = _status_in(self._base, path) or os.fstat(self._base)
        with held_entry(directory, name) as held:
            set_owner(held, status.st_uid, status.st_gid)

    def _note_directory(self, path: bytes, member: tarfile.TarInfo) -> None:
        mode = member.mode & self._modes
        self._directories.append(_Directory(path, mode, member.mtime))


def _status_in(base: int, path: bytes) -> os.stat_result | None:
    """Return the status of what a base has at a path; None for nothing."""
    try:
        fd = open_exactly(path, base, os.O_PATH | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with closing_fd(fd):
        return os.fstat(fd)


def _refused(member: tarfile.TarInfo, why: str) -> WorkspaceError:
    return WorkspaceError(f"cannot unpack {member.name!r}: {why}; leave it out")
