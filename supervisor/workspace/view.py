"""A child's view of its workspaces: mounts that it sees, and one as FD 3's root.

Rule: FD 3's root and the child's tree are copies of one mount, or the same mount: a write
by one way is seen by the other at once (spec WS2).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from supervisor.sandbox.held_mount import HeldMount
from supervisor.sandbox.shown_files import ShownMount
from supervisor.spawn.launchpad import words
from vfs.backends import MountDirectory
from vfs.places import Place, open_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.sandbox.plan import WantedWalls
    from supervisor.spec import ChildSpec
    from supervisor.workspace.use import WorkspaceUse


USERS, VIEW = "workspace users", "workspace view"
"""Names of the user and the mount namespace of a child that makes its mounts."""


def mount_word(index: int) -> str:
    """Return what the mount of a child's workspace is called among its descriptors."""
    return f"workspace {index}"


def namespace_word(index: int) -> str:
    """Return what the mount namespace of that mount is called, if it has one."""
    return f"workspace {index} namespace"


def show(
    wanted: WantedWalls, use: WorkspaceUse, mount: HeldMount | None, own: str = ""
) -> None:
    """Add a workspace to what a child sees.

    Args:
        wanted: the walls that it is to have.
        use: the workspace.
        mount: owned by the caller; None if the host has none.
        own: the directory of the layer, where the child makes the mount.
    """
    if mount is not None or own:
        fds = (-1, -1) if mount is None else (mount.fd, mount.namespace)
        shown = ShownMount(use.base, fds[0], use.is_writable, own, fds[1])
        wanted.files.mounts = (*wanted.files.mounts, shown)
    elif use.is_writable:  # the base as it is: the child has its owner's user
        wanted.files.kept = (*wanted.files.kept, use.base)
    else:
        wanted.files.unwritten = (*wanted.files.unwritten, use.base)


def restore_shown(
    wanted: WantedWalls, spec: ChildSpec, held: Mapping[int, str]
) -> None:
    """Add a child's workspaces, of which the program before held the mounts."""
    fds = {word: fd for fd, word in held.items()}
    if {USERS, VIEW} <= fds.keys():
        wanted.joined = {words.USERS: fds[USERS], words.VIEW: fds[VIEW]}
    for index, use in enumerate(spec.workspaces):
        fd = fds.get(mount_word(index), -1)
        mount = HeldMount(fd, fds.get(namespace_word(index), -1)) if fd >= 0 else None
        is_own = mount is None and use.mode == "review"
        show(wanted, use, mount, _layer_of(use) if is_own else "")


def unmounted(
    spec: ChildSpec, wanted: WantedWalls
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a child sees of its workspaces as it is: to write, and to execute."""
    plain = [use for use in spec.workspaces if wanted.files.mount_of(use.base) is None]
    return (
        tuple(use.base for use in plain if use.is_writable),
        tuple(use.base for use in plain if not use.is_writable),
    )


def _layer_of(use: WorkspaceUse) -> str:
    from supervisor.workspace.directory import path_of  # noqa: PLC0415 - only there

    return path_of(use.state_dir, use.name)


def open_root(spec: ChildSpec, wanted: WantedWalls) -> Place:
    """Return FD 3's root of a child whose root is its first workspace (spec WS5).

    Where the child makes the mount there is nothing in it until ``fill_root``.

    Raises:
        OSError: it cannot be opened, or not be copied.
    """
    use = spec.workspaces[0]
    mount = wanted.files.mount_of(use.base)
    if mount is None:
        return open_place(
            use.base,
            read=True,
            write=use.is_writable,
            relative=b"",
            publish=spec.publish,
            durability=spec.durability,
        )
    fd = -1
    if mount.fd >= 0:
        fd = mount.copy()
    directory = MountDirectory(fd, wanted.user)
    try:
        if fd >= 0:
            directory.hold()
            if use.is_writable:
                directory.remove_stale()
        return Place(
            directory,
            (use.base.encode(errors="surrogateescape"),),
            read=True,
            write=use.is_writable,
            relative=b"",
            publish=spec.publish,
            durability=spec.durability,
        )
    except BaseException:
        directory.close()
        raise


def fill_root(root: Place | None, mounts: list[int]) -> None:
    """Put the first mount that a child has made into FD 3's root, which owns it then.

    Args:
        root: of FD 3; None if that is no workspace.
        mounts: all that it has made; the others are closed.

    Raises:
        OSError: it cannot be looked at.
    """
    for fd in mounts if root is None else mounts[1:]:
        os.close(fd)
    if root is None:
        return
    root.fill(mounts[0])
    if root.write and isinstance(root.backend, MountDirectory):
        root.backend.remove_stale()


def own_mounts(wanted: WantedWalls) -> Iterator[ShownMount]:
    """Yield the mounts that the child makes itself, in the order in which it does."""
    return (mount for mount in wanted.files.mounts if mount.fd < 0)
