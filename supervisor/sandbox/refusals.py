"""The texts of starts that are refused: what, why, and what to do."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hostlib.messages import remedy
from supervisor.sandbox.groups import HOLDERS
from supervisor.spawn.request import SpawnError

if TYPE_CHECKING:
    from collections.abc import Iterable

ASK_DOCTOR = "see 'sandhost doctor' for the modes that work here"


LEAVES_GROUPS = f"it can leave its groups, for want of {HOLDERS}"


def failed_for_paths(error: SpawnError, paths: Iterable[str]) -> SpawnError:
    """Word that a layer that the machine has cannot be had for what is a child's own."""
    layer, why = error.stage, error.reason
    if layer == "uid":  # the launchpad has said which path it is
        how = "put it on ext4, xfs, btrfs or tmpfs, or name a profile without 'uid'"
    else:
        first, *more = dict.fromkeys(paths)
        beside = f" or {len(more)} others" if more else ""
        why = f"{why}, at {first}{beside}"
        how = "look at what is mounted there, or name another directory"
    text = f"cannot have the layer {layer!r} for this child's own paths: {why}; {how}"
    return SpawnError(error.errno, layer, text, why)


def no_workspace(path: str, why: str, how: str = ASK_DOCTOR) -> SpawnError:
    """Word that a child cannot see a workspace, and what to do."""
    text = f"cannot show workspace {path!r}: {why}; {how}"
    if why.startswith("cannot "):
        text = why
    return SpawnError(errno.EOPNOTSUPP, "workspace", text, why)


def internal_error(why: Exception) -> SpawnError:
    """Return the error of a start that failed by a fault of this program."""
    reason = f"{type(why).__name__}: {why}"
    text = f"cannot start a child: an internal error ({reason}); report it, please"
    return SpawnError(errno.EIO, "request", text, reason)


def not_prepared(why: OSError) -> SpawnError:
    """Word what could not be had for a child: its root, a grant, a descriptor."""
    name = why.filename
    what = "" if name is None else f"cannot use {os.fsdecode(name)!r}: "
    text = f"cannot start a child: {what}{why.strerror}{remedy(why)}"
    return SpawnError(why.errno or 0, "request", text)


def no_place(name: str) -> SpawnError:
    """Word that a recipe counts on a variable that no service has set."""
    text = f"cannot fill in the recipe: no {name} is offered; set [llm] endpoint = true"
    return SpawnError(0, "request", text)


def too_late(executable: str, limit_s: float) -> SpawnError:
    """Word that a program did not begin within the time that the child may take."""
    text = f"it did not begin within its time limit, {limit_s:g} s"
    text = f"cannot execute {executable!r}: {text}; look at the disk that it is on"
    return SpawnError(errno.ETIMEDOUT, "exec", text, os.strerror(errno.ETIMEDOUT))


def cpus_not_kept(why: str, *, leaves: bool = False) -> SpawnError:
    """Word that nothing here keeps a limit that only a group of processes can keep.

    Args:
        why: there is no group, or none that keeps it; "" for what that takes.
        leaves: there is one, which the child can leave.
    """
    why = why or "no group of processes with the controller 'cpu' can be made for it"
    how = "delegate that controller (systemd: Delegate=cpu)"
    if leaves:
        why, how = LEAVES_GROUPS, "add such layers"
    how = f"leave the limit out, or {how}"
    text = f"cannot start a child: nothing keeps the limit 'cpus': {why}; {how}"
    return SpawnError(errno.EOPNOTSUPP, "cgroup", text)


def names_not_served() -> SpawnError:
    """Word that a child has rules, and its host nothing that keeps them."""
    why = "this host was started without it; start it anew"
    text = f"cannot start a child: cannot keep the network's rules: {why}"
    return SpawnError(errno.EINVAL, "network", text, why)
