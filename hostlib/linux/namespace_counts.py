"""Limits on the number of namespaces: the reason for ENOSPC of unshare(2).

The sysctls of namespaces(7), read after a namespace was refused.

Rules of this file.

1. A sysctl of 0 means that this machine allows no such namespace; a child that does not
   require one starts without it (``plan``, rule 2).
2. With another value the namespaces are used up, perhaps by a child, which says nothing
   about the machine.  An outer sandbox that allows none (``bwrap --disable-userns``)
   gives the same error, and cannot be told apart from the inside.
"""

from __future__ import annotations

from hostlib.linux.namespaces import KINDS

_KINDS = {
    **{layer: name for layer, (_, name) in KINDS.items()},
    "uid": "user",  # a user namespace maps the owners of files
}
"""Layer -> the kernel's name for its namespace."""

_OR_ELSE = {
    "mnt": "as many mounts as fs.mount-max, ",
    "pid": "32 lie in one another, ",
    "user": "32 lie in one another, ",
}
"""Other reasons for ENOSPC: mount(2), pid_namespaces(7), user_namespaces(7)."""


def is_disabled(layer: str) -> bool:
    """Return whether this machine allows no namespace of a layer."""
    return layer in _KINDS and _most(layer) == "0"


def explain_refusal(layer: str) -> tuple[str, str]:
    """Return why the kernel refused a layer with ENOSPC, and what to do.

    Args:
        layer: the refused layer.

    Returns:
        Both texts are empty for a layer without a namespace.
    """
    if layer not in _KINDS:
        return "", ""
    sysctl = f"user.{_name(layer)}"
    if is_disabled(layer):
        return f"sysctl {sysctl} is 0", f"raise it, or do without the layer {layer!r}"
    kind = _KINDS[layer]
    why = f"there are as many {kind} namespaces as sysctl {sysctl} allows"
    how = f"end what has them, raise it, or name a profile without the layer {layer!r}"
    return f"{why}, {_OR_ELSE.get(kind, '')}or an outer sandbox allows none", how


def _name(layer: str) -> str:
    return f"max_{_KINDS[layer]}_namespaces"


def _most(layer: str) -> str:
    """Return the value of the sysctl; "" if there is none."""
    path = f"/proc/sys/user/{_name(layer)}"
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
