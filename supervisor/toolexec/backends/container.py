"""Sidecars in containers, through the command line of docker or podman.

1. A sidecar is one container with the workspace at ``/workspace``. It runs as long as
   ``CLI wait NAME`` does.
2. A label names the host, as (pid, start time): the container is removed when the
   sidecar stops, and one of a dead host at the next start (attack 39).
3. Signals to ``CLI exec`` do not reach the container. A shell in it reads names of
   signals from its input, sends them to the tool's process group, and ends that with
   its input.
4. A command of the engine has a time limit, and only the variables that name the
   engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import trio

from hostlib.linux import processes
from hostlib.readiness import wait_readable
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError, find_executable
from supervisor.toolexec import workspace
from supervisor.toolexec.availability import Availability, NoAnswerError
from supervisor.toolexec.backends.base import Backend, own_process
from supervisor.toolexec.routes import SpawnPlan

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import ChildView
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.toolexec.sidecar_section import SidecarSection

LABEL = "sandhost.host"
"""The label that names the host of a container."""

STATE = "/var/tmp/sandhost"  # noqa: S108 - a name inside the container
"""The HOME of tools in a container."""

PASSED = (
    "PATH",
    "HOME",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_CONTEXT",
    "DOCKER_TLS_VERIFY",
    "DOCKER_CERT_PATH",
    "DOCKER_API_VERSION",
    "CONTAINER_HOST",
    "CONTAINER_SSHKEY",
    "CONTAINERS_CONF",
)
"""Variables by which an engine's command finds its engine and logs in."""

ASK_TIMEOUT_S = 10.0
"""Longest wait for a command of the engine that starts no container."""

RUN_TIMEOUT_S = 600.0
"""Longest wait for the start of a container: its image may have to be fetched."""

END_TIMEOUT_S = 5.0
"""Longest wait for a killed command of the engine."""

OUTPUT_BYTES = 65_536
"""Most output of a command of the engine that is kept."""

INSIDE = r"""
path=$1; shift
[ -z "$path" ] || PATH=$path:$PATH
case $1 in
tsc)
  if [ -x node_modules/.bin/tsc ]; then shift; set -- ./node_modules/.bin/tsc "$@"; fi ;;
python|python3|pip|pip3)
  if [ -d .venv/bin ]; then
    VIRTUAL_ENV=$PWD/.venv; PATH=$VIRTUAL_ENV/bin:$PATH; export VIRTUAL_ENV
  fi ;;
esac
export PATH
exec 3<&0 </dev/null
group=$$
(
  trap '' TERM INT HUP QUIT USR1 USR2
  exec >/dev/null 2>&1
  while read -r name <&3; do
    kill -s "$name" -- "-$group" || kill -s "$name" "$group"
  done
  kill -s TERM -- "-$group" || kill -s TERM "$group"
  sleep 1
  kill -s KILL -- "-$group" || kill -s KILL "$group"
) &
exec "$@" 3<&-
"""
"""Runs a tool in the container: ``sh -c INSIDE sh PATH TOOL [ARG]...`` (rule 3)."""

FIND = r"""
PATH=${1:+$1:}$PATH
command -v "$2" >/dev/null || { printf 'sandhost-%s\n' lacks; exit 1; }
"""
"""Printed if a tool is missing: its status may also be that of an engine that failed
before, whose own message may contain this text."""

LACKS_IT = b"sandhost-lacks"


class CliSidecar(Backend):
    """A container; a ``routes.Target``.

    Args:
        name: its name in the configuration.
        section: its configuration.
        launcher: starts the engine's commands.

    Attributes:
        container: the container's name.
    """

    def __init__(self, name: str, section: SidecarSection, launcher: Launcher) -> None:
        super().__init__(name, section, starts=True)
        self.container = f"sandhost-{os.getpid()}-{name}"
        self._path = ":".join(section.path)
        self._launcher = launcher
        self._questions = 0
        self._image = section.image or ""
        self._command = tuple(section.start or ("sleep", "infinity"))
        self._env = {
            key: value.format(state=STATE) for key, value in self.kind_env.items()
        } | section.env
        self._cli = section.cli
        self._backend = section.backend
        self.tools = Availability(self._probe)
        self._cli_env = {n: os.environ[n] for n in PASSED if n in os.environ}

    # Its life

    async def start(self) -> SpawnedProcess:
        """Start the container; see ``supervision.Starter``."""
        await self._remove_leftovers()
        await self.ask("rm", "-f", self.container)
        label = f"{LABEL}={_identity(os.getpid())}"
        words = ["run", "-d", "--name", self.container, "--label", label]
        words += ["-v", f"{self.workspace}:/workspace", "-w", "/workspace"]
        for key, value in self._env.items():
            words += ["-e", f"{key}={value}"]
        status, said = await self.ask(
            *words, self._image, *self._command, timeout_s=RUN_TIMEOUT_S
        )
        if status != 0:
            lines = said.decode(errors="replace").split("\n")
            reason = next(
                (line for line in lines if line.strip()), "it did not say why"
            )
            raise OSError(5, f"cannot start a container of {self._image!r}: {reason}")
        return await self._spawn(("wait", self.container))

    @property
    def is_asking(self) -> bool:
        """Whether a command of the engine runs."""
        return self._questions > 0

    async def clean_up(self) -> None:
        """Remove the container."""
        with contextlib.suppress(OSError, SpawnError, LaunchpadLost):
            await self.ask("rm", "-f", self.container)

    async def _remove_leftovers(self) -> None:
        """Remove containers of hosts that are gone (rule 2)."""
        form = '{{.Names}}\t{{.Label "' + LABEL + '"}}'
        status, said = await self.ask(
            "ps", "-a", "--filter", f"label={LABEL}", "--format", form
        )
        if status != 0:
            return
        for line in said.decode(errors="replace").splitlines():
            name, _, owner = line.partition("\t")
            if owner and not _is_alive(owner):
                await self.ask("rm", "-f", name)

    # One request

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """See ``routes.Target``."""
        self.check_workspace()
        return await workspace.open_cwd(self.workspace_fd, cwd, child.threads)

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """See ``routes.Target``."""
        del child
        here = workspace.path_of(cwd_fd)
        top = workspace.path_of(self.workspace_fd).rstrip("/")
        there = f"/workspace{here[len(top) :]}"
        words = ["exec", "-i", "-w", there]
        words += [self.container, "sh", "-c", INSIDE, "sh", self._path, tool]
        words += map(os.fsdecode, args)
        executable = self._engine()
        return SpawnPlan(
            executable=executable,
            argv=(os.path.basename(executable), *words),  # noqa: PTH119 - a str
            env=dict(self._cli_env),
            is_elsewhere=True,
            reads_signals=True,
        )

    async def _probe(self, tool: str) -> str | None:
        words = ("exec", self.container, "sh", "-c", FIND, "sh", self._path, tool)
        status, said = await self.ask(*words)
        if status == 0:
            return tool
        if LACKS_IT in said.split():
            return None
        raise NoAnswerError

    # The engine

    def _engine(self) -> str:
        if self._cli is not None:
            return self._cli
        return find_executable(self._backend, self._cli_env.get("PATH"), "/")

    async def ask(
        self, *words: str, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Run a command of the engine to its end.

        Returns:
            (exit status, the beginning of its output).

        Raises:
            SpawnError: the command cannot be started.
            OSError: it did not end in time.
        """
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        self._questions += 1
        try:
            try:
                process = await self._spawn(words, writer)
            finally:
                os.close(writer)
            with trio.move_on_after(timeout_s):
                return await _finish(process, reader)
            raise TimeoutError(110, f"'{self._backend} {words[0]}' does not answer")
        finally:
            self._questions -= 1
            os.close(reader)

    async def _spawn(
        self, words: tuple[str, ...], output: int | None = None
    ) -> SpawnedProcess:
        executable = self._engine()
        argv = (os.path.basename(executable), *words)  # noqa: PTH119 - a str
        with own_process(
            executable, argv, self._cli_env, "/", output=output
        ) as request:
            return await self._launcher.spawn(request)


async def _finish(process: SpawnedProcess, reader: int) -> tuple[int, bytes]:
    """Return the status and the output of a process; it ends with this call."""
    said = bytearray()
    try:
        while True:
            await wait_readable(reader)
            more = os.read(reader, 4096)
            if not more:
                break
            if len(said) < OUTPUT_BYTES:
                said += more
        ended = await process.wait_exit()
    finally:
        process.send_signal(signal.SIGKILL)
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            with contextlib.suppress(LaunchpadLost):
                await process.wait_swept()
        process.close()
    return (1 if ended.code is None else ended.code), bytes(said)


def _identity(pid: int) -> str | None:
    """Return the lasting name of a process: its pid and its start."""
    found = processes.read_parent_and_start(pid)
    return None if found is None else f"{pid}:{found[1]}"


def _is_alive(owner: str) -> bool:
    pid, _, _ = owner.partition(":")
    return pid.isascii() and pid.isdigit() and _identity(int(pid)) == owner
