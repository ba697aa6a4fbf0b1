"""``sandhost relay``: a nested child behind a proxy, inside a child (spec section 7).

The relay is a small host of its own: a launchpad ends the nested child's whole tree, the
proxy (``vfs.relay``) stands between its FD 3 and this process's.  It has no tables and
no policy: those are the real host's.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from protocol.toolexec_token import narrowed
from supervisor.here import working_directory
from supervisor.launcher import Launcher
from supervisor.logs import Log
from supervisor.run import (
    HOST_FAILED,
    complain,
    guarded,
    heeded_signals,
    innermost,
)
from supervisor.sandbox import walled
from supervisor.sandbox.plan import AUTO, NONE, PROFILES, Machine, Wanted
from supervisor.spawn_request import SpawnRequest, find_executable
from vfs.relay import RelayError, open_relay

if TYPE_CHECKING:
    from supervisor.launchpad.start import LaunchpadProcess
    from supervisor.spawned import SpawnedProcess
    from vfs.relay import FdPart

_OWN_ACCOUNT = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "SANDHOST_LLM_SOCKET")
"""This process's own account at the host's model: not the nested child's."""

_TOOLS_TOKEN = "AIFO_TOOLEEXEC_TOKEN"  # noqa: S105 - the name of a variable

_LINES = re.compile(
    r"(fd[:-][0-9]{1,18}):(?:([0-9]{1,18})|([0-9]{0,18})-([0-9]{0,18}))", re.ASCII
)

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for the nested child (spec S6)."""


def run_nested(
    launchpad: LaunchpadProcess,
    command: tuple[str, ...],
    rights: dict[str, object] | None,
    fds: tuple[str, ...] | None = None,
) -> int:
    """Run one nested child to its end.

    Args:
        launchpad: started before this module was imported.
        command: its program and arguments.
        rights: what ``NARROW`` asks for; None leaves all of this process's.
        fds: the only LLM fds that it gets, ``fd:1`` or lines of one,
            ``fd:1:10-20``; None: all of this process's.

    Returns:
        Its exit status as ``run`` gives it.
    """
    Log("INFO").start()  # the relay tells which files it closed for a nested child
    return guarded("relay", _relay_or_say_why, launchpad, command, rights, fds)


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


async def _relay_or_say_why(
    launchpad: LaunchpadProcess,
    command: tuple[str, ...],
    rights: dict[str, object] | None,
    fds: tuple[str, ...] | None,
) -> int:
    try:
        status = await _relay(launchpad, command, rights, fds)
    except* RelayError as group:
        complain("relay", str(innermost(group)))
        status = HOST_FAILED
    return status


async def _relay(
    launchpad: LaunchpadProcess,
    command: tuple[str, ...],
    rights: dict[str, object] | None,
    fds: tuple[str, ...] | None,
) -> int:
    stopped_by: list[int] = []
    with trio.open_signal_receiver(*heeded_signals()) as signals:
        async with trio.open_nursery() as nursery:
            launcher = Launcher(launchpad)
            await nursery.start(launcher.run)
            async with open_relay() as relay:
                parts = None if fds is None else [fd_part(fd) for fd in fds]
                nested = await relay.new_client(rights, parts)
                try:
                    door = nested.child_end.fileno()
                    env = _environment(relay.dialect, rights)
                    process = await _spawn(launcher, command, door, env)
                finally:
                    nested.child_end.close()

                async def stop_on_signal() -> None:
                    async for number in signals:
                        stopped_by.append(number)
                        if len(stopped_by) == 1:
                            process.send_signal(signal.SIGTERM)
                            nursery.start_soon(_kill_later, process)
                        else:
                            process.send_signal(signal.SIGKILL)

                nursery.start_soon(stop_on_signal)
                status = await process.wait_exit()
                await relay.client_done(nested)
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


def _environment(dialect: int, rights: dict[str, object] | None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _OWN_ACCOUNT}
    env.update(FSPROXY_FD="3", FSPROXY_VERSION=str(dialect), FSPROXY_TOP_LEVEL="false")
    token = env.get(_TOOLS_TOKEN)
    if rights is not None and token is not None:
        # It stands for this process's rights, which are more (attack 38).
        has_root = not {"read", "write"} & rights.keys()
        env[_TOOLS_TOKEN] = narrowed(token, os.urandom(8).hex(), root=has_root)
    return env


async def _spawn(
    launcher: Launcher, command: tuple[str, ...], door: int, env: dict[str, str]
) -> SpawnedProcess:
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
        )
        # A level of its own, inside of what this process is in (spec A5). The host said
        # whether it builds walls; whoever says otherwise weakens what is its own.
        profile = PROFILES[NONE if env.get("FSPROXY_SANDBOX") == NONE else AUTO]
        # It has its parent's user, which nobody in a sandbox can change.
        profile = replace(profile, layers=profile.layers - {"uid"})
        network = "host" if env.get("FSPROXY_NETWORK") == "host" else "none"
        own = tuple(path for path in (env.get("TMPDIR"),) if path)
        wanted = Wanted(profile, network, working_directory(), own)
        wanted.no_groups = "a nested child is in its parent's"
        process, walls = await walled.spawn(launcher, Machine(), request, wanted)
        if "landlock" in walls.missing:
            # Both are of one user, and in one namespace of pids.
            Log("WARNING").write(
                "WARNING",
                "The nested child goes without the layer 'landlock':"
                f" {walls.missing['landlock']}; nothing keeps it from the memory, and so"
                " from the rights, of the child that it runs in",
            )
        return process
    finally:
        os.close(cwd)
