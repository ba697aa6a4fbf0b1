"""Children that share the launchpad's memory until their exec (ADR 61).

What they find when they run is in `test_launcher.py`, which asks both ways of starting.
"""

import ctypes
import gc
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from supervisor import proctree
from supervisor.launchpad import life, vfork
from supervisor.launchpad.family import Child, Family
from supervisor.launchpad.order import Order
from supervisor.launchpad.vfork import LISTING, CallList, Starter
from tests.helpers.command import sandhost
from tests.helpers.hosts import eventually
from tests.helpers.older import without
from tests.helpers.spawning import PYTHON, Stage, Watched, staged

pytestmark = pytest.mark.slow

IS_X86_64 = os.uname().machine == "x86_64"
only_x86_64 = pytest.mark.skipif(not IS_X86_64, reason="forked on this processor")
only_with_strace = pytest.mark.skipif(
    not shutil.which("strace") or os.geteuid() != 0,
    reason="takes strace, and the right to trace the launchpad",
)

CLONE3, CLOSE_RANGE, MEMFD_CREATE = 435, 436, 319
ENOSYS, EPERM = 38, 1

# Says what it was given, without a limit of its own.
SAY = "import os; print(os.environ['NAME'], os.environ['LONG'])"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A launcher."""
    async with staged(tmp_path) as stage:
        yield stage


@asynccontextmanager
async def traced(pid: int, log: Path, *options: str) -> AsyncIterator[None]:
    """Trace a process, and what it starts from now on."""
    argv = ["strace", "-f", "-o", str(log), "-e", "signal=none", *options]
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


@only_x86_64
@pytest.mark.skipif(
    not shutil.which("as") or not shutil.which("objcopy"), reason="binutils are missing"
)
def test_the_bytes_are_what_the_listing_says(tmp_path: Path) -> None:
    source, made, code = (tmp_path / name for name in ("s", "o", "bin"))
    words = "\n".join(text for _, text in LISTING)
    source.write_text(f".intel_syntax noprefix\n{words}\n")
    subprocess.run(["as", "-o", made, source], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, code], check=True)
    assert code.read_bytes() == bytes.fromhex("".join(code for code, _ in LISTING))


def order(program: bytes, *, umask: int | None = None, limits: int = 0) -> Order:
    """Return an order: the same descriptors each time, as the launchpad gives them."""
    made = Order({"rlimits": None} if limits else {})
    rlimits = tuple((number, 5, 5) for number in range(limits))
    body = (
        program,
        (b"name",),
        {b"A": b"1"},
        (0, 1, 2, 3),
        rlimits,
        umask,
        made.layers,
    )
    made.fill(body, [7, 8, 9, 10, 11])
    made.report = 12
    return made


def calls_of(order: Order, starter: Starter | None = None) -> CallList:
    """Return what the child of an order will do."""
    return CallList(order, (starter or Starter())._steps_of(order))


def test_the_steps_of_a_shape_are_made_once_and_what_differs_each_time() -> None:
    starter = Starter()
    first, again = (calls_of(order(path), starter) for path in (b"/a", b"/b"))
    others = [
        calls_of(order(b"/a", umask=0o77), starter),
        calls_of(order(b"/a", limits=1), starter),
        calls_of(order(b"/a", limits=2), starter),
    ]
    assert again._steps is first._steps
    assert first._calls.raw != again._calls.raw  # where its program stands
    shapes = {id(one._steps) for one in (first, *others)}
    assert len(shapes) == 4
    assert [len(one._steps.stages) for one in (first, *others)] == [11, 12, 12, 13]
    assert dict(others[2].applied)["rlimits"] == "2 set"
    for number in range(vfork._KNOWN):
        calls_of(order(b"/a", umask=number), starter)
    assert len(starter._known) <= vfork._KNOWN


def test_a_child_that_is_starting_keeps_the_limits_that_it_will_set() -> None:
    starter = Starter()
    calls = calls_of(order(b"/a", limits=2), starter)
    (at,) = [
        index
        for index, stage in enumerate(calls._steps.stages)
        if stage == "rlimit" and calls._steps.stages[index - 1] != "rlimit"
    ]
    (address,) = struct.unpack_from("Q", calls._calls, 8 + at * 64 + 24)
    starter._known.clear()
    others = [ctypes.create_string_buffer(b"x" * 31) for _ in range(1000)]
    assert ctypes.string_at(address, 32) == struct.pack("4Q", 5, 5, 5, 5)
    del others


# ADR 61: a list is kept until its child has become its program, or has ended.
def test_who_is_starting_when_the_host_goes_keeps_its_calls() -> None:
    calls = calls_of(order(b"/a"))
    family = Family()
    reader, writer = os.pipe()
    child = Child(life.STARTING, os.getpid(), reader)
    child.calls = calls
    family.enter(child, -1)
    del child
    holders = len(gc.get_referrers(calls))
    family.clear()
    assert len(gc.get_referrers(calls)) == holders
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("at", [0, 4, 10])
def test_the_call_that_failed_is_named(at: int) -> None:
    calls = calls_of(order(b"/a"))
    assert calls.fault() is None
    struct.pack_into("q", calls._calls, 8 + at * 64 + 56, -13)
    assert calls.fault() == (13, calls._steps.stages[at])


@only_x86_64
@only_with_strace
@pytest.mark.parametrize(
    ("layers", "is_shared"),
    [({}, True), ({"rlimits": None}, True), ({"no_new_privs": None}, False)],
)
async def test_only_who_puts_on_no_walls_shares_memory(
    stage: Stage, tmp_path: Path, layers: dict[str, object], is_shared: bool
) -> None:
    log = tmp_path / "log"
    stage.layers = layers
    async with traced(stage.launchpad, log, "-e", "trace=clone,clone3,fork,vfork"):
        process = await stage.launcher.spawn(stage.request(("/bin/true",)))
        assert (await process.wait_exit()).code == 0
        process.close()
    assert log.read_text().count("CLONE_VM") == is_shared


# S2: an exec that hangs hangs alone.
@only_x86_64
@only_with_strace
async def test_who_hangs_before_its_exec_holds_up_nobody_and_can_be_killed(
    stage: Stage, tmp_path: Path
) -> None:
    ours, theirs = os.pipe()
    earlier = await stage.launcher.spawn(stage.request(("/bin/cat",), ((ours, 0),)))
    os.close(ours)
    delay = ("-e", "trace=execve", "-e", "inject=execve:delay_enter=60000000")
    async with trio.open_nursery() as nursery:
        async with traced(stage.launchpad, tmp_path / "log", *delay):
            nursery.start_soon(stage.launcher.spawn, stage.request(("/bin/true",)))
            await eventually(lambda: len(proctree.children_of(stage.launchpad)) == 2)
            os.close(theirs)
            with trio.fail_after(30):
                assert (await earlier.wait_exit()).code == 0
            (hanging,) = set(proctree.children_of(stage.launchpad)) - {earlier.pid}
            watched = Watched(hanging)
            await eventually(lambda: len(stage.launcher.descriptors()) == 4)
            nursery.cancel_scope.cancel()
    with trio.fail_after(30):
        await watched.ended()
    assert len(stage.launcher.descriptors()) == 2
    os.close(watched.pidfd)
    earlier.close()
    after = await stage.launcher.spawn(stage.request(("/bin/true",)))
    assert (await after.wait_exit()).code == 0
    after.close()


@only_x86_64
@only_with_strace
async def test_who_is_killed_before_its_exec_was_born_and_has_ended(
    stage: Stage, tmp_path: Path
) -> None:
    delay = ("-e", "trace=execve", "-e", "inject=execve:delay_enter=60000000")
    ends: list[tuple[int, int | None]] = []

    async def live() -> None:
        process = await stage.launcher.spawn(stage.request(("/bin/true",)))
        ends.append((process.pid, (await process.wait_exit()).signal))
        process.close()

    async with trio.open_nursery() as nursery:
        async with traced(stage.launchpad, tmp_path / "log", *delay):
            nursery.start_soon(live)
            await eventually(lambda: len(stage.launcher.descriptors()) == 4)
            (hanging,) = proctree.children_of(stage.launchpad)
            os.kill(hanging, signal.SIGKILL)
    assert ends == [(hanging, signal.SIGKILL)]


async def test_many_at_once_are_given_what_is_theirs(stage: Stage) -> None:
    said: dict[int, bytes] = {}

    async def one(number: int) -> None:
        env = {"NAME": str(number), "LONG": str(number % 10) * (number * 300)}
        said[number], status = await stage.output((*PYTHON, SAY), env=env)
        assert status.code == 0

    async with trio.open_nursery() as nursery:
        for number in range(1, 65):
            nursery.start_soon(one, number)
    for number, words in said.items():
        name, long = words.decode().split()
        assert (name, long) == (str(number), str(number % 10) * (number * 300))


async def test_who_is_killed_by_another_is_told_of(stage: Stage) -> None:
    process = await stage.launcher.spawn(stage.request(("/bin/sleep", "1000")))
    process.send_signal(signal.SIGKILL)
    assert (await process.wait_exit()).signal == signal.SIGKILL
    process.close()


# attack 6: the number of a descriptor that is to follow is another's target
async def test_where_descriptors_are_in_the_way_the_child_has_its_own_all_the_same(
    stage: Stage,
) -> None:
    fds = tuple((stage.null, number) for number in range(3, 40))
    count = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[-2])"
    written, status = await stage.output((*PYTHON, count), fds)
    assert (written, status.code) == (b"39\n", 0)


@only_x86_64
@pytest.mark.parametrize(
    ("number", "answer"),
    [(CLONE3, ENOSYS), (CLOSE_RANGE, ENOSYS), (MEMFD_CREATE, EPERM)],
)
def test_where_it_cannot_be_done_a_child_is_forked(number: int, answer: int) -> None:
    options = ("--sandbox", "none")
    for _ in range(2):
        told = sandhost("run", *options, "echo", "x", wrapper=without(number, answer))
        assert (told.out, told.err, told.status) == (b"x\n", b"", 0)
