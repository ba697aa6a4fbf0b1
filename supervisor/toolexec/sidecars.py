"""All sidecars of a host: opened, watched, and asked who runs a tool.

    async with open_sidecars(host, config.sidecar) as sidecars:   # routes.Routes
        target = await sidecars.route(child, "make", b".", rights)

The ``Routes`` that the ToolExec server asks.

Handed over, a sidecar goes on if it is configured as it was; one that is configured
otherwise by now is ended, as nobody takes its process, and started anew. One that is
between two starts is started at once by the next program.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from supervisor.sandbox.scratch import Scratch, ScratchState
from supervisor.spawn.process import ProcessState  # noqa: TC001 - msgspec
from supervisor.toolexec.backends.local import LocalSidecar
from supervisor.toolexec.kinds import ALL_TOOLS
from supervisor.toolexec.routes import RefusedError, candidates, unavailable
from supervisor.toolexec.supervision import supervise
from vfs.handover import state_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

    from protocol.toolexec.token import Rights
    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.toolexec.routes import SpawnPlan, Target
    from supervisor.toolexec.sidecar_section import SidecarSection

FIRST_START_S = 10.0
"""Longest that a host waits for its sidecars' first start; children come after it, and
what takes longer (an image that is fetched) is not available to them at first."""


class Sidecar(Protocol):
    """The offer of every backend; more than a ``routes.Target``."""

    name: str
    kind: str
    allow: frozenset[str]
    timeout_s: float
    tty: bool
    fd3: bool
    is_running: bool
    generation: int
    starts: bool
    workspace_fd: int
    section: SidecarSection
    process: SpawnedProcess | None
    is_moving: bool
    user: int | None

    @property
    def is_asking(self) -> bool:
        """Whether it asks something of what it runs on."""
        ...

    def open(self, written: Iterable[str]) -> None:
        """Acquire what it holds.

        Args:
            written: directories in which children or tools may have made links.

        Raises:
            OSError: it cannot be had.
        """
        ...

    def close(self) -> None:
        """Let go of that."""
        ...

    async def start(self) -> SpawnedProcess:
        """See ``supervision.Starter``."""
        ...

    async def clean_up(self) -> None:
        """See ``supervision.Starter``."""
        ...

    async def has(self, child: ChildView, tool: str, cwd: bytes) -> bool:
        """Tell whether it can run a tool now, in a working directory."""
        ...

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """See ``routes.Target``."""
        ...

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """See ``routes.Target``."""
        ...


class SidecarState(msgspec.Struct):
    """A sidecar with a process; ``section`` is its configuration as plain values."""

    section: Any
    generation: int
    process: ProcessState
    user: int | None


class SidecarsState(msgspec.Struct):
    """Those with a process, by name, and their directory."""

    state: ScratchState | None = None
    running: dict[str, SidecarState] = {}

    def scratch(self) -> Scratch | None:
        """Return their directory."""
        return None if self.state is None else Scratch.restore(self.state)

    def process_of(self, sidecar: Sidecar, host: Parts) -> SpawnedProcess | None:
        """Return the process of a sidecar that is what it was; None: start one."""
        left = self.running.get(sidecar.name)
        if left is None or left.section != msgspec.to_builtins(sidecar.section):
            return None
        del self.running[sidecar.name]
        sidecar.generation = left.generation
        if left.user is not None:
            host.machine.keep_user(left.user)
            sidecar.user = left.user
        return host.launcher.restore_process(left.process)

    def close_untaken(self) -> None:
        """Close the pidfds of the others; the host ends their processes."""
        while self.running:
            os.close(self.running.popitem()[1].process.pidfd)


def read_sidecars(left: object) -> SidecarsState:
    """Return what was handed over.

    Raises:
        HandoverError: it is another program's.
    """
    if left is None:
        return SidecarsState()
    return state_from(left, SidecarsState, "the sidecars")


class Sidecars:
    """The sidecars of one host; a ``routes.Routes``.

    Args:
        sidecars: in the order of the configuration.
        state: the directory of those that have a process; None if none has.
    """

    def __init__(
        self, sidecars: tuple[Sidecar, ...], state: Scratch | None = None
    ) -> None:
        self.sidecars = sidecars
        self.state = state
        configured = (sidecar.allow for sidecar in sidecars)
        self.tools = ALL_TOOLS.union(*configured)

    def is_permitted(self, child: ChildView, tool: str, rights: Rights) -> bool:
        """See ``routes.Routes``; a child's own policy may hold less."""
        if tool not in self.tools:
            return False
        if child.session is None:
            return False
        granted = child.session.client.policy.tools
        return all(some is None or tool in some for some in (granted, rights.tools))

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: Rights
    ) -> Target:
        """See ``routes.Routes``."""
        found = candidates(tool, self.sidecars)
        allowed = [sidecar for sidecar in found if _may_use(child, rights, sidecar)]
        if found and not allowed:
            text = f"forbidden: tool '{tool}' is not permitted with narrowed rights\n"
            raise RefusedError(403, text.encode())
        for sidecar in allowed:
            # One after the other: a worse one is not asked while a better one answers.
            if await sidecar.has(child, tool, cwd) and sidecar.is_running:
                return sidecar
        raise unavailable(tool, self.sidecars)

    def busy(self) -> str | None:
        """See ``routes.Routes``."""
        for sidecar in self.sidecars:
            if sidecar.is_moving:
                return f"sidecar {sidecar.name} is being started or ended"
            if sidecar.is_asking:
                return f"the engine of sidecar {sidecar.name} is being asked"
        return None

    def hand_over(self) -> tuple[object, set[int]]:
        """See ``routes.Routes``."""
        left, fds = SidecarsState(), set()
        if self.state is not None:
            left.state = self.state.snapshot()
            fds.add(left.state.fd)
        for sidecar in self.sidecars:
            if sidecar.process is not None:
                process = sidecar.process.snapshot()
                section = msgspec.to_builtins(sidecar.section)
                left.running[sidecar.name] = SidecarState(
                    section, sidecar.generation, process, sidecar.user
                )
                fds.add(process.pidfd)
        return msgspec.to_builtins(left, builtin_types=(bytes,)), fds

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what they hold of the host's descriptors, with a word for each."""
        for sidecar in self.sidecars:
            if sidecar.workspace_fd >= 0:
                yield sidecar.workspace_fd, "workspace"
            if sidecar.process is not None:
                for fd in sidecar.process.descriptors():
                    yield fd, "pidfd"


def _may_use(child: ChildView, rights: Rights, sidecar: Sidecar) -> bool:
    """Tell whether a sidecar gives its tools no more than is left (spec A5, I8).

    Where a sidecar has no workspace of its own, tools work in all of the child's root;
    where tools have FD 3, they have all that the child's own connection has.
    """
    if sidecar.fd3 and rights.is_narrowed:
        return False
    if sidecar.workspace_fd >= 0:
        return True
    session = child.session
    return rights.root and session is not None and session.client.policy.has_root


@asynccontextmanager
async def open_sidecars(
    host: Parts, sections: Mapping[str, SidecarSection], left: object = None
) -> AsyncIterator[Sidecars]:
    """Start what the configuration has; it ends with the block.

    Args:
        host: whose launcher starts processes.
        sections: by name, as configured.
        left: what the program before has left of them; None if nothing.

    Raises:
        OSError: a workspace cannot be reached; its path is in ``filename``.
        HandoverError: what was left is another program's.
    """
    before = read_sidecars(left)
    async with contextlib.AsyncExitStack() as stack:
        state = before.scratch()
        if state is None and any(s.start is not None for s in sections.values()):
            state = Scratch(None)
        if state is not None:
            stack.push_async_callback(_remove, host, state)
            host.holders.add(state.descriptors)
        sidecars = Sidecars(
            tuple(
                _make(host, name, section, state) for name, section in sections.items()
            ),
            state,
        )
        for sidecar in sidecars.sidecars:
            stack.callback(sidecar.close)
            sidecar.open(host.settings.written)
        host.holders.add(sidecars.descriptors)
        stack.callback(host.holders.discard, sidecars.descriptors)
        async with trio.open_nursery() as nursery:
            await _start(host, sidecars, nursery, before)
            yield sidecars
            nursery.cancel_scope.cancel()


async def _start(
    host: Parts, sidecars: Sidecars, nursery: trio.Nursery, before: SidecarsState
) -> None:
    first_starts = []
    for sidecar in sidecars.sidecars:
        if sidecar.starts:
            tried = trio.Event()
            first_starts.append(tried)
            running = before.process_of(sidecar, host)
            nursery.start_soon(
                supervise, sidecar, host.log.write, tried, host.journal.write, running
            )
    before.close_untaken()
    with trio.move_on_after(FIRST_START_S):
        for tried in first_starts:
            await tried.wait()


def _make(
    host: Parts, name: str, section: SidecarSection, state: Scratch | None
) -> Sidecar:
    if section.backend == "local":
        if state is None:
            return LocalSidecar(name, section, host, "/")
        where = _state_dir(state, name)
        return LocalSidecar(name, section, host, where, state.fd)
    # Most hosts have none.
    from supervisor.toolexec.backends.container import CliSidecar  # noqa: PLC0415

    return CliSidecar(name, section, host.launcher)


def _state_dir(state: Scratch, name: str) -> str:
    path = f"{state.run}/{name}"
    with contextlib.suppress(FileExistsError):  # of the program before
        os.mkdir(path, 0o700)  # noqa: PTH102 - a str, as everything beside it
    return path


async def _remove(host: Parts, state: Scratch) -> None:
    failure = await state.remove()
    host.holders.discard(state.descriptors)
    if failure is not None:
        host.log.write("WARNING", failure)
