"""Trials of the ways to make an overlay, on a tmpfs of which nothing is left.

A host that is root tries them in threads (``sandbox.held_mount``); ``doctor`` of another
user runs `try_as_user` in a process, which becomes its own user's namespace for that.
"""

from __future__ import annotations

import os

from supervisor.spawn.launchpad.layers.common_root import keep_to_itself
from supervisor.spawn.launchpad.layers.fresh_root import attach_at_top, make_cover
from supervisor.spawn.launchpad.layers.namespaces import enter, enter_user
from supervisor.spawn.launchpad.layers.overlay import Layers, make_overlay

_FIND = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_layers() -> Layers:
    """Make a tmpfs in the caller's own mount namespace; return empty layers in it."""
    top = make_cover()
    try:
        # Attached: before Linux 6.15 nothing in it could be copied else.
        attach_at_top(top)
        for name in ("base", "own", "own/upper", "own/work"):
            os.mkdir(name, dir_fd=top)
        base, own = (os.open(name, _FIND, dir_fd=top) for name in ("base", "own"))
        return Layers(base, own)
    finally:
        os.close(top)


def try_as_user(way: str) -> int:
    """Make an overlay in a user namespace, as a child of a host that is not root.

    Returns:
        0; or errno of what this machine does not let a user do.
    """
    try:
        enter_user(os.geteuid(), os.getegid())
        enter("mountns")
        keep_to_itself()
        make_overlay(make_layers(), way, has_user_marks=True)
    except OSError as error:
        return error.errno or 1
    return 0
