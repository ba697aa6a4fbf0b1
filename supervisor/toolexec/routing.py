"""Which sidecars may run a tool, best first; and the two refusals. Pure.

Rules of this file (spec: sidecars, routing, allowlists).

1. A tool that belongs to a kind goes to the sidecars of that kind, in the order of the
   configuration; then to others whose own list names it.
2. A development tool goes to every kind, in the order of ``kinds.KINDS``.
3. Any other tool goes where a list names it.
4. A sidecar whose list lacks the tool is passed over.  If all lists that could have it
   lack it, the tool is forbidden (403); if one has it but does not run, or runs and has
   no such program, it is not available (409).  Never 127.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from supervisor.toolexec.kinds import DEV_TOOLS, ORDER, OWNERS, toolchains_for
from supervisor.toolexec.routes import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SUGGESTED = 2
"""Toolchains that are named to a child that has none with the tool."""


class Routable(Protocol):
    """What routing looks at."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        ...

    @property
    def kind(self) -> str:
        """Its kind."""
        ...

    @property
    def allow(self) -> frozenset[str]:
        """The tools it may run."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it takes work."""
        ...


R = TypeVar("R", bound=Routable)


def candidates(tool: str, sidecars: Sequence[R]) -> tuple[R, ...]:
    """Return the sidecars that may run a tool and run now, best first.

    Args:
        tool: its name.
        sidecars: in the order of the configuration.

    Raises:
        RefusedError: 403: no list of those that could have the tool has it.
    """
    eligible = _eligible(tool, sidecars)
    if eligible and not any(tool in sidecar.allow for sidecar in eligible):
        raise forbidden(tool, eligible)
    return tuple(s for s in eligible if tool in s.allow and s.is_running)


def _eligible(tool: str, sidecars: Sequence[R]) -> list[R]:
    ordered = sorted(sidecars, key=lambda sidecar: ORDER[sidecar.kind])  # stable
    if tool in DEV_TOOLS:
        return ordered
    owner = OWNERS.get(tool)
    first = [sidecar for sidecar in ordered if sidecar.kind == owner]
    return first + [s for s in ordered if s.kind != owner and tool in s.allow]


def forbidden(tool: str, sidecars: Iterable[Routable]) -> RefusedError:
    """Return the refusal of a tool that is in no list where it could be."""
    names = ", ".join(f"'{sidecar.name}'" for sidecar in sidecars)
    text = f"forbidden: tool '{tool}' is not permitted by the allowlist of {names}\n"
    return RefusedError(403, text.encode())


def unavailable(tool: str, sidecars: Iterable[Routable]) -> RefusedError:
    """Return the refusal of a tool that no running sidecar has."""
    kinds = dict.fromkeys(toolchains_for(tool))
    kinds.update(dict.fromkeys(s.kind for s in sidecars if tool in s.allow))
    best = sorted(kinds, key=ORDER.__getitem__)[:SUGGESTED]
    advice = " or ".join(f"--toolchain {kind}" for kind in best)
    text = (
        f"tool '{tool}' not available in running sidecars; start an appropriate"
        f" toolchain (e.g., {advice})\n"
    )
    return RefusedError(409, text.encode())
