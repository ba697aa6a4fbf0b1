"""Supervises a sidecar's process: start, watch, restart, end.

Rules of this file.

1. A sidecar runs while its process does.  Each start is a new generation.
2. A process that ends is started again after a pause, which doubles each time and is
   short again after a steady run.
3. It ends with the host: SIGTERM, a grace period, SIGKILL to the whole tree.
4. Each start, end and pause is an event of the journal.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from typing import TYPE_CHECKING, NoReturn, Protocol

import trio

from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError
from supervisor.spawn.restarts import RestartPolicy, Restarts

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.spawn.process import ExitStatus, SpawnedProcess

RESTART_POLICY = RestartPolicy(
    restart="always",
    backoff_s=0.5,  # a server whose port is still taken needs a moment
    max_restarts=sys.maxsize,
    within_s=10.0,  # a longer run was no failed start
    max_backoff_s=30.0,
    spread=0.0,
)
"""A sidecar that ends is always started again, each time later, 30 s apart at most."""

GRACE_S = 2.0
"""Grace period between SIGTERM and SIGKILL when the host stops."""

END_TIMEOUT_S = 10.0
"""Longest wait for the end of one sidecar."""


class Starter(Protocol):
    """A backend's record of its process.

    Attributes:
        process: the running one.
        is_moving: whether it is being started or ended.
    """

    name: str
    kind: str
    is_running: bool
    generation: int
    process: SpawnedProcess | None
    is_moving: bool

    async def start(self) -> SpawnedProcess:
        """Start it; return the process that runs as long as it takes work.

        Raises:
            SpawnError: it cannot be started.
            OSError: as above.
        """
        ...

    async def clean_up(self) -> None:
        """Remove leftovers of a run; called after each, bounded and shielded."""
        ...


class Tell(Protocol):
    """The journal's ``write``."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write an event."""
        ...


async def supervise(
    sidecar: Starter,
    log: Callable[..., None],
    tried: trio.Event,
    tell: Tell,
    running: SpawnedProcess | None = None,
) -> NoReturn:
    """Keep a sidecar running until cancelled.

    Args:
        sidecar: the supervised one.
        log: takes a level, a line and its fields.
        tried: set when the first start has succeeded or failed.
        tell: writes events.
        running: its process from the program before; owned.

    Raises:
        LaunchpadLost: no process can be started or awaited any more.

    Cancellation: ends its process, bounded.
    """
    restarts = Restarts(RESTART_POLICY, trio.current_time, random.random)
    while True:
        restarts.started()
        try:
            first, running = running, None
            why = await _run_once(sidecar, tried, tell, first)
        except (SpawnError, OSError) as failure:
            why = str(failure)
        finally:
            tried.set()
        restarts.ended(1)
        pause_s = restarts.wait_s()
        text = f"Sidecar '{sidecar.name}' is down: {why}; next start in {pause_s:g} s"
        log("WARNING", text, sidecar=sidecar.name, reason=why)
        tell("sidecar.restarting", sidecar=sidecar.name, reason=why, pause_s=pause_s)
        await trio.sleep(pause_s)


async def _run_once(
    sidecar: Starter, tried: trio.Event, tell: Tell, running: SpawnedProcess | None
) -> str:
    """Start a sidecar and wait for its end; return its end in words."""
    how = "ended by the host"
    sidecar.is_moving = True
    try:
        process = running or await sidecar.start()
        sidecar.process = process
        try:
            sidecar.is_running = True
            tried.set()
            if running is None:
                sidecar.generation += 1
                tell(
                    "sidecar.started",
                    sidecar=sidecar.name,
                    kind=sidecar.kind,
                    generation=sidecar.generation,
                    pid=process.pid,
                )
            sidecar.is_moving = False
            how = _describe_end(await process.wait_exit())
        finally:
            sidecar.is_moving = True
            sidecar.process = None
            sidecar.is_running = False
            await _end(process)
            tell(
                "sidecar.ended",
                sidecar=sidecar.name,
                generation=sidecar.generation,
                reason=how,
            )
    finally:
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            await sidecar.clean_up()
        sidecar.is_moving = False
    return how


async def _end(process: SpawnedProcess) -> None:
    """End a process and all beneath it; nothing if they have ended."""
    with trio.move_on_after(END_TIMEOUT_S, shield=True):
        with contextlib.suppress(LaunchpadLost):
            process.send_signal(signal.SIGTERM)
            with trio.move_on_after(GRACE_S):
                await process.wait_exit()
            process.send_signal(signal.SIGKILL)
            await process.wait_swept()
    process.close()


def _describe_end(status: ExitStatus) -> str:
    if status.signal is not None:
        return f"ended by signal {status.signal}"
    if status.code is None:
        return "ended with an unknown status"
    return f"exited with {status.code}"
