"""Nothing is left behind.

When a child ends, when the host does, when all goes wrong.

Real processes that do not want to die. Their pidfds are taken while they live, so that
"dead" is said of that process and not of a number.
"""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from hostlib.linux import processes
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER
from supervisor.spawn.launchpad import wire
from supervisor.spawn.process import LaunchpadLost, Record, SpawnedProcess
from supervisor.spawn.request import SpawnError
from tests.helpers.spawning import (
    FAMILY,
    FAMILY_SIZE,
    PYTHON,
    ROOT,
    WAYS,
    LauncherStage,
    Watched,
    all_ended_within,
    host_command,
    staged,
    started,
    watching,
)
from tests.helpers.stage import eventually
from tests.helpers.stock import only_stock_beneath, stock_of

pytestmark = pytest.mark.slow

# Descendants of a dead child are signalled within 10 ms (spec S4); this much is for a
# machine that is busy with other things.
PATIENCE_S = 30.0

# A child that takes its subreaper flag off, so that its daemon leaves it at once.
RENEGADE = (
    f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 0)\n" + FAMILY
)

# Each of its processes forks as fast as it can, until 200 were made. The child itself
# ends when 60 are there: the sweep races with the rest.
FORK_BOMB = r"""
import os, signal
tickets, seller = os.pipe()
os.write(seller, b"x" * 200)
os.close(seller)
made, tell = os.pipe()
if os.fork():
    for _ in range(60):
        os.read(made, 1)
    os._exit(0)
while os.read(tickets, 1):
    if os.fork() == 0:
        os.setsid()
        os.write(3, b"%d\n" % os.getpid())
        os.write(tell, b"x")
while True:
    signal.pause()
"""


@pytest.fixture(params=WAYS)
async def stage(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[LauncherStage]:
    """A launcher whose children start in one of the two ways."""
    async with started(request.param, tmp_path) as stage:
        yield stage


async def all_ended(watched: list[Watched]) -> None:
    """Wait until each has ended, but not for ever."""
    with trio.fail_after(PATIENCE_S):
        for process in watched:
            await process.ended()


# ---------------------------------------------------------------- a child ends


# attack 28, spec S3
@pytest.mark.parametrize("program", [FAMILY, RENEGADE], ids=["family", "renegade"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
async def test_what_a_child_leaves_is_killed_and_its_siblings_live(
    stage: LauncherStage, program: str, number: int
) -> None:
    sibling, others = await stage.family()
    child, pids = await stage.family(program)
    with watching(others) as spared, watching(pids) as doomed:
        child.send_signal(number)  # SIGUSR1: it exits by itself, with 7
        status = await child.wait_exit()
        assert (status.code, status.signal) in {(7, None), (None, signal.SIGKILL)}
        await child.wait_swept()
        # Waited for above: they are dead by now, not soon.
        assert not any(process.is_alive() for process in doomed)
        assert all(process.is_alive() for process in spared)
        await sibling.end_tree()
        await all_ended(spared)
    await sibling.wait_exit()
    await sibling.wait_swept()
    child.close()
    sibling.close()


# spec S2: the exit is told although a descendant holds descriptor 3
async def test_the_exit_is_seen_while_a_daemon_lives(stage: LauncherStage) -> None:
    child, pids = await stage.family()
    with watching(pids) as family:
        child.send_signal(signal.SIGUSR1)
        assert (await child.wait_exit()).code == 7
        await all_ended(family)
    child.close()


async def test_ending_a_tree_ends_what_is_stopped_or_deaf(stage: LauncherStage) -> None:
    child, pids = await stage.family()
    with watching(pids) as family:
        await child.end_tree()
        await all_ended(family)
    assert (await child.wait_exit()).signal == signal.SIGKILL
    await child.end_tree()  # of the dead: nothing happens
    child.close()


async def test_a_stopped_child_ends(stage: LauncherStage) -> None:
    child, pids = await stage.family()
    child.send_signal(signal.SIGSTOP)
    with watching(pids) as family:
        await child.end_tree()
        await all_ended(family)
    child.close()


async def test_a_signal_reaches_the_child_alone_or_its_tree(
    stage: LauncherStage,
) -> None:
    program = FAMILY.replace("os.execve(", "#").replace(
        "os.kill(os.getpid(), signal.SIGSTOP)", "pass"
    )
    child, pids = await stage.family(program)
    with watching(pids) as (itself, *others):
        child.send_signal(signal.SIGWINCH)  # ignored by all
        await child.signal_tree(signal.SIGUSR1)
        await all_ended([itself, *others])
    assert (await child.wait_exit()).code == 7
    child.close()


# attack 29, attack 28
async def test_a_fork_bomb_is_swept(stage: LauncherStage) -> None:
    ours, theirs = os.pipe()
    argv = (*PYTHON, FORK_BOMB)
    child = await stage.launcher.spawn(stage.request(argv, ((theirs, 3),)))
    os.close(theirs)
    await child.wait_exit()
    async with trio.lowlevel.FdStream(ours) as stream:
        with trio.fail_after(PATIENCE_S):
            said = b"".join([part async for part in stream])  # until nobody holds it
            await child.wait_swept()
    assert len(said.split()) >= 60
    child.close()


# ---------------------------------------------------------------- many


STOCK_DESCRIPTORS = 3
"""Of a child that waits: its pidfd, its line, its pipe of reports."""


def tally(stage: LauncherStage) -> tuple[object, ...]:
    """Holdings of host and launchpad: descriptors, children, table rows."""
    stock = len(stock_of(stage.launchpad))
    return (
        sorted(os.listdir("/proc/self/fd")),
        len(os.listdir(f"/proc/{stage.launchpad}/fd")) - stock * STOCK_DESCRIPTORS,
        only_stock_beneath(stage.launchpad),
        stage.launcher.statistics(),
    )


# I5
async def test_200_children_leave_nothing(stage: LauncherStage) -> None:
    for _ in range(3):
        await stage.output(("/bin/true",))
    while not await stage.launcher.stock():  # somebody waits for the next order
        pass
    before = tally(stage)
    for number in range(200):
        if number % 10 == 0:
            with pytest.raises(SpawnError):
                await stage.launcher.spawn(stage.request(("/missing",)))
        _, status = await stage.output(("/bin/sh", "-c", f"/bin/true & exit {number}"))
        assert status.code == number
    # One for the stock may be under way.
    await eventually(lambda: tally(stage) == before)


async def test_each_of_many_at_once_gets_its_own_end(stage: LauncherStage) -> None:
    codes: dict[int, int | None] = {}

    async def one(number: int) -> None:
        request = stage.request(("/bin/sh", "-c", f"exit {number}"))
        child = await stage.launcher.spawn(request)
        codes[number] = (await child.wait_exit()).code
        await child.wait_swept()
        child.close()

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(one, number)
    assert codes == {number: number for number in range(100)}
    assert stage.launcher.statistics() == {"children": 0}


# ---------------------------------------------------------------- cancellation


async def test_a_cancelled_spawn_leaves_no_child(stage: LauncherStage) -> None:
    ours, theirs = os.pipe()
    request = stage.request(("/bin/sleep", "1000"), ((theirs, 3),))
    in_time: list[SpawnedProcess] = []

    async def spawn() -> None:
        in_time.append(await stage.launcher.spawn(request))

    for step in range(4):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spawn)
                for _ in range(step):  # before it is sent, after, or later
                    await trio.lowlevel.checkpoint()
                scope.cancel()
    for process in in_time:  # where this task had to wait for the processor
        await process.end_tree()
        process.close()
    os.close(theirs)
    async with trio.lowlevel.FdStream(ours) as stream:
        with trio.fail_after(PATIENCE_S):
            assert await stream.receive_some() == b""  # no `sleep` holds the other end
            while stage.launcher.statistics()["children"]:
                await trio.lowlevel.checkpoint()


# The order to end it may not leave for the launchpad: the control socket can be full.
@pytest.mark.parametrize("is_born_first", [False, True])
def test_a_child_that_no_caller_gets_is_killed(is_born_first: bool) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        try:
            pidfd = os.pidfd_open(process.pid)
            record = Record()
            if not is_born_first:
                record.let_go()
            record.take(wire.SPAWNED, [process.pid, 0, (), -1], [pidfd])
            if is_born_first:
                record.let_go()
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(pidfd)
        finally:
            process.kill()


async def test_a_cancelled_launcher_ends_everything(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        request = stage.request(("/bin/true",))
        child, pids = await stage.family()
        with watching(pids) as family:
            stage.scope.cancel()
            with trio.CancelScope(shield=True):
                await all_ended(family)
    with pytest.raises(LaunchpadLost, match="the host is stopping"):
        await stage.launcher.spawn(request)
    with pytest.raises(LaunchpadLost):
        await child.wait_exit()
    child.close()


async def test_a_stopped_launchpad_ends_everything_too(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        child, pids = await stage.family()
        with watching([*pids, stage.launchpad]) as everybody:
            signal.pidfd_send_signal(everybody[-1].pidfd, signal.SIGSTOP)
            stage.scope.cancel()
            with trio.CancelScope(shield=True):
                await all_ended(everybody)
    child.close()


# ---------------------------------------------------------------- the launchpad dies


async def told_lost(child: SpawnedProcess, told: list[LaunchpadLost]) -> None:
    """Wait for the exit of a child whose launchpad is about to die."""
    # Shielded: the nursery is cancelled by the same loss.
    with trio.move_on_after(PATIENCE_S, shield=True):
        try:
            await child.wait_exit()
        except LaunchpadLost as lost:
            told.append(lost)


async def test_when_the_launchpad_is_killed_everything_ends(tmp_path: Path) -> None:
    before = processes.children_of(os.getpid())
    told: list[LaunchpadLost] = []
    with trio.fail_after(PATIENCE_S), pytest.RaisesGroup(LaunchpadLost):
        async with staged(tmp_path) as stage, trio.open_nursery() as nursery:
            child, pids = await stage.family()
            with watching([*pids, stage.launchpad]) as everybody:
                nursery.start_soon(told_lost, child, told)
                signal.pidfd_send_signal(everybody[-1].pidfd, signal.SIGKILL)
                with trio.CancelScope(shield=True):
                    await all_ended(everybody)
    assert [str(lost) for lost in told] == [
        "the launchpad ended unexpectedly: its children are gone"
    ]
    # Reaped too: neither the launchpad nor an orphan is a zombie of the host.
    assert processes.children_of(os.getpid()) == before
    child.close()


# ---------------------------------------------------------------- the host dies


@contextmanager
def running_host(tmp_path: Path, count: int) -> Iterator[tuple[int, list[Watched]]]:
    """A host with `count` families: its pidfd, and every process beneath it."""
    fifo = tmp_path / "said"
    os.mkfifo(fifo)
    command = host_command(fifo, count, (*PYTHON, FAMILY))
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as host:
        pidfd = os.pidfd_open(host.pid)
        text = b""
        with open(fifo, "rb", buffering=0) as said:
            while text.count(b"\n") < count * FAMILY_SIZE + 1:
                text += said.read(65_536)
        pids = [int(line.split()[-1]) for line in text.splitlines()]
        with watching(pids) as everybody:
            assert all(process.is_alive() for process in everybody)
            yield pidfd, everybody
        os.close(pidfd)


def test_a_killed_host_leaves_no_process(tmp_path: Path) -> None:
    # spec: the whole tree is gone within 1 s; 20 families are 60 processes.
    with running_host(tmp_path, 20) as (host, everybody):
        signal.pidfd_send_signal(host, signal.SIGKILL)
        assert all_ended_within(everybody, 1.0)


def test_a_killed_process_group_of_the_host_leaves_no_process(tmp_path: Path) -> None:
    with running_host(tmp_path, 2) as (host, everybody):
        leader = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/self/fdinfo/{host}").read_text().splitlines()
                if line.startswith("Pid:")
            )
        )
        os.killpg(leader, signal.SIGKILL)  # `start_new_session`: only the host's own
        assert all_ended_within(everybody, 1.0)


def test_a_terminated_launchpad_goes_on(tmp_path: Path) -> None:
    with running_host(tmp_path, 1) as (host, everybody):
        *family, launchpad = sorted(
            everybody,
            key=lambda p: Path(f"/proc/{p.pid}/comm").read_text() == "sandhost-pad\n",
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.pidfd_send_signal(launchpad.pidfd, number)
        # It still works: the host's end is what it waits for.
        assert not all_ended_within([launchpad], 0.2)
        assert all(process.is_alive() for process in family)
        signal.pidfd_send_signal(host, signal.SIGKILL)
        assert all_ended_within(everybody, 1.0)
