"""Children that share the launchpad's memory until their exec (ADR 61).

What they find when they run is in `test_launcher.py`, which asks both ways of starting.
"""

import ctypes
import gc
import os
import select
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
from supervisor.launchpad import calls, life, vfork
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
DUP2, EXECVE, FCHDIR, UMASK, PRLIMIT64 = 33, 59, 81, 95, 302
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
    return made


def list_of(order: Order, starter: Starter | None = None) -> CallList:
    """Return what the child of an order will do."""
    return (starter or Starter())._list_of(order, 12)


def made_of(found: CallList) -> list[tuple[int, ...]]:
    """Return the calls of a list, as far as its exec: number, arguments, result."""
    calls = struct.iter_unpack("7Qq", found.memory.raw[8:][: 64 * 64])
    made = []
    for call in calls:
        made.append(call)
        if call[0] == EXECVE:
            break
    return made


def strings_at(address: int) -> list[bytes]:
    """Return the texts that a list of pointers, ended by a 0, points at."""
    found = []
    while pointer := ctypes.c_uint64.from_address(address).value:
        found.append(ctypes.string_at(pointer))
        address += 8
    return found


def test_a_list_says_what_its_order_says() -> None:
    asked = order(b"/program", umask=0o77, limits=2)
    asked.argv, asked.env = (b"name", b"", b"x y"), {b"A": b"1", b"B": b""}
    found = list_of(asked)
    made = made_of(found)
    assert struct.unpack_from("Q", found.memory) == (12,)
    assert [call[0] for call in made].count(DUP2) == 4
    assert (FCHDIR, 7) in {call[:2] for call in made}
    assert (UMASK, 0o77) in {call[:2] for call in made}
    assert [call[1:3] for call in made if call[0] == DUP2] == [
        (8, 0), (9, 1), (10, 2), (11, 3)
    ]  # fmt: skip
    limits = [call[1:4] for call in made if call[0] == PRLIMIT64]
    assert [(who, which) for who, which, _ in limits] == [(0, 0), (0, 1)]
    for _, _, address in limits:
        assert ctypes.string_at(address, 16) == struct.pack("2Q", 5, 5)
    number, path, argv, environ, *_ = made[-1]
    assert (number, ctypes.string_at(path)) == (EXECVE, b"/program")
    assert strings_at(argv) == [b"name", b"", b"x y"]
    assert strings_at(environ) == [b"A=1", b"B="]
    assert dict(calls.applied(asked))["rlimits"] == "2 set"


def test_no_limit_is_said_as_the_kernel_has_it() -> None:
    asked = order(b"/a", limits=1)
    asked.rlimits = ((0, -1, -1),)
    (limit,) = [call for call in made_of(list_of(asked)) if call[0] == PRLIMIT64]
    assert ctypes.string_at(limit[3], 16) == b"\xff" * 16


def test_an_order_of_the_same_shape_has_its_own_program_and_limits() -> None:
    starter = Starter()
    first, again = (list_of(order(path), starter) for path in (b"/a", b"/b"))
    assert len(starter._shapes._known) == 1
    programs = [ctypes.string_at(made_of(found)[-1][1]) for found in (first, again)]
    assert programs == [b"/a", b"/b"]
    limited = made_of(list_of(order(b"/a", limits=2), starter))
    assert [call[0] for call in limited].count(PRLIMIT64) == 2
    masked = made_of(list_of(order(b"/a", umask=0), starter))
    assert UMASK in {call[0] for call in masked}
    for number in range(calls._KNOWN):
        list_of(order(b"/a", umask=number), starter)
    assert len(starter._shapes._known) <= calls._KNOWN


# What a host that sends its descriptors in another order would have: the same sources.
def test_an_order_with_another_directory_has_another_shape() -> None:
    starter = Starter()
    for cwd_fd in (7, 12, 7):
        asked = order(b"/a")
        asked.cwd_fd = cwd_fd
        made = made_of(list_of(asked, starter))
        assert [call[1] for call in made if call[0] == FCHDIR] == [cwd_fd]
        assert [call[1] for call in made if call[0] == DUP2] == [8, 9, 10, 11]


def test_memory_is_had_again_when_its_child_is_its_program() -> None:
    starter = Starter()
    first = list_of(order(b"/a"), starter)
    second = list_of(order(b"/a"), starter)
    assert first.address != second.address
    starter.is_over(first)
    again = list_of(order(b"/b"), starter)
    assert again.memory is first.memory
    assert ctypes.string_at(made_of(again)[-1][1]) == b"/b"
    for found in [list_of(order(b"/a"), starter) for _ in range(2 * vfork._KEPT)]:
        starter.is_over(found)
    assert len(starter._free) == vfork._KEPT


def test_an_order_that_is_longer_than_the_room_has_its_own() -> None:
    starter = Starter()
    asked = order(b"/a")
    asked.env = {b"LONG": b"x" * vfork.ROOM_BYTES}
    found = list_of(asked, starter)
    (said,) = strings_at(made_of(found)[-1][3])
    assert said == b"LONG=" + b"x" * vfork.ROOM_BYTES
    assert len(starter._free) == 1  # what was too small is the next one's
    starter.is_over(found)
    assert len(starter._free) == 1


# ADR 61: a list is kept until its child has become its program, or has ended.
def test_who_is_starting_when_the_host_goes_keeps_its_calls() -> None:
    found = list_of(order(b"/a"))
    epoll = select.epoll()
    family = Family(epoll)
    reader, writer = os.pipe()
    child = Child(life.STARTING, os.getpid(), reader)
    child.calls = found
    family.enter(child, -1)
    del child
    holders = len(gc.get_referrers(found))
    family.clear()
    assert len(gc.get_referrers(found)) == holders
    epoll.close()
    os.close(reader)
    os.close(writer)


STAGES = ("signals", "session", "subreaper", "pdeathsig", "cwd", "descriptors")


@pytest.mark.parametrize("at", [*range(6), -1])
def test_the_call_that_failed_is_named(at: int) -> None:
    found = list_of(order(b"/a"))
    assert found.fault() is None
    at %= len(made_of(found))
    struct.pack_into("q", found.memory, 8 + at * 64 + 56, -13)
    stage = STAGES[at] if at < len(STAGES) else "exec"
    assert found.fault() == (13, stage)
    struct.pack_into("q", found.memory, 8 + 56, -1)  # the list ends with the first
    assert found.fault() == (1, "signals")


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
            # Its pipe and its pidfd; and where one is offered who stands by.
            await eventually(lambda: len(stage.launcher.descriptors()) == 5)
            nursery.cancel_scope.cancel()
    with trio.fail_after(30):
        await watched.ended()
    assert len(stage.launcher.descriptors()) == 3
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
