"""Tools that have ended before anybody is answered.

Their output, their note, their pipe.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest
import trio

from supervisor.toolexec.execution import Execution
from supervisor.toolexec.output.stores import HEAD_BYTES
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, opened_scene

pytestmark = pytest.mark.slow

NOTE = b"aifo-coder proxy timeout\n"
KIB = 1024


@pytest.fixture
def ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every tool finished before its reply begins."""
    begin = Execution.begin

    async def begin_and_wait(self: Execution, *args: Any) -> None:
        await begin(self, *args)
        await self.finished.wait()

    monkeypatch.setattr(Execution, "begin", begin_and_wait)


# spec E22: what stands in memory may be all of an output, or its beginning.
@pytest.mark.usefixtures("ended_first")
@pytest.mark.parametrize(
    "size", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + KIB, 1000 * KIB]
)
async def test_a_tool_that_has_ended_is_answered_whole(scene: Scene, size: int) -> None:
    reply = await scene.run(f"tool=head&arg=-c&arg={size}&arg=/dev/zero")
    assert (reply.status, reply.code) == (200, 0)
    assert reply.body == bytes(size)


# spec toolexec 5: after all output the note is the last chunk, of its own.
@pytest.mark.usefixtures("ended_first")
@pytest.mark.parametrize(
    ("said", "timeout_s"),
    [(b"", 0.2), (b"out", 2.0)],  # a tool with output has begun
)
async def test_of_a_tool_that_timed_out_before_the_note_is_a_chunk(
    tmp_path: Path, said: bytes, timeout_s: float
) -> None:
    async with opened_scene(tmp_path, timeout_s=timeout_s) as scene:
        script = b"printf '%25s' '" + said + b"'; exec sleep 1000"
        request = scene.request(b"tool=sh&arg=-c&arg=" + script, "X-Aifo-Exec-Id: t")
        expected = tuple(filter(None, (said, NOTE)))
        reply = await scene.say(request)
        assert (reply.chunks, reply.code) == (expected, 124)
        # And when it is asked for again, from wherever.
        for start in range(len(said) + 1):
            line = f"GET /exec/t?from={start} HTTP/1.1"
            again = await scene.say(scene.head(0, line=line))
            assert again.chunks == tuple(filter(None, (said[start:], NOTE)))
            assert again.code == 124


def output_of(pid: int) -> IO[bytes]:
    """Open what a process prints to."""
    return Path(f"/proc/{pid}/fd/1").open("wb", buffering=0)


# spec E24: nobody hears of an end that was told before; it is looked for.
async def test_a_pipe_that_somebody_holds_beyond_such_an_end_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.toolexec.execution.HOLDERS_S", 0.1)
    go = scene.workspace / "go"
    os.mkfifo(go)
    begin = Execution.begin

    with ExitStack() as holding:

        async def begin_late(self: Execution, *args: Any) -> None:
            process = self.process
            assert process is not None
            holding.enter_context(output_of(process.pid))
            with go.open("r+b", buffering=0) as gate:
                gate.write(b"\n")
                await eventually(lambda: process.has_exited)
            await begin(self, *args)

        monkeypatch.setattr(Execution, "begin", begin_late)
        with trio.fail_after(20):
            reply = await scene.run("tool=sh&arg=-c&arg=read x <go; printf off; exit 3")
    assert (reply.body, reply.code) == (b"off", 3)
