"""The part of an order for the layers that a child is to put on.

The words of each layer, as ``launchpad.child`` takes them, for a child and for a
process that has nothing of any child's; the files that a fresh root has of its own: those
of ``/etc``, and the command ``sandhost`` where the machine has none.

Rule: files of ``/etc`` say nothing of the host's users, nor which machine this is.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

from supervisor.sandbox import seccomp_filter
from supervisor.sandbox import visible as sandbox_paths
from supervisor.sandbox.groups import as_pair
from supervisor.spawn.launchpad.layers.fresh_root import HIDE
from supervisor.spawn.launchpad.words import HELD, JOINED, NET, OVERLAY, USERS, VIEW
from supervisor.spawn.request import SpawnError
from vfs.mounts import has_mounts_within, other_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from supervisor.sandbox.plan import WantedWalls
    from supervisor.sandbox.shown_files import ShownFiles
    from supervisor.sandbox.view import View
    from supervisor.spawn.launchpad.layers.fresh_root import Tree

OwnFiles = tuple[tuple[bytes, bytes], ...]
"""(path, content) of each."""

_USER = "child"
"""Name of the child's user and group, where they are not root's."""

_NOBODY = 65534

_COMMAND_PLACE = "/usr/local/bin"
"""The directory of the command: on everybody's PATH, and in no distribution's hands."""

_COMMAND = "sandhost"
_MOST_FIRST_LINE_BYTES = 127
"""Longest ``#!`` line that every kernel reads: execve(2)."""


def layers_on_the_wire(
    layers: set[str], wanted: WantedWalls, executable: str, home: str = "/"
) -> dict[str, object]:
    """Return what goes to the launchpad for the layers that are asked for.

    Args:
        layers: from ``Plan.wanted``.
        wanted: the walls that were made ready.
        executable: the program.
        home: its HOME.

    Raises:
        SpawnError: its working directory is none that it may be in.
    """
    found: dict[str, object] = dict.fromkeys(layers)  # the name alone, or more below
    no_internet = wanted.network == "none" and "netns" not in layers
    found.update(_choose_namespaces(layers, wanted))
    if layers & {"landlock", "mountns"}:
        files = wanted.files
        view = _view(layers, wanted, executable).hide(files.hidden)
        _check_nothing_hidden(files)
        view = view.show(files.mounts)
        if not view.cwd:
            raise _directory_error(files.cwd)
        if _is_of_a_process(view.cwd):
            raise _process_order(files.cwd, view.cwd)
        made = (
            _own_files(layers, wanted, home),
            _command() if wanted.has_command else b"",
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
    more = _resolver_files(os.uname().nodename) if wanted.is_served else ()
    if "uid" in layers and wanted.user is not None:
        return (*_user_files(wanted.user, wanted.user, home), *more)
    return (*_user_files(os.geteuid(), os.getegid(), home), *more)


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


def _user_files(uid: int, gid: int, home: str) -> OwnFiles:
    """Return the files that name a child's user.

    Args:
        uid: as the child sees its number.
        gid: as above.
        home: its HOME.
    """
    if not home.startswith("/") or {":", "\n"} & set(home):  # passwd(5) cannot say it
        home = "/"
    own = f"{_USER}:x:{uid}:{gid}:{_USER}:{home}:/bin/sh"
    root = "root:x:0:0:root:/root:/bin/sh"
    if uid == 0:
        root, own = f"root:x:0:{gid}:root:{home}:/bin/sh", ""
    nobody = f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/nonexistent:/usr/sbin/nologin"
    own_group = f"{_USER}:x:{gid}:" if gid != 0 else ""
    contents = {
        "passwd": _lines(root, own, nobody),
        "group": _lines("root:x:0:", own_group, f"nogroup:x:{_NOBODY}:"),
        "machine-id": _lines(os.urandom(16).hex()),
        "subuid": b"",
        "subgid": b"",
    }
    return tuple(
        (f"/etc/{name}".encode(), content) for name, content in contents.items()
    )


def _resolver_files(host_name: str) -> OwnFiles:
    """Return the files by which names are looked up where the host answers (NET4).

    Args:
        host_name: of the child.
    """
    own = "" if host_name in {"", "localhost"} else f" {host_name}"
    contents = {
        "resolv.conf": _lines("nameserver 127.0.0.1", "options ndots:1"),
        "hosts": _lines(f"127.0.0.1 localhost{own}", f"::1 localhost{own}"),
        "nsswitch.conf": _lines(
            *(f"{kind}: files" for kind in ("passwd", "group", "shadow")),
            "hosts: files dns",
            *(f"{kind}: files" for kind in ("networks", "protocols", "services")),
        ),
    }
    return tuple(
        (f"/etc/{name}".encode(), content) for name, content in contents.items()
    )


def _lines(*lines: str) -> bytes:
    return b"".join(os.fsencode(line) + b"\n" for line in lines if line)


def _command() -> bytes:
    """Return the program of the command; b"" where none is to be added.

    The place has one, or cannot have one: an overlay shows nothing of what is mounted
    there.
    """
    there = f"{_COMMAND_PLACE}/{_COMMAND}"
    if os.path.lexists(there) or has_mounts_within(_COMMAND_PLACE):
        return b""
    return _program()


@cache
def _program() -> bytes:
    packages = os.path.abspath(__file__).rpartition("/supervisor/")[0]  # noqa: PTH100 - text
    # Isolated: neither PYTHONPATH nor a directory of the child's names its modules.
    first = f"#!{sys.executable} -I"
    code = (
        f"import sys; sys.path.append({packages!r}); sys.argv[0] = {_COMMAND!r}\n"
        "from supervisor.__main__ import main\n"
        "main()\n"
    )
    if len(os.fsencode(first)) > _MOST_FIRST_LINE_BYTES or " " in sys.executable:
        words = shlex.join([sys.executable, "-I", "-c", code])
        return os.fsencode(f'#!/bin/sh\nexec {words} "$@"\n')
    return os.fsencode(f"{first}\n{code}")
