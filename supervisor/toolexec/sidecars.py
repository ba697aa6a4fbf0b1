"""All sidecars of a host: opened, supervised, and asked for a tool.

    async with open_sidecars(host, config.sidecar) as sidecars:   # routes.Routes
        target = await sidecars.route(child, "make", b".", rights)

The ``Routes`` of the ToolExec server.

In a hand-over, a sidecar with an unchanged configuration goes on; a changed one is
ended and started again. One between two starts is started at once by the next program.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from hostlib.handover import state_from
from supervisor.sandbox.scratch import Scratch, ScratchState
from supervisor.spawn.process import ProcessState  # noqa: TC001 - msgspec
from supervisor.toolexec.backends.local import LocalSidecar
from supervisor.toolexec.kinds import ALL_TOOLS
from supervisor.toolexec.routes import ToolRefusedError, candidates, unavailable
from supervisor.toolexec.supervision import supervise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

    from protocol.toolexec.token import TokenRights
    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.toolexec.backends.base import Backend
    from supervisor.toolexec.routes import Target
    from supervisor.toolexec.sidecar_section import SidecarSection

FIRST_START_S = 10.0
"""Longest wait of a host for its sidecars' first start; children come after it. Slower
ones (an image that is fetched) are not available at first."""


class SidecarState(msgspec.Struct):
    """A sidecar with a process; ``section`` is its configuration as plain values."""

    section: Any
    generation: int
    process: ProcessState
    user: int | None


class SidecarsState(msgspec.Struct):
    """The state of sidecars with a process, by name, and their directory."""

    state: ScratchState | None = None
    running: dict[str, SidecarState] = {}

    def scratch(self) -> Scratch | None:
        """Return their directory."""
        return None if self.state is None else Scratch.restore(self.state)

    def process_of(self, sidecar: Backend, host: Parts) -> SpawnedProcess | None:
        """Return the process of an unchanged sidecar; None to start one."""
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
        """Close the pidfds of the other ones; the host ends their processes."""
        while self.running:
            os.close(self.running.popitem()[1].process.pidfd)


def read_sidecars(left: object) -> SidecarsState:
    """Return the handed-over state.

    Raises:
        HandoverError: the state is another program's.
    """
    if left is None:
        return SidecarsState()
    return state_from(left, SidecarsState, "the sidecars")


class Sidecars:
    """The sidecars of one host; a ``routes.Routes``.

    Args:
        sidecars: in the order of the configuration.
        state: the directory of those with a process; None if there are none.
    """

    def __init__(
        self, sidecars: tuple[Backend, ...], state: Scratch | None = None
    ) -> None:
        self.sidecars = sidecars
        self.state = state
        configured = (sidecar.allow for sidecar in sidecars)
        self.tools = ALL_TOOLS.union(*configured)

    def is_permitted(self, child: ChildView, tool: str, rights: TokenRights) -> bool:
        """See ``routes.Routes``; a child's own policy may allow less."""
        if tool not in self.tools:
            return False
        if child.session is None:
            return False
        granted = child.session.client.policy.tools
        return all(some is None or tool in some for some in (granted, rights.tools))

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: TokenRights
    ) -> Target:
        """See ``routes.Routes``."""
        found = candidates(tool, self.sidecars)
        allowed = [sidecar for sidecar in found if _may_use(child, rights, sidecar)]
        if found and not allowed:
            text = f"forbidden: tool '{tool}' is not permitted with narrowed rights\n"
            raise ToolRefusedError(403, text.encode())
        found, allowed = tuple(allowed), [*_fenced(child, allowed)]
        if found and not allowed:
            text = (
                f"forbidden: tool '{tool}' runs in a container, which outlives the lease"
                " of a fleet's child; have a local sidecar, or [fleet] unfenced = true\n"
            )
            raise ToolRefusedError(403, text.encode())
        for sidecar in allowed:
            # One after another: a worse one is asked only after a better one.
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

    def snapshot(self) -> tuple[object, set[int]]:
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
        """Yield their descriptors of the host, with a word for each."""
        for sidecar in self.sidecars:
            if sidecar.workspace_fd >= 0:
                yield sidecar.workspace_fd, "workspace"
            if sidecar.process is not None:
                for fd in sidecar.process.descriptors():
                    yield fd, "pidfd"


def _may_use(child: ChildView, rights: TokenRights, sidecar: Backend) -> bool:
    """Return whether a sidecar's tools have the token's rights at most (A5, I8).

    Without a workspace of the sidecar, tools work in all of the child's root; with FD
    3, they have all rights of the child's own connection.
    """
    if sidecar.fd3 and rights.is_narrowed:
        return False
    if sidecar.workspace_fd >= 0:
        return True
    session = child.session
    return rights.root and session is not None and session.client.policy.has_root


def _fenced(child: ChildView, sidecars: Iterable[Backend]) -> Iterator[Backend]:
    """Yield the sidecars whose tools end with the lease of their child (spec FL6).

    A tool in a container is beneath its engine, and not beneath the child's launchpad.
    """
    life = child.spec.fleet
    for sidecar in sidecars:
        if life is None or not life.is_fenced or sidecar.section.backend == "local":
            yield sidecar


@asynccontextmanager
async def open_sidecars(
    host: Parts, sections: Mapping[str, SidecarSection], left: object = None
) -> AsyncIterator[Sidecars]:
    """Start the configured sidecars; they end with the block.

    Args:
        host: has the launcher.
        sections: by name, as configured.
        left: the state of the program before; None without one.

    Raises:
        OSError: a workspace cannot be reached; its path is in ``filename``.
        HandoverError: the state is another program's.
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
) -> Backend:
    if section.backend == "local":
        if state is None:
            return LocalSidecar(name, section, host, "/")
        where = _state_dir(state, name)
        return LocalSidecar(name, section, host, where, state.fd)
    # Most hosts have no containers.
    from supervisor.toolexec.backends.container import CliSidecar  # noqa: PLC0415

    return CliSidecar(name, section, host.launcher)


def _state_dir(state: Scratch, name: str) -> str:
    path = f"{state.run}/{name}"
    with contextlib.suppress(FileExistsError):  # made by the program before
        os.mkdir(path, 0o700)  # noqa: PTH102 - a str, as everything beside it
    return path


async def _remove(host: Parts, state: Scratch) -> None:
    failure = await state.remove()
    host.holders.discard(state.descriptors)
    if failure is not None:
        host.log.write("WARNING", failure)
