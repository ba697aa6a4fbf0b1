"""Calls that stay in the Trio thread, and calls that leave it for a worker."""

import contextlib
import ctypes
import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from hostlib import large_files, threads
from hostlib.threads import calls_at_work, in_thread
from tests.helpers.leaks import give_back
from vfs import mounts
from vfs.backends.host_file import HostHandle
from vfs.mounts import MOUNTS, Mount, mount_of

SIZE = 200_000


@pytest.fixture
def file(tmp_path: Path, no_leaks: None) -> Iterator[int]:
    """Return a descriptor of a file with `SIZE` bytes on the test's disk."""
    del no_leaks
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(range(250)) * (SIZE // 250))
    yield fd
    os.close(fd)


def forgotten(file: int) -> bool:
    """Have the kernel forget what it holds of a file; whether it did.

    It keeps a page that somebody else looks at in that moment (writeback, reclaim, another
    processor's list of new pages), so it is told again.
    """
    os.fsync(file)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file, [bytearray(SIZE)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        time.sleep(0.01)
    return False


# Reading without waiting


def test_what_is_in_memory_is_read_at_once(file: int) -> None:
    mount = mount_of(os.fstat(file).st_dev)
    if not (mount.in_memory or mount.inline):
        pytest.skip("the disk of this test can't tell what is in memory")
    assert mount.read(file, 1000, 500) == os.pread(file, 1000, 500)
    assert mount.read(file, SIZE, 10) == os.pread(file, SIZE, 10)
    assert mount.read(file, 10, SIZE) == b""
    assert mount.read(file, 0, 0) == b""


def test_what_is_on_the_disk_only_is_refused(file: int) -> None:
    mount = mount_of(os.fstat(file).st_dev)
    if mount.in_memory or not mount.inline:
        pytest.skip("the disk of this test has nothing that is not in memory")
    for _ in range(500):
        if not forgotten(file):
            pytest.skip("this kernel keeps in memory what it was told to forget")
        try:
            mount.read(file, SIZE, 0)
        except BlockingIOError:
            break  # the look itself has the disk read ahead, which may be quick
    else:
        pytest.fail("what is on the disk only was never refused")
    # A machine short of memory may forget it again at once.
    for _ in range(100):
        assert os.pread(file, SIZE, 0)[:3] == b"\0\1\2"
        with contextlib.suppress(BlockingIOError):
            assert len(mount.read(file, SIZE, 0)) == SIZE
            return
    pytest.fail("what was just read is never in memory")


# A read that gets half of it without waiting gives nothing, and moves nothing.
def test_half_in_memory_is_not_in_memory(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int) -> int:
        del fd, flags
        calls.append(offset)
        if len(calls) == 2:
            raise BlockingIOError(errno.EAGAIN, "not there")
        buffers[0][:4096] = b"x" * 4096
        return 4096

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(BlockingIOError):
        Mount("ext4").read(file, 10_000, 100)
    assert calls == [100, 4196]


def test_parts_are_put_together(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(200)) * 10
    steps = iter((7, 1, 500, 0))

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int) -> int:
        del fd, flags
        count = min(next(steps), len(content) - offset)
        buffers[0][:count] = content[offset : offset + count]
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    assert Mount("ext4").read(file, 1000, 50) == content[50:558]


# A file that does not know the flag, on a file system that does, goes to a thread.
def test_a_file_that_does_not_know_the_flag(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter((errno.EOPNOTSUPP, errno.EIO))

    def preadv(*_: object) -> int:
        raise OSError(next(codes), "no")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(BlockingIOError):
        Mount("xfs").read(file, 10, 0)
    with pytest.raises(OSError, match="no") as raised:
        Mount("xfs").read(file, 10, 0)
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "overlay", "unknown"])
def test_what_nobody_knows_always_goes_to_a_thread(file: int, kind: str) -> None:
    mount = Mount(kind)
    assert not mount.in_memory
    assert not mount.inline
    with pytest.raises(BlockingIOError):
        mount.read(file, 10, 0)
    mount.try_again()
    assert not mount.inline


# Mounts


def test_a_mount_is_looked_up_by_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    assert mount_of(device) is mount_of(device)
    shm = Path("/dev/shm")
    if os.path.ismount(shm):
        assert mount_of(shm.stat().st_dev).in_memory
    try:
        assert not mount_of(1 << 40).inline
    finally:
        MOUNTS.pop(1 << 40, None)


def test_a_device_that_no_mount_names_is_known_by_what_lies_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shm = Path("/dev/shm")
    if not os.path.ismount(shm):
        pytest.skip("no /dev/shm here")
    monkeypatch.setattr(mounts, "MOUNTS", {})
    fd = os.open(shm, os.O_PATH | os.O_DIRECTORY)
    try:
        mount = mount_of(1 << 40, fd)
    finally:
        os.close(fd)
    assert (mount.in_memory, mount.is_distant) == (True, False)
    assert mount_of((1 << 40) + 1).is_distant  # nothing is known of it


def test_a_slow_mount_is_written_by_threads_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    mount = Mount("ext4")
    mount.note(mounts.SLOW_WRITE_S)
    before = [mount.inline]
    mount.note(mounts.SLOW_WRITE_S * 1.01)
    assert [*before, mount.inline] == [True, False]
    clock[0] += mounts.SLOW_MOUNT_S * 0.99
    mount.try_again()
    after = [mount.inline]
    clock[0] += mounts.SLOW_MOUNT_S * 0.02
    mount.try_again()
    assert [*after, mount.inline] == [False, True]


# Threads


# I1: a call that has begun is waited for, whoever is cancelled.
async def test_a_call_that_has_begun_is_never_abandoned() -> None:
    begun, may_end = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    ended: list[bool] = []

    def call() -> None:
        token.run_sync_soon(begun.set)
        may_end.wait()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, call)
        await begun.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        assert not ended
        may_end.set()
    assert ended == [True]


async def test_threads_are_bounded_and_the_others_wait() -> None:
    may_end = threading.Event()
    running: list[int] = []
    lock = threading.Lock()

    def call() -> None:
        with lock:
            running.append(threading.get_ident())
        may_end.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(threads.MAX_THREADS + 5):
            nursery.start_soon(in_thread, call)
        while threads.statistics().tasks_waiting < 5:
            await trio.lowlevel.checkpoint()
        while len(running) < threads.MAX_THREADS:
            await trio.lowlevel.checkpoint()
        assert len(running) == threads.MAX_THREADS
        may_end.set()
    assert len(running) == threads.MAX_THREADS + 5


# spec S7: what is done for one child leaves threads to the others.
async def test_a_share_of_the_threads() -> None:
    may_end = threading.Event()
    share = trio.CapacityLimiter(threads.THREADS_PER_CHILD)
    running: list[int] = []

    def call() -> None:
        running.append(threading.get_ident())
        may_end.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(threads.MAX_THREADS):
            nursery.start_soon(partial(in_thread, call, share=share))
        while share.statistics().tasks_waiting < 12:
            await trio.lowlevel.checkpoint()
        assert await in_thread(divmod, 17, 5) == (3, 2)
        other = trio.CapacityLimiter(1)
        assert await in_thread(divmod, 17, 5, share=other) == (3, 2)
        assert threads.statistics().borrowed_tokens == 4
        may_end.set()
    assert len(running) == threads.MAX_THREADS


def test_a_thread_that_waits_for_something_has_slept() -> None:
    reader, writer = os.pipe()
    before = threads.count_sleeps()
    other = threading.Timer(0.001, os.write, (writer, b"x"))
    other.start()
    os.read(reader, 1)
    assert threads.count_sleeps() > before
    other.join()
    os.close(reader)
    os.close(writer)


def test_a_slow_append_tells_its_mount(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = HostHandle(os.dup(file), os.fstat(file))
    handle.mount = Mount("ext4")
    clock = iter((1.0, 1.0 + mounts.SLOW_WRITE_S * 2, 5.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    handle.append(b"x")
    handle.close()
    assert not handle.mount.inline


def test_a_file_of_procfs_is_written_though_it_has_no_end() -> None:
    memory = ctypes.create_string_buffer(b"old")
    fd = os.open("/proc/self/mem", os.O_WRONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.lseek(fd, 0, os.SEEK_END)
    handle = HostHandle(fd, os.fstat(fd))
    handle.pwrite(b"new", ctypes.addressof(memory))
    handle.close()
    assert memory.value == b"new"


async def test_what_a_call_returns_and_raises_comes_back() -> None:
    assert await in_thread(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 1, 0)


async def test_signals_are_the_trio_threads_alone() -> None:
    mine = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    theirs = await in_thread(signal.pthread_sigmask, signal.SIG_BLOCK, ())
    assert signal.SIGTERM not in mine
    assert {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2} <= theirs


async def test_calls_at_work_are_counted() -> None:
    give_back()  # work of earlier tests counts, too
    assert calls_at_work() == 0
    assert await in_thread(calls_at_work) == 1
    assert calls_at_work() == 0


# Between any two steps of the loop a call counts until its caller has the result.
@pytest.mark.parametrize("share", [None, trio.CapacityLimiter(1)], ids=["", "share"])
async def test_a_call_is_counted_until_its_caller_goes_on(
    share: trio.CapacityLimiter | None,
) -> None:
    give_back()
    for _ in range(100):
        seen: list[int] = []
        async with trio.open_nursery() as nursery:
            begun, done = trio.Event(), trio.Event()

            async def caller(begun: trio.Event, done: trio.Event) -> None:
                begun.set()
                await in_thread(os.getpid, share=share)
                done.set()

            nursery.start_soon(caller, begun, done)
            await begun.wait()
            while not done.is_set():
                seen.append(calls_at_work())
                await trio.lowlevel.checkpoint()
        assert set(seen) <= {1}
        assert calls_at_work() == 0


def unnamed(where: Path, size: int) -> int:
    """Open a file that has no name any more."""
    path = where / "unnamed"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.write(fd, b"x" * size)
    os.fsync(fd)  # else it may have no blocks yet
    path.unlink()
    return fd


def is_open(fd: int) -> bool:
    """Whether a descriptor is there."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# Only what gives much back is worth a thread.
def test_a_long_file_without_a_name_is_closed_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(
        "hostlib.large_files.in_background",
        lambda call, *args: later.append(partial(call, *args)),
    )
    monkeypatch.setattr("hostlib.large_files.INLINE_TRUNCATE_BYTES", 100_000)
    (tmp_path / "named").write_bytes(b"x" * 200_000)
    named = os.open(tmp_path / "named", os.O_RDONLY | os.O_CLOEXEC)
    for fd in (named, unnamed(tmp_path, 1000)):
        large_files.close_file(fd)
        assert not is_open(fd)
    assert not later
    for _ in range(2):
        fds = [unnamed(tmp_path, 200_000) for _ in range(3)]
        for fd in fds:
            large_files.close_file(fd)
        assert all(map(is_open, fds))
        assert large_files.closing_files() == tuple(fds)
        assert len(later) == len(fds)
        for run in later:
            run()
        assert large_files.closing_files() == ()
        assert not any(map(is_open, fds))
        later.clear()


# I1
def test_without_a_thread_it_is_closed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hostlib.large_files.INLINE_TRUNCATE_BYTES", 100_000)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        for _ in range(2):
            fd = unnamed(tmp_path, 200_000)
            large_files.close_file(fd)
            assert not is_open(fd)
            assert large_files.closing_files() == ()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked
    large_files.close_file(unnamed(tmp_path, 200_000))


async def test_without_a_thread_it_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def broken() -> None:
        raise RuntimeError("a fault of the call")

    with pytest.raises(RuntimeError, match="a fault of the call"):
        await threads.in_thread(broken)
    monkeypatch.setattr(trio.to_thread, "run_sync", none)
    with pytest.raises(BlockingIOError):  # EAGAIN
        await threads.in_thread(os.getpid)
    give_back()
    assert not threads.calls_at_work()


def test_without_a_thread_what_has_to_be_done_is_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    done: list[int] = []
    threads.in_background(done.append, 1)
    assert done == [1]


def test_what_is_done_afterwards_takes_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start, held, done = threading.Thread.start, threading.Event(), threading.Event()
    results: list[int] = []

    def note(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    def broken() -> None:
        raise OSError(errno.EIO, "a fault of one keeps no other")

    monkeypatch.setattr(threading.Thread, "start", note)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    threads.in_background(held.wait)  # type: ignore[arg-type]
    for number in range(100):
        threads.in_background(results.append, number)
    assert (len(started), results) == (1, [])
    threads.in_background(broken)
    threads.in_background(threads.in_background, done.set)
    held.set()
    assert done.wait(60)
    assert results == list(range(100))
    for thread in started:
        thread.join()


# attack 42: what a caller had at hand is freed at once, and not by the collector.
async def test_a_call_that_fails_in_a_thread_keeps_nothing() -> None:
    class Large:
        """The memory to be freed."""

    def fail(_large: Large) -> None:
        raise ZeroDivisionError

    large = Large()
    kept = weakref.ref(large)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            await in_thread(fail, large)
        del large
        assert kept() is None
    finally:
        gc.enable()
