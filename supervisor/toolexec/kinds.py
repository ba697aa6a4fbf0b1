"""The five kinds of sidecar: their tools, and the order of asking.

Tables and pure functions on them.

Rules of this file.

1. A tool of a kind is run by that kind. Development tools belong to none: every kind
   may have them, and they are asked in the order of ``KINDS``.
2. A tool is a name, never a path, and never an option (attack 32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DEV_TOOLS = (
    "make",
    "cmake",
    "ninja",
    "pkg-config",
    "gcc",
    "g++",
    "clang",
    "clang++",
    "cc",
    "c++",
)
"""Tools that any kind may have."""

# The protocol allows 64 bytes; exec and the shell see the name as it is.
_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolchainKind:
    """One kind of toolchain.

    Attributes:
        name: in the configuration and ``--toolchain``.
        own: the tools that belong to it.
        env: environment of its tools; ``{state}`` stands for the directory of a child
            at the sidecar.
    """

    name: str
    own: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def allow(self) -> frozenset[str]:
        """The usual allowlist of a sidecar of this kind."""
        return frozenset((*self.own, *DEV_TOOLS))


KINDS = {
    kind.name: kind
    for kind in (
        ToolchainKind("c-cpp"),
        ToolchainKind(
            "rust",
            ("cargo", "rustc"),
            {"CARGO_HOME": "{state}/cargo", "CC": "gcc", "CXX": "g++"},
        ),
        ToolchainKind("go", ("go", "gofmt")),
        ToolchainKind("node", ("node", "npm", "npx", "tsc", "ts-node")),
        ToolchainKind("python", ("python", "python3", "pip", "pip3")),
    )
}
"""All kinds, in the order of asking for a development tool."""

ORDER = {name: position for position, name in enumerate(KINDS)}

OWNERS = {tool: kind.name for kind in KINDS.values() for tool in kind.own}
"""The kind of each tool that belongs to one."""

ALL_TOOLS = frozenset((*OWNERS, *DEV_TOOLS))
"""The tools of all kinds."""


def is_tool_name(name: str) -> bool:
    """Return whether a text can name a tool: no path, no blank, no option."""
    return _NAME.fullmatch(name) is not None


def toolchains_for(tool: str) -> tuple[str, ...]:
    """Return the kinds that have a tool, best first; none for an unknown tool."""
    owner = OWNERS.get(tool)
    if owner is not None:
        return (owner,)
    return tuple(KINDS) if tool in DEV_TOOLS else ()
