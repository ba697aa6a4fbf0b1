"""A child whose exec is under way when the launchpad tells of it (ADR 74).

The launchpad is played by the test, so that what comes first is the test's to choose; the real one
is in `test_vfork.py` and `test_launcher.py`.
"""

import _socket
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from supervisor import launcher
from supervisor.launcher import SPAWNS_UNDER_WAY, Launcher
from supervisor.launchpad import wire
from supervisor.launchpad.start import LaunchpadProcess
from supervisor.spawn_request import SpawnError, SpawnRequest
from supervisor.spawned import ExitStatus, LaunchpadLost, SpawnedProcess
from tests.helpers.hosts import eventually
from tests.helpers.leaks import open_here

PID, CREATE_TIME = 4711, 815
APPLIED = (("session", "own"),)
REFUSED = (errno.EACCES, "exec", b"why")


class Played:
    """A launcher, and the other end of its control socket.

    Attributes:
        launcher: it runs.
        pad: the launchpad's end.
        report: the end of the pipe that the child has; -1 when it was closed.
        reader: the other end, which a launchpad keeps as well; likewise.
    """

    def __init__(self, launcher: Launcher, pad: _socket.socket) -> None:
        self.launcher = launcher
        self.pad = pad
        self.report = -1
        self.reader = -1
        self._born: list[SpawnedProcess | BaseException] = []

    async def ask(self) -> None:
        """Ask for a child, and keep what comes of it."""
        cwd = os.open("/", os.O_PATH | os.O_CLOEXEC)
        request = SpawnRequest("/bin/true", ("true",), {}, cwd, ())
        try:
            self._born.append(await self.launcher.spawn(request))
        except (SpawnError, LaunchpadLost) as why:
            self._born.append(why)
        finally:
            os.close(cwd)

    async def heard(self) -> int:
        """Take the order; return its number."""
        while True:
            try:
                received = wire.receive_message(self.pad)
            except BlockingIOError:
                await trio.lowlevel.checkpoint()
                continue
            assert received is not None
            (kind, ident, *_), fds = received
            for fd in fds:
                os.close(fd)
            if kind == wire.SPAWN:
                return int(ident)

    def tell_begun(self, ident: int, fds: int = 2) -> None:
        """Say that it has begun, with so many of the descriptors."""
        ours, self.report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pidfd = os.pidfd_open(os.getpid())
        facts = (PID, CREATE_TIME, APPLIED, -1)
        wire.send_message(self.pad, (wire.BEGUN, ident, *facts), (pidfd, ours)[:fds])
        os.close(pidfd)
        self.reader = ours

    def tell_failed(self, ident: int) -> None:
        """Say that it is nothing."""
        wire.send_message(self.pad, (wire.FAILED, ident, *REFUSED))

    def close_report(self, said: bytes = b"") -> None:
        """End its pipe, as an exec does, or as who has failed."""
        if said:
            os.write(self.report, said)
        os.close(self.report)
        self.report = -1

    async def outcome(self) -> SpawnedProcess | BaseException:
        """Wait for what `ask` has got."""
        await eventually(lambda: bool(self._born))
        return self._born.pop()


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    async with playing() as played:
        yield played


@asynccontextmanager
async def playing() -> AsyncIterator[Played]:
    """Run a launcher whose launchpad is the test; all it held is closed at the end."""
    kinds = ("socket:", "pipe:", "anon_inode:[pidfd]")
    before = open_here(*kinds)
    ours, pad = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # It ends by itself.
    pid = os.posix_spawn("/bin/true", ["true"], {})  # noqa: ASYNC221
    process = LaunchpadProcess(pid, os.pidfd_open(pid), ours)  # type: ignore[arg-type]
    launcher = Launcher(process)
    async with trio.open_nursery() as nursery:
        await nursery.start(launcher.run)
        scene = Played(launcher, pad)
        yield scene
        nursery.cancel_scope.cancel()
    pad.close()
    for fd in (scene.report, scene.reader):
        if fd >= 0:
            os.close(fd)
    assert open_here(*kinds) <= before
    with pytest.raises(ChildProcessError):  # the launcher has waited for it
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222


async def begun(played: Played, nursery: trio.Nursery, fds: int = 2) -> int:
    """Let a child be asked for and begin."""
    nursery.start_soon(played.ask)
    ident = await played.heard()
    played.tell_begun(ident, fds)
    return ident


async def test_it_is_there_when_its_pipe_ends_and_not_before(
    played: Played, nursery: trio.Nursery
) -> None:
    await begun(played, nursery)
    await eventually(lambda: len(played.launcher.descriptors()) == 4)
    await trio.sleep(0.1)
    assert not played._born
    assert not played.launcher.is_at_rest
    played.close_report()
    process = await played.outcome()
    assert isinstance(process, SpawnedProcess)
    assert (process.pid, process.create_time) == (PID, CREATE_TIME)
    assert process.applied == APPLIED
    assert len(played.launcher.descriptors()) == 2
    process.close()


# An exec on a file system that does not answer: nobody else waits for that.
async def test_execs_that_hang_hang_alone(
    played: Played, nursery: trio.Nursery
) -> None:
    held: list[int] = []
    with trio.fail_after(10):
        for _ in range(SPAWNS_UNDER_WAY + 1):
            await begun(played, nursery)
            held += [played.report, played.reader]
    assert not played._born
    assert not played.launcher.is_at_rest
    played.report = played.reader = -1
    for fd in held:
        os.close(fd)
    await eventually(lambda: len(played._born) == SPAWNS_UNDER_WAY + 1)
    for process in played._born:
        assert isinstance(process, SpawnedProcess)
        process.close()
    assert played.launcher.is_at_rest


# Likewise of one in walls, which is told of when it is its program.
async def test_starts_of_which_nothing_is_heard_keep_others_for_a_moment(
    played: Played, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "SPAWN_TURN_S", 0.5)
    for _ in range(SPAWNS_UNDER_WAY + 1):
        nursery.start_soon(played.ask)
    with trio.fail_after(10):
        asked = [await played.heard() for _ in range(SPAWNS_UNDER_WAY)]
        begun_s = trio.current_time()
        asked.append(await played.heard())
    assert trio.current_time() - begun_s > 0.3
    for ident in asked:
        played.tell_failed(ident)
    await eventually(lambda: len(played._born) == SPAWNS_UNDER_WAY + 1)
    assert played.launcher.is_at_rest


@pytest.mark.parametrize("order", ["byte first", "word first"])
async def test_one_that_comes_to_nothing_is_told_with_the_reason(
    order: str, played: Played, nursery: trio.Nursery
) -> None:
    ident = await begun(played, nursery)
    if order == "word first":
        played.tell_failed(ident)
        await trio.testing.wait_all_tasks_blocked()
    played.close_report(b"x")
    if order == "byte first":
        await trio.testing.wait_all_tasks_blocked()
        played.tell_failed(ident)
    why = await played.outcome()
    assert isinstance(why, SpawnError)
    assert (why.errno, why.stage) == REFUSED[:2]
    assert played.launcher.statistics() == {"children": 0}


# Killed between the call that failed and its word of that: it was taken for a program.
async def test_one_that_is_refused_when_somebody_has_it_has_ended(
    played: Played, nursery: trio.Nursery
) -> None:
    ident = await begun(played, nursery)
    played.close_report()
    process = await played.outcome()
    assert isinstance(process, SpawnedProcess)
    ends: list[bool] = []
    process.at_exit(lambda: ends.append(True))
    played.tell_failed(ident)
    with trio.fail_after(10):
        await process.wait_swept()
        assert await process.wait_exit_soon() == ExitStatus()
    assert ends == [True]
    process.close()


@pytest.mark.parametrize("fds", [0, 1])
async def test_a_host_that_may_open_no_more_has_no_child(
    fds: int, played: Played, nursery: trio.Nursery
) -> None:
    await begun(played, nursery, fds)
    why = await played.outcome()
    assert isinstance(why, SpawnError)
    assert (why.errno, why.stage) == (errno.EMFILE, "pidfd")


@pytest.mark.parametrize("turns", range(6))
async def test_who_is_cancelled_meanwhile_closes_both(
    turns: int, played: Played
) -> None:
    async with trio.open_nursery() as nursery:
        await begun(played, nursery)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    # What was on its way comes to nobody.
    await eventually(lambda: len(played.launcher.descriptors()) == 2)
    assert not played._born


# What epoll knows of a descriptor lives as long as anybody has the same open file.
async def test_what_ends_later_is_not_taken_for_who_has_the_number_then(
    played: Played,
) -> None:
    async with trio.open_nursery() as nursery:
        await begun(played, nursery)
        await eventually(lambda: len(played.launcher.descriptors()) == 4)
        await trio.testing.wait_all_tasks_blocked()
        number = played.launcher.descriptors()[2]
        nursery.cancel_scope.cancel()
    kept, silent = os.pipe()
    reused = fcntl.fcntl(kept, fcntl.F_DUPFD_CLOEXEC, number)
    assert reused == number
    with trio.move_on_after(0.2) as patience:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.wait_readable, reused)
            await trio.testing.wait_all_tasks_blocked()
            played.close_report()
    assert patience.cancelled_caught
    for fd in (kept, silent, reused):
        os.close(fd)


async def test_a_launchpad_that_is_lost_meanwhile_is_told_of() -> None:
    with pytest.RaisesGroup(LaunchpadLost):
        async with playing() as played, trio.open_nursery() as nursery:
            ident = await begun(played, nursery)
            assert ident == 1
            await eventually(lambda: len(played.launcher.descriptors()) == 4)
            os.write(played.report, b"x")  # its word follows, but nobody says it
            played.pad.close()
            await trio.sleep_forever()
