"""Hidden files of a base: the search for them, and the layer that hides them.

Rules:
 1. The layer lies between upper and base. It has a whiteout for each hidden name, and the
    directories above them with the base's owners, modes and times.
 2. A directory of the layer stays the same inode while the base's one does: the kernel
    notes it as the origin of what the upper has (``load_origins``).
 3. A hidden path of a base is no row if it is missing in the workspace, and no commit
    takes a change that would write over it, move it or remove it.

Spec WS6. Source: Documentation/filesystems/overlayfs.rst ("whiteouts").
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hostlib.linux.files import DIRECTORY, closing_fd, open_directory
from hostlib.linux.syscalls import open_exactly
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.attributes import read_acls, set_acls
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import TOP, join, objects_beneath, parents, split
from supervisor.workspace.linux import (
    is_whiteout,
    read_file_handle,
    set_mode,
    set_owner,
    set_times,
)
from supervisor.workspace.selection import Patterns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from supervisor.workspace.directory import WorkspaceDirectory
    from supervisor.workspace.layers import LayeredTree, TreeNode

LAYER = "hidden"
"""Name of the layer in a workspace's directory."""

_DIRECTORIES, _INHERITED = "hidden-directories", "hidden-origins"
_SKIPPED = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.EACCES}
)
_WILD = frozenset("*?[\\")


class Twin(msgspec.Struct, frozen=True, array_like=True):
    """A directory of the base, and the one that the layer has for it.

    Attributes:
        device: of the base's.
        inode: of the base's.
        handle: of the base's, as of ``read_file_handle``; b"" where there is none.
        own: the handle of the layer's.
    """

    device: int
    inode: int
    handle: bytes
    own: bytes


_decoder = msgspec.msgpack.Decoder(dict[bytes, Twin])
_origins_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


def matches_any_depth(patterns: Iterable[str]) -> bool:
    """Tell whether some pattern can match at any depth, so that all is looked at."""
    return any(_parts(text) is None for text in _plain(patterns))


def find_hidden(base: int, patterns: Sequence[str]) -> list[bytes]:
    """Return the paths that patterns hide, without what lies beneath another one.

    Args:
        base: a descriptor of the base's top.
        patterns: in gitignore's form.

    Raises:
        OSError: something cannot be read.
    """
    hide = Patterns(patterns)
    if matches_any_depth(patterns):
        return [path for path, is_hidden in _walk(base, hide) if is_hidden]
    found: set[bytes] = set()
    for text in _plain(patterns):
        found.update(_expand(base, _parts(text) or (), hide))
    return sorted(path for path in found if found.isdisjoint(parents(path)))


def _plain(patterns: Iterable[str]) -> Iterator[str]:
    """Yield the patterns that can hide something."""
    for text in patterns:
        if text.strip("/ ") and not text.startswith(("#", "!")):
            yield text


def _parts(pattern: str) -> tuple[str, ...] | None:
    """Return the names that a pattern goes through; None if it can match anywhere."""
    text = pattern.rstrip("/")
    if "/" not in text or "**" in text:
        return None
    return tuple(text.strip("/").split("/"))


def _walk(base: int, hide: Patterns) -> Iterator[tuple[bytes, bool]]:
    pending = [TOP]
    while pending:
        directory = pending.pop()
        for name, is_directory in _entries(base, directory):
            path = join(directory, name)
            is_hidden = hide.match(path, is_directory=is_directory)
            yield path, is_hidden
            if is_directory and not is_hidden:
                pending.append(path)


def _expand(base: int, parts: tuple[str, ...], hide: Patterns) -> Iterator[bytes]:
    """Yield what a pattern names that goes through known directories."""
    pending: list[tuple[bytes, int]] = [(TOP, 0)]
    while pending:
        directory, depth = pending.pop()
        is_last = depth + 1 == len(parts)
        for name, is_directory in _matching(base, directory, parts[: depth + 1]):
            path = join(directory, name)
            if is_last and hide.match(path, is_directory=is_directory):
                yield path
            elif is_directory and not is_last:
                pending.append((path, depth + 1))


def _matching(
    base: int, directory: bytes, parts: tuple[str, ...]
) -> Iterator[tuple[bytes, bool]]:
    """Yield (name, is it a directory) of what the last of some names names."""
    if not _WILD & set(parts[-1]):
        name = os.fsencode(parts[-1])
        with contextlib.suppress(*_UNREACHABLE):
            with closing_fd(
                open_exactly(join(directory, name), base, os.O_PATH | os.O_NOFOLLOW)
            ) as fd:
                yield name, stat.S_ISDIR(os.fstat(fd).st_mode)
        return
    pattern = Patterns(["/" + "/".join(parts)])
    for name, is_directory in _entries(base, directory):
        if pattern.match(join(directory, name), is_directory=is_directory):
            yield name, is_directory


_UNREACHABLE = (FileNotFoundError, NotADirectoryError, PermissionError)


def _entries(base: int, directory: bytes) -> list[tuple[bytes, bool]]:
    """Return (name, is it a directory); nothing of what a child cannot reach either."""
    try:
        fd = open_directory(directory, base)
    except OSError as why:
        if why.errno not in _SKIPPED:
            raise
        return []
    with closing_fd(fd), os.scandir(fd) as entries:
        return [
            (os.fsencode(one.name), one.is_dir(follow_symlinks=False))
            for one in entries
        ]


def hide_paths(directory: WorkspaceDirectory, base: int, paths: list[bytes]) -> None:
    """Make the layer hide some paths and nothing else.

    Raises:
        OSError: it cannot be made; EPERM: this user may not make directories that look
            like those of the base.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(LAYER, 0o700, dir_fd=directory.fd)
    with closing_fd(os.open(LAYER, DIRECTORY, dir_fd=directory.fd)) as top:
        twins = _Layer(top, base, _load(directory)).write(paths)
    directory.write(_DIRECTORIES, msgspec.msgpack.encode(twins))


def has_layer(directory: WorkspaceDirectory) -> bool:
    """Tell whether a workspace has a layer that hides something, or has had one."""
    return directory.read(_DIRECTORIES) is not None


def load_origins(directory: WorkspaceDirectory) -> dict[bytes, bytes]:
    """Return the handles of the layer's directories, and of the base's beneath them."""
    known = directory.read(_INHERITED)
    inherited = {} if known is None else _origins_decoder.decode(known)
    twins = _load(directory).values()
    return inherited | {
        twin.own: twin.handle for twin in twins if twin.own and twin.handle
    }


def share_origins(directory: WorkspaceDirectory) -> str:
    """Return the file of the origins that a fork of a workspace knows of; "" for none."""
    origins = load_origins(directory)
    if not origins:
        return ""
    directory.write(_INHERITED, msgspec.msgpack.encode(origins))
    return _INHERITED


def _load(directory: WorkspaceDirectory) -> dict[bytes, Twin]:
    data = directory.read(_DIRECTORIES)
    return {} if data is None else _decoder.decode(data)


class _Layer:
    def __init__(self, top: int, base: int, twins: dict[bytes, Twin]) -> None:
        self._top = top
        self._base = base
        self._twins = twins

    def write(self, paths: list[bytes]) -> dict[bytes, Twin]:
        """Write the layer; return its directories."""
        wanted: dict[bytes, set[bytes]] = {TOP: set()}
        wanted.update((path, set()) for path in self._twins)
        for path in paths:
            directory, name = split(path)
            for above in (*parents(path), directory):
                wanted.setdefault(above, set())
            wanted[directory].add(name)
        made: dict[bytes, Twin] = {}
        for path in sorted(wanted):
            twin = self._make_directory(path, made)
            if twin is not None:
                made[path] = twin
                self._write_whiteouts(path, wanted[path])
        for path in sorted(made, reverse=True):
            self._copy_attributes(path)
        return made

    def _make_directory(self, path: bytes, made: dict[bytes, Twin]) -> Twin | None:
        """Return a directory that is as the base's; None if the base has none there."""
        parent, name = split(path)
        if path and parent not in made:
            return None
        try:
            old = open_directory(path, self._base)
        except OSError as why:
            if why.errno not in _SKIPPED:
                raise
            self._remove(path)
            return None
        with closing_fd(old):
            status, handle = os.fstat(old), read_file_handle(old) or b""
        known = self._twins.get(path)
        same = (status.st_dev, status.st_ino, handle)
        if known is not None and (known.device, known.inode, known.handle) == same:
            self._open_for_change(path)
            return known
        if path:
            self._remove(path)
            with self._directory(parent) as fd:
                os.mkdir(name, 0o700, dir_fd=fd)
        with self._directory(path) as fd:
            return Twin(*same, read_file_handle(fd) or b"")

    def _open_for_change(self, path: bytes) -> None:
        with self._directory(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
            set_mode(fd, 0o700)

    def _remove(self, path: bytes) -> None:
        parent, name = split(path)
        with contextlib.suppress(FileNotFoundError), self._directory(parent) as fd:
            why = remove_tree(Path(os.fsdecode(name)), fd)
            if why is not None and why.errno != errno.ENOENT:
                raise why

    def _write_whiteouts(self, path: bytes, names: set[bytes]) -> None:
        with self._directory(path) as fd:
            there = set()
            for name in map(os.fsencode, os.listdir(fd)):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if is_whiteout(status) and name in names:
                    there.add(name)
                elif is_whiteout(status):
                    os.unlink(name, dir_fd=fd)
                elif name in names:
                    self._remove(join(path, name))
            for name in names - there:
                # Linux lets any user make this one device since 5.8.
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=fd)

    def _copy_attributes(self, path: bytes) -> None:
        with (
            closing_fd(open_directory(path, self._base)) as old,
            self._directory(path) as fd,
        ):
            status = os.fstat(old)
            set_owner(fd, status.st_uid, status.st_gid)
            set_mode(fd, stat.S_IMODE(status.st_mode))
            set_acls(fd, read_acls(old))
            set_times(fd, (status.st_atime_ns, status.st_mtime_ns))

    @contextlib.contextmanager
    def _directory(self, path: bytes, flags: int = DIRECTORY) -> Iterator[int]:
        with closing_fd(open_exactly(path or b".", self._top, flags)) as fd:
            yield fd


def visible_rows(
    rows: Sequence[Row], hide: Patterns, base: LayeredTree, base_layer: int
) -> list[Row]:
    """Return rows without what is missing in a workspace only because it is hidden.

    Of a deleted directory in which something is hidden, the rest is deleted.
    """
    if not hide:
        return list(rows)
    found: list[Row] = []
    for row in rows:
        if row.new is not None and shows_hidden(row.new, hide, base_layer):
            continue  # in a directory that was renamed
        if row.change is not Change.DELETED or row.old is None:
            found.append(row)
        elif not is_hidden(hide, row.old):
            found += _visible_parts(row, row.old, hide, base)
    found.sort(key=lambda row: row.path)
    return found


def _visible_parts(
    row: Row, old: TreeNode, hide: Patterns, base: LayeredTree
) -> Iterator[Row]:
    inside = list(objects_beneath(base, old, row.path)) if old.is_directory else []
    hidden = {path for path, node in inside if is_hidden(hide, node)}
    if not hidden:
        yield row
        return
    kept = {row.path}.union(*map(parents, hidden))
    for path, node in inside:
        if path not in kept and path not in hidden and split(path)[0] in kept:
            yield Row(path, Change.DELETED, None, node)


def shows_hidden(node: TreeNode, hide: Patterns, base_layer: int) -> bool:
    """Tell whether an object of a workspace is one that is hidden in the base."""
    part = node.parts[0]
    if part.layer != base_layer:
        return False
    return hide.match(part.path, is_directory=node.is_directory)


def is_hidden(hide: Patterns, node: TreeNode) -> bool:
    """Tell whether an object is one that patterns hide, or lies beneath such."""
    return hide.match(node.path, is_directory=node.is_directory)


def hidden_paths(row: Row, hide: Patterns, base: LayeredTree) -> list[bytes]:
    """Return what is hidden in the base and a row would write over, move or remove."""
    found = []
    for node in (row.old, row.replaced):
        if node is None or not hide:
            continue
        if is_hidden(hide, node):
            found.append(node.path)
        takes = row.change in {Change.TYPE, Change.RENAMED} or node is row.replaced
        if takes and node.is_directory:
            inside = objects_beneath(base, node, node.path)
            found += [path for path, one in inside if is_hidden(hide, one)]
    return found
