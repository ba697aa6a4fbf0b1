"""One workspace, several children: they see copies of one mount (spec WS19).

Finds the children that share a workspace, and copies their mounts. There is no table:
the children of the host are asked, also after a hand-over.

Rules of this file.

1. Two mounts that write to one layer are forbidden: the second child gets a copy of the
   first one's mount, and of the descriptor of its lock. The last copy that is closed
   unmounts and unlocks: a child that comes while a copy is open waits for that end.
2. A mount shows the operator's files as one user's, so children that share one have one
   user (``Machine`` counts them). Their other walls keep them apart.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from supervisor.sandbox.held_mount import HeldMount
from supervisor.workspace.run import MountedWorkspace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import trio

    from supervisor.sandbox.plan import WantedWalls
    from supervisor.spec import ChildSpec
    from supervisor.workspace.use import WorkspaceUse


class Sharer(Protocol):
    """A child that may share a workspace.

    Attributes:
        id: unique in the host.
        spec: which workspaces it has.
        wanted: the walls that it is to have; None before its start.
        gone: set when nothing of it is left.
    """

    id: str
    spec: ChildSpec
    wanted: WantedWalls | None
    gone: trio.Event

    @property
    def held(self) -> Mapping[int, str]:
        """Descriptors that it holds for its start and its end, with a word for each."""
        ...


def user_of_sharers(child: Sharer, children: Iterable[Sharer]) -> int | None:
    """Return the user that a child must have; None for any."""
    others = tuple(children)
    for use in child.spec.workspaces:
        for other in _sharers(child, use, others):
            return None if other.wanted is None else other.wanted.user
    return None


def has_sharers(child: Sharer, use: WorkspaceUse, children: Iterable[Sharer]) -> bool:
    """Return whether another child has a workspace mounted."""
    return any(_mount_in(other, use) for other in _sharers(child, use, children))


def mount_of_sharers(
    child: Sharer, use: WorkspaceUse, children: Iterable[Sharer]
) -> MountedWorkspace | None:
    """Return copies of another child's mount and lock; None if there is none.

    Raises:
        OSError: no descriptor is left.
        PermissionError: that child has another user.
    """
    for other in _sharers(child, use, children):
        mounted = _mount_in(other, use)
        if mounted is None:
            continue
        if child.wanted is None or other.wanted is None:
            raise RuntimeError("a child that sees mounts has walls")
        if child.wanted.user != other.wanted.user:
            text = f"child {other.id}, with which it is shared, has another user"
            raise PermissionError(errno.EPERM, f"{text}; give both one policy")
        if mounted.mount is None:
            raise RuntimeError("a mount that is shared is the host's")
        mount = mounted.mount.duplicate()
        try:
            return MountedWorkspace(mount, os.dup(mounted.lock))
        except OSError:
            mount.close()
            raise
    return None


def sharer_that_ends(
    child: Sharer, use: WorkspaceUse, children: Iterable[Sharer]
) -> Sharer | None:
    """Return a child that has closed its mount, and not its lock yet; or None."""
    for other in _sharers(child, use, children):
        if _mount_in(other, use) is None and _lock_in(other, use) is not None:
            return other
    return None


def _sharers(
    child: Sharer, use: WorkspaceUse, children: Iterable[Sharer]
) -> Iterator[Sharer]:
    if not use.is_shared:
        return
    for other in children:
        has_it = any(use.is_same(one) for one in other.spec.workspaces)
        if has_it and other is not child and other.wanted is not None:
            yield other


def _mount_in(other: Sharer, use: WorkspaceUse) -> MountedWorkspace | None:
    """Return the mount and lock that a child holds of a workspace, if it does."""
    mount = None if other.wanted is None else other.wanted.files.mount_of(use.base)
    lock = _lock_in(other, use)
    if mount is None or mount.fd not in other.held or lock is None:
        return None
    return MountedWorkspace(HeldMount(mount.fd, mount.namespace), lock)


def _lock_in(other: Sharer, use: WorkspaceUse) -> int | None:
    """Return the descriptor of a workspace's lock that a child holds."""
    if other.wanted is None:
        return None
    locked = (one for one in other.spec.workspaces if one.mode == "review")
    for one, lock in zip(locked, other.wanted.locks, strict=False):
        if use.is_same(one) and lock in other.held:
            return lock
    return None
