"""A child that stands by: whose it is, what it holds, and that nobody's order is lost.

What it finds when it runs, and how it ends, is in `test_launcher.py` and
`test_launcher_ends.py`, which ask all ways of starting. What an order looks like is in
`test_vfork.py`.
"""

import _socket
import ctypes
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from supervisor import proctree
from supervisor.launcher import Launcher
from supervisor.launchpad import calls, life, standby, vfork
from supervisor.launchpad.family import Child
from supervisor.launchpad.standby import FIRST_RECEIVED, MOST_RECEIVED, ORDER_BYTES
from supervisor.launchpad.vfork import Starter
from supervisor.spawn_request import SpawnError, SpawnRequest
from supervisor.spawned import LaunchpadLost, SpawnedProcess
from supervisor.standby import Offers
from tests.helpers.hosts import Stage as HostStage
from tests.helpers.hosts import eventually, opened
from tests.helpers.spawning import (
    Stage,
    Watched,
    accustomed,
    is_offered,
    offered,
    staged,
)
from tests.helpers.stock import names_beneath

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="forked on others"),
]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A launcher for whose next child somebody stands by."""
    async with staged(tmp_path) as stage:
        await accustomed(stage)
        await offered(stage.launcher)
        yield stage


@pytest.fixture
async def host_stage(tmp_path: Path) -> AsyncIterator[HostStage]:
    """A host."""
    async with opened(tmp_path) as host_stage:
        yield host_stage


async def waiting(stage: Stage) -> int:
    """Return the pid of who stands by."""
    await offered(stage.launcher)
    ((pid, create_time),) = await stage.launcher.stock()
    # It is offered before it has made its first calls, none of which waits.
    await eventually(lambda: state_of(pid) == "S")
    assert proctree.read_parent_and_start(pid) == (stage.launchpad, create_time)
    return pid


def state_of(pid: int) -> str:
    """Return what a process does (proc(5)): S it waits, T it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def stopped(pid: int) -> None:
    """Stop a process: what it waits for meanwhile it takes up to the moment it stops."""
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: state_of(pid) == "T")


async def born(stage: Stage, *argv: str) -> SpawnedProcess:
    """Start a child, without waiting for anybody who stands by."""
    return await stage.launcher.spawn(stage.request(argv))


def held_by(pid: int) -> dict[int, str]:
    """Return what each descriptor of a process is."""
    places = Path(f"/proc/{pid}/fd").iterdir()
    return {int(at.name): str(at.readlink()).partition(":")[0] for at in places}


async def buried(process: SpawnedProcess) -> int | None:
    """Wait for the end of a child; return what it exited with."""
    status = await process.wait_exit()
    await process.wait_swept()
    process.close()
    return status.code


async def test_who_stood_by_is_the_next_child_each_time(stage: Stage) -> None:
    for code in range(5):
        pid = await waiting(stage)
        process = await born(stage, "/bin/sh", "-c", f"exit {code}")
        assert process.pid == pid
        assert await buried(process) == code
    assert stage.launcher.statistics() == {"children": 0}


async def test_a_host_with_one_child_has_nobody_stand_by(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        assert await buried(await born(stage, "/bin/true")) == 0
        assert not await stage.launcher.stock()
        assert len(stage.launcher.descriptors()) == 2


async def test_it_holds_nothing_but_its_line_and_its_pipe(stage: Stage) -> None:
    pid = await waiting(stage)
    held = held_by(pid)
    standard = {number: held.pop(number) for number in range(3)}
    assert {standard[0], standard[1]} == {"/dev/null"}
    # In the way of what an order puts there, so that none of it is in the way of that.
    taken = {number: held.pop(number) for number in range(3, FIRST_RECEIVED)}
    assert set(taken.values()) == {"/dev/null"}
    assert sorted(held.values()) == ["pipe", "socket"]
    assert min(held) >= FIRST_RECEIVED + MOST_RECEIVED
    assert names_beneath(stage.launchpad) == {pid: "sandhost-stock"}
    assert os.getsid(pid) == pid


# S2: nothing of the host's survives it.
async def test_it_dies_with_the_launchpad(tmp_path: Path) -> None:
    lost = None
    try:
        async with staged(tmp_path) as stage:
            await accustomed(stage)
            lost = Watched(await waiting(stage))
            os.kill(stage.launchpad, signal.SIGKILL)
            await trio.sleep_forever()
    except* LaunchpadLost:
        pass
    assert lost is not None
    with trio.fail_after(30):
        await lost.ended()
    os.close(lost.pidfd)


async def test_one_that_is_killed_while_it_waits_is_missed_by_nobody(
    stage: Stage,
) -> None:
    for _ in range(3):
        pid = await waiting(stage)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: pid not in names_beneath(stage.launchpad))  # noqa: B023
        process = await born(stage, "/bin/true")
        assert process.pid != pid
        assert await buried(process) == 0
    assert stage.launcher.statistics() == {"children": 0}


# Nothing acknowledged is lost: its line ends with ECONNRESET.
async def test_an_order_that_was_not_taken_is_another_childs(stage: Stage) -> None:
    pid = await waiting(stage)
    await stopped(pid)
    ours, theirs = os.pipe()
    request = stage.request(("/bin/echo", "once"), ((theirs, 1),))
    processes: list[SpawnedProcess] = []

    async def ask() -> None:
        processes.append(await stage.launcher.spawn(request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await eventually(lambda: len(stage.launcher.descriptors()) == 5)
        await trio.testing.wait_all_tasks_blocked()
        assert not processes
        os.kill(pid, signal.SIGKILL)
    os.close(theirs)
    (process,) = processes
    assert process.pid != pid
    async with trio.lowlevel.FdStream(ours) as stream:
        assert b"".join([part async for part in stream]) == b"once\n"
    assert await buried(process) == 0
    await eventually(lambda: stage.launcher.statistics() == {"children": 0})
    assert len(stage.launcher.descriptors()) == 3


async def test_who_is_cancelled_before_it_takes_its_order_leaves_nothing(
    stage: Stage,
) -> None:
    pid = await waiting(stage)
    watched = Watched(pid)
    await stopped(pid)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.launcher.spawn, stage.request(("/bin/true",)))
        await eventually(lambda: len(stage.launcher.descriptors()) == 5)
        nursery.cancel_scope.cancel()
    with trio.fail_after(30):
        await watched.ended()
    os.close(watched.pidfd)
    await eventually(lambda: stage.launcher.statistics() == {"children": 0})
    assert len(stage.launcher.descriptors()) == 3
    assert await buried(await born(stage, "/bin/true")) == 0


async def test_of_one_that_stays_the_launchpad_is_told_or_hears_with_the_next(
    stage: Stage,
) -> None:
    await waiting(stage)
    stays = [await born(stage, "/bin/sleep", "1000")]
    await stage.launcher.stock()  # what the launchpad was told is done
    assert not is_offered(stage.launcher)
    stays[0].will_stay()
    await eventually(lambda: is_offered(stage.launcher))
    stays.append(await born(stage, "/bin/sleep", "1000"))
    assert not is_offered(stage.launcher)
    stays.append(await born(stage, "/bin/sleep", "1000"))
    await eventually(lambda: is_offered(stage.launcher))
    stood = [process._ident < 0 for process in stays]
    assert stood == [True, True, False]
    for process in stays:
        process.send_signal(signal.SIGKILL)
        await buried(process)


async def test_children_of_a_host_are_replaced_as_they_stay(
    host_stage: HostStage,
) -> None:
    children, launcher = [], host_stage.host.launcher
    for _ in range(5):
        children.append(await host_stage.puppet())
        await eventually(
            lambda: launcher._standby._offers is None or is_offered(launcher)
        )
    idents = [puppet.child.process._ident for puppet in children]  # type: ignore[union-attr]
    assert [ident < 0 for ident in idents] == [False, False, True, True, True]


# 3.1: what a profile asks for is put on, whoever waits for another order.
async def test_an_order_for_walls_is_none_for_who_stands_by(stage: Stage) -> None:
    stage.layers = {"no_new_privs": None}
    program = ("/bin/grep", "NoNewPrivs", "/proc/self/status")
    written, _ = await stage.output(program)
    assert written == b"NoNewPrivs:\t1\n"
    assert is_offered(stage.launcher)


@pytest.mark.parametrize("beyond", [0, 1])
async def test_an_order_may_be_as_long_as_its_room(stage: Stage, beyond: int) -> None:
    pid = await waiting(stage)

    def request(length: int) -> SpawnRequest:
        return stage.request(("/bin/sh", "-c", 'exit "${#1}"', "sh", "x" * length))

    made = standby_order(stage.launcher, request(0))
    process = await stage.launcher.spawn(request(ORDER_BYTES - made + beyond))
    assert (process.pid == pid) == (not beyond)
    assert await buried(process) == (ORDER_BYTES - made + beyond) % 256


def standby_order(launcher: Launcher, request: SpawnRequest) -> int:
    """Return how many bytes an order takes."""
    return len(launcher._standby._orders.of(request, 1 << 40)[0])


async def test_a_request_that_is_none_leaves_whoever_stands_by(stage: Stage) -> None:
    pid = await waiting(stage)
    with pytest.raises(SpawnError, match="NUL"):
        await born(stage, "/bin/true", "a\0b")
    process = await born(stage, "/bin/true")
    assert process.pid == pid
    await buried(process)


async def test_an_order_that_is_too_long_leaves_it_to_the_next(stage: Stage) -> None:
    pid = await waiting(stage)
    long = ("/bin/sh", "-c", "exit 3", "x" * ORDER_BYTES)
    process = await born(stage, *long)
    assert process.pid != pid
    assert await buried(process) == 3
    assert is_offered(stage.launcher)
    assert len(stage.launcher.descriptors()) == 5  # it was looked at
    process = await born(stage, "/bin/true")
    assert process.pid == pid
    assert await buried(process) == 0


@pytest.mark.parametrize("number", [FIRST_RECEIVED - 1, FIRST_RECEIVED])
async def test_an_order_whose_numbers_do_not_fit_is_anothers(
    stage: Stage, number: int
) -> None:
    pid = await waiting(stage)
    request = stage.request(("/bin/true",), ((stage.null, number),))
    process = await stage.launcher.spawn(request)
    assert (process.pid == pid) == (number < FIRST_RECEIVED)
    assert await buried(process) == 0


async def test_as_many_descriptors_as_fit_arrive_where_they_belong(
    stage: Stage,
) -> None:
    """All that a target may be, from sources in any order."""
    await waiting(stage)
    ours, theirs = os.pipe()
    targets = [*range(FIRST_RECEIVED - 1, 2, -1), 0, 2]
    fds = (*((stage.null, target) for target in targets), (theirs, 1))
    request = stage.request(("/bin/ls", "/proc/self/fd"), fds)
    process = await stage.launcher.spawn(request)
    assert process._ident < 0
    os.close(theirs)
    async with trio.lowlevel.FdStream(ours) as stream:
        said = b"".join([part async for part in stream])
    # The directory that is listed has the next number.
    assert sorted(map(int, said.split())) == list(range(FIRST_RECEIVED + 1))
    assert await buried(process) == 0


async def test_who_looks_no_more_for_it_lets_it_end(stage: Stage) -> None:
    pid = await waiting(stage)
    watched = Watched(pid)
    stage.launcher._standby.close()
    with trio.fail_after(30):
        await watched.ended()
    os.close(watched.pidfd)
    await eventually(lambda: not proctree.children_of(stage.launchpad))
    await accustomed(stage)
    assert await waiting(stage) != pid


def waits_in_vain(result: int, failure: tuple[object, ...] | None) -> bool:
    """Whether nobody stands by any more after one that has ended so."""
    memory = ctypes.create_string_buffer(struct.pack("q", result) + b"\0")
    ours, theirs = os.pipe()
    child = Child(life.STANDING_BY, os.getpid(), ours)
    child.orders_at = ctypes.addressof(memory) + 8
    child.failure = failure
    kept = standby.Standby(Starter())
    pair = _socket.socketpair()
    kept.begin(pair[0].detach())
    kept.child = child
    kept.is_over(child)
    in_vain = not kept.is_wanted
    kept.end()
    child.let_go()
    pair[1].close()
    os.close(ours)
    os.close(theirs)
    return in_vain


def test_where_nobody_can_wait_nobody_is_started_again_and_again() -> None:
    assert waits_in_vain(0, (1, "session"))
    assert waits_in_vain(-38, (38, "order"))
    assert not waits_in_vain(0, None)  # killed by somebody
    assert not waits_in_vain(200, None)
    assert not waits_in_vain(200, (2, "exec"))


def test_where_no_process_is_to_be_had_nobody_stands_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_starter: Starter) -> None:
        raise OSError(11, "no process")

    kept = standby.Standby(Starter())
    pair = _socket.socketpair()
    kept.begin(pair[0].detach())
    monkeypatch.setattr(standby, "stand_by", refuse)
    with pytest.raises(OSError, match="no process"):
        kept.make()
    assert not kept.is_wanted
    assert pair[1].recv(1) == b""  # the host hears of it when it looks
    pair[1].close()


def test_a_host_that_may_open_no_more_has_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.pipe()
    kept = Offers()
    kept.asked()
    line = kept.asked()
    assert line is not None
    line.close()
    received = ((-1, 1, 1, 4096), [ours])
    monkeypatch.setattr("supervisor.launchpad.wire.receive_message", lambda _: received)
    request = SpawnRequest("/x", ("x",), {}, cwd_fd=0, fds=((0, 0),))
    assert kept.take(request) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
    kept.close()
    os.close(theirs)


def test_what_is_kept_open_is_no_more_than_was_said() -> None:
    made = calls.keep((70, 71), 5)
    ranges = [call[1:3] for call in struct.iter_unpack("7Qq", made) if call[0] == 436]
    assert ranges == [(3, 69), (72, calls.LAST_FD)]
    made = calls.keep((70, 75), 3)
    ranges = [call[1:3] for call in struct.iter_unpack("7Qq", made) if call[0] == 436]
    assert ranges == [(3, 69), (71, 74), (76, calls.LAST_FD)]


async def test_an_end_of_descriptors_as_one_is_to_stand_by_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "no descriptor")

    async with staged(tmp_path) as stage:
        assert await buried(await born(stage, "/bin/true")) == 0
        with monkeypatch.context() as patch:
            patch.setattr("supervisor.standby._socket.socketpair", refuse)
            for _ in range(2):
                assert await buried(await born(stage, "/bin/true")) == 0
        assert stage.launcher.statistics() == {"children": 0}
        await accustomed(stage)


async def test_a_program_is_not_said_to_wait(stage: Stage) -> None:
    pid = await waiting(stage)
    process = await born(stage, "/bin/sleep", "1000")
    assert process.pid == pid
    assert pid not in {waits for waits, _ in await stage.launcher.stock()}
    process.send_signal(signal.SIGKILL)
    await buried(process)


def test_where_children_are_forked_nobody_is_wanted() -> None:
    starter = Starter()
    starter._start = None
    kept = standby.Standby(starter)
    pair = _socket.socketpair()
    kept.begin(pair[0].detach())
    assert kept.make() is None
    assert not kept.is_wanted
    assert pair[1].recv(1) == b""  # where it would have been offered is closed
    pair[1].close()


def test_all_that_one_needs_is_in_its_memory() -> None:
    room = standby._calls(Starter(), 70, 71)
    made, orders_at = room
    end = orders_at + ORDER_BYTES + standby._HEADER.size + standby._IOVEC.size
    assert end + standby._RIGHTS_BYTES <= made.address + vfork.ROOM_BYTES


def test_who_is_told_of_where_nobody_looks_is_the_last() -> None:
    kept = standby.Standby(Starter())
    pair = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    kept.begin(pair[0].detach())
    pair[1].close()
    ours, theirs = os.pipe()
    child = Child(life.STANDING_BY, os.getpid(), ours)
    kept.tell(child)
    assert child.pidfd == -1
    assert not kept.is_wanted
    os.close(ours)
    os.close(theirs)


async def test_where_nobody_is_offered_it_is_asked_again_and_less_often(
    stage: Stage,
) -> None:
    offers = stage.launcher._standby
    theirs = offers._offers
    assert theirs is not None
    theirs.shutdown(_socket.SHUT_RD)  # as if the launchpad had closed its end
    while stage.launcher._standby._offers is theirs:
        assert await buried(await born(stage, "/bin/true")) == 0
    asked = 0
    while offers._offers is None:
        asked += 1
        assert await buried(await born(stage, "/bin/true")) == 0
    assert asked == 3  # and the one that found it gone
    await waiting(stage)


async def test_of_one_child_the_launchpad_is_told_once() -> None:
    offers = Offers()
    offers.will_stay(3)  # has not stood by
    offers.will_stay(-7)
    with trio.fail_after(30):
        assert await offers.has_stayed() == -7
    with trio.move_on_after(0.1) as patience:
        await offers.has_stayed()
    assert patience.cancelled_caught


async def test_where_the_control_socket_is_full_it_is_asked_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path) as stage:
        with monkeypatch.context() as patch:
            patch.setattr(stage.launcher, "_mention", lambda *_: False)
            for _ in range(3):
                assert await buried(await born(stage, "/bin/true")) == 0
            assert stage.launcher._standby._offers is None
        await accustomed(stage)
        await waiting(stage)
