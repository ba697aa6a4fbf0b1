"""A sidecar's long-lived process.

Pauses between starts, and its end. No processes.
"""

import signal
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
import trio
import trio.testing

from supervisor.spawn.process import ExitStatus, SpawnedProcess
from supervisor.spawn.request import SpawnError
from supervisor.toolexec.supervision import GRACE_S, supervise

Clock = trio.testing.MockClock


class Process:
    """A process that ends when it is told to, or after so long."""

    pid = 4711

    def __init__(self, runs_s: float, *, obeys: bool = True) -> None:
        self.signals: list[int] = []
        self.is_closed = False
        self._runs_s = runs_s
        self._obeys = obeys
        self._ended = trio.Event()

    async def wait_exit(self) -> ExitStatus:
        """End by a signal or by itself."""
        with trio.move_on_after(self._runs_s):
            await self._ended.wait()
        return ExitStatus(code=3)

    async def wait_swept(self) -> None:
        """Nothing was left."""
        await trio.lowlevel.checkpoint()

    def send_signal(self, number: int) -> None:
        """Take a signal."""
        self.signals.append(number)
        if self._obeys or number == signal.SIGKILL:
            self._ended.set()

    def close(self) -> None:
        """Record it."""
        self.is_closed = True


class Sidecar:
    """A supervised sidecar: the times of its starts, and what each start gives."""

    name = "x"
    kind = "rust"

    def __init__(self, make: Callable[[int], Process]) -> None:
        self.is_running = False
        self.is_moving = False
        self.process: SpawnedProcess | None = None
        self.generation = 0
        self.starts: list[float] = []
        self.cleaned = 0
        self.processes: list[Process] = []
        self._make = make

    async def start(self) -> SpawnedProcess:
        """Start a process, or fail."""
        await trio.lowlevel.checkpoint()
        self.starts.append(trio.current_time())
        process = self._make(len(self.starts))
        self.processes.append(process)
        return cast("SpawnedProcess", process)

    async def clean_up(self) -> None:
        """Record it; also when cancelled."""
        self.cleaned += 1
        await trio.lowlevel.checkpoint()


def said_nothing(level: str, text: str, **_: object) -> None:
    """Ignore a log line."""
    del level, text


def told_nothing(event: str, **fields: object) -> None:
    """Ignore an event."""
    del event, fields


async def pauses(sidecar: Sidecar, wait_s: float) -> list[float]:
    """Supervise for so long; return the times between starts."""
    with trio.move_on_after(wait_s):
        await supervise(sidecar, said_nothing, trio.Event(), told_nothing)
    starts = sidecar.starts
    return [after - before for before, after in pairwise(starts)]


# ToolExec 6: a sidecar that ends is started again, later each time.
async def test_pauses_double_up_to_half_a_minute(
    autojump_clock: Clock,
) -> None:
    del autojump_clock
    sidecar = Sidecar(lambda _: Process(0.0))
    found = await pauses(sidecar, 100.0)
    assert found == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])
    assert sidecar.generation == len(sidecar.starts) == sidecar.cleaned


async def test_after_a_steady_run_the_pause_is_short_again(
    autojump_clock: Clock,
) -> None:
    del autojump_clock
    sidecar = Sidecar(lambda count: Process(20.0 if count == 4 else 0.0))
    assert await pauses(sidecar, 28.0) == pytest.approx([0.5, 1, 2, 20.5, 1, 2])


async def test_a_failed_start_is_told_and_tried_again(
    autojump_clock: Clock,
) -> None:
    del autojump_clock
    said: list[str] = []
    events: list[tuple[str, dict[str, object]]] = []

    def tell(event: str, **fields: object) -> None:
        events.append((event, fields))

    def make(count: int) -> Process:
        if count == 1:
            raise SpawnError(2, "lookup", "cannot start 'x': not found")
        if count == 2:
            raise OSError(5, "disk on fire")
        return Process(1000.0)

    sidecar = Sidecar(make)
    tried = trio.Event()
    with trio.move_on_after(10.0):
        await supervise(
            sidecar, lambda _, text, **_more: said.append(text), tried, tell
        )
    assert tried.is_set()
    assert said == [
        "Sidecar 'x' is down: cannot start 'x': not found; next start in 0.5 s",
        "Sidecar 'x' is down: [Errno 5] disk on fire; next start in 1 s",
    ]
    assert (sidecar.generation, sidecar.cleaned) == (1, 3)
    assert [event for event, _ in events] == [
        "sidecar.restarting",
        "sidecar.restarting",
        "sidecar.started",
        "sidecar.ended",
    ]
    assert events[1][1]["pause_s"] == 1
    started = {"sidecar": "x", "kind": "rust", "generation": 1, "pid": 4711}
    assert events[2][1] == started
    assert events[3][1]["reason"] == "ended by the host"


@pytest.mark.parametrize("obeys", [True, False])
async def test_the_end_of_the_host_ends_it(autojump_clock: Clock, obeys: bool) -> None:
    del autojump_clock
    sidecar = Sidecar(lambda _: Process(1000.0, obeys=obeys))
    tried = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise, sidecar, said_nothing, tried, told_nothing)
        await tried.wait()
        assert sidecar.is_running
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    took_s = trio.current_time() - began
    (process,) = sidecar.processes
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]
    assert process.is_closed
    assert (sidecar.is_running, sidecar.cleaned) == (False, 1)
    assert took_s == (0.0 if obeys else GRACE_S)
