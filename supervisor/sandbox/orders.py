"""The part of an order for the layers that a child is to put on.

The words of each layer, as ``launchpad.child`` takes them, for a child and for a
process that has nothing of any child's.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from supervisor.sandbox import seccomp_filter
from supervisor.sandbox import visible as sandbox_paths
from supervisor.sandbox.command import command_of
from supervisor.sandbox.etc_files import files_of, resolver_files
from supervisor.sandbox.groups import as_pair
from supervisor.spawn.launchpad.layers.fresh_root import HIDE
from supervisor.spawn.launchpad.words import HELD, JOINED, NET, OVERLAY, USERS, VIEW
from supervisor.spawn.request import SpawnError
from vfs.mounts import other_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from supervisor.sandbox.etc_files import OwnFiles
    from supervisor.sandbox.plan import WantedWalls
    from supervisor.sandbox.shown_files import ShownFiles
    from supervisor.sandbox.view import View
    from supervisor.spawn.launchpad.layers.fresh_root import Tree


def layers_on_the_wire(
    layers: set[str], wanted: WantedWalls, executable: str, home: str = "/"
) -> dict[str, object]:
    """Return what goes to the launchpad for the layers that are asked for.

    Args:
        layers: from ``Plan.wanted``.
        wanted: what was made ready.
        executable: the program.
        home: what it has as its HOME.

    Raises:
        SpawnError: its working directory is none that it may be in.
    """
    found: dict[str, object] = dict.fromkeys(layers)  # the name alone, or more below
    no_internet = wanted.network == "none" and "netns" not in layers
    found.update(_choose_namespaces(layers, wanted))
    if layers & {"landlock", "mountns"}:
        files = wanted.files
        view = _view(layers, wanted, executable).hiding(files.hidden)
        _check_nothing_hidden(files)
        view = view.showing(files.mounts)
        if not view.cwd:
            raise _directory_error(files.cwd)
        if _is_of_a_process(view.cwd):
            raise _process_order(files.cwd, view.cwd)
        made = (
            _own_files(layers, wanted, home),
            command_of() if wanted.has_command else b"",
        )
        walls = _walls(view, layers, wanted, made, no_internet=no_internet)
        found.update(walls)
    if "uid" in layers:
        found["uid"] = wanted.user
    if "cgroup" in layers:
        found["cgroup"] = tuple(as_pair(file) for file in wanted.bounds.procs)
    if "seccomp" in layers:
        found["seccomp"] = seccomp_filter.build_here(
            network=not no_internet,
            unix=wanted.profile.unix_sockets,
            alone="pidns" in layers,
        )
    return found


def _choose_namespaces(
    layers: Collection[str], wanted: WantedWalls
) -> Iterator[tuple[str, object]]:
    """Yield the words of the layers that are its own, or those of a tool's child."""
    if "userns" in layers:
        is_joined = USERS in wanted.joined
        yield "userns", JOINED if is_joined else (os.geteuid(), os.getegid())
    if "netns" in layers and NET in wanted.joined:
        yield "netns", JOINED


def _view(layers: Collection[str], wanted: WantedWalls, executable: str) -> View:
    """Return what a child sees, with what is shown to it by name.

    Raises:
        SpawnError: something that is exposed cannot be.
    """
    files = wanted.files
    if not (files.readable or files.exposed):
        return sandbox_paths.view_of(executable, files)
    from supervisor.sandbox import exposed_paths  # noqa: PLC0415 - seldom

    readable = exposed_paths.read_by_calls(files, can_hide="mountns" in layers)
    view = sandbox_paths.view_of(executable, replace(files, readable=readable))
    can_hide = "mountns" in wanted.profile.layers
    exposed_paths.check_exposed(view.exposed, files, can_hide=can_hide)
    return view


def _own_files(layers: Collection[str], wanted: WantedWalls, home: str) -> OwnFiles:
    """Return the child's own files of ``/etc``; none without a fresh root."""
    if "mountns" not in layers:
        return ()
    more = resolver_files(os.uname().nodename) if wanted.is_served else ()
    if "uid" in layers and wanted.user is not None:
        return (*files_of(wanted.user, wanted.user, home), *more)
    return (*files_of(os.geteuid(), os.getegid(), home), *more)


def common_layers(layers: Mapping[str, object]) -> dict[str, object]:
    """Return what goes to the launchpad for the same layers, but nothing of a child's.

    Args:
        layers: as ``layers_on_the_wire`` has returned them.
    """
    common = sandbox_paths.common_view()
    _, no_internet = cast("tuple[object, bool]", layers.get("landlock", (None, False)))
    walls = _walls(common, layers.keys(), no_internet=no_internet)
    if layers.get("userns") == JOINED:
        walls["userns"] = (os.geteuid(), os.getegid())
    if layers.get("netns") == JOINED:
        walls["netns"] = None
    return {**layers, **walls}


def _walls(
    view: View,
    layers: Collection[str],
    wanted: WantedWalls | None = None,
    made: tuple[OwnFiles, bytes] = ((), b""),
    *,
    no_internet: bool,
) -> dict[str, object]:
    """Return what goes to the launchpad for the layers that are about paths."""
    found: dict[str, object] = {}
    if "mountns" in layers:
        files, command = made
        view = view.without(os.fsdecode(path) for path, _ in files)
        trees = view.mounts()
        links = view.symlinks(trees)
        if "uid" not in layers:
            trees = tuple(
                (path, kind, what if kind == HIDE else False)
                for path, kind, what in trees
            )
        held = trees if wanted is None else _add_held(trees, wanted)
        found["mountns"] = links, held, os.fsencode(view.cwd), files, command
        view = view.in_fresh_root()
    if "landlock" in layers:
        found["landlock"] = (view.landlock(), no_internet)
    return found


def _check_nothing_hidden(files: ShownFiles) -> None:
    """Refuse a workspace that holds what is to be hidden: its child could move it.

    Raises:
        SpawnError: it holds keys, or directories of a host.
    """
    for location in files.hidden if files.mounts else ():
        for path in (location.path, *other_names(location.path)):
            mount = files.mount_of(path)
            if mount is not None:
                why = f"it holds {path!r}, which no child may see"
                text = (
                    f"cannot show workspace {mount.path!r}: {why}; put that elsewhere"
                )
                raise SpawnError(errno.EPERM, "workspace", text, why)


def _add_held(trees: tuple[Tree, ...], wanted: WantedWalls) -> tuple[Tree, ...]:
    """Return trees with mounts of the host's, or of the child's, under their paths."""
    shown: dict[bytes, Tree] = {}
    position = 0
    for mount in wanted.files.mounts:
        path = os.fsencode(mount.path)
        if mount.fd >= 0:
            shown[path] = (path, HELD, position)
            position += 1
        elif VIEW in wanted.joined:
            shown[path] = (path, JOINED, False)
        else:
            shown[path] = (path, OVERLAY, os.fsencode(mount.own))
    return tuple(shown.get(tree[0], tree) for tree in trees)


def _is_of_a_process(path: str) -> bool:
    """Tell whether a path is what ``/proc`` shows of one process."""
    top, proc, *rest = f"{path}/".split("/")
    return (top, proc) == ("", "proc") and rest[0].isdecimal()


def _process_order(path: str, real: str) -> SpawnError:
    """Word that a child cannot start in a process's directory."""
    why = (
        f"it is {real}, of a process as the host sees it, and the child sees others by"
        " such numbers or none; name a directory that is not a process's"
    )
    text = f"cannot start a child: cannot use the working directory {path!r}: {why}"
    return SpawnError(errno.EINVAL, "cwd", text, why)


def _directory_error(path: str) -> SpawnError:
    """Word that a child may not be where it is to start."""
    why = (
        "a link on its way may be of its own making and leads to what it does not see;"
        " put a directory there"
    )
    text = f"cannot start a child: cannot use the working directory {path!r}: {why}"
    return SpawnError(errno.ELOOP, "cwd", text, why)
