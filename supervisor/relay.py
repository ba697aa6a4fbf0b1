"""``sandhost relay``: a nested child behind a proxy (spec section 7).

The relay is a small host of its own: a launchpad ends the nested child's whole tree, the
proxy (``vfs.relay``) stands between its FD 3 and this process's.  It has no tables and
no policy: those are the real host's.

Rule: a nested child shares neither TMPDIR nor its token for tools with its siblings or its
parent. Its TMPDIR lies in this process's, and ends with it.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.journal import Journal
from hostlib.log import Log
from hostlib.messages import remedy
from hostlib.paths import absolute, working_directory
from protocol.toolexec.token import narrow_token
from supervisor.run import (
    HOST_FAILED,
    complain,
    heeded_signals,
    innermost,
    run_program,
)
from supervisor.sandbox import start as sandbox_start
from supervisor.sandbox.groups import GroupBounds
from supervisor.sandbox.plan import AUTO, NONE, PROFILES, Machine, WantedWalls
from supervisor.sandbox.scratch import remove_tree
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.spawn.inner_pair import InnerListener
from supervisor.spawn.launcher import Launcher
from supervisor.spawn.process import ExitStatus
from supervisor.spawn.request import SpawnRequest, find_executable
from vfs.relay import RelayError, open_relay

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator

    from supervisor.network.settings import NetworkSettings
    from supervisor.spawn.launchpad.start import LaunchpadProcess
    from supervisor.spawn.process import SpawnedProcess
    from vfs.relay import FdPart

_OWN = (
    "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN",
    "SANDHOST_LLM_SOCKET", "FSPROXY_SOCKET",
)  # fmt: skip
"""This process's own account at the host's model, and its door: not the nested child's."""

_TOOLS_TOKEN = "AIFO_TOOLEEXEC_TOKEN"  # noqa: S105 - the name of a variable

_NETWORK = "FSPROXY_NETWORK"

_LINES = re.compile(
    r"(fd[:-][0-9]{1,18}):(?:([0-9]{1,18})|([0-9]{0,18})-([0-9]{0,18}))", re.ASCII
)

_NO_PLACE = (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOTDIR)
"""Errors of a TMPDIR that cannot be written, as for a COMMAND in bubblewrap."""

SWEEP_TIMEOUT_S = 5.0
"""Longest wait for the rest of a nested child's processes, which are killed at once."""

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for the nested child (spec S6)."""


def run_nested(
    launchpad: LaunchpadProcess,
    command: tuple[str, ...],
    rights: dict[str, object] | None,
    fds: tuple[str, ...] | None = None,
    shown: ShownPaths | None = None,
) -> int:
    """Run one nested child to its end.

    Args:
        launchpad: started before this module was imported.
        command: its program and arguments.
        rights: the arguments of ``NARROW``; None leaves all of this process's.
        fds: the only LLM fds that it gets, ``fd:1`` or lines of one,
            ``fd:1:10-20``; None: all of this process's.
        shown: the part of this process's view that it sees by system calls.

    Returns:
        Its exit status as ``run`` gives it.
    """
    Log("INFO").start()  # the relay tells which files it closed for a nested child
    status = HOST_FAILED
    try:
        with _directory_of_its_own() as tmp:
            nested = NestedChildSpec(command, rights, fds, tmp, shown or ShownPaths())
            status = run_program("relay", _relay_or_say_why, launchpad, nested)
    except OSError as why:
        where = os.environ.get("TMPDIR")
        text = (
            f"cannot make a directory for the nested child: {where!r}: {why.strerror}"
        )
        complain("relay", f"{text}{remedy(why)}")
    return status


class ShownPaths(NamedTuple):
    """The paths and names that a nested child reaches by system calls.

    Attributes:
        exposed: paths to read and execute.
        readable: paths to read.
        network: names that it may reach; None for none.
    """

    exposed: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    network: NetworkSettings | None = None


class NestedChildSpec(NamedTuple):
    """The description of a nested child.

    Attributes:
        command: its program and arguments.
        rights: see ``run_nested``.
        fds: as above.
        tmp: its TMPDIR; None where this process has none.
        shown: see ``run_nested``.
    """

    command: tuple[str, ...]
    rights: dict[str, object] | None
    fds: tuple[str, ...] | None
    tmp: str | None
    shown: ShownPaths = ShownPaths()

    @property
    def is_narrowed(self) -> bool:
        """Whether it has fewer files than this process."""
        return bool({"read", "write"} & (self.rights or {}).keys())


@contextmanager
def _directory_of_its_own() -> Iterator[str | None]:
    """Make a TMPDIR for a nested child in this process's, and remove it.

    Yields:
        Its path; None where this process has no TMPDIR that it may write.

    Raises:
        OSError: it cannot be made.
    """
    where = os.environ.get("TMPDIR")
    path = None
    try:
        path = (
            tempfile.mkdtemp(prefix="nested-", dir=absolute(where)) if where else None
        )
    except OSError as why:
        if why.errno not in _NO_PLACE:
            raise
        text = f"The nested child has no TMPDIR: {where!r}: {why.strerror}"
        how = "set it to a directory that this child may write"
        Log("WARNING").write("WARNING", f"{text}; {how}")
    if path is None:
        yield None
        return
    try:
        yield path
    finally:
        failure = remove_tree(Path(path))
        if failure is not None:
            text = f"cannot remove {path!r}: {failure.strerror}; remove it by hand"
            Log("WARNING").write("WARNING", text)


def fd_part(text: str) -> FdPart:
    """Return what ``--fd`` names: ``fd:1``, or lines, as ``fd:1:10-20``, ``fd:1:7``."""
    match = _LINES.fullmatch(text)
    if match is None:
        return text  # an id, or nothing that the host knows
    fd, only, start, end = match.groups()
    part: dict[str, str | int] = {"fd": fd}
    if start or only:
        part["start_line"] = int(start or only)
    if end or only:
        part["end_line"] = int(end or only)
    return part


async def _relay_or_say_why(launchpad: LaunchpadProcess, spec: NestedChildSpec) -> int:
    try:
        status = await _relay(launchpad, spec)
    except* RelayError as group:
        complain("relay", str(innermost(group)))
        status = HOST_FAILED
    return status


async def _relay(launchpad: LaunchpadProcess, spec: NestedChildSpec) -> int:
    stopped_by: list[int] = []
    process: SpawnedProcess | None = None
    status = ExitStatus()
    with trio.open_signal_receiver(*heeded_signals()) as signals:
        async with trio.open_nursery() as nursery:

            async def stop_on_signal() -> None:
                async for number in signals:
                    stopped_by.append(number)
                    if process is None:  # its start can hang, and it cannot be asked
                        nursery.cancel_scope.cancel()
                    elif len(stopped_by) == 1:
                        process.send_signal(signal.SIGTERM)
                        nursery.start_soon(_kill_later, process)
                    else:
                        process.send_signal(signal.SIGKILL)

            nursery.start_soon(stop_on_signal)
            launcher = Launcher(launchpad)
            await nursery.start(launcher.run)
            async with open_relay() as relay, AsyncExitStack() as stack:
                fds = spec.fds
                parts = None if fds is None else [fd_part(fd) for fd in fds]
                nested = await relay.new_client(spec.rights, parts)
                network = await stack.enter_async_context(_network(spec, nursery))
                try:
                    door = nested.child_end.fileno()
                    env = _environment(relay.dialect, spec)
                    process = await _spawn(launcher, spec, door, env, network)
                finally:
                    nested.child_end.close()
                status = await process.wait_exit()
                await relay.client_done(nested)
                with trio.move_on_after(SWEEP_TIMEOUT_S):
                    # And nothing is made in its TMPDIR any more.
                    await process.wait_swept()
                process.close()
            nursery.cancel_scope.cancel()
    if stopped_by:
        return 128 + stopped_by[0]
    if status.signal is not None:
        return 128 + status.signal
    return HOST_FAILED if status.code is None else status.code


async def _kill_later(process: SpawnedProcess) -> None:
    await trio.sleep(GRACE_S)
    process.send_signal(signal.SIGKILL)


def _environment(dialect: int, spec: NestedChildSpec) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _OWN}
    env.update(FSPROXY_FD="3", FSPROXY_VERSION=str(dialect), FSPROXY_TOP_LEVEL="false")
    env.pop("TMPDIR", None)
    if spec.tmp is not None:
        env["TMPDIR"] = spec.tmp
    network = spec.shown.network
    if network is not None:
        env[_NETWORK] = " ".join(map(str, network.rules))
    elif env.get(_NETWORK) != "host":
        env.pop(_NETWORK, None)
    token = env.get(_TOOLS_TOKEN)
    if token is not None:
        # It stands for this process's rights, which may be more (attack 38), and for its
        # executions (attack 48).
        has_root = not spec.is_narrowed
        env[_TOOLS_TOKEN] = narrow_token(token, os.urandom(8).hex(), root=has_root)
    return env


@asynccontextmanager
async def _network(
    spec: NestedChildSpec, nursery: trio.Nursery
) -> AsyncIterator[InnerListener | None]:
    """Yield what makes the sockets of a nested child with rules; serve them then.

    Raises:
        OSError: there is no descriptor for its way here.
    """
    settings = spec.shown.network
    if settings is None:
        yield None
        return
    from supervisor.network.child_network import (  # noqa: PLC0415 - with one
        ChildIdentity,
        ChildNetwork,
        Outside,
    )
    from supervisor.network.service import order_of, sockets_of  # noqa: PLC0415 - as above

    log, journal = Log("WARNING"), Journal(-1, lambda _: None)
    journal.taps.append(partial(_tell_refused, log))
    outside = Outside(journal, log)
    async with AsyncExitStack() as stack:
        stack.callback(outside.pipes.close)
        nursery.start_soon(outside.run)

        def serve(made: list[socket.socket], has_v6: bool) -> None:
            sockets = sockets_of(settings, made, has_v6=has_v6)
            network = ChildNetwork(ChildIdentity("nested"), settings, sockets, outside)
            stack.push_async_callback(network.aclose)
            network.start(nursery)

        listener = InnerListener()
        stack.callback(listener.close)
        listener.add_sockets(order_of(settings), serve)
        yield listener


def _tell_refused(log: Log, event: str, fields: dict[str, object]) -> None:
    """Log what the nested child did not reach: its host does not hear of it."""
    if event in {"network.refused", "network.failed"}:
        from supervisor.network.reasons import describe_refusal  # noqa: PLC0415 - with one

        text = describe_refusal(fields)
        log.write("WARNING", f"The nested child did not reach {text}", event=event)


async def _spawn(
    launcher: Launcher,
    spec: NestedChildSpec,
    door: int,
    env: dict[str, str],
    listener: InnerListener | None,
) -> SpawnedProcess:
    command = spec.command
    cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        request = SpawnRequest(
            executable=find_executable(
                command[0], env.get("PATH"), working_directory()
            ),
            argv=command,
            env=env,
            cwd_fd=cwd,
            fds=((0, 0), (1, 1), (2, 2), (door, 3)),
            listener=listener,
        )
        # A level of its own, inside of what this process is in (spec A5). The host said
        # whether it builds walls; a child that says otherwise weakens what is its own.
        profile = PROFILES[NONE if env.get("FSPROXY_SANDBOX") == NONE else AUTO]
        # It has its parent's user, which no process in a sandbox can change.
        profile = replace(profile, layers=profile.layers - {"uid"})
        network = "host" if env.get(_NETWORK) == "host" else "none"
        if listener is not None:
            network = "rules"
        workspace = "" if spec.is_narrowed else env.get("FSPROXY_WORKSPACE", "")
        files = ShownFiles(
            working_directory(),
            own=() if spec.tmp is None else (spec.tmp,),
            kept=(workspace,) if workspace else (),
            exposed=spec.shown.exposed,
            readable=spec.shown.readable,
        )
        bounds = GroupBounds(why_none="a nested child is in its parent's")
        is_served = listener is not None
        wanted = WantedWalls(profile, network, files, bounds, is_served)
        process, walls = await sandbox_start.spawn(launcher, Machine(), request, wanted)
        if listener is not None:
            try:
                listener.serve_received()
            except OSError:
                process.send_signal(signal.SIGKILL)
                process.close()
                raise
        if "landlock" in walls.missing:
            # Both are of one user, and in one namespace of pids.
            Log("WARNING").write(
                "WARNING",
                "The nested child goes without the layer 'landlock':"
                f" {walls.missing['landlock']}; nothing keeps it from the memory, and so"
                " from the rights, of the child that it runs in, nor from its files",
            )
        return process
    finally:
        os.close(cwd)
