"""How a child ends, and what is done, kept and freed then."""

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import trio

from hostlib.linux import processes
from supervisor.children.child import Child
from supervisor.parts import Settings
from tests.helpers.stage import Stage, eventually, open_stage
from tests.helpers.stock import only_stock_beneath
from tests.system.attacks.conftest import WALLS, only

pytestmark = [pytest.mark.slow, pytest.mark.attack]


async def run_example(stage: Stage, name: str) -> Child:
    child = await stage.spawn(
        sys.executable, "-I", stage.script(name), top_level=True, cwd=str(stage.where)
    )
    await child.wait_gone()
    return child


# spec S2, S3: the seed's example of abnormal termination.
async def test_seed_abnormal_termination(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with open_stage(tmp_path, log_level="INFO") as stage:
        child = await run_example(stage, "seed_abnormal.py")
        assert child.status == 1
        assert (tmp_path / "temp1.txt").read_bytes() == b"data1"
        assert (tmp_path / "temp2.txt").read_bytes() == b"data2"
        stage.assert_nothing_left()
        closed = stage.events("file.auto_closed")
        assert [row["filename"] for row in closed] == ["temp1.txt", "temp2.txt"]
        assert stage.events("file.closed") == []
        said = capfd.readouterr().err
        for row in closed:
            # The contract's own words, with either reason (EOF may come first).
            line = f"Auto-closed fileno {row['fileno']} for client {row['client_id']}"
            assert f"{line} ({row['reason']})" in said
            assert row["reason"] in {"pipe EOF", "process exit"}
        (spawned,) = stage.events("child.spawned")
        assert (
            f"Process {spawned['pid']} terminated, cleaning up client "
            f"{spawned['client_id']}" in said
        )


# spec S3: the seed's example of normal termination.
async def test_seed_normal_termination(stage: Stage) -> None:
    child = await run_example(stage, "seed_normal.py")
    assert child.status == 0
    assert (stage.where / "temp.txt").read_bytes() == b"data"
    stage.assert_nothing_left()
    assert [row["filename"] for row in stage.events("file.closed")] == ["temp.txt"]
    assert stage.events("file.auto_closed") == []


# spec S2: exit is the authority: a grandchild that holds FD 3 keeps EOF away.
# attack 28, I5
async def test_a_daemon_that_holds_the_door_keeps_nothing_open(stage: Stage) -> None:
    child = await stage.puppet()
    await child.open(b"a", b"w")
    daemon = await child.do("daemon()")
    pidfd = os.pidfd_open(stage.pid_of(child, daemon))
    try:
        assert await child.kill() == 128 + signal.SIGKILL
        assert select.select([pidfd], [], [], 0)[0], "the daemon is alive"
    finally:
        os.close(pidfd)
    stage.assert_nothing_left()


# attack 28: daemons, stopped processes, processes that ignore every signal.
async def test_the_whole_tree_of_a_dead_child_is_gone(stage: Stage) -> None:
    child = await stage.puppet()
    for _ in range(3):
        await child.do("daemon()")
    for last in ("daemon()", "os.kill(os.getpid(), signal.SIGSTOP)"):
        child.tell(f"forked('deafen()', 'daemon()', {last!r})")

    def family() -> list[processes.ProcessIdentity]:
        return processes.trees_beneath(stage.launchpad, [child.pid])

    # bubblewrap stays beside it, and is the init of its namespace.
    await eventually(lambda: len(family()) == 9 + 2 * bool(stage.wrapper))
    everybody = family()
    await child.kill()
    for pid, create_time in everybody:
        stat = processes.read_parent_and_start(pid)
        assert stat is None or stat[1] != create_time, f"{pid} is alive"
    stage.assert_nothing_left()


# spec S3: a child that ends well takes its daemons with it all the same.
async def test_daemons_of_a_child_that_exits_are_ended(stage: Stage) -> None:
    child = await stage.puppet()
    await child.do("daemon()")
    assert await child.leave() == 0
    assert only_stock_beneath(stage.launchpad)


PIPELINED_BYTES = 2 * 1024 * 1024


# spec S2: what was sent before the death is done first, as far as it is complete.
@pytest.mark.parametrize("publish", ["direct", "on-close"])
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
async def test_what_a_dead_child_had_sent_is_done(
    stage: Stage, publish: str, transport: str
) -> None:
    child = await stage.puppet(publish=publish, transport=transport)
    first = await child.open(b"a", b"w")
    size = PIPELINED_BYTES
    parts = []
    for fileno, name in ((first, ""), (first + 1, "b"), (first + 2, "c")):
        if name:
            parts.append(f"b'OPEN {name} w false\\n'")
        parts.append(f"b'WRITE {fileno} {size}\\n' + b'x' * {size}")
        parts.append(f"b'WRITE {fileno} 3\\nabcCLOSE {fileno}\\n'")
    torn = f"b'OPEN d w false\\nWRITE {first + 3} 10\\nabc'"
    child.tell(f"(send({' + '.join([*parts, torn])}), die())")
    assert await child.child.wait_gone() == 128 + signal.SIGKILL
    for name in "abc":
        assert (stage.root / name).read_bytes() == b"x" * size + b"abc"
    # spec W2, I6: and nothing of what was not complete.
    left = (stage.root / "d").read_bytes() if (stage.root / "d").exists() else b""
    assert left == b""


# spec S2: nothing but OPEN, READ, WRITE, CLOSE and SYNC is done for the dead.
async def test_other_requests_of_the_dead_are_not_done(stage: Stage) -> None:
    (stage.root / "kept").write_bytes(b"1")
    child = await stage.puppet()
    session = child.child.session
    assert session is not None
    stage.host.pump.suspend(session)  # so that all of it waits in the socket
    sent = (
        b"REMOVE false kept\nMKDIR false made\nOPEN opened w false\nMKDIR false m2\nPI"
    )
    await child.do(f"send({sent!r})")
    await child.kill()
    assert sorted(os.listdir(stage.root)) == ["kept", "opened"]


# spec S2, S4: a process that shares the door and does not read delays no clean-up.
async def test_nobody_waits_for_a_reader_that_outlived_its_child(stage: Stage) -> None:
    with (stage.root / "big").open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    child = await stage.puppet()
    fileno = await child.open(b"big")
    await child.do("daemon()")
    await child.do(f"send(b'READ {fileno} 16777216\\n' * 3)")
    session = child.child.session
    assert session is not None
    await eventually(lambda: session.outbound.is_waiting)
    with trio.fail_after(stage.host.settings.deadline_s / 2):  # not until then
        await child.kill()
    stage.assert_nothing_left()


# I1: a number that a closed connection had may be another's by the time its process
# ends; that one goes on.
async def test_an_exit_touches_no_connection_that_took_over_a_number(
    stage: Stage,
) -> None:
    first, heir = await stage.puppet(), await stage.puppet()
    assert first.child.session is not None
    number = first.child.session.read_fd
    await first.do("os.close(IN)")
    await eventually(lambda: len(stage.host.fs.tables.clients) == 1)
    connections = []
    while number not in stage.host.pump.sessions:
        connections.append(await heir.do("attached()"))
        assert len(connections) < 60
    assert await first.leave() == 0
    with trio.fail_after(30):
        answers = await heir.do(f"{{ask(b'PING\\n', d) for d in {connections}}}")
    assert answers == {b"OK"}


# spec S3: nested clients are closed before the client they hang on.
async def test_nested_clients_are_closed_first(stage: Stage) -> None:
    child = await stage.puppet()
    await child.open(b"a", b"w")
    await child.do("opened(b'b', b'w', fd=attached())")
    await child.do("opened(b'c', b'w', fd=attached(attached()))")
    order = list(stage.host.fs.tables.clients)
    assert len(order) == 4
    await child.kill()
    gone = [row["client_id"] for row in stage.events("client.gone")]
    assert gone[-1] == child.client_id
    assert gone.index(order[3]) < gone.index(order[2])
    assert sorted(gone) == sorted(order)
    stage.assert_nothing_left()


# spec S3, attack 28: a nested process whose parent died is part of the tree.
async def test_nested_processes_end_with_their_top_child(stage: Stage) -> None:
    child = await stage.puppet()
    pid, (fileno,) = await child.do(
        "forked(\"opened(b'n', b'w')\", fd=attached())",
    )
    assert stage.host.fs.tables.files[fileno].client.parent is not None
    pidfd = os.pidfd_open(stage.pid_of(child, pid))
    try:
        await child.kill()
        assert select.select([pidfd], [], [], 0)[0], "the nested process is alive"
    finally:
        os.close(pidfd)
    stage.assert_nothing_left()


# spec S6: SIGTERM first; who does not listen has its grace period, unless one insists.
async def test_a_stopping_host_asks_before_it_kills(tmp_path: Path) -> None:
    async with open_stage(tmp_path, Settings(grace_s=600.0)) as stage:
        deaf, obedient = await stage.puppet(), await stage.puppet()
        await deaf.do("deafen()")
        stage.host.request_stop()
        assert await obedient.child.wait_gone() == 128 + signal.SIGTERM
        assert not deaf.child.gone.is_set()
        stage.host.request_stop()
        assert await deaf.child.wait_gone() == 128 + signal.SIGKILL


# spec S6
async def test_who_does_not_listen_is_killed_after_its_grace_period(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, Settings(grace_s=0.3)) as stage:
        deaf = await stage.puppet()
        await deaf.do("deafen()")
        start = time.monotonic()
        stage.host.request_stop()
        assert await deaf.child.wait_gone() == 128 + signal.SIGKILL
        assert time.monotonic() - start >= 0.3


# spec S6: what a child still writes in its grace period is kept. bubblewrap would not pass
# the signal on.
@only(*WALLS)
async def test_a_child_may_finish_its_file_when_it_is_stopped(stage: Stage) -> None:
    child = await stage.puppet()
    fileno = await child.open(b"a", b"w")
    await child.do(f"last_words(b'WRITE {fileno} 4\\nlast', 3)")
    stage.host.request_stop()
    assert await child.child.wait_gone() == 3
    assert (stage.root / "a").read_bytes() == b"last"


# attack 27: the pid of a dead child names somebody else; he is left alone.
async def test_a_pid_that_was_given_to_somebody_else_is_not_signalled(
    stage: Stage,
) -> None:
    child = await stage.puppet()
    process = child.child.process
    assert process is not None
    daemon = await child.do("daemon()")
    await child.kill()
    bystander = start_with_pid(child.pid, daemon)
    try:
        child.child.stop(0.0)
        stage.host.request_stop(0.0)
        process.close()
        await process.end_tree()
        other = await stage.puppet()  # its death makes the launchpad look for leftovers
        await other.kill()
        assert processes.read_parent_and_start(bystander) is not None
        assert bystander in processes.children_of(os.getpid())
        pidfd = os.pidfd_open(bystander)
        assert not select.select([pidfd], [], [], 0)[0], "he was signalled"
        os.close(pidfd)
    finally:
        kill_and_reap(bystander)


# I3: a stop may come at any moment, also before there is a process.
@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.002, 0.004])
async def test_a_stop_ends_a_child_that_is_just_being_started(
    stage: Stage, delay_s: float
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.spawn, stage.spec(("/bin/sleep", "1000")))
        await trio.sleep(delay_s)
        await eventually(lambda: bool(stage.host.children))
        (child,) = stage.host.children.values()
        stage.host.request_stop()
    assert await child.wait_gone() == 128 + signal.SIGTERM
    stage.assert_nothing_left()


def start_with_pid(*wanted: int) -> int:
    """Start a process that has one of these pids, or skip the test.

    In a pid namespace of its own any user may; `test_unprivileged.py` runs this in one.
    """
    for pid in wanted:
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w") as last:
                last.write(str(pid - 1))
        except PermissionError:
            pytest.skip("only root may choose the next pid")
        new = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        if new == pid:
            return new
        kill_and_reap(new)
    pytest.skip("another process was faster to take the pid")


def kill_and_reap(pid: int) -> None:
    """End a process that this one started."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
