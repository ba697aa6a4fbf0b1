"""Parts that all backends of sidecars share: their record, their held workspace.

The configuration of a sidecar, as the routing and the supervision read it.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hostlib.user_values import parse_duration
from supervisor.sandbox.link_checks import check_ways
from supervisor.spawn.request import SpawnRequest
from supervisor.toolexec.kinds import KINDS
from supervisor.toolexec.workspace import path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from supervisor.spawn.process import SpawnedProcess
    from supervisor.toolexec.sidecar_section import SidecarSection


class Backend:
    """One sidecar, whatever runs it.

    Args:
        name: its name in the configuration.
        section: what the configuration says of it.
        starts: it has a long-lived process, and runs while that does.

    Attributes:
        kind: what toolchain it is.
        allow: the tools it may run.
        timeout_s: time limit of one execution, seconds; 0 for none.
        tty: a tool's output is a terminal.
        fd3: a tool has FD 3.
        is_running: it takes work.
        generation: how often it was started; what is known of its tools belongs to one.
        workspace: its own, as configured; None for the calling child's root.
        workspace_fd: the same, held; -1 for none.
        section: what the configuration says of it.
        process, is_moving: see ``supervision.Starter``.
        is_asking: whether it asks something of what it runs on.
        user: whose its process is; None for the host's.
    """

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
        """Whether it asks something of what it runs on."""
        return False

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
        """Make sure that its workspace has not been removed since it is held.

        Raises:
            OSError: it has; what has its name now is another one.
        """
        if not os.fstat(self.workspace_fd).st_nlink:
            text = (
                f"the workspace of sidecar '{self.name}', {self.workspace}, was removed"
            )
            raise OSError(errno.ENOENT, f"{text}; make it again and restart the host")

    def close(self) -> None:
        """Let go of its workspace."""
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
    """Describe a process of a sidecar's own, one that is no tool.

    Args:
        executable: its program, an absolute path.
        argv: what that sees.
        env: all of its environment.
        where: its working directory.
        output: takes what it says; None for nobody.
        rlimits: as ``SpawnRequest`` has them.

    Raises:
        OSError: the directory cannot be opened.
    """
    with ExitStack() as stack:
        null = opened(stack, os.devnull, os.O_RDWR)
        said = null if output is None else output
        yield SpawnRequest(
            executable=executable,
            argv=argv,
            env=env,
            cwd_fd=opened(stack, where, os.O_PATH | os.O_DIRECTORY),
            fds=((null, 0), (said, 1), (said, 2)),
            rlimits=rlimits,
        )


def opened(stack: ExitStack, path: str, flags: int) -> int:
    """Open something for as long as a block lasts."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
