"""The disk space for logs of running tools, for all of a child together."""

import os
from pathlib import Path

import pytest

from supervisor.toolexec.execution import Execution
from supervisor.toolexec.executions import QUOTA_LIMITS, ChildExecutions
from supervisor.toolexec.output.quota import LEAST_FILE_BYTES
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, opened_scene, receive_until, send

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
LIMIT = 2 * LEAST_FILE_BYTES


async def printed_and_live(scene: Scene, name: str, size: int) -> Execution:
    """Start a tool that prints so much and stays, and that nobody reads."""
    script = f"head -c {size} /dev/zero; exec sleep 1000".encode()
    extra = (f"X-Aifo-Exec-Id: {name}", "X-Aifo-Detach: 1")
    with await scene.connect() as sock:
        await send(sock, scene.request(b"tool=sh&arg=-c&arg=" + script, *extra))
        await receive_until(sock, b"\r\n\r\n")
    (owner,) = scene.tool.children.values()
    execution = owner.live[name]
    await eventually(lambda: execution.log.end == size)
    return execution


def on_the_disk(owner: ChildExecutions) -> list[int]:
    """Return how long the files of all that run are."""
    fds = [fd for one in owner.live.values() for fd in one.log.descriptors()]
    return [os.fstat(fd).st_size for fd in fds]


# spec E31: beyond twice `log_limit` a log has what it needs to go on, and no more.
async def test_what_runs_at_once_is_bounded_all_together(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, log_limit_bytes=LIMIT) as scene:
        (owner,) = scene.tool.children.values()
        for name in ("a", "b", "c", "d"):
            await printed_and_live(scene, name, LIMIT + 4 * MIB)
        sizes = on_the_disk(owner)
        assert sizes == [LIMIT, LIMIT, LEAST_FILE_BYTES, LEAST_FILE_BYTES]
        assert sum(sizes) == QUOTA_LIMITS * LIMIT + 2 * LEAST_FILE_BYTES
        assert owner.quota.used_bytes == QUOTA_LIMITS * LIMIT
