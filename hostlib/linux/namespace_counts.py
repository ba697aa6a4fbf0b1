"""How many namespaces there may be: what ENOSPC of unshare(2) says of the machine.

The sysctls of namespaces(7), read when a namespace was refused.

Rules of this file.

1. Where such a sysctl is 0 nobody is given any: that is the machine's, and a child that
   needs none does without (``plan``, rule 2).
2. Where it is more, some are there, and a child may have brought that about: that says
   nothing of the machine.  The same answer comes from an outer sandbox that allows none
   (``bwrap --disable-userns``), which nobody can tell from the inside.
"""

from __future__ import annotations

_KINDS = {
    "userns": "user",
    "uid": "user",  # how owners are shown is the map of one
    "mountns": "mnt",
    "pidns": "pid",
    "netns": "net",
    "ipcns": "ipc",
    "utsns": "uts",
}
"""What the kernel calls the namespaces that a layer makes."""

_OR_ELSE = {
    "mnt": "as many mounts as fs.mount-max, ",
    "pid": "32 lie in one another, ",
    "user": "32 lie in one another, ",
}
"""What else has the same answer: mount(2), pid_namespaces(7), user_namespaces(7)."""


def is_given_to_nobody(layer: str) -> bool:
    """Tell whether this machine gives nobody what a layer makes."""
    return layer in _KINDS and _most(layer) == "0"


def why_refused(layer: str) -> tuple[str, str]:
    """Return why the kernel refused a layer with ENOSPC, and what to do.

    Args:
        layer: where it did.

    Returns:
        Both empty for a layer that makes no namespace.
    """
    if layer not in _KINDS:
        return "", ""
    sysctl = f"user.{_name(layer)}"
    if is_given_to_nobody(layer):
        return f"sysctl {sysctl} is 0", f"raise it, or do without the layer {layer!r}"
    kind = _KINDS[layer]
    why = f"there are as many {kind} namespaces as sysctl {sysctl} allows"
    how = f"end what has them, raise it, or name a profile without the layer {layer!r}"
    return f"{why}, {_OR_ELSE.get(kind, '')}or an outer sandbox allows none", how


def _name(layer: str) -> str:
    return f"max_{_KINDS[layer]}_namespaces"


def _most(layer: str) -> str:
    """Return what the sysctl says; "" where there is none."""
    path = f"/proc/sys/user/{_name(layer)}"
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
