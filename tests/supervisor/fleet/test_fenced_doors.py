"""Effects at the doors of a fleet child.

Each asks the fence, with a clock of the test.
"""

import socket
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio

from hostlib.accounts import Account
from hostlib.journal import Journal
from hostlib.log import Log
from supervisor.control.server import OrderError, Orders
from supervisor.control.workspaces import WorkspaceOrders
from supervisor.fleet.fence import Fence, FencedError, FleetLife
from supervisor.network.connections import Connection, Connections
from supervisor.network.notices import Notices
from supervisor.network.pace import Pace
from supervisor.network.traffic import ChildTraffic
from supervisor.network.tunnel import Pipes, Tunnel
from supervisor.sandbox.plan import PROFILES
from supervisor.workspace.use import WorkspaceUse
from tests.helpers.stage import Stage, open_model_stage, stage
from tests.helpers.toolscene import opened_scene

__all__ = ["stage"]

pytestmark = pytest.mark.slow

LIFE = FleetLife("a", "c1", 1)


class Lease:
    """A lease whose clock the test sets."""

    def __init__(self, fence: Fence) -> None:
        self.is_over = False
        fence.judge = self.judge

    def judge(self, life: FleetLife) -> None:
        """Refuse once the lease is over."""
        assert life == LIFE
        if self.is_over:
            raise FencedError("cannot let 'c1' act: the lease of node 'a' is over")


# spec FL6
async def test_a_write_does_not_go_out_when_the_lease_is_over(stage: Stage) -> None:
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE)
    fileno = await child.open(b"file", b"w")
    assert await child.ask(b"WRITE %d 2\nab" % fileno) == b"OK 2"
    lease.is_over = True
    refused = await child.ask(b"WRITE %d 2\ncd" % fileno)
    assert refused.startswith(b"ERROR fenced: cannot let 'c1' act")
    assert (stage.root / "file").read_bytes() == b"ab"
    await child.kill()


# spec FL6
@pytest.mark.parametrize("size", [200_000, 2])
async def test_a_write_that_waits_is_asked_for_when_it_is_whole(
    stage: Stage, size: int
) -> None:
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE)
    fileno = await child.open(b"file", b"w")
    head = b"WRITE %d %d\n" % (fileno, size)
    await child.do(f"send({head!r})")
    lease.is_over = True
    refused = await child.ask(b"x" * size)
    assert refused.startswith(b"ERROR fenced")
    assert (stage.root / "file").read_bytes() == b""
    await child.kill()


# spec FL6
@pytest.mark.parametrize(
    "request_line",
    [
        b"OPEN new w false\n",
        b"OPEN old a false\n",
        b"MKDIR false directory\n",
        b"REMOVE false old\n",
        b"RENAME false 3 3\noldnew",
    ],
)
async def test_names_are_not_changed_when_the_lease_is_over(
    stage: Stage, request_line: bytes
) -> None:
    (stage.root / "old").write_bytes(b"old")
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE)
    lease.is_over = True
    assert (await child.ask(request_line)).startswith(b"ERROR fenced")
    assert [path.name for path in stage.root.iterdir()] == ["old"]
    await child.kill()


# spec FL6
async def test_a_file_is_not_published_when_the_lease_is_over(stage: Stage) -> None:
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE, publish="on-close")
    fileno = await child.open(b"file", b"w")
    assert await child.ask(b"WRITE %d 2\nab" % fileno) == b"OK 2"
    lease.is_over = True
    assert (await child.ask(b"CLOSE %d\n" % fileno)).startswith(b"ERROR fenced")
    await child.kill()
    assert not (stage.root / "file").exists()


# spec FL6
async def test_reading_and_syncing_go_on(stage: Stage) -> None:
    (stage.root / "old").write_bytes(b"old")
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE)
    fileno = await child.open(b"new", b"w")
    assert await child.ask(b"WRITE %d 2\nab" % fileno) == b"OK 2"
    lease.is_over = True
    assert (await child.ask(b"OPEN old r false\n")).startswith(b"OK ")
    # Accepted bytes are made durable, which changes nothing.
    assert await child.ask(b"SYNC %d\n" % fileno) == b"OK"
    await child.kill()


# spec FL6
async def test_a_child_of_no_fleet_is_not_asked_about(stage: Stage) -> None:
    lease = Lease(stage.host.fence)
    lease.is_over = True
    child = await stage.puppet()
    fileno = await child.open(b"file", b"w")
    assert await child.ask(b"WRITE %d 2\nab" % fileno) == b"OK 2"
    await child.kill()


# spec FL6
async def test_no_model_is_asked_when_the_lease_is_over(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path) as stage:
        line = stage.connect()
        fence = stage.host.fence
        lease = Lease(fence)
        fence.add(line.client.pipe_id.partition(":")[0], LIFE)
        assert (await line.chat(b"a")).line.startswith(b"OK ")
        lease.is_over = True
        refused = await line.chat(b"a")
        assert b"the lease of node 'a' is over" in refused.line
        assert len(stage.provider.served) == 1


# spec FL6: an answer that comes, and a second attempt at a provider that has failed.
@pytest.mark.parametrize("prompt", [b"!endless !slow=0.01", b"!once=500"])
async def test_a_call_ends_with_the_lease(tmp_path: Path, prompt: bytes) -> None:
    async with open_model_stage(tmp_path) as stage:
        line = stage.connect()
        served = stage.provider.served

        def judge(life: FleetLife) -> None:
            if served:
                raise FencedError(f"cannot let {life.child!r} act: its lease is over")

        stage.host.fence.judge = judge
        stage.host.fence.add(line.client.pipe_id.partition(":")[0], LIFE)
        with trio.fail_after(60):
            refused = await line.chat(prompt)
        assert b"its lease is over" in refused.line
        assert len(served) == 1


# spec FL6
async def test_no_tool_is_run_when_the_lease_is_over(tmp_path: Path) -> None:
    async with opened_scene(tmp_path) as scene:
        lease = Lease(scene.stage.host.fence)
        tenant = await scene.tenant(fleet=LIFE)
        body = b"tool=sh&arg=-c&arg=echo>made"
        answered = await scene.say(
            scene.request(body, token=tenant.token), tenant=tenant
        )
        assert answered.status == 200
        lease.is_over = True
        (scene.workspace / "made").unlink()
        refused = await scene.say(
            scene.request(body, token=tenant.token), tenant=tenant
        )
        assert refused.status == 403
        assert b"the lease of node 'a' is over" in refused.body
        assert not (scene.workspace / "made").exists()


def connections(fence: Fence) -> Connections:
    """Return the connections of a child that a fence knows."""
    notices = Notices(Journal(-1, pytest.fail), "child-1")
    table = Connections(ChildTraffic(), notices, Log("ERROR"), Pace(), Account(limit=8))
    table.check_effect = partial(fence.check, "child-1")
    return table


# spec FL6
async def test_no_connection_begins_when_the_lease_is_over() -> None:
    fence = Fence()
    lease = Lease(fence)
    fence.add("child-1", LIFE)
    table = connections(fence)
    served = 0

    async def serve(connection: Connection) -> None:
        nonlocal served
        served += 1

    for lease.is_over in (False, True):
        ours, theirs = trio.socket.socketpair()
        with theirs:
            await table.serve(Connection(plain(ours), "host", 80), serve)
    assert served == 1


# spec FL6: bytes that a child has sent within its lease are no effect after it.
async def test_an_open_connection_is_cut_when_the_lease_is_over() -> None:
    fence = Fence()
    lease = Lease(fence)
    fence.add("child-1", LIFE)
    table = connections(fence)
    ours, inner = socket.socketpair()
    outer, server = socket.socketpair()
    pipes = Pipes()

    async def join(connection: Connection) -> None:
        with table.counted(connection) as meter:
            await Tunnel(connection.inner, outer, meter, pipes).run()

    with ours, server, closing(pipes):
        for one in (ours, server, inner, outer):
            one.setblocking(False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(table.serve, Connection(inner, "host", 80), join)
            ours.send(b"a")
            await trio.lowlevel.wait_readable(server)
            assert server.recv(9) == b"a"
            lease.is_over = True
            ours.send(b"b")
        assert server.recv(9) == b""


def plain(sock: trio.socket.SocketType) -> socket.socket:
    """Return a socket of the standard library in place of one of Trio's."""
    return socket.socket(fileno=sock.detach())


# spec FL6
async def test_no_workspace_is_committed_when_the_lease_is_over(
    stage: Stage, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    use = WorkspaceUse("w", str(base), "direct", str(tmp_path))
    lease = Lease(stage.host.fence)
    child = await stage.puppet(fleet=LIFE, workspaces=(use,), sandbox=PROFILES["auto"])
    orders = Orders()
    WorkspaceOrders(stage.host, str(tmp_path)).add_to(orders)
    lease.is_over = True
    with pytest.raises(OrderError, match="the lease of node 'a' is over"):
        await orders.orders["workspace"]({"verb": "commit", "name": "w"})
    with pytest.raises(OrderError, match="other"):
        await orders.orders["workspace"]({"verb": "commit", "name": "other"})
    await child.kill()
