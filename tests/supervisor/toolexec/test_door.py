"""FD 3 of tools: a nested client of the child, closed with the execution."""

import os
import socket

import pytest
import trio

from supervisor.spawn.request import SpawnRequest
from supervisor.toolexec.door import ToolDoor, open_door
from tests.helpers.stage import Stage, stage
from tests.helpers.toolruns import waiting_child

__all__ = ["stage"]

pytestmark = pytest.mark.slow


async def spoken(stage: Stage, door: ToolDoor, script: str) -> bytes:
    """Run a shell that has the door as FD 3; return what it printed."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    cwd_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stdio = ((stage.null, 0), (writer, 1), (writer, 2))
    request = SpawnRequest(
        executable="/bin/sh",
        argv=("sh", "-c", script),
        env={"PATH": os.environ["PATH"], **door.env},
        cwd_fd=cwd_fd,
        fds=(*stdio, *door.fds),
    )
    process = await stage.host.launcher.spawn(request)
    door.close_tools_end()
    os.close(writer)
    os.close(cwd_fd)
    await process.wait_exit()
    process.close()
    os.set_blocking(reader, False)
    said = os.read(reader, 65_536)
    os.close(reader)
    return said


# ToolExec 6: FD 3 in tools, if the sidecar says so, then as a nested client.
async def test_a_tool_speaks_as_a_nested_client(stage: Stage) -> None:
    child = await waiting_child(stage, top_level=True)
    await trio.Path(child.spec.root, "file").write_text("of the child")
    assert child.session is not None
    own = child.session.client
    async with open_door(child) as door:
        (nested,) = own.nested
        assert nested.row()["parent_id"] == own.id
        script = (
            "printf 'OPEN file r false\\nOPEN /etc/passwd r true\\n' >&3;"
            " read -r one <&3; read -r two <&3; echo $one; echo $two;"
            " echo $FSPROXY_FD $FSPROXY_TOP_LEVEL"
        )
        one, two, env = (await spoken(stage, door, script)).splitlines()
        assert one.startswith(b"OK ")
        assert b"access denied" in two  # spec A1: a right that it was not left
        assert env == b"3 false"
    # Closed with the execution, and what it had opened.
    assert own.nested == []
    assert not stage.host.fs.tables.files
    assert own.ledger.clients.used == 1


# spec S2: who holds the other end after the execution talks to nobody.
async def test_what_outlives_the_execution_talks_to_nobody(stage: Stage) -> None:
    child = await waiting_child(stage)
    async with open_door(child) as door:
        holder = socket.socket(fileno=os.dup(door.fds[0][0]))
        holder.sendall(b"PING\n")
        assert await trio.to_thread.run_sync(holder.recv, 100) == b"OK\n"
    assert holder.recv(100) == b""
    with holder, pytest.raises(BrokenPipeError):
        holder.sendall(b"PING\n")


# spec S7
async def test_a_child_with_all_its_clients_has_no_more_doors(stage: Stage) -> None:
    child = await waiting_child(stage)
    async with trio.open_nursery() as nursery:
        held = 0
        leave = trio.Event()

        async def hold(task_status: trio.TaskStatus[None]) -> None:
            async with open_door(child):
                task_status.started()
                await leave.wait()

        while held < stage.host.settings.clients_per_child - 1:
            await nursery.start(hold)
            held += 1
        with pytest.raises(OSError, match="Too many users"):
            async with open_door(child):
                pass
        leave.set()


async def test_a_child_that_ends_takes_its_doors_along(stage: Stage) -> None:
    child = await waiting_child(stage)
    async with open_door(child):
        assert child.process is not None
        child.process.send_signal(9)
        await child.wait_gone()
        assert not stage.host.fs.tables.clients
