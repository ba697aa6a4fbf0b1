"""The changes of a workspace as a file: a patch, or a tar as an OCI layer.

Rules:
 1. The file is written beside its place and renamed when it is on the disk.
 2. A tar is the same for the same tree: sorted by the bytes of the paths, owners by number.
 3. A deleted path is ``.wh.NAME``. A name that begins so cannot be said, and is
    refused.

Sources: OCI image-spec, layer.md; pax(1); tar(5), "SCHILY.xattr".
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tarfile
from typing import IO, TYPE_CHECKING, Literal

from hostlib.linux.files import closing_fd
from supervisor.workspace.attributes import program_attributes
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.layers import join, split
from supervisor.workspace.linux import RENAME_NOREPLACE, rename
from supervisor.workspace.patch import write_patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from supervisor.workspace.layers import LayeredTree, TreeNode

    Writer = Callable[[LayeredTree, LayeredTree, Sequence[Row], IO[bytes]], None]

Form = Literal["patch", "tar"]
FORMS: tuple[Form, ...] = ("patch", "tar")

WHITEOUT = b".wh."
"""Prefix of the name of a path that a layer removes."""

_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
_XATTR = "SCHILY.xattr."
_KEPT = ("user.", "security.capability")


def form_of(path: str) -> Form:
    """Return the form that the name of a file says.

    Raises:
        WorkspaceError: the name ends neither in ``.patch`` nor in ``.tar``.
    """
    for form in FORMS:
        if path.endswith(f".{form}"):
            return form
    text = f"cannot export to {path!r}: its name says no form"
    raise WorkspaceError(f"{text}; end it in .patch or .tar")


def writer_of(form: Form) -> Writer:
    """Return what writes a form."""
    return _write_patch if form == "patch" else write_tar


@contextlib.contextmanager
def write_whole(path: str, *, replaces: bool) -> Iterator[IO[bytes]]:
    """Give a file that takes its place when the block has ended well.

    Raises:
        WorkspaceError: something is there already, or the directory is not.
    """
    directory, name = os.path.split(os.path.abspath(path))
    if not replaces and os.path.lexists(path):
        raise _is_there(path)
    try:
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as why:
        text = f"cannot export to {path!r}: {directory!r}: {why.strerror}"
        raise WorkspaceError(f"{text}; name a directory that is there") from None
    new = f".{name[:200]}.{secrets.token_hex(4)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(new, flags, 0o666, dir_fd=top), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        flag = 0 if replaces else RENAME_NOREPLACE
        rename(top, os.fsencode(new), top, os.fsencode(name), flag)
        os.fsync(top)
    except FileExistsError:
        raise _is_there(path) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=top)
        os.close(top)


def _is_there(path: str) -> WorkspaceError:
    text = f"cannot export to {path!r}: it is there already"
    return WorkspaceError(f"{text}; name another file, or use --force")


def _write_patch(
    base: LayeredTree, merged: LayeredTree, rows: Sequence[Row], file: IO[bytes]
) -> None:
    file.writelines(write_patch(base, merged, rows, binary=True))


def open_tar(file: IO[bytes]) -> tarfile.TarFile:
    """Return a tar that is written to a file; it takes names of any bytes."""
    return tarfile.open(
        fileobj=file, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape",
        encoding="utf-8",
    )  # fmt: skip


def write_tar(
    base: LayeredTree, merged: LayeredTree, rows: Sequence[Row], file: IO[bytes]
) -> None:
    """Write rows as a layer for container tools.

    Args:
        base: the base alone.
        merged: the workspace's layers.
        rows: of ``compare`` without renames.
        file: opened for writing.

    Raises:
        WorkspaceError: a path cannot be said.
        OSError: something cannot be read or written.
    """
    del base
    links: dict[tuple[int, int], bytes] = {}
    with open_tar(file) as tar:
        for row in rows:
            _check_name(row.path)
            if row.change is Change.DELETED:
                directory, name = split(row.path)
                tar.addfile(_member(join(directory, WHITEOUT + name)))
            elif row.new is not None:
                add_node(tar, merged, row.new, links)


def _check_name(path: bytes) -> None:
    if any(part.startswith(WHITEOUT) for part in path.split(b"/")):
        text = f"cannot export {os.fsdecode(path)!r}: in a layer {WHITEOUT.decode()!r}"
        raise WorkspaceError(f"{text} means a removal; export a .patch")


def _member(path: bytes) -> tarfile.TarInfo:
    return tarfile.TarInfo(os.fsdecode(path or b"."))


def add_node(
    tar: tarfile.TarFile,
    merged: LayeredTree,
    node: TreeNode,
    links: dict[tuple[int, int], bytes],
) -> None:
    """Add an object of a tree to a tar.

    Args:
        tar: it.
        merged: the tree.
        node: the object.
        links: paths of files with more names that are in the tar, by device and inode.

    Raises:
        OSError: it cannot be read.
    """
    status = node.status
    member = _member(node.path)
    member.type = _KINDS[node.kind]
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid, member.gid = status.st_uid, status.st_gid
    member.mtime = status.st_mtime_ns // 1_000_000_000
    key = (status.st_dev, status.st_ino)
    if not node.is_directory and status.st_nlink > 1:
        if key in links:
            member.type = tarfile.LNKTYPE
            member.linkname = os.fsdecode(links[key])
            tar.addfile(member)
            return
        links[key] = node.path
    if node.kind == stat.S_IFLNK:
        member.linkname = os.fsdecode(merged.read_link(node))
    elif node.kind in {stat.S_IFCHR, stat.S_IFBLK}:
        member.devmajor = os.major(status.st_rdev)
        member.devminor = os.minor(status.st_rdev)
    if node.kind != stat.S_IFREG:
        member.pax_headers = _xattrs(merged, node) if node.is_directory else {}
        tar.addfile(member)
        return
    fd = merged.open_file(node)
    with open(fd, "rb") as content:
        member.size = os.fstat(fd).st_size
        member.pax_headers = _headers(fd)
        tar.addfile(member, content)


def _xattrs(merged: LayeredTree, node: TreeNode) -> dict[str, str]:
    with closing_fd(merged.open_node(node)) as fd:
        return _headers(fd)


def _headers(fd: int) -> dict[str, str]:
    """Return the attributes of a file as headers; overlayfs's own stay behind."""
    found = {}
    for name, own_name in program_attributes(fd):
        if name.startswith(_KEPT):
            value = os.getxattr(fd, name).decode("utf-8", "surrogateescape")
            found[_XATTR + own_name] = value
    return found
