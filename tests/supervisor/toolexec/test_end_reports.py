"""The moment between a tool's last byte and the word of its end.

The launchpad's word of a tool's end is held up, so that the moment lasts.
"""

from typing import TYPE_CHECKING, Any

import pytest
import trio

from supervisor.spawn import process
from supervisor.spawn.launchpad import wire
from supervisor.toolexec import door, executions
from supervisor.toolexec.execution import Execution
from supervisor.toolexec.output.pump import OutputPump
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, parse, receive_all, send

if TYPE_CHECKING:
    from supervisor.spawn.launcher import Launcher

pytestmark = pytest.mark.slow

LONG_S, PATIENCE_S = 1000.0, 60.0
"""A wait for a word that no test outlasts, and how soon the end has come without it."""


class Held:
    """Words of ends of tools that are held up."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self.words: list[tuple[Any, ...]] = []

    async def end(self, scene: Scene) -> Execution:
        """Wait until the word of a tool's end is held up; return its execution."""
        owner = scene.tool.children[scene.child.puppet.child.id]
        await eventually(
            lambda: self.words and any(e.process for e in owner.live.values())
        )
        (execution,) = owner.live.values()
        return execution

    def tell(self) -> None:
        """Let them go, and hold no more."""
        launcher, self.launcher = self.launcher, None
        assert launcher is not None
        for words in self.words:
            launcher.take_message(*words)


@pytest.fixture
def held(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Hold up the word of each end but that of the child there is."""
    launcher, held = scene.stage.host.launcher, Held()
    child = scene.child.puppet.child.process
    assert child is not None
    held.launcher, take = launcher, launcher.take_message

    def take_later(message: tuple[Any, ...], fds: list[int]) -> None:
        kind, ident, *rest = message
        if kind == wire.SWEPT:  # of some, and each behind the word of its end
            others = tuple(one for one in ident if one != child.ident)
            held.words.append(((kind, others), []))
            ident = tuple(one for one in ident if one == child.ident)
        if kind == wire.EXITED and ident != child.ident:
            held.words.append((message, fds))
        else:
            take((kind, ident, *rest), fds)

    def take_or_later(message: tuple[Any, ...], fds: list[int]) -> None:
        (take if held.launcher is None else take_later)(message, fds)

    monkeypatch.setattr(launcher, "take_message", take_or_later)
    return held


# spec E23: how it ended nobody knows any more; that it has, its pidfd says.
async def test_an_end_that_nobody_tells_of_is_looked_for(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", 0.01)
    reply = await scene.run("tool=true")
    assert reply.code == 128 + 9
    assert held.words
    held.tell()  # too late
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", LONG_S)
    assert (await scene.run("tool=true")).code == 0


# It is the launchpad that is lost: nobody will say how it ended.
async def test_an_end_that_will_never_be_told_is_no_secret(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", LONG_S)
    with await scene.connect() as sock:
        await send(sock, scene.request(b"tool=true"))
        execution = await held.end(scene)
        assert execution.process is not None
        execution.process.record.tell_exit()
        with trio.fail_after(PATIENCE_S):
            assert parse(await receive_all(sock)).code == 128 + 9
    held.tell()


async def test_an_end_that_was_told_first_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OutputPump.run

    async def run_later(self: OutputPump) -> None:
        await trio.sleep(0.1)
        await run(self)

    monkeypatch.setattr(OutputPump, "run", run_later)
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", LONG_S)
    with trio.fail_after(PATIENCE_S):
        assert (await scene.run("tool=true")).code == 0


# spec S3: a child's end is none of its tools' later than it may be.
async def test_a_child_that_ends_in_that_moment_leaves_nothing(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(
        executions, "END_TIMEOUT_S", 2.0
    )  # that all is gone is not told
    with await scene.connect() as sock:
        await send(sock, scene.request(b"tool=true"))
        execution = await held.end(scene)
        child = scene.child.puppet.child
        assert child.process is not None
        child.process.send_signal(9)
        await eventually(execution.finished.is_set, 1.0)
        with trio.fail_after(20):
            await child.wait_gone()
    assert not scene.tool.slots.used
    held.tell()


async def test_a_tools_door_is_closed_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    close = door.close_door

    async def noted(session: Any) -> None:
        closed.append(session)
        await close(session)

    monkeypatch.setattr(door, "close_door", noted)
    scene.routes.fd3 = True
    assert (await scene.run("tool=true")).code == 0
    await eventually(lambda: len(closed) == 1)
