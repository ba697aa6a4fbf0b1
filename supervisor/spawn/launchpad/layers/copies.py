"""Copies of mounts that a child may see, attached nowhere yet: open_tree(2).

1. Owners are mapped for a child of another user, and its mounts are read-only.
2. A mount that cannot have owners mapped (a cgroup file system) is left out and covered.
"""

from __future__ import annotations

import errno
import os

from hostlib.linux import mount_calls
from hostlib.linux.syscalls import NOT_THERE, open_exactly
from supervisor.spawn.launchpad.layers.fresh_root import HeldTree, PartError


def copy_trees(
    path: bytes, kind: str, owners: int, *, if_possible: bool = False
) -> list[HeldTree]:
    """Copy what is mounted at a path and beneath it; nothing if nothing is there.

    Args:
        path: of the tree.
        kind: the rights there.
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
        fd = _copy(found, kind, mount_calls.OPEN_TREE)
        if owners < 0:
            return [HeldTree(path, fd)]
        try:
            mount_calls.set_attributes(fd, mount_calls.ATTR_IDMAP, owners, beneath=True)
        except OSError:  # of the path itself, or of something that is mounted beneath
            return _copies_in_part(
                fd, found, path, kind, owners, if_possible=if_possible
            )
        return [HeldTree(path, fd)]
    finally:
        os.close(found)


def _copies_in_part(
    fd: int, found: int, path: bytes, kind: str, owners: int, *, if_possible: bool
) -> list[HeldTree]:
    """Return copies of which some cannot have owners mapped; ``fd`` has none."""
    try:
        held = _copy_separately(found, path, kind, owners)
    except PartError:
        if if_possible:
            return [HeldTree(path, fd)]
        os.close(fd)
        raise
    os.close(fd)
    return held


def _copy_separately(found: int, path: bytes, kind: str, owners: int) -> list[HeldTree]:
    """Copy a mount and those beneath it that can have owners mapped (rule 2).

    Raises:
        PartError: owners cannot be mapped on the file system of the path itself.
    """
    try:
        top = _copy_mapped(found, kind, owners)
    except OSError as error:
        raise PartError("uid", error.errno or errno.EIO, path) from None
    held = {path: HeldTree(path, top)}
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
            held[place] = HeldTree(place, _copy_mapped(inside, kind, owners), over=over)
        except OSError:
            held[place] = HeldTree(place, over, is_hidden=True, is_left_out=True)
        finally:
            os.close(inside)
    return list(held.values())


def _copy_mapped(found: int, kind: str, owners: int) -> int:
    """Copy one mount, and nothing beneath it, with its owners mapped.

    Raises:
        OSError: its file system cannot show them so.
    """
    fd = _copy(found, kind, mount_calls.OPEN_ONE)
    try:
        mount_calls.set_attributes(fd, mount_calls.ATTR_IDMAP, owners)
    except OSError:
        os.close(fd)
        raise
    return fd


def _copy(found: int, kind: str, flags: int) -> int:
    fd = mount_calls.open_tree(found, b"", flags | mount_calls.AT_EMPTY_PATH)
    attributes = mount_calls.ATTR_NOSUID
    if kind != "device":
        attributes |= mount_calls.ATTR_NODEV
    if kind != "write":
        attributes |= mount_calls.ATTR_RDONLY
    if kind == "read":
        attributes |= mount_calls.ATTR_NOEXEC
    mount_calls.set_attributes(fd, attributes, beneath=True)
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
