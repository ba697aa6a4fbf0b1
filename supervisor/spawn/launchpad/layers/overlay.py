"""Overlay mounts, made from held descriptors: what a child sees of a workspace.

The host makes one where it is root (``sandbox.held_mount``); else the child does, in its
user namespace. How an overlay takes its layers depends on the kernel: `WAYS`.

Sources: Documentation/filesystems/overlayfs.rst, fsopen(2), open_tree(2),
proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os

from hostlib.linux import mount_calls
from hostlib.linux.syscalls import open_exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Option = tuple[bytes, bytes | None]

_FIND = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

DETACHED, ATTACHED, NAMED = "detached", "attached", "named"
WAYS = (DETACHED, ATTACHED, NAMED)
"""How an overlay takes its layers, the newest way first: the first that works is taken.

DETACHED: mounts that are attached nowhere, by descriptor (Linux 6.15). ATTACHED: mounts
of the caller's mount namespace, by descriptor (6.13). NAMED: such mounts, as
``/proc/self/fd/N`` in the options of mount(2).
"""

_PLACE = b"/proc"
"""Directory on which a mount by NAMED is for a moment (see ``layers.mounts``)."""

SEALED_FILE = "sealed"
"""File with an overlay's sealed layers, newest first, a NUL after each."""

VOLATILE_FILE = "volatile"
"""File of an overlay's directory that is there if its mount syncs nothing."""

USER_XATTR = b"userxattr"
"""The option by which overlayfs keeps its attributes as a user's."""

_OPTIONS = ((b"index", b"off"), (b"metacopy", b"off"), (b"xino", b"auto"))


def clone_mount(fd: int) -> int:
    """Return a descriptor of an unattached copy of a mount from one directory on.

    Mounts beneath are not copied.

    Raises:
        OSError: EPERM: this process has no CAP_SYS_ADMIN; EINVAL: a mount of another
            namespace, or one that cannot be copied.
    """
    return mount_calls.open_tree(
        fd, b"", mount_calls.OPEN_ONE | mount_calls.AT_EMPTY_PATH
    )


def copy_mount(fd: int, *, is_writable: bool) -> int:
    """Return a descriptor of a copy of a mount as a child is to see it."""
    copy = clone_mount(fd)
    try:
        attributes = mount_calls.ATTR_NOSUID | mount_calls.ATTR_NODEV
        attributes |= 0 if is_writable else mount_calls.ATTR_RDONLY
        mount_calls.set_attributes(copy, attributes)
    except OSError:
        os.close(copy)
        raise
    return copy


class OwnersError(OSError):
    """Owners cannot be mapped on the file system of one of the layers."""


class Layers:
    """Descriptors of what an overlay is made of, until `close`.

    Attributes:
        base: of the base's top.
        own: of the directory that has ``upper`` and ``work``; ``hidden``, if it is there,
            lies between upper and base.
        sealed: of the tops of the layers between upper and base, newest first.
    """

    __slots__ = ("base", "own", "sealed")

    def __init__(self, base: int, own: int, sealed: Sequence[int] = ()) -> None:
        self.base = base
        self.own = own
        self.sealed = sealed

    def __iter__(self) -> Iterator[int]:
        return iter((self.base, self.own, *self.sealed))

    def close(self) -> None:
        """Close them."""
        for fd in self:
            os.close(fd)


def copy_layers(layers: Layers, owners: int = -1) -> Layers:
    """Return copies of mounts, attached nowhere, from the layers on.

    Args:
        layers: descriptors of directories.
        owners: a user namespace in which the operator and the child change places; -1 to
            show everybody as they are.

    Raises:
        OwnersError: a file system cannot show them so.
        OSError: as of `clone_mount`.
    """
    copies: list[int] = []
    try:
        # Upper and work are reached through one copy of one mount, or it is EINVAL.
        for fd in layers:
            copies.append(clone_mount(fd))
            if owners >= 0:
                map_owners(copies[-1], owners)
    except OSError:
        for fd in copies:
            os.close(fd)
        raise
    base, own, *sealed = copies
    return Layers(base, own, sealed)


def map_owners(fd: int, owners: int) -> None:
    """Map the owners of files by a user namespace, in an unattached mount.

    Raises:
        OwnersError: the file system cannot, or the kernel.
    """
    try:
        mount_calls.set_attributes(fd, mount_calls.ATTR_IDMAP, owners)
    except OSError as error:
        raise OwnersError(error.errno, error.strerror) from None


def make_overlay(
    layers: Layers,
    way: str,
    *,
    has_user_marks: bool = False,
    is_volatile: bool = False,
) -> int:
    """Return a descriptor of the unattached overlay mount of a workspace.

    Args:
        layers: for DETACHED copies as `copy_layers` makes them, else in the mount
            namespace of the caller.
        way: one of `WAYS`.
        has_user_marks: overlayfs keeps its attributes as a user's; root keeps its own.
        is_volatile: nothing is synced, neither when it is asked for nor at the end. The
            kernel marks the work directory, and makes no other mount with that mark.

    Raises:
        OSError: with the kernel's own reason where it gives one.
    """
    held: list[int] = []
    try:
        lowers = [*layers.sealed, *_hiding(held, layers.own), layers.base]
        upper, work = (_open(held, name, layers.own) for name in ("upper", "work"))
        attributes = mount_calls.ATTR_NOSUID | mount_calls.ATTR_NODEV
        # overlayfs does not look at the flags of its layers' mounts.
        if os.fstatvfs(layers.base).f_flag & os.ST_NOEXEC:
            attributes |= mount_calls.ATTR_NOEXEC
        options: list[Option] = [(b"volatile", None)] if is_volatile else []
        # userxattr comes first, or the options after it are refused.
        options.append(
            (USER_XATTR, None) if has_user_marks else (b"redirect_dir", b"on")
        )
        options += _OPTIONS
        make = _make_by_names if way == NAMED else _make_by_descriptors
        return make(options, (lowers, upper, work), attributes)
    finally:
        for fd in held:
            os.close(fd)


def mount_overlay_by_path(base: bytes, own: bytes) -> int:
    """Make an overlay in a user namespace, from paths without links; as above.

    The paths of its sealed layers stand in the file ``sealed`` beside the upper; a file
    ``volatile`` there makes it so. The caller has a mount namespace of its own.
    """
    held = [open_exactly(path) for path in (base, own)]
    try:
        held += [open_exactly(path) for path in _sealed_paths(held[1])]
        layers = Layers(held[0], held[1], held[2:])
        is_volatile = _has_file(layers.own, VOLATILE_FILE)
        try:
            return make_overlay(
                layers, ATTACHED, has_user_marks=True, is_volatile=is_volatile
            )
        except OSError:
            # An older kernel, or a fault that this way has as well.
            return make_overlay(
                layers, NAMED, has_user_marks=True, is_volatile=is_volatile
            )
    finally:
        for fd in held:
            os.close(fd)


def read_mount_number(fd: int) -> bytes:
    """Return the number that the table of mounts has for the mount of a descriptor."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return file.read().partition(b"mnt_id:")[2].split()[0]


def options_in(table: bytes, number: bytes) -> list[bytes] | None:
    """Return the options that a file system was really mounted with.

    Args:
        table: the content of ``/proc/self/mountinfo``.
        number: of the mount.

    Returns:
        None if the mount is attached nowhere: the table does not have it then.
    """
    for line in table.splitlines():
        found, _, rest = line.partition(b" ")
        if found == number:
            return rest.rpartition(b" ")[2].split(b",")
    return None


def _sealed_paths(own: int) -> list[bytes]:
    try:
        fd = os.open(SEALED_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=own)
    except FileNotFoundError:
        return []
    with open(fd, "rb") as file:
        return file.read().split(b"\0")[:-1]


def _has_file(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _hiding(held: list[int], own: int) -> list[int]:
    """Return the layer that hides names of the base, if there is one."""
    try:
        return [_open(held, "hidden", own)]
    except FileNotFoundError:
        return []


def _open(held: list[int], name: str, directory: int) -> int:
    fd = os.open(name, _FIND, dir_fd=directory)
    held.append(fd)
    return fd


def _make_by_descriptors(
    options: list[Option], layers: tuple[list[int], int, int], attributes: int
) -> int:
    lowers, upper, work = layers
    config = mount_calls.fsopen(b"overlay", mount_calls.FSOPEN_CLOEXEC)
    try:
        for key, value in options:
            _set(
                config,
                mount_calls.SET_FLAG if value is None else mount_calls.SET_STRING,
                key,
                value,
            )
        for fd in lowers:
            _set(config, mount_calls.SET_FD, b"lowerdir+", None, fd)
        for key, fd in ((b"upperdir", upper), (b"workdir", work)):
            _set(config, mount_calls.SET_FD, key, None, fd)
        _set(config, mount_calls.CMD_CREATE, None)
        return mount_calls.fsmount(config, mount_calls.FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(config)


def _make_by_names(
    options: list[Option], layers: tuple[list[int], int, int], attributes: int
) -> int:
    """Do it by mount(2): a value of fsconfig(2) has 255 bytes, its options have 4,095."""
    lowers, upper, work = layers
    named: list[Option] = [
        *options,
        (b"lowerdir", b":".join(map(_name, lowers))),
        (b"upperdir", _name(upper)),
        (b"workdir", _name(work)),
    ]
    text = b",".join(
        key if value is None else key + b"=" + value for key, value in named
    )
    # MS_NOSUID, MS_NODEV, MS_NOEXEC have the numbers of the attributes.
    mount_calls.mount(b"overlay", _PLACE, b"overlay", attributes, text)
    try:
        return mount_calls.open_tree(mount_calls.AT_FDCWD, _PLACE, mount_calls.OPEN_ONE)
    finally:
        mount_calls.unmount(_PLACE, mount_calls.MNT_DETACH)


def _name(fd: int) -> bytes:
    return b"/proc/self/fd/%d" % fd


def _set(
    options: int,
    command: int,
    key: bytes | None,
    value: bytes | None = None,
    fd: int = 0,
) -> None:
    try:
        mount_calls.fsconfig(options, command, key, value, fd)
    except OSError as why:
        raise OSError(why.errno, _reason(options) or why.strerror) from None


def _reason(options: int) -> str:
    """Return what the kernel says of the last failure; "" for nothing."""
    try:
        text = os.read(options, 1024).decode(errors="replace")
    except OSError:
        return ""
    return text[2:].strip()  # "e ", "w ", "i ": how bad it is
