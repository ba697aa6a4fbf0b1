"""The local backend: tools of this host, run in the child's own directory.

Rules of this file.

1. PATH is the configured directories, then the system's, which is never replaced; the
   rest of the environment is the sidecar's.  Nothing else of the host's is passed: a
   home directory with somebody's tokens least of all, so HOME is the child's own.
2. What tools keep for later (HOME, CARGO_HOME) lies in a directory of the child and the
   sidecar, and ends with the child: no child can leave there what another one runs.
3. ``tsc`` is the project's own if it has one, Python is that of ``.venv``, if the
   working directory has one.
4. Without a command to start, a local sidecar is always running.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from supervisor.config_sidecar import limit_texts
from supervisor.options import parse_duration, parse_limits
from supervisor.spawn_request import SpawnError, SpawnRequest, find_executable
from supervisor.toolexec import project, workspace
from supervisor.toolexec.availability import Availability
from supervisor.toolexec.kinds import KINDS
from supervisor.toolexec.routes import RefusedError, SpawnPlan
from vfs.errors import UnavailableError
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from supervisor.child import Child
    from supervisor.config_sidecar import SidecarSection
    from supervisor.launcher import Launcher, SpawnedProcess

_PRIVATE = 0o700
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def system_path() -> str:
    """Return the PATH that the host itself was started with."""
    return os.environ.get("PATH") or os.defpath.lstrip(":")


class LocalSidecar:
    """A toolchain of this host; a ``routes.Target``.

    Args:
        name: its name in the configuration.
        section: what the configuration says of it.
        launcher: starts its long-lived process.
        state_dir: where that process runs if there is no workspace.

    Attributes:
        is_running: it takes work.
        generation: how often it was started; what is known of its tools belongs to one.
        section: what the configuration says of it.
        process, is_moving: see ``supervision.Starter``.
        workspace_fd: its own workspace, held; -1: the calling child's root.
    """

    def __init__(
        self, name: str, section: SidecarSection, launcher: Launcher, state_dir: str
    ) -> None:
        kind = KINDS[section.kind]
        allow = kind.allow if section.allow is None else frozenset(section.allow)
        self.name = name
        self.kind = kind.name
        self.allow = allow
        self.timeout_s = parse_duration(section.timeout)
        self.tty = section.tty
        self.fd3 = section.fd3
        self.is_running = section.start is None
        self.generation = 0
        self.section = section
        self.process: SpawnedProcess | None = None
        self.is_moving = False
        self.workspace_fd = -1
        self.rlimits = parse_limits(limit_texts(section)).rlimits()
        self._programs = tuple(section.path)
        self.path = ":".join((*section.path, system_path()))
        self.starts = section.start is not None
        self._command = tuple(section.start or ())
        self._kind_env = kind.env
        self._env = section.env
        self._launcher = launcher
        self._state_dir = state_dir
        self._workspace = section.workspace
        self._tools = Availability(self._probe)

    # Its life

    def open(self) -> None:
        """Hold its workspace.

        Raises:
            OSError: the workspace cannot be reached; its path is in ``filename``.
        """
        if self._workspace is not None:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            self.workspace_fd = os.open(self._workspace, flags)

    def close(self) -> None:
        """Let go of its workspace."""
        fd, self.workspace_fd = self.workspace_fd, -1
        if fd >= 0:
            os.close(fd)

    async def start(self) -> SpawnedProcess:
        """Start its long-lived process; see ``supervision.Starter``."""
        where = self._workspace or self._state_dir
        env = self._environment(self._state_dir, tmp=self._state_dir)
        executable = find_executable(self._command[0], env["PATH"], where)
        with contextlib.ExitStack() as stack:
            null = _opened(stack, os.devnull, os.O_RDWR)
            cwd_fd = self.workspace_fd
            if cwd_fd < 0:
                cwd_fd = _opened(stack, where, os.O_PATH | os.O_DIRECTORY)
            request = SpawnRequest(
                executable=executable,
                argv=self._command,
                env=env,
                cwd_fd=cwd_fd,
                fds=((null, 0), (null, 1), (null, 2)),
                rlimits=self.rlimits,
            )
            return await self._launcher.spawn(request)

    @property
    def is_asking(self) -> bool:
        """Never: what is asked of this machine takes no process."""
        return False

    async def clean_up(self) -> None:
        """Nothing: what its process left is ended as a tree."""

    # One request

    async def has(self, child: Child, tool: str, cwd: bytes) -> bool:
        """Tell whether it can run a tool now, in a working directory."""
        if await self._tools.find(tool, self.generation) is not None:
            return True
        if project.own_name(tool) is None:
            return False
        try:
            cwd_fd = await self.open_cwd(cwd, child)
        except RefusedError:
            return False
        try:
            return project.own_program(tool, cwd_fd) is not None
        finally:
            os.close(cwd_fd)

    async def open_cwd(self, cwd: bytes, child: Child) -> int:
        """See ``routes.Target``."""
        share = None if child.session is None else child.session.client.ledger.threads
        if self.workspace_fd >= 0:
            return await workspace.open_cwd(self.workspace_fd, cwd, share)
        if child.session is not None:
            try:
                child.session.client.policy.check_available()
            except UnavailableError:
                raise workspace.refused() from None
        return await workspace.open_cwd(self._workspace_of(child), cwd, share)

    async def command(
        self, child: Child, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """See ``routes.Target``."""
        where = workspace.path_of(cwd_fd)
        tmp = child.spec.tmp_dir or child.spec.env.get("TMPDIR")
        state = state_of(child, self.name)
        env = self._environment(state, tmp=tmp)
        env["PWD"] = where
        own = project.own_program(tool, cwd_fd)
        if project.has_venv(tool, cwd_fd):
            venv = env["VIRTUAL_ENV"] = f"{where}/{project.VENV}"
            env["PATH"] = f"{venv}/bin:{env['PATH']}"
        if own is not None:
            name = executable = f"{where}/{own}"
        else:
            found = await self._tools.find(tool, self.generation)
            # Gone since it was routed here: exec says so (127).
            name, executable = tool, found or f"/usr/bin/{tool}"
        return SpawnPlan(
            executable=executable,
            argv=(name, *map(os.fsdecode, args)),
            env=env,
            cwd=where,
            rlimits=tightest(child.spec.rlimits, self.rlimits),
            is_walled=True,
            shared=(workspace.path_of(self._workspace_of(child)),),
            kept=(state,) if tmp is None else (state, tmp),
            programs=self._programs,
        )

    def _workspace_of(self, child: Child) -> int:
        if self.workspace_fd >= 0:
            return self.workspace_fd
        (root_fd,) = child.places[0].backend.descriptors()
        return root_fd

    def _environment(self, state: str, *, tmp: str | None) -> dict[str, str]:
        env = {"PATH": self.path, "HOME": state, "TMPDIR": tmp or state}
        if "LANG" in os.environ:
            env["LANG"] = os.environ["LANG"]
        if self.tty:
            env["TERM"] = os.environ.get("TERM", "dumb")
        for name, value in self._kind_env.items():
            env[name] = value.format(state=state)
        env.update(self._env)
        return env

    async def _probe(self, tool: str) -> str | None:
        # PATH may lead through a network file system.
        return await in_thread(_find, tool, self.path)


def state_of(child: Child, sidecar: str) -> str:
    """Return the directory that a child has at a sidecar; it is made at first use.

    Raises:
        OSError: the child has no directory of its own, or no more room.
    """
    run_dir = child.spec.run_dir
    if run_dir is None:
        raise FileNotFoundError(2, f"child {child.id} has no directory for sidecars")
    name = f"sidecar-{sidecar}"
    with contextlib.ExitStack() as stack:
        run_fd = _opened(stack, run_dir, os.O_RDONLY | _DIRECTORY)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=run_fd)
            owner = os.fstat(run_fd)
            if owner.st_uid != os.geteuid():  # a child under a uid of its own
                # By descriptor: the child may put something else in its place.
                fd = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=run_fd)
                stack.callback(os.close, fd)
                os.fchown(fd, owner.st_uid, owner.st_gid)
    return f"{run_dir}/{name}"


def tightest(
    some: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return the smaller of each two limits, -1 being none."""
    found: dict[int, tuple[int, int]] = {}
    for which, soft, hard in (*some, *others):
        known = found.get(which, (-1, -1))
        found[which] = (_smaller(known[0], soft), _smaller(known[1], hard))
    return tuple((which, soft, hard) for which, (soft, hard) in found.items())


def _smaller(one: int, other: int) -> int:
    return max(one, other) if -1 in {one, other} else min(one, other)


def _find(tool: str, path: str) -> str | None:
    try:
        return find_executable(tool, path, "/")
    except SpawnError:
        return None


def _opened(stack: contextlib.ExitStack, path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
