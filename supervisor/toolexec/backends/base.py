"""Shared parts of all backends of sidecars: their record, their held workspace.

The configuration of a sidecar in the form that routing and supervision read.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hostlib.threads import in_thread
from hostlib.user_values import parse_duration
from supervisor.sandbox.link_checks import check_ways
from supervisor.spawn.request import SpawnRequest
from supervisor.toolexec import project
from supervisor.toolexec.kinds import KINDS
from supervisor.toolexec.routes import ToolRefusedError
from supervisor.toolexec.workspace import path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from supervisor.fsproxy.ports import ChildView
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.toolexec.availability import Availability
    from supervisor.toolexec.routes import SpawnPlan
    from supervisor.toolexec.sidecar_section import SidecarSection


class Backend(ABC):
    """One sidecar with any backend.

    Args:
        name: its name in the configuration.
        section: its configuration.
        starts: whether it needs a long-lived process to run.

    Attributes:
        kind: its toolchain.
        allow: the tools it may run.
        timeout_s: time limit of one execution, seconds; 0 for none.
        tty: whether a tool's output is a terminal.
        fd3: whether a tool has FD 3.
        is_running: whether it takes work.
        generation: number of its starts; the known tools belong to one generation.
        workspace: its own, as configured; None for the calling child's root.
        workspace_fd: the held workspace; -1 for none.
        section: its configuration.
        process, is_moving: see ``supervision.Starter``.
        is_asking: whether a question to its engine is under way.
        user: the user of its process; None for the host's.
        tools: the known ones; set by each backend.
    """

    tools: Availability

    def __init__(self, name: str, section: SidecarSection, *, starts: bool) -> None:
        kind = KINDS[section.kind]
        self.name = name
        self.kind = kind.name
        self.allow = kind.allow if section.allow is None else frozenset(section.allow)
        self.timeout_s = parse_duration(section.timeout)
        self.tty = section.tty
        self.fd3 = section.fd3
        self.starts = starts
        self.is_running = not starts
        self.generation = 0
        self.section = section
        self.process: SpawnedProcess | None = None
        self.is_moving = False
        self.user: int | None = None
        self.workspace = section.workspace
        self.workspace_fd = -1
        self.kind_env = kind.env

    @property
    def is_asking(self) -> bool:
        """Whether a question to its engine is under way."""
        return False

    async def has(self, child: ChildView, tool: str, cwd: bytes) -> bool:
        """Return whether it, or the project in a working directory, has a tool now."""
        if await self.tools.find(tool, self.generation) is not None:
            return True
        if project.own_name(tool) is None:
            return False
        try:
            cwd_fd = await self.open_cwd(cwd, child)
        except ToolRefusedError:
            return False
        try:
            # Of a container this is seen through the mount; only the container itself
            # can follow links that lead out of it.
            own, _ = await in_thread(
                project.find_own_program, tool, cwd_fd, share=child.threads
            )
        finally:
            os.close(cwd_fd)
        return own is not None

    @abstractmethod
    async def start(self) -> SpawnedProcess:
        """Start its process; see ``supervision.Starter``."""

    @abstractmethod
    async def clean_up(self) -> None:
        """Remove leftovers of a run; see ``supervision.Starter``."""

    @abstractmethod
    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """Return the held working directory; see ``routes.Target``."""

    @abstractmethod
    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """Return the process to spawn; see ``routes.Target``."""

    def open(self, written: Iterable[str]) -> None:
        """Hold its workspace.

        Args:
            written: directories in which children or tools may have made links.

        Raises:
            OSError: the workspace cannot be reached; its path is in ``filename``.
        """
        if self.workspace is not None:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            fd = self.workspace_fd = os.open(self.workspace, flags)
            check_ways({self.workspace: path_of(fd)}, written)

    def check_workspace(self) -> None:
        """Check that its held workspace has not been removed.

        Raises:
            OSError: it has; its name is another directory's or none.
        """
        if not os.fstat(self.workspace_fd).st_nlink:
            text = (
                f"the workspace of sidecar '{self.name}', {self.workspace}, was removed"
            )
            raise OSError(errno.ENOENT, f"{text}; make it again and restart the host")

    def close(self) -> None:
        """Close its workspace."""
        fd, self.workspace_fd = self.workspace_fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def own_process(
    executable: str,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    where: str,
    *,
    output: int | None = None,
    rlimits: tuple[tuple[int, int, int], ...] = (),
) -> Iterator[SpawnRequest]:
    """Yield a request for a process of the sidecar that is no tool.

    Args:
        executable: its program, an absolute path.
        argv: its arguments.
        env: all of its environment.
        where: its working directory.
        output: gets its output; None for none.
        rlimits: as in ``SpawnRequest``.

    Raises:
        OSError: the directory cannot be opened.
    """
    with ExitStack() as stack:
        null = open_for(stack, os.devnull, os.O_RDWR)
        said = null if output is None else output
        yield SpawnRequest(
            executable=executable,
            argv=argv,
            env=env,
            cwd_fd=open_for(stack, where, os.O_PATH | os.O_DIRECTORY),
            fds=((null, 0), (said, 1), (said, 2)),
            rlimits=rlimits,
        )


def open_for(stack: ExitStack, path: str, flags: int) -> int:
    """Return a descriptor that is closed with a stack."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
