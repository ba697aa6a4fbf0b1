"""Whether a tool is there: asked once a generation, by who wants to know."""

import threading
from typing import TYPE_CHECKING, cast

import pytest
import trio
import trio.testing

from hostlib import threads
from supervisor.toolexec.availability import Availability
from supervisor.toolexec.backends import local
from supervisor.toolexec.sidecar_section import SidecarSection

if TYPE_CHECKING:
    from supervisor.parts import Parts


class Probe:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, str | None] = {}
        self.gates: dict[str, trio.Event] = {}

    async def __call__(self, tool: str) -> str | None:
        """Answer, when the gate of this tool is open."""
        self.asked.append(tool)
        gate = self.gates.get(tool)
        if gate is not None:
            await gate.wait()
        return self.answers.get(tool)


# ToolExec 6: availability is cached per (sidecar generation, tool).
async def test_each_generation_is_asked_once() -> None:
    probe = Probe()
    known = Availability(probe)
    assert await known.find("make", 1) is None
    probe.answers["make"] = "/bin/make"
    assert await known.find("make", 1) is None
    assert await known.find("make", 2) == "/bin/make"
    del probe.answers["make"]
    assert await known.find("make", 2) == "/bin/make"
    assert probe.asked == ["make", "make"]


async def test_several_that_ask_share_one_probe() -> None:
    probe = Probe()
    probe.answers["cc"] = "/bin/cc"
    gate = probe.gates["cc"] = trio.Event()
    known = Availability(probe)
    found = []

    async def ask() -> None:
        found.append(await known.find("cc", 1))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert found == ["/bin/cc"] * 5
    assert probe.asked == ["cc"]


async def test_a_cancelled_asker_is_replaced() -> None:
    probe = Probe()
    probe.answers["cc"] = "/bin/cc"
    gate = probe.gates["cc"] = trio.Event()
    known = Availability(probe)
    found = []
    first = trio.CancelScope()

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            found.append(await known.find("cc", 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert found == ["/bin/cc"]
    assert probe.asked == ["cc", "cc"]


# ToolExec 6: a slow probe delays only who asked, and not for ever.
async def test_a_slow_probe_delays_only_who_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    probe = Probe()
    probe.answers["cc"] = "/bin/cc"
    probe.gates["make"] = trio.Event()
    known = Availability(probe, timeout_s=5.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(known.find, "make", 1)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        assert await known.find("cc", 1) == "/bin/cc"
        assert trio.current_time() == began
    assert trio.current_time() - began == 5.0
    probe.gates["make"].set()
    probe.answers["make"] = "/bin/make"
    assert await known.find("make", 1) == "/bin/make"


async def test_an_answer_for_a_generation_that_is_over_is_not_kept() -> None:
    probe = Probe()
    probe.answers["cc"] = "/old/cc"
    gate = probe.gates["cc"] = trio.Event()
    known = Availability(probe)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(known.find, "cc", 1)
        await trio.testing.wait_all_tasks_blocked()
        del probe.gates["cc"]
        assert await known.find("make", 2) is None
        gate.set()
    probe.answers["cc"] = "/new/cc"
    assert await known.find("cc", 2) == "/new/cc"


# A PATH may lead through a file system that does not answer.
async def test_a_client_that_leaves_a_dead_path_waits_no_more_and_takes_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    def find(tool: str, path: str, where: str) -> str:
        del path, where
        is_over.wait()
        return f"/bin/{tool}"

    monkeypatch.setattr(local, "find_executable", find)
    section = SidecarSection(kind="go")
    sidecar = local.LocalSidecar("go", section, cast("Parts", None), "/")
    left: list[int] = []

    async def ask(number: int) -> None:
        try:
            await sidecar.tools.find(f"tool-{number}", 1)
        finally:
            left.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(threads.MAX_THREADS + 4):
            nursery.start_soon(ask, number)
        await trio.testing.wait_all_tasks_blocked(0.05)
        try:
            assert threads.statistics().borrowed_tokens == 0
            assert not left
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(left) == threads.MAX_THREADS + 4
        finally:
            is_over.set()
