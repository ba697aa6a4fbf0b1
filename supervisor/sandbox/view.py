"""A child's view of the file system: rules, and their form in each layer.

One list, in the forms in which the launchpad takes it.

Rule: a path of a rule has no links.  Its user opens it without following any
(``syscalls.open_exactly``): a path with a link in it by then counts as missing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from supervisor.spawn.launchpad.layers.fresh_root import HIDE, IF_POSSIBLE
from vfs.mounts import other_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from supervisor.sandbox.host_directories import Location
    from supervisor.sandbox.shown_files import ShownMount
    from supervisor.spawn.launchpad.layers.fresh_root import Tree


_TMP = "/tmp"  # noqa: S108 - the child's own


class PathRule(NamedTuple):
    """The rights on a path and all beneath it.

    Attributes:
        path: without symbolic links.
        kind: ``list``, ``read``, ``execute``, ``write`` or ``device``; ``hide``: it is
            empty but for what other rules say of places beneath.
        mapped: root's files there are shown as the child's, if it is another user.
        identity: device and inode of what is hidden.
        if_possible: it is shown as it is where its file system cannot map owners.
    """

    path: str
    kind: str
    mapped: bool = False
    identity: tuple[int, int] | None = None
    if_possible: bool = False

    @property
    def owners(self) -> bool | str:
        """Whether owners are mapped, as the launchpad takes it."""
        return IF_POSSIBLE if self.mapped and self.if_possible else self.mapped


class View(NamedTuple):
    """The files that a child sees.

    Attributes:
        rules: the rights by path.
        links: (path, target) of the symbolic links on the way.
        cwd: the working directory, without links; "" if it is none that it may be in.
        exposed: (path as it is written, path without links) of what the operator shows
            by name; "" for one that is not there, or is reached by a link of a child's.
    """

    rules: tuple[PathRule, ...]
    links: tuple[tuple[str, str], ...]
    cwd: str = ""
    exposed: tuple[tuple[str, str], ...] = ()

    def hide(self, locations: Iterable[Location]) -> View:
        """Return it with some directories empty, but for what its rules name in them.

        One that is the working directory itself is there, and as it is.

        Args:
            locations: where they are; that may have more names than one.
        """
        names = {
            name: location.identity
            for location in locations
            for name in (location.path, *other_names(location.path))
        }
        seen = {rule.path for rule in self.rules if rule.kind != "list"}
        rules = [
            rule._replace(mapped=False)
            if rule.path == self.cwd and rule.path in names
            else rule
            for rule in self.rules
        ]
        rules += (
            PathRule(path, HIDE, identity=identity)
            for path, identity in names.items()
            if path not in seen
        )
        return self._replace(rules=tuple(rules))

    def show(self, mounts: Iterable[ShownMount]) -> View:
        """Return it with mounts of the host's in place of all that is beneath them."""
        rules = list(self.rules)
        for mount in mounts:
            beneath = mount.path + "/"
            rules = [r for r in rules if not f"{r.path}/".startswith(beneath)]
            rules.append(
                PathRule(mount.path, "write" if mount.is_writable else "execute")
            )
        return self._replace(rules=tuple(rules))

    def landlock(self) -> tuple[tuple[bytes, str], ...]:
        """Return the rules as ``launchpad.landlock`` takes them; it can hide nothing."""
        rules = (rule for rule in self.rules if rule.kind != HIDE)
        return tuple((os.fsencode(rule.path), rule.kind) for rule in rules)

    def in_fresh_root(self) -> View:
        """Return it with what a fresh root has besides the trees of ``mounts``.

        Every directory can be listed, for nothing else is there; ``/etc`` holds only what
        may be read; ``/dev/shm``, ``/tmp`` and the terminals are its own.
        """
        fresh: tuple[PathRule, ...] = (
            PathRule("/", "list"),
            PathRule("/etc", "read"),
            PathRule("/dev/shm", "write"),  # noqa: S108 - no file
            PathRule("/dev/pts", "device"),
        )
        if not any(rule.path == _TMP for rule in self.rules):
            fresh += (PathRule(_TMP, "write"),)
        rules = (rule for rule in self.rules if not _is_read_in_etc(rule))
        return self._replace(rules=(*rules, *fresh))

    def without(self, paths: Iterable[str]) -> View:
        """Return it without rules and links of some paths: others stand there."""
        gone = set(paths)
        rules = tuple(rule for rule in self.rules if rule.path not in gone)
        links = tuple(link for link in self.links if link[0] not in gone)
        return self._replace(rules=rules, links=links)

    def mounts(self) -> tuple[Tree, ...]:
        """Return the trees as ``launchpad.mounts`` takes them, outer ones first.

        A tree in another one of the same kind is left out: it is there already. So is
        ``/proc``, which is mounted by itself.
        """
        trees: dict[str, PathRule] = {}
        around: list[PathRule] = []  # the trees that the path at hand lies in
        for rule in sorted(self.rules, key=_parts):
            if rule.kind == "list" or f"{rule.path}/".startswith("/proc/"):
                continue
            while around and not rule.path.startswith(around[-1].path + "/"):
                around.pop()
            if rule.kind == HIDE and not around:
                continue  # it is not to be seen anyhow
            if not around or not _gives(around[-1], rule):
                trees[rule.path] = rule
                around.append(rule)
        return tuple(
            (os.fsencode(r.path), r.kind, r.identity or r.owners)
            for r in trees.values()
        )

    def symlinks(self, trees: tuple[Tree, ...]) -> tuple[tuple[bytes, bytes], ...]:
        """Return the links that are not beneath one of the trees, or hidden there."""
        tops = {path: kind for path, kind, _ in trees}
        links = ((os.fsencode(p), os.fsencode(to)) for p, to in sorted(self.links))
        return tuple(
            (path, to) for path, to in links if _kind_around(tops, path) in ("", HIDE)
        )


def _is_read_in_etc(rule: PathRule) -> bool:
    return rule.kind == "read" and rule.path.startswith("/etc/")


def _kind_around(tops: Mapping[bytes, str], path: bytes) -> str:
    """Return the kind of the nearest tree that a path lies beneath; "" for none."""
    while path := path.rpartition(b"/")[0]:
        if path in tops:
            return tops[path]
    return ""


def _gives(tree: PathRule, rule: PathRule) -> bool:
    """Tell whether what lies in a tree is there as a rule wants it."""
    # A place to execute from is read as well.
    alike = tree.kind == rule.kind or (tree.kind, rule.kind) == ("execute", "read")
    return alike and tree.mapped == rule.mapped


def _parts(rule: PathRule) -> list[str]:
    """Return what sorts a path right after what it lies in."""
    return rule.path.split("/")
