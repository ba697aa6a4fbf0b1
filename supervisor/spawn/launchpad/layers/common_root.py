"""A fresh root with what all children of a kind see, before there is an order.

1. All mounts are private first: shared ones, as systemd's, would propagate. The fresh
   root lies over the old one, where no path leads: nothing is covered meanwhile.
2. It is used if all in it is asked for, and each path is still the same file. Its maker
   hears when the machine's mounts change (``launchpad.prefork``).
"""

from __future__ import annotations

import os

from hostlib.linux import mount_calls
from supervisor.spawn.launchpad.layers.copies import copy_trees
from supervisor.spawn.launchpad.layers.fresh_root import (
    Stage,
    attach_at_top,
    identity_of,
    make_top,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.spawn.launchpad.layers.fresh_root import Tree


LINKS = (
    (b"/dev/fd", b"/proc/self/fd"),
    (b"/dev/stdin", b"/proc/self/fd/0"),
    (b"/dev/stdout", b"/proc/self/fd/1"),
    (b"/dev/stderr", b"/proc/self/fd/2"),
    (b"/dev/ptmx", b"pts/ptmx"),
    (b"/etc/mtab", b"../proc/self/mounts"),
)
_TERMINALS = b"newinstance,ptmxmode=0666,mode=0620,max=256"
"""Mount options of a child's devpts; kernel.pty.max counts its terminals, too."""
_SMALL = b"mode=1777,size=64m,nr_inodes=16k"
"""Mount options of a child's ``/dev/shm`` and ``/tmp``; larger files go to TMPDIR."""


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

    __slots__ = ("_above", "_links", "_seen", "has_terminals", "stage")

    def __init__(
        self,
        trees: tuple[Tree, ...] = (),
        links: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        keep_to_itself()
        top = make_top()
        attach_at_top(top)
        self.stage = Stage(top)
        self.stage.make_places(b"/proc", b"/dev", b"/dev/shm", b"/dev/pts", b"/tmp")
        os.fchdir(top)
        for place in (b"dev/shm", b"tmp"):
            mount_calls.mount(
                b"tmpfs",
                place,
                b"tmpfs",
                mount_calls.MS_NOSUID | mount_calls.MS_NODEV,
                _SMALL,
            )
        self.has_terminals = _mount_terminals()
        self.stage.make_links((*LINKS, *links))  # some of them lie in /tmp
        self._links = frozenset(links)
        self._seen = {tree: identity_of(tree[0]) for tree in trees}
        self._above = {above for path, *_ in trees for above in parents(path)}
        for path, kind, _ in trees:
            for copy in copy_trees(path, kind, -1):
                self.stage.attach(copy)
                copy.close()

    def fits(
        self,
        trees: tuple[Tree, ...],
        links: tuple[tuple[bytes, bytes], ...],
        files: tuple[tuple[bytes, bytes], ...],
    ) -> bool:
        """Tell whether it can become the root of these trees, links and files.

        An entry made in one of its trees would be made in the machine's own files.
        """
        rest = set(trees) - self._seen.keys()
        own = [path for path, _ in (*files, *(set(links) - self._links))]
        return (
            len(rest) == len(trees) - len(self._seen)
            and self._links.issubset(links)
            and self._above.isdisjoint((*own, *(path for path, *_ in rest)))
            and not self._cover(own)
            and all(was == identity_of(tree[0]) for tree, was in self._seen.items())
        )

    def _cover(self, paths: list[bytes]) -> bool:
        """Tell whether one of these paths is a tree that it has, or lies in one."""
        tops = {path for path, *_ in self._seen}
        return any(not tops.isdisjoint((path, *parents(path))) for path in paths)

    def trees_to_attach(self, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Return those trees that it does not have."""
        return tuple(tree for tree in trees if tree not in self._seen)

    def remove(self) -> None:
        """Unmount it."""
        os.fchdir(self.stage.top)
        mount_calls.unmount(b".", mount_calls.MNT_DETACH)
        os.chdir("/")
        os.close(self.stage.top)


def make_common_root(
    trees: tuple[Tree, ...], links: tuple[tuple[bytes, bytes], ...]
) -> CommonRoot:
    """Make the root that a child in stock waits with."""
    umask = os.umask(0o022)
    try:
        return CommonRoot(trees, links)
    finally:
        os.umask(umask)


def parents(path: bytes) -> Iterator[bytes]:
    """Yield the directories that a path lies in, but for the top."""
    while path := path.rpartition(b"/")[0]:
        yield path


def keep_to_itself() -> None:
    """Make all mounts of this mount namespace private: nothing goes in or out."""
    mount_calls.mount(b"none", b"/", b"", mount_calls.MS_REC_PRIVATE, b"")


def make_root(top: int) -> None:
    """Make a mount the root of this mount namespace, and unmount all that was in it.

    Args:
        top: a descriptor of the mount, which is attached somewhere here.
    """
    os.fchdir(top)
    mount_calls.pivot_root(b".", b".")
    mount_calls.unmount(b".", mount_calls.MNT_DETACH)


def _mount_terminals() -> bool:
    """Mount a devpts that is nobody else's; tell whether this machine gives one."""
    flags = mount_calls.MS_NOSUID | mount_calls.MS_NOEXEC
    try:
        mount_calls.mount(b"devpts", b"dev/pts", b"devpts", flags, _TERMINALS)
    except OSError:  # a kernel without them, or one that is played: it is told
        return False
    return True
