"""Routing: which sidecar runs a tool, and how.

1. A tool of a kind goes to the sidecars of that kind, in the order of the configuration;
   then to others whose own list names it.
2. A development tool goes to every kind, in the order of ``kinds.KINDS``.
3. Any other tool goes to sidecars whose list names it.
4. A sidecar whose list lacks the tool is skipped. If all lists lack it, the tool is
   forbidden (403); if a sidecar that has it does not run, or has no such program, it is
   not available (409). Never 127.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from supervisor.toolexec.kinds import DEV_TOOLS, ORDER, OWNERS, toolchains_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.toolexec.token import TokenRights
    from supervisor.fsproxy.ports import ChildView


class ToolRefusedError(Exception):
    """A tool's request that is refused.

    Attributes:
        status: 400, 403 or 409.
        body: one line with the reason, with its LF.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class SpawnPlan:
    """The process to spawn for one execution; text stands for bytes (surrogateescape).

    Attributes:
        executable: an absolute path; execve(2) decides whether it is a program.
        argv: its arguments, its own name first.
        env: all of its environment.
        cwd: its working directory in the host's view; a process begins in the
            descriptor that comes with the plan, and its walls show it by this name.
        rlimits: (resource, soft, hard) as for setrlimit(2).
        is_walled: whether it runs in its child's walls; else as the host does.
        is_elsewhere: whether it needs no directory of this host and starts in ``/``.
        shared: paths that it may write there: the workspace.
        kept: as above, of the child's own.
        programs: paths that it may read and execute there.
        reads_signals: whether it reads signals' names from its input, one a line, and
            ends with it, since signals do not reach it.
    """

    executable: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    rlimits: tuple[tuple[int, int, int], ...] = ()
    is_walled: bool = False
    is_elsewhere: bool = False
    shared: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    reads_signals: bool = False


class Target(Protocol):
    """A running sidecar, chosen for one request.

    Attributes:
        name: its name in the configuration.
        kind: its toolchain.
        timeout_s: its time limit for an execution, seconds; 0 for none of its own.
        tty: whether stdout and stderr of its tools are a terminal.
        fd3: whether its tools have FD 3, as a nested client of the child.
    """

    name: str
    kind: str
    timeout_s: float
    tty: bool
    fd3: bool

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """Open a working directory beneath the workspace; ways out are not followed.

        Args:
            cwd: ``.``, ``/workspace[/...]`` or a host path beneath the workspace.
            child: has the tool.

        Returns:
            An O_PATH descriptor; the caller closes it.

        Raises:
            ToolRefusedError: 400: it leads out, or is missing.
            OSError: the workspace has been removed, or a resource is missing.
        """
        ...

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """Return the process to spawn.

        Raises:
            OSError: it cannot be determined (a fault of the host).
        """
        ...


class Routes(Protocol):
    """All sidecars of a host."""

    def is_permitted(self, child: ChildView, tool: str, rights: TokenRights) -> bool:
        """Return whether an allowlist has the tool, and the token stands for it."""
        ...

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: TokenRights
    ) -> Target:
        """Return the sidecar that runs a tool.

        Args:
            child: has the tool.
            tool: its name.
            cwd: its working directory.
            rights: of the request's token.

        Raises:
            ToolRefusedError: 403 or 409.
        """
        ...

    def busy(self) -> str | None:
        """Return what must end before a hand-over; None if nothing must."""
        ...

    def snapshot(self) -> tuple[object, set[int]]:
        """Return their state as plain values, and descriptors; changes nothing."""
        ...


class NoSidecars:
    """The routes of a host without a sidecar: no tool is permitted."""

    def is_permitted(self, child: ChildView, tool: str, rights: TokenRights) -> bool:
        """Return False."""
        return False

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: TokenRights
    ) -> Target:
        """Raise: it is never called, since no tool is permitted."""
        raise NotImplementedError(tool)

    def busy(self) -> str | None:
        """Return None."""
        return None

    def snapshot(self) -> tuple[object, set[int]]:
        """Return nothing."""
        return None, set()


SUGGESTED = 2
"""Toolchains that are named to a child whose sidecars lack the tool."""


class Routable(Protocol):
    """A sidecar as routing sees it."""

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
        """The tools that it may run."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it takes work."""
        ...


R = TypeVar("R", bound=Routable)


def candidates(tool: str, sidecars: Sequence[R]) -> tuple[R, ...]:
    """Return the running sidecars that may run a tool, best first.

    Args:
        tool: its name.
        sidecars: in the order of the configuration.

    Raises:
        ToolRefusedError: 403: no list has it.
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


def forbidden(tool: str, sidecars: Iterable[Routable]) -> ToolRefusedError:
    """Return the refusal of a tool that is in no list."""
    names = ", ".join(f"'{sidecar.name}'" for sidecar in sidecars)
    text = f"forbidden: tool '{tool}' is not permitted by the allowlist of {names}\n"
    return ToolRefusedError(403, text.encode())


def unavailable(tool: str, sidecars: Iterable[Routable]) -> ToolRefusedError:
    """Return the refusal of a tool that no running sidecar has."""
    kinds = dict.fromkeys(toolchains_for(tool))
    kinds.update(dict.fromkeys(s.kind for s in sidecars if tool in s.allow))
    best = sorted(kinds, key=ORDER.__getitem__)[:SUGGESTED]
    advice = " or ".join(f"--toolchain {kind}" for kind in best)
    text = (
        f"tool '{tool}' not available in running sidecars; start an appropriate"
        f" toolchain (e.g., {advice})\n"
    )
    return ToolRefusedError(409, text.encode())
