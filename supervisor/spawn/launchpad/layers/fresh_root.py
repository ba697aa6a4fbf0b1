"""The fresh root of the layer "mountns" while it is filled: places and covers.

The one way to attach a copy of a mount, and to hide a path in one.

1. An attached copy may be the child's directory, which changes it meanwhile: nothing is
   made in it, and places are opened without links from the fresh root's top. A missing or
   replaced place is skipped.
2. A hidden path is covered by an empty read-only directory, with places only for trees
   beneath. A path that cannot be covered ends the start.
3. Places in our own directories are looked up by descriptor: no other process has them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat

from hostlib.linux.syscalls import NOT_THERE, caller, open_exactly

# <asm/unistd.h>: these have one number everywhere.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 429, 442
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
# <linux/mount.h>, <fcntl.h>
_AT_FDCWD, _OPEN_TREE_CLONE = -100 & 0xFFFFFFFFFFFFFFFF, 1 | os.O_CLOEXEC
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 1 << 20
ATTR_NOEXEC = 8
_MOVE_FROM_EMPTY_PATH = 0x4
_MOVE_EMPTY_PATHS = 0x44  # of both
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6

_COVER = ((b"mode", b"755"), (b"size", b"64k"), (b"nr_inodes", b"4k"))
"""Of what hides: as many inodes as a path has parts, for some paths."""

_TOP = ((b"mode", b"755"), (b"size", b"1m"))

HIDE = "hide"
"""The kind of a tree that is none: what is there is covered."""

IF_POSSIBLE = "if possible"
"""Owners are mapped where the file system of a tree can show them so."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Path, kind; whether owners are mapped (or IF_POSSIBLE), or device and inode of what
    # is to be hidden, or the position of a mount that is held, or the directory of an
    # overlay's layer.
    Tree = tuple[bytes, str, bool | int | str | bytes | tuple[int, int]]


class PartError(Exception):
    """A part of the layer fails: whose failure it is, errno, path.

    Of "uid": a file system cannot show its files as another user's. Of "pidns": a fresh
    ``/proc`` cannot be mounted. Of "mountns": what is to be hidden is not where it was.
    Of "workspace": its overlay cannot be made, or not be attached. Of "userxattr": it is
    made, without that option.
    """


class _Attributes(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


_ATTRIBUTES_BYTES = ctypes.sizeof(_Attributes)

_open_tree = caller(_SYS_OPEN_TREE, "ntn")
_move_mount = caller(_SYS_MOVE_MOUNT, "ntntn")
_mount_setattr = caller(_SYS_MOUNT_SETATTR, "ntnnn")
_fsopen = caller(_SYS_FSOPEN, "tn")
_fsconfig = caller(_SYS_FSCONFIG, "nnttn")
_fsmount = caller(_SYS_FSMOUNT, "nnn")


class Held:
    """The descriptor of one of the trees.

    Attributes:
        path: of the tree.
        fd: a copy of what is mounted there; of what is to be hidden, the directory itself.
        over: of a mount beneath another copy, what it is mounted on there; else -1.
        is_directory: or a file.
        is_hidden: it is to be covered.
        is_left_out: it is covered because no copy of what is mounted there can be had.
    """

    __slots__ = ("fd", "is_directory", "is_hidden", "is_left_out", "over", "path")

    def __init__(
        self,
        path: bytes,
        fd: int,
        *,
        over: int = -1,
        is_hidden: bool = False,
        is_left_out: bool = False,
    ) -> None:
        self.path = path
        self.fd = fd
        self.over = over
        self.is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.is_hidden = is_hidden
        self.is_left_out = is_left_out

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self.fd)
        if self.over >= 0:
            os.close(self.over)


class _Ours:
    """A file system that nobody has touched but this process, for places of trees.

    Args:
        top: a descriptor of its top.
        path: of that in the fresh root.
    """

    def __init__(self, top: int, path: bytes = b"") -> None:
        self.top = top
        self.path = path
        self._made = {path}  # directories
        self._links: set[bytes] = set()

    def name(self, path: bytes) -> bytes:
        """Return what a path is called from its top."""
        return path[len(self.path) + 1 :]

    def make_directory(self, path: bytes) -> bool:
        """Make a directory, and what it lies in; tell whether it is one of ours now."""
        if path in self._made:
            return True
        known = path
        missing = []
        while known not in self._made:
            if known in self._links:
                return False
            missing.append(known)
            known = known.rpartition(b"/")[0]
        for directory in reversed(missing):
            os.mkdir(self.name(directory), dir_fd=self.top)
            self._made.add(directory)
        return True

    def make_link(self, path: bytes, target: bytes) -> None:
        """Make a symbolic link, if nothing else is there."""
        if path in self._made or path in self._links:
            return
        if self.make_directory(path.rpartition(b"/")[0]):
            os.symlink(target, self.name(path), dir_fd=self.top)
            self._links.add(path)

    def make_file(self, path: bytes, content: bytes, mode: int = 0o644) -> None:
        """Make a file and its parents; empty where RLIMIT_FSIZE is too small."""
        self.make_directory(path.rpartition(b"/")[0])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.name(path), flags, mode, dir_fd=self.top)
        try:
            os.write(fd, content)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
        finally:
            os.close(fd)

    def make_place(self, path: bytes, *, is_directory: bool) -> bool:
        """Make what a tree can be mounted on; tell whether that is there."""
        if is_directory:
            return self.make_directory(path)
        if path in self._links or not self.make_directory(path.rpartition(b"/")[0]):
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(self.name(path), flags, 0o644, dir_fd=self.top))
        return True


class Stage:
    """The fresh root while it is filled (rules 1 and 2).

    Args:
        top: a descriptor of its directory.
        links: (path, target) of symbolic links in it, and in what hides.
    """

    def __init__(self, top: int, links: tuple[tuple[bytes, bytes], ...]) -> None:
        self._root = _Ours(top)
        self._links = links
        self._around: dict[bytes, _Ours | None] = {b"": self._root}  # None: a copy

    @property
    def top(self) -> int:
        """The descriptor of its directory."""
        return self._root.top

    def make_places(self, *paths: bytes) -> None:
        """Make directories at the top."""
        for path in paths:
            self._root.make_directory(path)

    def make_links(self, links: tuple[tuple[bytes, bytes], ...]) -> None:
        """Make the links, here and in what hides from now on."""
        self._links = links
        self._make_links(self._root)

    def make_files(self, files: tuple[tuple[bytes, bytes], ...]) -> None:
        """Make files of ours."""
        for path, content in files:
            self._root.make_file(path, content)

    def make_program(self, path: bytes, content: bytes) -> None:
        """Make an executable file of ours."""
        self._root.make_file(path, content, 0o755)

    def _make_links(self, ours: _Ours) -> None:
        for path, target in self._links:
            if path.startswith(ours.path + b"/"):
                ours.make_link(path, target)

    def attach(self, tree: Held) -> None:
        """Mount a copy under its name; nothing happens where that cannot be."""
        if tree.path == b"/":  # which is this one
            return
        ours = self._holder(tree.path)
        try:
            if ours is None:
                # A file in a copy under that name may be the child's doing.
                place = self._the_same(tree)
            elif ours.make_place(tree.path, is_directory=tree.is_directory):
                place = open_exactly(ours.name(tree.path), ours.top)
            else:
                return
        except OSError as error:
            if error.errno not in {*NOT_THERE, errno.ESTALE}:
                raise
            return
        try:
            _move_mount(tree.fd, b"", place, b"", _MOVE_EMPTY_PATHS)
        finally:
            os.close(place)
        self._around[tree.path] = None

    def hide(self, tree: Held) -> None:
        """Cover a directory within a copy; elsewhere nothing of it is to be seen.

        Raises:
            PartError: it is not there any more, so nobody knows where it is.
        """
        if self._holder(tree.path) is not None:
            return
        try:
            place = self._the_same(tree)
        except OSError as error:
            if error.errno not in {*NOT_THERE, errno.ESTALE}:
                raise
            raise moved(tree.path) from None
        cover = make_cover() if tree.is_directory else _make_shut_file()
        try:
            _move_mount(cover, b"", place, b"", _MOVE_EMPTY_PATHS)
        finally:
            os.close(place)
        if not tree.is_directory:
            os.close(cover)
            return
        self._around[tree.path] = ours = _Ours(cover, tree.path)
        self._make_links(ours)

    def seal(self) -> None:
        """Make what is ours read-only, but nothing that is mounted in it."""
        for ours in self._around.values():
            if ours is not None:
                set_attributes(ours.top, ATTR_RDONLY)
                if ours is not self._root:
                    os.close(ours.top)

    def _holder(self, path: bytes) -> _Ours | None:
        """Return what of ours a path lies in; None: it lies in a copy."""
        while path not in self._around:
            path = path.rpartition(b"/")[0]
        return self._around[path]

    def _the_same(self, tree: Held) -> int:
        """Open what lies in a copy under a tree's name.

        Raises:
            OSError: ESTALE: it is another file.
        """
        place = open_exactly(tree.path[1:], self._root.top)
        expected = tree.fd if tree.over < 0 else tree.over
        if not os.path.samestat(os.fstat(place), os.fstat(expected)):
            os.close(place)
            raise OSError(errno.ESTALE, "another file")
        return place


def moved(path: bytes) -> PartError:
    """Return the error of what is to be hidden and is not there (rule 2)."""
    return PartError("mountns", errno.ESTALE, path)


def identity_of(path: bytes) -> tuple[int, int] | None:
    """Return (device, inode) of what is at a path; None if nothing can be reached."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def attach_at_top(fd: int) -> None:
    """Mount a copy over the root of this mount namespace, where no path leads to it."""
    _move_mount(fd, b"", _AT_FDCWD, b"/", _MOVE_FROM_EMPTY_PATH)


def make_cover() -> int:
    """Make a file system that is empty and nowhere yet; a descriptor of its top."""
    return _make_tmpfs(_COVER, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)


def make_top() -> int:
    """Make what becomes a fresh root, as `make_cover` does."""
    return _make_tmpfs(_TOP, ATTR_NOSUID | ATTR_NODEV)


def _make_tmpfs(settings: tuple[tuple[bytes, bytes], ...], attributes: int) -> int:
    options = _fsopen(b"tmpfs", _FSOPEN_CLOEXEC)
    try:
        for key, value in settings:
            _fsconfig(options, _FSCONFIG_SET_STRING, key, value, 0)
        _fsconfig(options, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _fsmount(options, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(options)


def _make_shut_file() -> int:
    """Copy the mount of a file that cannot be opened: a device without devices."""
    fd = _open_tree(_AT_FDCWD, b"/dev/null", _OPEN_TREE_CLONE)
    set_attributes(fd, ATTR_NOSUID | ATTR_NODEV | ATTR_RDONLY)
    return fd


def set_attributes(
    fd: int, attributes: int, owners: int = 0, *, beneath: bool = False
) -> None:
    """Set attributes of a mount: mount_setattr(2).

    Args:
        fd: the top of it.
        attributes: ATTR_*.
        owners: the user namespace for ATTR_IDMAP.
        beneath: of what is mounted beneath it as well.

    Raises:
        OSError: the kernel does not know one, or refuses it.
    """
    asked = _Attributes(attributes, 0, 0, owners)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if beneath else 0)
    _mount_setattr(fd, b"", flags, ctypes.addressof(asked), _ATTRIBUTES_BYTES)
