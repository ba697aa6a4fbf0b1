"""The layer "mountns": a fresh root with copies of mounts that a child may see.

1. It runs in its own mount namespace; failures come before the root changes.
2. A child that stays user 0 gets a read-only ``/proc``: it owns ``/proc/sys``.
3. Copies are attached and hidden by the rules of ``launchpad.layers.fresh_root``.
4. The part that all children of a kind see may be there already (``layers.common_root``).
"""

from __future__ import annotations

import _socket
import errno
import os

from hostlib.linux import mount_calls, namespaces
from hostlib.linux.syscalls import NOT_THERE, open_exactly
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.layers.common_root import LINKS, CommonRoot, make_root
from supervisor.spawn.launchpad.layers.copies import copy_trees
from supervisor.spawn.launchpad.layers.fresh_root import (
    HIDE,
    IF_POSSIBLE,
    HeldTree,
    PartError,
    moved,
)
from supervisor.spawn.launchpad.layers.overlay import (
    USER_XATTR,
    mount_overlay_by_path,
    options_in,
    read_mount_number,
)
from supervisor.spawn.launchpad.words import HELD, JOINED, OVERLAY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from supervisor.spawn.launchpad.layers.fresh_root import Tree

_NAMED = 3  # mounts that a report names

_TABLE = b"/proc/self/mountinfo"

_PROGRAMS, _OTHERS_PROGRAMS = b"/.sandhost", b"/usr/local/bin"
"""The program of ours that a child may run, and where it is seen."""


class RootEntries:
    """Entries of the fresh root itself.

    Attributes:
        links: (path, target) of symbolic links.
        files: (path, content) of files.
        command: the program ``sandhost``; b"" for none.
    """

    __slots__ = ("command", "files", "links")

    def __init__(
        self,
        links: tuple[tuple[bytes, bytes], ...],
        files: tuple[tuple[bytes, bytes], ...],
        command: bytes = b"",
    ) -> None:
        self.links = links
        self.files = files
        self.command = command


class PassedDescriptors:
    """Descriptors that have come with an order.

    Attributes:
        mounts: of mounts that are attached nowhere.
        way: a socket by which overlays go to the host, it is closed; -1 for none.
        joined: the mount namespace of the child whose mounts are seen; -1 for none.
    """

    __slots__ = ("joined", "mounts", "way")

    def __init__(self, mounts: Sequence[int], way: int, joined: int) -> None:
        self.mounts = mounts
        self.way = way
        self.joined = joined


def build(
    made: RootEntries,
    trees: tuple[Tree, ...],
    owners: int,
    passed: PassedDescriptors,
    common: CommonRoot | None = None,
    *,
    fresh_proc: bool,
) -> str:
    """Make the fresh root and move into it; the working directory is its top then.

    Args:
        made: links, files and a program.
        trees: (path, "execute", "read", "write" or "device", whether owners are
            mapped), or (path, "hide", (device, inode)), or (path, "held", position in
            ``passed.mounts``), or (path, "overlay", directory of its layer), or (path,
            "joined", False); each before what lies in it.
        owners: a user namespace whose map says how owners are shown; -1 for none.
        passed: the descriptors of the order.
        common: made before; taken if all that is in it is asked for.
        fresh_proc: a ``/proc`` of this process's own pid namespace; else the old one.

    Returns:
        The mounts that were made, in a few words.

    Raises:
        PartError: owners cannot be mapped on one of the file systems, the fresh
            ``/proc`` cannot be had, a path to hide was moved, or an overlay is not made
            as it was asked for.
        OSError: another thing that this machine does not let it do.
    """
    held: list[HeldTree] = []
    umask = os.umask(0o022)
    try:
        if common is not None and not common.fits(trees, made.links, made.files):
            common.remove()
            common = None
        root = common or CommonRoot((), made.links)
        for tree in root.trees_to_attach(trees):
            held += _hold(tree, owners, passed)
        kinds = {path: kind for path, kind, _ in trees}
        overlays = [one for one in held if kinds.get(one.path) == OVERLAY]
        if passed.way >= 0:
            _send(passed.way, [one.fd for one in overlays])
        numbers = [(one.path, read_mount_number(one.fd)) for one in overlays]
        stays_root = owners < 0 and os.geteuid() == 0
        proc = -1 if fresh_proc else _hold_proc(to_read=stays_root)
        without = _fill(
            root, made, held, proc, mount_calls.MS_RDONLY if stays_root else 0
        )
        if overlays:
            _check_user_marks(numbers)
        make_root(root.stage.top)
        os.close(root.stage.top)
        os.chdir("/")
    finally:
        os.umask(umask)
    count = len(held) + len(trees) - len(root.trees_to_attach(trees))
    return f"{count} places{_describe_left_out(held)}{without}"


def _hold(tree: Tree, owners: int, passed: PassedDescriptors) -> list[HeldTree]:
    """Hold what a tree is in the fresh root; arguments and errors as of ``build``."""
    path, kind, what = tree
    if kind == HIDE:
        return [_hold_hidden(path, what)]
    if kind in {HELD, JOINED, OVERLAY}:
        over = _find_place(path)
        if kind == HELD:
            mount = passed.mounts[what]  # type: ignore[index]
        elif kind == JOINED:
            mount = _copy_of_joined(passed.joined, path)
        else:
            mount = _overlay(path, what)  # type: ignore[arg-type]
        return [HeldTree(path, mount, over=over)]
    asks = owners if what else -1
    return copy_trees(path, kind, asks, if_possible=what == IF_POSSIBLE)


def is_made_here(path: bytes) -> bool:
    """Tell whether a directory is the fresh root's own, and no copy of another."""
    return path in {b"/", b"/proc"} or path.startswith(b"/proc/")


def _fill(
    root: CommonRoot,
    made: RootEntries,
    held: list[HeldTree],
    proc: int,
    flags: int,
) -> str:
    """Fill the fresh root; say what it goes without."""
    stage = root.stage
    stage.make_links((*LINKS, *made.links))
    stage.make_files(made.files)
    if made.command:
        stage.make_program(_PROGRAMS + b"/sandhost", made.command)
    for tree in held:
        if tree.is_hidden:
            stage.hide(tree)
        else:
            stage.attach(tree)
        tree.close()
    flags |= mount_calls.MS_NOSUID | mount_calls.MS_NODEV | mount_calls.MS_NOEXEC
    if proc < 0:
        os.fchdir(stage.top)
        try:
            mount_calls.mount(b"proc", b"proc", b"proc", flags, b"")
        except OSError as error:
            raise PartError("pidns", error.errno or errno.EIO, b"") from None
    else:
        stage.attach(HeldTree(b"/proc", proc))
        os.close(proc)
    without = "" if root.has_terminals else ", no terminals of its own"
    if made.command:
        without += _show_programs(stage.top)
    stage.seal()
    return without


def _show_programs(top: int) -> str:
    """Lay a directory of ours over the machine's own programs; say why not, if not.

    They stay beneath, and a name that is the machine's already is not taken: its host has
    looked (``sandbox.orders``).
    """
    # "." is the place itself, which as a path could lead out of the fresh root.
    how = b"lowerdir=/proc/self/fd/%d%b:." % (top, _PROGRAMS)
    try:
        place = open_exactly(_OTHERS_PROGRAMS[1:], top)
        try:
            os.fchdir(place)
        finally:
            os.close(place)
        mount_calls.mount(
            b"overlay",
            b".",
            b"overlay",
            mount_calls.MS_RDONLY | mount_calls.MS_NOSUID | mount_calls.MS_NODEV,
            how,
        )
    except OSError as error:
        if error.errno in NOT_THERE:
            return ""  # the machine has no such directory
        return f", no command 'sandhost' ({error.strerror})"
    return ""


def _find_place(path: bytes) -> int:
    """Hold what a mount of the host's covers where it lies in a copy; -1: nothing."""
    try:
        return open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return -1


def _overlay(path: bytes, own: bytes) -> int:
    """Make the overlay of a workspace.

    Raises:
        PartError: this machine does not let a user make it, or not here.
    """
    try:
        return mount_overlay_by_path(path, own)
    except OSError as error:
        raise PartError("workspace", error.errno or errno.EIO, path) from None


def _check_user_marks(overlays: list[tuple[bytes, bytes]]) -> None:
    """Refuse an overlay that the kernel has made without the marks of a user.

    It makes one all the same, and a directory that is removed and made anew there cannot
    be read (EIO).

    Args:
        overlays: path and number of each mount.

    Raises:
        PartError: one is made so, or it is not attached where it was to be.
    """
    with open(_TABLE, "rb") as file:
        rows = file.read()
    for path, number in overlays:
        options = options_in(rows, number)
        if options is None:
            raise PartError("workspace", errno.ESTALE, path)
        if USER_XATTR not in options:
            raise PartError("userxattr", errno.EOPNOTSUPP, path)


def _send(way: int, overlays: list[int]) -> None:
    """Send the host overlays, and the user and the mount namespace that they are in."""
    line = _socket.socket(fileno=way)
    own: list[int] = []
    try:
        for name in ("/proc/self/ns/user", "/proc/self/ns/mnt"):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            own.append(fd)
        wire.send_message(line, (), (*overlays, *own))
    finally:
        for fd in own:
            os.close(fd)
        line.close()


def _copy_of_joined(namespace: int, path: bytes) -> int:
    """Copy a mount of another mount namespace, by a process that enters that one.

    Only root outside comes back from there.

    Raises:
        PartError: it cannot be had there.
    """
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
        if pid == 0:
            _send_copy(theirs, namespace, path)
        theirs.close()
        received = wire.wait_for_message(ours)
        os.waitpid(pid, 0)
    finally:
        ours.close()
        theirs.close()
    (number,), fds = received or ((errno.EIO,), [])
    if not fds:
        raise PartError("workspace", number, path)
    return fds[0]


def _send_copy(line: _socket.socket, namespace: int, path: bytes) -> NoReturn:
    try:
        namespaces.set_namespace(namespace, namespaces.NEW_MOUNTS)
        fd = mount_calls.open_tree(
            open_exactly(path), b"", mount_calls.OPEN_ONE | mount_calls.AT_EMPTY_PATH
        )
        wire.send_message(line, (0,), (fd,))
    except OSError as error:
        wire.send_message(line, (error.errno or errno.EIO,))
    finally:
        os._exit(0)


def _hold_hidden(path: bytes, identity: object) -> HeldTree:
    """Hold what is to be hidden.

    Raises:
        PartError: it is not there, but somewhere.
    """
    try:
        fd = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        raise moved(path) from None
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != identity:
        raise moved(path)
    return HeldTree(path, fd, is_hidden=True)


def _describe_left_out(held: list[HeldTree]) -> str:
    """Say which mounts are left out (``layers.copies``), in a few words; "" for none."""
    left = [one.path.decode(errors="replace") for one in held if one.is_left_out]
    if not left:
        return ""
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    return f", without what is mounted at {', '.join(left[:_NAMED])}{more}"


def _hold_proc(*, to_read: bool) -> int:
    fd = mount_calls.open_tree(mount_calls.AT_FDCWD, b"/proc", mount_calls.OPEN_TREE)
    if to_read:
        mount_calls.set_attributes(fd, mount_calls.ATTR_RDONLY, beneath=True)
    return fd
