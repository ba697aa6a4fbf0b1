"""A start that takes long.

It holds up nobody else, and what has not begun can be ended.
"""

import _socket
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from hostlib.linux import processes
from supervisor.spawn import launcher
from supervisor.spawn.launcher import SPAWNS_UNDER_WAY, Launcher
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.start import LaunchpadProcess
from supervisor.spawn.request import SpawnError, SpawnRequest
from tests.helpers.spawning import LauncherStage, Watched, staged
from tests.helpers.stage import eventually

pytestmark = pytest.mark.slow

only_with_strace = pytest.mark.skipif(
    not shutil.which("strace") or os.geteuid() != 0,
    reason="takes strace, and the right to trace the launchpad",
)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[LauncherStage]:
    """A launcher."""
    async with staged(tmp_path) as stage:
        yield stage


@asynccontextmanager
async def hanging_execs(pid: int) -> AsyncIterator[None]:
    """Let each execve(2) of what a process forks from now on take a minute."""
    inject = ("-e", "trace=execve", "-e", "inject=execve:delay_enter=60000000")
    argv = ["strace", "-f", "-o", os.devnull, "-e", "signal=none", *inject]
    # From this thread: in those that wait for file systems, signals are blocked.
    process = subprocess.Popen(  # noqa: ASYNC220
        [*argv, "-p", str(pid)], stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        said = await trio.to_thread.run_sync(process.stderr.readline)
        assert b"attached" in said
        yield
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.communicate)


# spec S2: an exec that hangs hangs alone.
@only_with_strace
async def test_an_exec_that_hangs_holds_up_no_other_and_can_be_killed(
    stage: LauncherStage,
) -> None:
    ours, theirs = os.pipe()
    earlier = await stage.launcher.spawn(stage.request(("/bin/cat",), ((ours, 0),)))
    os.close(ours)
    async with trio.open_nursery() as nursery:
        async with hanging_execs(stage.launchpad):
            nursery.start_soon(stage.launcher.spawn, stage.request(("/bin/true",)))
            await eventually(lambda: len(processes.children_of(stage.launchpad)) == 2)
            os.close(theirs)
            with trio.fail_after(30):
                assert (await earlier.wait_exit()).code == 0
            (hanging,) = set(processes.children_of(stage.launchpad)) - {earlier.pid}
            watched = Watched(hanging)
            assert not stage.launcher.is_at_rest
            nursery.cancel_scope.cancel()
    with trio.fail_after(30):
        await watched.ended()
    os.close(watched.pidfd)
    earlier.close()
    _, status = await stage.output(("/bin/true",))
    assert status.code == 0


@only_with_strace
async def test_a_child_that_is_killed_before_its_exec_was_born_and_has_ended(
    stage: LauncherStage,
) -> None:
    ends: list[tuple[int, int | None]] = []

    async def live() -> None:
        process = await stage.launcher.spawn(stage.request(("/bin/true",)))
        ends.append((process.pid, (await process.wait_exit()).signal))
        process.close()

    async with trio.open_nursery() as nursery:
        async with hanging_execs(stage.launchpad):
            nursery.start_soon(live)
            await eventually(lambda: bool(processes.children_of(stage.launchpad)))
            (hanging,) = processes.children_of(stage.launchpad)
            await eventually(lambda: waits_for_exec(hanging))
            os.kill(hanging, signal.SIGKILL)
    assert ends == [(hanging, signal.SIGKILL)]


def waits_for_exec(pid: int) -> bool:
    """Whether a process is where it calls execve(2), number 59 or 221 (proc(5))."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in {"59", "221"}


# The launchpad is played by the test: it takes orders, and says nothing for long.
async def test_starts_of_which_nothing_is_heard_keep_others_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "SPAWN_TURN_S", 0.5)
    refused: list[SpawnError] = []
    ours, pad = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    pid = os.posix_spawn("/bin/true", ["true"], {})  # noqa: ASYNC221 - ends by itself
    process = LaunchpadProcess(pid, os.pidfd_open(pid), ours)  # type: ignore[arg-type]
    asker = Launcher(process)

    async def ask() -> None:
        cwd = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            await asker.spawn(SpawnRequest("/bin/true", ("true",), {}, cwd, ()))
        except SpawnError as why:
            refused.append(why)
        finally:
            os.close(cwd)

    async with trio.open_nursery() as nursery:
        await nursery.start(asker.run)
        for _ in range(SPAWNS_UNDER_WAY + 1):
            nursery.start_soon(ask)
        with trio.fail_after(10):
            asked = [await heard(pad) for _ in range(SPAWNS_UNDER_WAY)]
            begun_s = trio.current_time()
            asked.append(await heard(pad))
        assert trio.current_time() - begun_s > 0.3
        for ident in asked:
            wire.send_message(pad, (wire.FAILED, ident, errno.EACCES, "exec", b"why"))
        await eventually(lambda: len(refused) == SPAWNS_UNDER_WAY + 1)
        assert asker.is_at_rest
        nursery.cancel_scope.cancel()
    pad.close()


async def heard(pad: _socket.socket) -> int:
    """Take an order; return its number."""
    while True:
        try:
            received = wire.receive_message(pad)
        except BlockingIOError:
            await trio.lowlevel.checkpoint()
            continue
        assert received is not None
        (kind, ident, *_), fds = received
        for fd in fds:
            os.close(fd)
        assert kind == wire.SPAWN
        return int(ident)
