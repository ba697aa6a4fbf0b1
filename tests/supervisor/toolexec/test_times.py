"""Times of the protocol: what they are, and that the last step is always the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.toolexec import connection, ending, execution, wire
from tests.helpers.command import SANDHOST
from tests.helpers.toolscene import Scene, opened_scene

pytestmark = pytest.mark.slow


# spec E7, E8, E22, E24
def test_times_are_those_of_the_protocol() -> None:
    assert (wire.HEAD_TIMEOUT_S, wire.BODY_TIMEOUT_S, wire.DRAIN_S) == (10, 30, 2)
    assert execution.HOLDERS_S == 1
    assert connection.HEAD_WAITS_S == 0.002


# A tool that takes no hint is killed, with what it started; its last words are kept.
# spec E25
@pytest.mark.parametrize("proto", ["1", "2"])
async def test_a_stubborn_tool_meets_every_step_of_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proto: str
) -> None:
    quick = tuple((after / 5, number) for after, number in ending.TIME_IS_UP)
    monkeypatch.setattr(execution, "TIME_IS_UP", quick)
    script = (
        "trap 'echo int' INT; trap 'echo term' TERM; echo on;"
        " while :; do sleep 0.02; done"
    )
    form = f"tool=sh&arg=-c&arg={script.replace(';', '%3b')}"
    async with opened_scene(tmp_path, timeout_s=1.5) as scene:
        reply = await scene.run(form, proto=proto)
        assert reply.code == 124
        if proto == "1":
            assert (reply.status, reply.body) == (504, b"timeout\n")
            # spec toolexec 5: the id comes back, with v1 and v2.
            assert len(reply.headers[b"x-exec-id"]) == 32
        else:
            steps = [b"on", b"int", b"term", b"aifo-coder proxy timeout"]
            lines = reply.body.splitlines()  # some shells also tell of their sleep
            assert [line for line in lines if line in steps] == steps
        (ended,) = scene.stage.events("exec.ended")
        assert ended["timed_out"] is True


# A line in progress is cleared before a line of the log stands there.
# spec E34
def test_on_a_terminal_the_line_in_progress_is_cleared_first(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "[toolexec]\nverbose = true\n[sidecar.c]\nkind = 'c-cpp'\nallow = ['true']\n"
    )
    code = "from vfs.client.tools import ToolClient; print(ToolClient().run('true',"
    code += " '--token', 's3cret', cwd='/workspace').exit_code)"
    ours, theirs = os.openpty()
    words = ("run", "--config", "c.toml", "--", sys.executable, "-c", code)
    with subprocess.Popen(
        [SANDHOST, *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=60)
    said = os.read(ours, 65_536)
    os.close(ours)
    assert out == b"0\n"
    (line,) = [part for part in said.split(b"\n") if b"toolexec: exec" in part]
    assert line.startswith(b"\r\x1b[K")
    assert line.rstrip().endswith(b": true --token ***")
    assert b"s3cret" not in said


# spec E31: with the quota used up each log still has 8 MiB, and no more.
async def test_a_log_without_quota_is_a_ring_of_eight_mebibytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_scene(tmp_path, log_limit_bytes=64 << 20) as scene:
        (owner,) = scene.tool.children.values()
        monkeypatch.setattr(owner.quota, "take", lambda _size: False)
        size = 20 << 20
        reply = await scene.run("tool=head", "arg=-c", f"arg={size}", "arg=/dev/zero")
        assert (len(reply.body), reply.code) == (size, 0)
        (kept,) = owner.kept.values()
        assert (8 << 20) <= kept.log.end - kept.log.start <= (8 << 20) + 65_536
        assert await replayed(scene, kept.id, size - 1000) == 1000


async def replayed(scene: Scene, exec_id: str, start: int) -> int:
    """Return how much there is from an offset on."""
    line = f"GET /exec/{exec_id}?from={start} HTTP/1.1"
    return len((await scene.say(scene.head(0, line=line))).body)
