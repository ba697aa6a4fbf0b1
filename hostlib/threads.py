"""Calls in other threads than the Trio thread; the only module that makes threads.

1. A call that may wait for a disk runs in a worker thread (``in_thread``; one that may
   be short, ``in_thread_if``) and is never
   abandoned: a descriptor is closed only when no call uses it (I1).  A call that waits
   for the network and uses nothing of its caller may be (``in_abandonable_thread``).
2. Other threads are for work that changes its thread (``in_own_thread``), or whose end no
   task waits for (``in_background``).
3. Other modules do not import ``threading``: locks between threads are ``ThreadLock``.
4. If no thread can be started, the caller's thread does the work (``in_background``), or it
   fails (``in_thread``, ``in_own_thread``).
"""

import contextlib
import errno
import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ThreadLock = threading.Lock
"""A lock for a few instructions of several threads; no ``await`` stands inside."""

NestedThreadLock = threading.RLock
"""A lock that its holder may take once more."""

MAX_THREADS = 16
"""Worker threads for blocking calls; a disk is not faster with more requests at once."""

THREADS_PER_CHILD = 4
"""Worker threads for one child, with all that is nested in it."""

LARGE_BYTES = 256 * 1024
"""Longest text that is joined, decoded or encoded in the Trio thread: about a millisecond.
Where its bytes are not known, its characters count."""

SWITCH_INTERVAL_S = 0.0005
"""How long a worker thread may hold the interpreter lock while the Trio thread waits.

Each system call releases the lock, and taking it back from a busy thread takes that long:
with the default of 5 ms a READ beside a long LIST would take 20 ms."""

sys.setswitchinterval(SWITCH_INTERVAL_S)

limiter = trio.CapacityLimiter(MAX_THREADS)


def statistics() -> trio.CapacityLimiterStatistics:
    """Return how many worker threads are busy, and how many calls wait for one."""
    return limiter.statistics()


async def in_thread(
    call: Callable[[*Ts], T], *args: *Ts, share: trio.CapacityLimiter | None = None
) -> T:
    """Run a blocking call in a worker thread.

    Args:
        call: the blocking function.
        args: its arguments.
        share: bounds the threads of one child, so that many connections and a slow disk
            leave threads to the other children (spec S5, S7).

    Cancellation: the wait for a free thread can be cancelled; a call that has begun is
    always waited for.

    Raises:
        OSError: ``EAGAIN``: no thread can be started.
        BaseException: the exceptions of the call.
    """
    done: list[T] = []
    # Raised here and not through Trio, whose frames would keep the exception in a cycle:
    # the locals of all callers would live until the garbage collector runs.
    failed: list[BaseException] = []
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        try:
            done.append(in_worker(call, *args))
        except BaseException as why:  # noqa: BLE001 - raised where it is waited for
            failed.append(why)

    _calls.at_work += 1
    try:
        async with share or contextlib.nullcontext():
            await trio.to_thread.run_sync(begin, limiter=limiter)
    except RuntimeError as why:
        if has_begun:
            raise
        # The user of this process has reached its number of processes and threads.
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from why
    finally:
        _calls.at_work -= 1
    if failed:
        raise failed.pop()
    return done.pop()


async def in_thread_if(is_long: bool, call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return the result of a call, run in a worker thread if it is long.

    Args:
        is_long: it takes longer than a millisecond, as for more than `LARGE_BYTES`.
        call: the function.
        args: its arguments.

    Raises:
        OSError: ``EAGAIN``: no thread can be started.
        BaseException: the exceptions of the call.
    """
    return await in_thread(call, *args) if is_long else call(*args)


async def in_abandonable_thread(
    call: Callable[[*Ts], T], *args: *Ts, limiter: trio.CapacityLimiter
) -> T:
    """Run a call that waits for the network in a worker thread.

    Args:
        call: the blocking function; it uses nothing that its caller may close.
        args: its arguments.
        limiter: bounds such threads, apart from those of ``in_thread``.

    Cancellation: abandons the call; its thread counts until the call has ended.

    Raises:
        OSError: ``EAGAIN``: no thread can be started.
        BaseException: the exceptions of the call.
    """
    has_begun = False

    def begin() -> T:
        nonlocal has_begun
        has_begun = True
        return in_worker(call, *args)

    try:
        return await trio.to_thread.run_sync(
            begin, limiter=limiter, abandon_on_cancel=True
        )
    except RuntimeError as why:
        if has_begun:
            raise
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from why


def in_trio_thread(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a call in the Trio thread, from a worker thread, and return its result."""
    return trio.from_thread.run_sync(call, *args)


def stop_if_cancelled() -> None:
    """Raise ``trio.Cancelled`` if the task that waits for this thread is cancelled.

    A call that has begun is always waited for, so a call of seconds checks between its
    steps.  Work that no task waits for always continues.
    """
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:  # no worker thread of Trio
        return


def show_faults(show: Callable[[BaseException | None], None]) -> None:
    """Set the function that is called with an exception that ends a thread."""
    threading.excepthook = lambda arguments: show(arguments.exc_value)


def count_sleeps() -> int:
    """Return how often this thread has slept, for anything but a processor.

    Two values around a long call show whether a disk was slow or the machine was busy;
    it costs a microsecond.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class _Calls:
    """The count of ``calls_at_work``: from a call's wait until its caller runs on.

    The limiter counts less: a call has no token for a moment after it got its share, nor
    between its end and its caller's receiving the result.
    """

    at_work = 0


_calls = _Calls()


def note_work(change: int) -> None:
    """Add to ``calls_at_work``, for tasks that wait to make a call."""
    _calls.at_work += change


def calls_at_work() -> int:
    """Return the number of calls that run in worker threads, wait, or have just ended.

    Background work (``in_background``) counts as one: a file that it closes must not be
    handed to the next program meanwhile.
    """
    return _calls.at_work + has_background_work()


def in_own_thread(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a call in a new thread that ends with it, wait, and return its result.

    For calls that change their thread, such as its mount namespace.

    Raises:
        OSError: EAGAIN: no thread can be started; the call is never done in this one.
    """
    run = _Run(partial(call, *args))
    thread = threading.Thread(target=in_worker, args=(run.do,), name="own")
    if not _is_started(thread):
        raise OSError(errno.EAGAIN, "no thread can be started")
    thread.join()
    return run.result()


def in_daemon_thread(call: Callable[[*Ts], None], *args: *Ts) -> None:
    """Run a long call in a thread of its own; the program does not wait for its end.

    Raises:
        OSError: EAGAIN: no thread can be started.
    """
    run = partial(call, *args)
    thread = threading.Thread(target=in_worker, args=(run,), daemon=True)
    if not _is_started(thread):
        raise OSError(errno.EAGAIN, "no thread can be started")


class _Run(Generic[T]):
    """A call, and its result or exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: list[T] = []
        self._failure: BaseException | None = None

    def do(self) -> None:
        """Do the call in this thread."""
        try:
            self._outcome.append(self._call())
        except BaseException as why:  # noqa: BLE001 - raised where it is waited for
            self._failure = why

    def result(self) -> T:
        """Return the call's result, or raise its exception."""
        if self._failure is not None:
            raise self._failure
        return self._outcome[0]


def in_background(call: Callable[[*Ts], None], *args: *Ts) -> None:
    """Run a long call in the background thread, without waiting for its end.

    For memory and files that are given back to the kernel.  One thread does all such
    calls, since each start of a thread takes a millisecond here.  The program waits for
    it at its end.  If no thread can be started, the caller's thread does the call.
    """
    _background.add(partial(call, *args))
    _background.begin()


def has_background_work() -> bool:
    """Return whether background calls are left."""
    return _background.is_at_work


class _Background:
    """A queue of calls, and the thread that does them while there are any."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_at_work = threading.Lock()  # the thread's; no other ever waits for it

    def add(self, call: Callable[[], None]) -> None:
        """Queue a call; ``begin`` must follow."""
        self._calls.append(call)

    @property
    def is_at_work(self) -> bool:
        """Whether the thread has calls to do."""
        return self._is_at_work.locked()

    def begin(self) -> None:
        """Start the thread, unless it is at work; without one, do all calls here."""
        if not (self._calls and self._is_at_work.acquire(blocking=False)):
            return
        thread = threading.Thread(
            target=in_worker, args=(self._run,), name="background"
        )
        if not _is_started(thread):
            self._run()

    def _run(self) -> None:
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._is_at_work.release()
            # Calls that came after the last look, or after a call that raised.
            self.begin()


_background = _Background()


def _is_started(thread: threading.Thread) -> bool:
    """Start a thread; return False if this process may not have more."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class _Worker(threading.local):
    """State of one worker thread: whether its signals are blocked."""

    is_deaf = False


_worker = _Worker()


def in_worker(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do a call in this thread, with all signals blocked from now on.

    Signals are for the Trio thread: one that a worker took during an exchange of the
    program would be lost.
    """
    if not _worker.is_deaf:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _worker.is_deaf = True
    return call(*args)
