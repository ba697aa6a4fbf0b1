"""The seam between the server and the sidecars: who runs a tool, and how.

The questions the server asks about one request, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from supervisor.spawn.request import SpawnRequest
from supervisor.toolexec.kinds import DEV_TOOLS, ORDER, OWNERS, toolchains_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.toolexec.token import Rights
    from supervisor.fsproxy.ports import ChildView


class RefusedError(Exception):
    """A request that no sidecar serves.

    Attributes:
        status: 400, 403 or 409.
        body: one line that says why, with its LF.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class SpawnPlan:
    """The process to spawn for one execution; text stands for bytes (surrogateescape).

    Attributes:
        executable: an absolute path; execve(2) says whether it is one of a program.
        argv: what the program sees, its own name first.
        env: all of its environment.
        cwd: its working directory as the host sees it; what is spawned there begins in
            the descriptor that goes with the plan, and its walls show it by this name.
        rlimits: (resource, soft, hard) as for setrlimit(2).
        is_walled: it runs in what its child runs in; else as the host does.
        is_elsewhere: it works in no directory of this host, so it is started in ``/``.
        shared: what it may write there: the workspace.
        kept: as above, of the child's own.
        programs: what it may read and execute there.
        asks_model: it joins the net namespace in which its child reaches the model's
            endpoint; else its net namespace is its own, if its child has one.
        reaches_names: it joins that in which its child has a network by name.
        reads_signals: signals do not reach the tool; it reads their names, one a line,
            from its input, and ends when that ends.
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
    asks_model: bool = False
    reaches_names: bool = False
    reads_signals: bool = False

    def request(self, cwd_fd: int, fds: tuple[tuple[int, int], ...]) -> SpawnRequest:
        """Say what the launcher is to start: the one place where a tool's process is made."""
        return SpawnRequest(
            executable=self.executable,
            argv=self.argv,
            env=self.env,
            cwd_fd=cwd_fd,
            fds=fds,
            rlimits=self.rlimits,
        )


class Target(Protocol):
    """A running sidecar, chosen for one request.

    Attributes:
        name: its name in the configuration.
        kind: what toolchain it is.
        timeout_s: its time limit for an execution, seconds; 0 for none of its own.
        tty: stdout and stderr of its tools are a terminal.
        fd3: its tools have FD 3, as a nested client of the child.
    """

    name: str
    kind: str
    timeout_s: float
    tty: bool
    fd3: bool

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """Resolve a working directory beneath the workspace, following no way out.

        Args:
            cwd: ``.``, ``/workspace[/...]`` or a host path beneath the workspace.
            child: whose tool it is.

        Returns:
            An O_PATH descriptor, the caller's to close.

        Raises:
            RefusedError: 400: it leads out, or is not there.
            OSError: the workspace has been removed, or the host lacks something.
        """
        ...

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """Say what to spawn.

        Raises:
            OSError: it cannot be found out (a fault of the host).
        """
        ...


class Routes(Protocol):
    """All sidecars of a host."""

    def is_permitted(self, child: ChildView, tool: str, rights: Rights) -> bool:
        """Whether any allowlist has the tool, and the token stands for it."""
        ...

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: Rights
    ) -> Target:
        """Choose the sidecar that runs a tool.

        Args:
            child: whose tool it is.
            tool: its name.
            cwd: where it is to work.
            rights: of the token that it is asked for with.

        Raises:
            RefusedError: 403 or 409.
        """
        ...

    def busy(self) -> str | None:
        """Say what has to end before they can be handed over; None if nothing has."""
        ...

    def hand_over(self) -> tuple[object, set[int]]:
        """Return their state as plain values, and its descriptors; change nothing."""
        ...


class NoSidecars:
    """The routes of a host without a sidecar: no tool is permitted."""

    def is_permitted(self, child: ChildView, tool: str, rights: Rights) -> bool:
        """No."""
        return False

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: Rights
    ) -> Target:
        """Never asked, for nothing is permitted."""
        raise NotImplementedError(tool)

    def busy(self) -> str | None:
        """Nothing is."""
        return None

    def hand_over(self) -> tuple[object, set[int]]:
        """Return nothing."""
        return None, set()


# Which sidecars may run a tool, best first; and the two refusals. Pure.
#
# Rules of this file (spec: sidecars, routing, allowlists).
#
# 1. A tool that belongs to a kind goes to the sidecars of that kind, in the order of the
#    configuration; then to others whose own list names it.
# 2. A development tool goes to every kind, in the order of ``kinds.KINDS``.
# 3. Any other tool goes where a list names it.
# 4. A sidecar whose list lacks the tool is passed over.  If all lists that could have it
#    lack it, the tool is forbidden (403); if one has it but does not run, or runs and has
#    no such program, it is not available (409).  Never 127.

SUGGESTED = 2
"""Toolchains that are named to a child that has none with the tool."""


class Routable(Protocol):
    """The part of a sidecar that routing looks at."""

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
