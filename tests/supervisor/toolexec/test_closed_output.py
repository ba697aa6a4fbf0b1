"""A tool that closes its output and runs on: a waiting client is not cut off."""

import os
import select
import signal

import pytest
import trio

from supervisor.spawn import process
from supervisor.spawn.launchpad import wire
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, parse, receive_all, send

pytestmark = pytest.mark.slow


# A tool that has closed its output is waited for by its pidfd: its end may be told before
# that has woken anybody.
async def test_the_end_of_a_tool_that_runs_on_with_its_output_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_REPORT_TIMEOUT_S", 0.01)
    launcher = scene.stage.host.launcher
    owner = scene.tool.children[scene.child.puppet.child.id]
    with await scene.connect() as sock:
        code = b"exec+%3E%26-+2%3E%26-;exec+sleep+1000"
        await send(sock, scene.request(b"tool=sh&arg=-c&arg=" + code))
        await eventually(
            lambda: any(
                one.process is not None and one.process.is_awaited
                for one in owner.live.values()
            )
        )
        (execution,) = owner.live.values()
        await trio.sleep(0.05)
        assert execution.process is not None
        os.kill(execution.process.pid, signal.SIGKILL)
        # No turn of the loop: as if the reader of all ends were at it already.
        while not execution.process.has_exited:
            assert select.select([launcher.control], [], [], 5)[0]
            received = wire.receive_message(launcher.control)
            assert received is not None
            launcher.take_message(*received)
        assert parse(await receive_all(sock)).code == 137
    assert (await scene.run("tool=true")).status == 200
