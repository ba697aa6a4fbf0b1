"""A mount that the host holds, of which children get copies (spec WS2, WS2a).

The mounts of a host that is root: made, tried, copied, given back.

Rules of this file.

1. A mount that is attached nowhere can be copied since Linux 6.15.  Before, only a
   process in the mount namespace of a mount can copy it.  So it is attached in one of its own, which
   holds nothing else, and ends with its last descriptor: no mount is left behind.
2. A namespace is entered by a thread that was started for it and ends with that: all else
   of the host stays in the namespace of its start.
3. A way of making an overlay is given if it works on a tmpfs: never by a version.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from hostlib.linux import namespaces
from supervisor.spawn.launchpad.layers.common_root import keep_to_itself, make_root
from supervisor.spawn.launchpad.layers.fresh_root import attach_at_top
from supervisor.spawn.launchpad.layers.overlay import (
    DETACHED,
    WAYS,
    Layers,
    OwnersError,
    clone_mount,
    copy_layers,
    copy_mount,
    make_overlay,
    map_owners,
)
from supervisor.spawn.launchpad.layers.overlay_trials import make_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class HeldMount:
    """A mount, and what it takes to copy it.

    Attributes:
        fd: of the mount.
        namespace: of the mount namespace that it is attached in; -1: it is nowhere.
    """

    fd: int
    namespace: int = -1

    def copy(self, *, is_writable: bool) -> int:
        """Return a descriptor of a copy as a child is to see it, attached nowhere.

        Raises:
            OSError: it cannot be copied.
        """
        copy = partial(copy_mount, self.fd, is_writable=is_writable)
        if self.namespace < 0:
            return copy()
        return _call_apart(_call_in_namespace, self.namespace, copy)

    def duplicate(self) -> HeldMount:
        """Return the same mount, held by other descriptors.

        Raises:
            OSError: no descriptor is left.
        """
        fd = os.dup(self.fd)
        try:
            return HeldMount(fd, os.dup(self.namespace) if self.namespace >= 0 else -1)
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Give it back; the last one unmounts it."""
        for fd in (self.fd, self.namespace):
            if fd >= 0:
                os.close(fd)


def hold_overlay(
    layers: Layers, owners: int = -1, *, is_volatile: bool = False
) -> HeldMount:
    """Make the overlay of a workspace in the first way that this machine gives.

    Args:
        layers: directories in this process's mount namespace; the caller's.
        owners: as of ``overlay.copy_layers``.
        is_volatile: as of ``overlay.make_overlay``.

    Raises:
        OwnersError: the owners of a layer cannot be mapped.
        OSError: of the first way that is given, or of the last one.
    """
    hold = partial(_hold, layers, owners, is_volatile=is_volatile)
    for way in WAYS[:-1]:
        try:
            return hold(way)
        except OwnersError:
            raise
        except OSError:
            if is_given(way):  # so it is these layers
                raise
    return hold(WAYS[-1])


def hold_directory(directory: int, owners: int = -1) -> HeldMount:
    """Make a copy of a directory's own mount, to be held.

    Args:
        directory: a descriptor of it.
        owners: as of ``overlay.copy_layers``.

    Raises:
        OwnersError: the owners of its files cannot be mapped.
        OSError: it cannot be copied.
    """
    fd = clone_mount(directory)
    try:
        if owners >= 0:
            map_owners(fd, owners)
        if _can_be_copied(fd):
            return HeldMount(fd)
        held = _call_apart(_hold_in_namespace, partial(os.dup, fd))
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return held


@cache
def is_given(way: str) -> bool:
    """Tell whether a way works here; remembered for the life of the process."""
    try:
        try_way(way)
    except OSError:
        return False
    return True


def try_way(way: str) -> None:
    """Make an overlay on a tmpfs in one way, and a copy of it; remove both.

    Raises:
        OSError: the kernel does not know it.
    """
    _call_apart(_try, way)


def _try(way: str) -> None:
    os.close(_enter_new_namespace())
    with (
        closing(make_layers()) as layers,
        closing(_hold(layers, -1, way)) as held,
    ):
        os.close(held.copy(is_writable=True))


def _hold(
    layers: Layers, owners: int, way: str, *, is_volatile: bool = False
) -> HeldMount:
    # Anew for each way: a mount cannot be attached twice.
    with closing(copy_layers(layers, owners)) as copies:
        make = partial(make_overlay, copies, way, is_volatile=is_volatile)
        if way == DETACHED:
            return _hold_detached(make)
        return _call_apart(_hold_in_namespace, make, copies)


def _hold_detached(make: Callable[[], int]) -> HeldMount:
    fd = make()
    if _can_be_copied(fd):
        return HeldMount(fd)
    os.close(fd)
    raise OSError(
        errno.EOPNOTSUPP, "a mount that is attached nowhere is not copied here"
    )


def _can_be_copied(fd: int) -> bool:
    try:
        os.close(clone_mount(fd))
    except OSError as why:
        if why.errno != errno.EINVAL:
            raise
        return False
    return True


def _hold_in_namespace(
    make: Callable[[], int], layers: Iterable[int] = ()
) -> HeldMount:
    """Move this thread into a mount namespace with a mount as its root.

    Args:
        make: makes it, in that namespace.
        layers: the mounts that are attached there for that.
    """
    fds = [_enter_new_namespace()]
    try:
        for layer in layers:
            attach_at_top(layer)
        fds.append(make())
        attach_at_top(fds[-1])
        make_root(fds[-1])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    namespace, fd = fds
    return HeldMount(fd, namespace)


def _enter_new_namespace() -> int:
    """Have this thread enter a new mount namespace; return a descriptor of that."""
    namespaces.unshare(namespaces.NEW_MOUNTS)
    keep_to_itself()
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _call_in_namespace(namespace: int, call: Callable[[], T]) -> T:
    """Call in another mount namespace, of which this thread is from then on."""
    namespaces.unshare(namespaces.FILE_SYSTEM)  # or setns(2) refuses a thread
    namespaces.set_namespace(namespace, namespaces.NEW_MOUNTS)
    return call()


def _call_apart(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call in a thread of its own (rule 2)."""
    from hostlib.threads import in_own_thread  # noqa: PLC0415 - most commands need no Trio

    return in_own_thread(call, *args)
