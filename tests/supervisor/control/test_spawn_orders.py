"""The order to start a configured child, in any state of its last process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from supervisor.config.child import ChildSection
from supervisor.config.directories import Places
from supervisor.config.document import Config
from supervisor.control.orders import DaemonOrders
from supervisor.control.server import OrderError, Orders
from supervisor.kept_children.roster import Children
from supervisor.sandbox.scratch import Scratch
from tests.helpers.stage import Stage, eventually, stage

__all__ = ["stage"]

pytestmark = pytest.mark.slow


class Daemon:
    """A host that keeps one configured child ``a``."""

    def __init__(self, stage: Stage, nursery: trio.Nursery, **words: Any) -> None:
        top = str(stage.where)
        (stage.where / "scratch").mkdir()
        places = Places(top, top, f"{top}/control", f"{top}/scratch")
        config = Config(child={"a": ChildSection(["sleep", "600"], **words)})
        self.children = Children(stage.host, config, places, nursery)
        self._orders = Orders()
        DaemonOrders(stage.host, self.children, places, None).add_to(self._orders)
        self.children.start_configured()

    async def spawn(self) -> dict[str, Any]:
        """Order the child to be started."""
        answer: Any = await self._orders.orders["spawn"]({"name": "a"})
        return dict(answer)

    async def kill(self) -> None:
        """Kill its process, and wait until it is gone."""
        await self._orders.orders["kill"]({"name": "a", "signal": "KILL"})
        kept = self.children.find("a")
        assert kept is not None
        await eventually(lambda: kept.child is None)


@asynccontextmanager
async def daemon(stage: Stage, **words: Any) -> AsyncIterator[Daemon]:
    """Keep a child while the block runs."""
    async with trio.open_nursery() as nursery:
        kept = Daemon(stage, nursery, **words)
        found = kept.children.find("a")
        assert found is not None
        await found.begun.wait()
        assert found.child is not None, found.reason
        yield kept
        found.stop(0)
        await found.settled.wait()
        nursery.cancel_scope.cancel()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Return what keeps the directories of children that have ended."""
    event = trio.Event()
    remove = Scratch.remove

    async def wait_and_remove(scratch: Scratch) -> str | None:
        await event.wait()
        return await remove(scratch)

    monkeypatch.setattr(Scratch, "remove", wait_and_remove)
    return event


@pytest.mark.parametrize("restart", ["no", "always"])
async def test_a_child_whose_end_is_not_over_is_started_after_it(
    stage: Stage, gate: trio.Event, restart: str
) -> None:
    async with daemon(stage, restart=restart) as kept, trio.open_nursery() as nursery:
        await kept.kill()
        answers = []

        async def spawn() -> None:
            answers.append(await kept.spawn())

        nursery.start_soon(spawn)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        await eventually(lambda: answers)
        assert answers[0]["pid"] is not None


async def test_a_child_that_waits_for_its_restart_is_started_at_once(
    stage: Stage,
) -> None:
    async with daemon(stage, restart="always", backoff="1h") as kept:
        await kept.kill()
        assert (await kept.spawn())["pid"] is not None


async def test_a_start_that_fails_is_told_though_it_has_lived_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with daemon(stage) as kept:
        await kept.kill()
        monkeypatch.setattr(Scratch, "__init__", fail)
        with pytest.raises(OrderError, match="No space left"):
            await kept.spawn()
