"""The layer "mountns": a fresh root with copies of mounts that a child may see.

1. It runs in its own mount namespace; failures come before the root changes.
2. All mounts are private first: shared ones, as systemd's, would propagate. The fresh
   root lies over the old one, where no path leads: nothing is covered meanwhile.
3. Owners are mapped for a child of another user, and its mounts are read-only.
4. A child that stays user 0 gets a read-only ``/proc``: it owns ``/proc/sys``.
5. A mount that cannot have owners mapped (a cgroup file system) is left out and covered.
6. Copies are attached and hidden by the rules of ``launchpad.fresh_root``.
7. What all children of a kind see can be attached before an order comes (`CommonRoot`);
   it is used if each path is still the same file and no mount changed meanwhile.
"""

from __future__ import annotations

import _socket
import errno
import os

from hostlib.linux.syscalls import NOT_THERE, caller, open_exactly, system_call
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.layers.fresh_root import (
    AT_EMPTY_PATH,
    AT_RECURSIVE,
    ATTR_IDMAP,
    ATTR_NODEV,
    ATTR_NOEXEC,
    ATTR_NOSUID,
    ATTR_RDONLY,
    HIDE,
    IF_POSSIBLE,
    Held,
    PartError,
    Stage,
    attach_at_top,
    identity_of,
    make_top,
    moved,
    set_attributes,
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
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from supervisor.spawn.launchpad.layers.fresh_root import Tree

# <asm/unistd.h>: mount_setattr(2) and its like have one number everywhere.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_MOUNT = 165 if _IS_X86_64 else 40
_SYS_UMOUNT2 = 166 if _IS_X86_64 else 39
_SYS_PIVOT_ROOT = 155 if _IS_X86_64 else 41
_SYS_SETNS = 308 if _IS_X86_64 else 268
_CLONE_NEWNS = 0x00020000
_SYS_OPEN_TREE = 428
# <linux/mount.h>, <fcntl.h>
_AT_FDCWD = -100 & 0xFFFFFFFFFFFFFFFF
_OPEN_ONE = 1 | os.O_CLOEXEC  # OPEN_TREE_CLONE
_OPEN_TREE = _OPEN_ONE | AT_RECURSIVE
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REC_PRIVATE = 0x4000 | (1 << 18)
_MNT_DETACH = 2

_NAMED = 3  # mounts that a report names

_TABLE = b"/proc/self/mountinfo"

_LINKS = (
    (b"/dev/fd", b"/proc/self/fd"),
    (b"/dev/stdin", b"/proc/self/fd/0"),
    (b"/dev/stdout", b"/proc/self/fd/1"),
    (b"/dev/stderr", b"/proc/self/fd/2"),
    (b"/dev/ptmx", b"pts/ptmx"),
    (b"/etc/mtab", b"../proc/self/mounts"),
)

_PROGRAMS, _OTHERS_PROGRAMS = b"/.sandhost", b"/usr/local/bin"
"""The program of ours that a child may run, and where it is seen."""

_TERMINALS = b"newinstance,ptmxmode=0666,mode=0620,max=256"
"""Of a child's own devpts: as many as it has, others have fewer (kernel.pty.max)."""


_SMALL = b"mode=1777,size=64m,nr_inodes=16k"
"""Of a child's own ``/dev/shm`` and ``/tmp``; what is larger goes to TMPDIR."""


_call_mount = caller(_SYS_MOUNT, "tttnt")
_umount = caller(_SYS_UMOUNT2, "tn")
_pivot_root = caller(_SYS_PIVOT_ROOT, "tt")
_open_tree = caller(_SYS_OPEN_TREE, "ntn")


class Made:
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


class Passed:
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


class CommonRoot:
    """A fresh root with what all children of a kind see; `build` adds the rest.

    Args:
        trees: as of ``build``: copies whose owners are shown as they are.
        links: (path, target) of symbolic links.

    Attributes:
        stage: the root while it is filled.
        has_terminals: it has a devpts of its own.

    Raises:
        OSError: this machine does not let it do that.

    The umask is to be 022.
    """

    __slots__ = ("_around", "_links", "_seen", "has_terminals", "stage")

    def __init__(
        self,
        trees: tuple[Tree, ...] = (),
        links: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        keep_to_itself()
        top = make_top()
        attach_at_top(top)
        self.stage = Stage(top, (*_LINKS, *links))
        self.stage.make_places(b"/proc", b"/dev", b"/dev/shm", b"/dev/pts", b"/tmp")
        os.fchdir(top)
        for place in (b"dev/shm", b"tmp"):
            _mount(b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, _SMALL)
        self.has_terminals = _mount_terminals()
        self._links = frozenset(links)
        self._seen = {tree: identity_of(tree[0]) for tree in trees}
        self._around = {above for path, *_ in trees for above in _parents(path)}
        for path, kind, _ in trees:
            for copy in _copies(path, kind, -1):
                self.stage.attach(copy)
                copy.close()

    def is_part_of(
        self, trees: tuple[Tree, ...], links: tuple[tuple[bytes, bytes], ...]
    ) -> bool:
        """Tell whether a root of these trees and links has all that is in this one."""
        rest = set(trees) - self._seen.keys()
        return (
            len(rest) == len(trees) - len(self._seen)
            and self._links.issubset(links)
            and not any(path in self._around for path, *_ in rest)
            and all(was == identity_of(tree[0]) for tree, was in self._seen.items())
        )

    def without(self, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Return those trees that it does not have."""
        return tuple(tree for tree in trees if tree not in self._seen)

    def remove(self) -> None:
        """Unmount it."""
        os.fchdir(self.stage.top)
        _umount(b".", _MNT_DETACH)
        os.chdir("/")
        os.close(self.stage.top)


def make_common_root(
    trees: tuple[Tree, ...], links: tuple[tuple[bytes, bytes], ...]
) -> CommonRoot:
    """Make what all children of a kind see, before there is an order (rule 7)."""
    umask = os.umask(0o022)
    try:
        return CommonRoot(trees, links)
    finally:
        os.umask(umask)


def _parents(path: bytes) -> Iterator[bytes]:
    """Yield the directories that a path lies in, but for the top."""
    while path := path.rpartition(b"/")[0]:
        yield path


def build(
    made: Made,
    trees: tuple[Tree, ...],
    owners: int,
    passed: Passed,
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
        passed: what has come with the order.
        common: made before; taken if all that is in it is asked for.
        fresh_proc: a ``/proc`` of this process's own pid namespace; else the old one.

    Returns:
        The mounts that were made, in a few words.

    Raises:
        PartError: owners cannot be mapped on one of the file systems, the fresh
            ``/proc`` cannot be had, what is to be hidden is not where it was, or an
            overlay is not what was asked for.
        OSError: another thing that this machine does not let it do.
    """
    held: list[Held] = []
    umask = os.umask(0o022)
    try:
        if common is not None and not common.is_part_of(trees, made.links):
            common.remove()
            common = None
        root = common or CommonRoot((), made.links)
        for tree in root.without(trees):
            held += _hold(tree, owners, passed)
        kinds = {path: kind for path, kind, _ in trees}
        overlays = [one for one in held if kinds.get(one.path) == OVERLAY]
        if passed.way >= 0:
            _send(passed.way, [one.fd for one in overlays])
        numbers = [(one.path, read_mount_number(one.fd)) for one in overlays]
        stays_root = owners < 0 and os.geteuid() == 0
        proc = -1 if fresh_proc else _hold_proc(to_read=stays_root)
        without = _fill(root, made, held, proc, _MS_RDONLY if stays_root else 0)
        if overlays:
            _check_user_marks(numbers)
        make_root(root.stage.top)
        os.close(root.stage.top)
        os.chdir("/")
    finally:
        os.umask(umask)
    count = len(held) + len(trees) - len(root.without(trees))
    return f"{count} places{_describe_left_out(held)}{without}"


def keep_to_itself() -> None:
    """Make all mounts of this mount namespace private: nothing goes in or out."""
    _mount(b"none", b"/", b"", _MS_REC_PRIVATE, b"")


def make_root(top: int) -> None:
    """Make a mount the root of this mount namespace, and unmount all that was in it.

    Args:
        top: a descriptor of the mount, which is attached somewhere here.
    """
    os.fchdir(top)
    _pivot_root(b".", b".")
    _umount(b".", _MNT_DETACH)


def _hold(tree: Tree, owners: int, passed: Passed) -> list[Held]:
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
        return [Held(path, mount, over=over)]
    asks = owners if what else -1
    return _copies(path, kind, asks, if_possible=what == IF_POSSIBLE)


def is_made_here(path: bytes) -> bool:
    """Tell whether a directory is the fresh root's own, and no copy of another."""
    return path in {b"/", b"/proc"} or path.startswith(b"/proc/")


def _fill(
    root: CommonRoot,
    made: Made,
    held: list[Held],
    proc: int,
    flags: int,
) -> str:
    """Fill the fresh root; say what it goes without."""
    stage = root.stage
    stage.make_links((*_LINKS, *made.links))
    stage.make_files(made.files)
    if made.command:
        stage.make_program(_PROGRAMS + b"/sandhost", made.command)
    for tree in held:
        if tree.is_hidden:
            stage.hide(tree)
        else:
            stage.attach(tree)
        tree.close()
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if proc < 0:
        os.fchdir(stage.top)
        try:
            _mount(b"proc", b"proc", b"proc", flags, b"")
        except OSError as error:
            raise PartError("pidns", error.errno or errno.EIO, b"") from None
    else:
        stage.attach(Held(b"/proc", proc))
        os.close(proc)
    without = "" if root.has_terminals else ", no terminals of its own"
    if made.command:
        without += _show_programs(stage.top)
    stage.seal()
    return without


def _show_programs(top: int) -> str:
    """Lay a directory of ours over the machine's own programs; say why not, if not.

    They stay beneath, and a name that is the machine's already is not taken: its host has
    looked (``sandbox.command``).
    """
    # "." is the place itself, which as a path could lead out of the fresh root.
    how = b"lowerdir=/proc/self/fd/%d%b:." % (top, _PROGRAMS)
    try:
        place = open_exactly(_OTHERS_PROGRAMS[1:], top)
        try:
            os.fchdir(place)
        finally:
            os.close(place)
        _mount(b"overlay", b".", b"overlay", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, how)
    except OSError as error:
        if error.errno in NOT_THERE:
            return ""  # the machine has no such directory
        return f", no command 'sandhost' ({error.strerror})"
    return ""


def _mount_terminals() -> bool:
    """Mount a devpts that is nobody else's; tell whether this machine gives one."""
    flags = _MS_NOSUID | _MS_NOEXEC
    try:
        _mount(b"devpts", b"dev/pts", b"devpts", flags, _TERMINALS)
    except OSError:  # a kernel without them, or one that is played: it is told
        return False
    return True


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
        system_call(_SYS_SETNS, namespace, _CLONE_NEWNS)
        fd = _open_tree(open_exactly(path), b"", _OPEN_ONE | AT_EMPTY_PATH)
        wire.send_message(line, (0,), (fd,))
    except OSError as error:
        wire.send_message(line, (error.errno or errno.EIO,))
    finally:
        os._exit(0)


def _hold_hidden(path: bytes, identity: object) -> Held:
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
    return Held(path, fd, is_hidden=True)


def _copies(
    path: bytes, kind: str, owners: int, *, if_possible: bool = False
) -> list[Held]:
    """Copy what is mounted at a path and beneath it; nothing if nothing is there.

    Args:
        path: of the tree.
        kind: what may be done there.
        owners: as of ``build``.
        if_possible: where owners cannot be mapped they are shown as they are.

    Raises:
        PartError: owners cannot be mapped on the file system of the path itself.
    """
    try:
        found = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return []
    try:
        fd = _copy(found, kind, _OPEN_TREE)
        if owners < 0:
            return [Held(path, fd)]
        try:
            set_attributes(fd, ATTR_IDMAP, owners, beneath=True)
        except OSError:  # of the path itself, or of something that is mounted beneath
            return _copies_in_part(
                fd, found, path, kind, owners, if_possible=if_possible
            )
        return [Held(path, fd)]
    finally:
        os.close(found)


def _copies_in_part(
    fd: int, found: int, path: bytes, kind: str, owners: int, *, if_possible: bool
) -> list[Held]:
    """Return copies of which some cannot have owners mapped; ``fd`` has none."""
    try:
        held = _copy_separately(found, path, kind, owners)
    except PartError:
        if if_possible:
            return [Held(path, fd)]
        os.close(fd)
        raise
    os.close(fd)
    return held


def _copy_separately(found: int, path: bytes, kind: str, owners: int) -> list[Held]:
    """Copy a mount and those beneath it that can have owners mapped (rule 5).

    Raises:
        PartError: owners cannot be mapped on the file system of the path itself.
    """
    try:
        top = _copy_mapped(found, kind, owners)
    except OSError as error:
        raise PartError("uid", error.errno or errno.EIO, path) from None
    held = {path: Held(path, top)}
    for place in _mounts_beneath(path):
        around = place.rpartition(b"/")[0]
        while around not in held:
            around = around.rpartition(b"/")[0]
        if held[around].is_hidden:
            continue
        try:
            # Mounts are not copied with what they are on, so this is what the place covers.
            over = open_exactly(place[len(around) + 1 :], held[around].fd)
            inside = open_exactly(place)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            continue  # another mount covers what it lies in
        try:
            held[place] = Held(place, _copy_mapped(inside, kind, owners), over=over)
        except OSError:
            held[place] = Held(place, over, is_hidden=True, is_left_out=True)
        finally:
            os.close(inside)
    return list(held.values())


def _copy_mapped(found: int, kind: str, owners: int) -> int:
    """Copy one mount, and nothing beneath it, with its owners mapped.

    Raises:
        OSError: its file system cannot show them so.
    """
    fd = _copy(found, kind, _OPEN_ONE)
    try:
        set_attributes(fd, ATTR_IDMAP, owners)
    except OSError:
        os.close(fd)
        raise
    return fd


def _copy(found: int, kind: str, flags: int) -> int:
    fd = _open_tree(found, b"", flags | AT_EMPTY_PATH)
    attributes = ATTR_NOSUID
    if kind != "device":
        attributes |= ATTR_NODEV
    if kind != "write":
        attributes |= ATTR_RDONLY
    if kind == "read":
        attributes |= ATTR_NOEXEC
    set_attributes(fd, attributes, beneath=True)
    return fd


def _mounts_beneath(path: bytes) -> list[bytes]:
    """Return where something is mounted in a directory, outer places first: proc(5)."""
    start = path + b"/"
    with open("/proc/self/mountinfo", "rb") as table:
        places = {_without_escapes(line.split()[4]) for line in table}
    return sorted(place for place in places if place.startswith(start))


def _without_escapes(field: bytes) -> bytes:
    first, *rest = field.split(b"\\")
    return first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)


def _describe_left_out(held: list[Held]) -> str:
    """Say which mounts are left out (rule 5), in a few words; "" for none."""
    left = [one.path.decode(errors="replace") for one in held if one.is_left_out]
    if not left:
        return ""
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    return f", without what is mounted at {', '.join(left[:_NAMED])}{more}"


def _hold_proc(*, to_read: bool) -> int:
    fd = _open_tree(_AT_FDCWD, b"/proc", _OPEN_TREE)
    if to_read:
        set_attributes(fd, ATTR_RDONLY, beneath=True)
    return fd


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, how: bytes) -> None:
    _call_mount(source, target, kind, flags, how)
