"""The local backend: tools of this host, run in the child's own directory.

1. PATH is the configured directories, then the system's; the rest of the environment is
   the sidecar's. HOME is the child's own: the host's may have a user's tokens.
2. Files that tools keep (HOME, CARGO_HOME) lie in a directory of child and sidecar, and
   end with the child: no other child runs them.
3. ``tsc`` is the project's own if it has one; Python is that of ``.venv`` in the
   working directory.
4. Without a command to start, a local sidecar is always running.
5. Its command runs in walls ("auto") as a user of its own: files that children leave in
   a shared workspace must not run as the host.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import trio

from hostlib.threads import in_abandonable_thread, in_thread
from hostlib.user_values import parse_limits
from supervisor.sandbox import start as sandbox_start
from supervisor.sandbox.groups import GroupBounds
from supervisor.sandbox.plan import PROFILES, WantedWalls
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.spawn.request import SpawnError, find_executable
from supervisor.toolexec import project, workspace
from supervisor.toolexec.availability import Availability
from supervisor.toolexec.backends.base import Backend, own_process
from supervisor.toolexec.routes import SpawnPlan
from supervisor.toolexec.sidecar_section import limit_texts
from vfs.backends import MountDirectory
from vfs.errors import UnavailableError

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import Walls
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.spec import ChildSpec
    from supervisor.toolexec.sidecar_section import SidecarSection

PROBES = 4
"""Most tools that a sidecar looks for at once, those included whose client waits no more."""

_NO_GROUPS = "a sidecar has none"
_PRIVATE = 0o700

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def system_path() -> str:
    """Return the PATH with which the host was started."""
    return os.environ.get("PATH") or os.defpath.lstrip(":")


class LocalSidecar(Backend):
    """A toolchain of this host; a ``routes.Target``.

    Args:
        name: its name in the configuration.
        section: of the configuration.
        host: starts its long-lived process, and builds its walls.
        state_dir: the working directory of that process without a workspace.
        made_in: a descriptor of the parent of this and other sidecars' directories,
            owned by the caller; -1 if there is none.
    """

    def __init__(
        self,
        name: str,
        section: SidecarSection,
        host: Parts,
        state_dir: str,
        made_in: int = -1,
    ) -> None:
        super().__init__(name, section, starts=section.start is not None)
        self.rlimits = parse_limits(limit_texts(section)).rlimits()
        self.path = ":".join((*section.path, system_path()))
        self._programs = tuple(section.path)
        self._command = tuple(section.start or ())
        self._profile = PROFILES[section.sandbox]
        self._env = section.env
        self._host = host
        self._state_dir = state_dir
        self._made_in = made_in
        self.tools = Availability(self._probe)
        self._probes = trio.CapacityLimiter(PROBES)
        self._told: set[str] = set()

    # Life

    async def start(self) -> SpawnedProcess:
        """Start its long-lived process in walls; see ``supervision.Starter``."""
        state = self._state_dir
        where = state
        if self.workspace_fd >= 0:
            where = workspace.path_of(self.workspace_fd)
        env = self._environment(state, tmp=state)
        executable = find_executable(self._command[0], env["PATH"], where)
        with own_process(
            executable, self._command, env, where, rlimits=self.rlimits
        ) as request:
            host = self._host
            wanted = self._describe_walls(where)
            process, walls = await sandbox_start.spawn(
                host.launcher, host.machine, request, wanted
            )
        self._tell_lost_layers(walls)
        return process

    def _tell_lost_layers(self, walls: Walls) -> None:
        """Warn of each layer that the machine did not give, once."""
        for layer, why in walls.lost.items():
            if layer not in self._told and why != _NO_GROUPS:
                self._told.add(layer)
                text = f"Sidecar {self.name!r} runs without the sandbox layer {layer!r}"
                how = "have sandbox = 'required' to refuse it"
                self._host.log.write(
                    "WARNING",
                    f"{text}: {why}; {how}",
                    sidecar=self.name,
                    layer=layer,
                    reason=why,
                )

    def _describe_walls(self, where: str) -> WantedWalls:
        """Return the walls of its process: a user, layers, the host's network."""
        files = ShownFiles(
            where,
            own=(self._state_dir,),
            shared=() if self.workspace_fd < 0 else (where,),
            programs=self._programs,
            hidden=self._host.apart.locations(self._made_in),
        )
        bounds = GroupBounds(why_none=_NO_GROUPS)
        wanted = WantedWalls(self._profile, "host", files, bounds)
        machine = self._host.machine
        if "uid" in self._profile.layers and "uid" not in machine.lacking:
            self.user = self.user or machine.take_user()
            wanted.user = self.user
        return wanted

    async def clean_up(self) -> None:
        """Keep its user and its files; see ``supervision.Starter``."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close its workspace and give its user back: all of its processes have ended."""
        super().close()
        if self.user is not None:
            self._host.machine.give_user_back(self.user)
            self.user = None

    # One request

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """See ``routes.Target``."""
        share = child.threads
        if self.workspace_fd >= 0:
            self.check_workspace()
        elif child.session is not None:
            try:
                child.session.client.policy.check_available()
            except UnavailableError:
                raise workspace.make_refusal() from None
        top = self._workspace_of(child)
        mount = self._mount_of(child)
        if mount is not None:
            names = workspace.beneath_name(cwd), child.places[0].beneath(cwd)
            return await in_thread(workspace.open_in_mount, mount, *names, share=share)
        cwd_fd = await workspace.open_cwd(top, cwd, share)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, cwd_fd)
            if workspace.is_kept(cwd_fd, top, child.spec.own_dirs):
                raise workspace.make_refusal()
            stack.pop_all()
        return cwd_fd

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """See ``routes.Target``."""
        where = self._path_of(cwd_fd, child)
        tmp = child.spec.tmp_dir or child.spec.env.get("TMPDIR")
        state = state_of(child.spec, self.name)
        env = self._environment(state, tmp=tmp)
        env["PWD"] = where
        own, has_venv = None, False
        if project.own_name(tool) is not None:
            own, has_venv = await in_thread(
                project.find_own_program, tool, cwd_fd, share=child.threads
            )
        if has_venv:
            venv = env["VIRTUAL_ENV"] = f"{where}/{project.VENV}"
            env["PATH"] = f"{venv}/bin:{env['PATH']}"
        if own is not None:
            name = executable = f"{where}/{own}"
        else:
            found = await self.tools.find(tool, self.generation)
            # Removed since it was routed here: exec fails with 127.
            name, executable = tool, found or f"/usr/bin/{tool}"
        return SpawnPlan(
            executable=executable,
            argv=(name, *map(os.fsdecode, args)),
            env=env,
            cwd=where,
            rlimits=tightest(child.spec.rlimits, self.rlimits),
            is_walled=True,
            shared=self._writable_paths(child),
            kept=(state,) if tmp is None else (state, tmp),
            programs=self._programs,
        )

    def _workspace_of(self, child: ChildView) -> int:
        if self.workspace_fd >= 0:
            return self.workspace_fd
        (root_fd,) = child.places[0].backend.descriptors()
        return root_fd

    def _mount_of(self, child: ChildView) -> MountDirectory | None:
        """Return the mount in which tools of a child work; None for a plain directory."""
        root = child.places[0].backend
        if self.workspace_fd >= 0 or not isinstance(root, MountDirectory):
            return None
        return root

    def _path_of(self, cwd_fd: int, child: ChildView) -> str:
        """Return the path of a working directory in a tool's view."""
        mount = self._mount_of(child)
        if mount is None:
            return workspace.path_of(cwd_fd)
        rest = os.fsdecode(mount.path_of(cwd_fd))
        return f"{child.spec.root}/{rest}" if rest else child.spec.root

    def _writable_paths(self, child: ChildView) -> tuple[str, ...]:
        """Return the paths that a tool may write, with the child's mount in place."""
        spec = child.spec
        if self.workspace_fd < 0 and spec.has_workspace_root:
            is_shown = self._mount_of(child) or spec.workspaces[0].is_writable
            return (spec.root,) if is_shown else ()
        return (workspace.path_of(self._workspace_of(child)),)

    def _environment(self, state: str, *, tmp: str | None) -> dict[str, str]:
        env = {"PATH": self.path, "HOME": state, "TMPDIR": tmp or state}
        if "LANG" in os.environ:
            env["LANG"] = os.environ["LANG"]
        if self.tty:
            env["TERM"] = os.environ.get("TERM", "dumb")
        for name, value in self.kind_env.items():
            env[name] = value.format(state=state)
        env.update(self._env)
        return env

    async def _probe(self, tool: str) -> str | None:
        # PATH may lead through a network file system that does not answer.
        return await in_abandonable_thread(_find, tool, self.path, limiter=self._probes)


def state_of(spec: ChildSpec, sidecar: str) -> str:
    """Return the directory of a child at a sidecar; it is made at first use.

    Raises:
        OSError: the child has no directory of its own, or no room.
    """
    name = f"sidecar-{sidecar}"
    with spec.run_dir_held() as run_fd:
        is_new = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=run_fd)
            is_new = True
        # The child may replace it, by a link for example: that is refused here, and
        # not followed later (``sandbox.visible``, rule 5; ``sandbox.view``).
        fd = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=run_fd)
        try:
            owner = os.fstat(run_fd)
            # A child with a user of its own.
            if is_new and owner.st_uid != os.geteuid():
                os.fchown(fd, owner.st_uid, owner.st_gid)
        finally:
            os.close(fd)
    return f"{spec.run_dir}/{name}"


def tightest(
    some: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return the smaller one of each two limits; -1 is no limit."""
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
