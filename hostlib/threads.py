"""The one way out of the Trio thread, and how every other thread is made.

Rules of this file.

1. A call that may wait for a disk runs in a worker thread (``in_thread``), never
   abandoned: a descriptor is closed only when nothing uses it (I1). A call that waits
   for the network and holds nothing of its caller's may be (``in_abandonable_thread``).
2. Threads that no task waits for are made here as well: for work that lets go of the
   interpreter (``beside``), that changes its thread (``apart``), and whose end nobody
   needs to know (``afterwards``).
3. Nobody else imports ``threading``: locks between threads are ``ThreadLock``.
4. Where no thread can be started the caller's thread does the work, or it waits
   (``eventually``), or it fails (``in_thread``, ``apart``).
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
"""Held for a few instructions that more than one thread may do; no await stands inside."""

NestedThreadLock = threading.RLock
"""A lock that its holder may take once more."""

MAX_THREADS = 16
"""Worker threads for blocking calls; a disk serves no more requests at once better."""

THREADS_PER_CHILD = 4
"""Worker threads for one child, with all that is nested in it."""

SWITCH_INTERVAL_S = 0.0005
"""How long a worker thread may keep the interpreter from the Trio thread.

Each call into the kernel lets go of it, and getting it back from a busy thread takes
that long: with the usual 5 ms a READ beside a long LIST would take 20."""

sys.setswitchinterval(SWITCH_INTERVAL_S)

_limiter = trio.CapacityLimiter(MAX_THREADS)


async def in_thread(
    call: Callable[[*Ts], T], *args: *Ts, share: trio.CapacityLimiter | None = None
) -> T:
    """Run a blocking call in a worker thread.

    Args:
        call: what blocks.
        args: its arguments.
        share: bounds the threads of one child, so that many connections and a slow disk
            leave threads to the other children (spec S5, S7).

    Cancellation: waits for a free thread can be cancelled; a call that has begun is
    always waited for.

    Raises:
        OSError: ``EAGAIN``: no thread can be started; what the call raises as well.
    """
    done: list[T] = []
    # Trio would keep an error in its frames, which the error keeps in turn: until the
    # collector comes, nothing would be freed that any caller had at hand.
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
            await trio.to_thread.run_sync(begin, limiter=_limiter)
    except RuntimeError as why:
        if has_begun:
            raise
        # The user of this process has as many processes and threads as it may.
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from why
    finally:
        _calls.at_work -= 1
    if failed:
        raise failed.pop()
    return done.pop()


async def in_abandonable_thread(
    call: Callable[[*Ts], T], *args: *Ts, limiter: trio.CapacityLimiter
) -> T:
    """Run a call that waits for the network in a worker thread.

    Args:
        call: what blocks; it uses nothing that its caller may close.
        args: its arguments.
        limiter: bounds such threads; those of disks are not among them.

    Cancellation: the call is left to its thread, which counts until the call has ended.

    Raises:
        OSError: ``EAGAIN``: no thread can be started; what the call raises as well.
    """
    try:
        return await trio.to_thread.run_sync(
            in_worker, call, *args, limiter=limiter, abandon_on_cancel=True
        )
    except RuntimeError as why:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from why


def in_loop(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a call in the Trio thread, from a worker thread that a task waits for."""
    return trio.from_thread.run_sync(call, *args)


def stop_if_cancelled() -> None:
    """Raise ``trio.Cancelled`` if the call that this thread works for is cancelled.

    A call that has begun is always waited for, so what takes seconds asks between its
    steps.  Work that no task waits for always goes on.
    """
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:  # no worker thread of Trio
        return


def show_faults(show: Callable[[BaseException | None], None]) -> None:
    """Have a fault that ends a thread shown."""
    threading.excepthook = lambda arguments: show(arguments.exc_value)


def times_slept() -> int:
    """Return how often this thread has waited for anything but a processor.

    Between the two ends of a call that took long it tells a slow disk from a machine that
    let others run meanwhile; it costs a microsecond.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class _Calls:
    """What ``calls_at_work`` tells: from before a call waits until its caller goes on.

    The limiter knows less: a call that got its share has no token for a moment, and one
    that has ended has given its back before its caller has the outcome.
    """

    at_work = 0


_calls = _Calls()


def note_work(change: int) -> None:
    """Let ``calls_at_work`` count so many more of those who wait to make a call."""
    _calls.at_work += change


def calls_at_work() -> int:
    """Return how many calls run in worker threads, wait for one, or have just ended.

    What nobody waits for (``afterwards``) counts as one: a file that it closes
    must not be handed to the next program meanwhile.
    """
    return _calls.at_work + are_left()


def beside(call: Callable[[*Ts], T], *args: *Ts) -> Callable[[], T]:
    """Run a call that lets go of the interpreter beside what the caller does meanwhile.

    For a worker thread that works through much data: it hashes and writes a piece while
    it reads the same piece.  So there are at most two such threads for each of those.

    Returns:
        What waits for the end of the call and returns, or raises, what it did.  It has
        to be called.  Where no thread can be started the call is done before.
    """
    run = _Run(partial(call, *args))
    thread = threading.Thread(target=run.do, name="beside")
    is_beside = _is_started(thread)
    if not is_beside:
        run.do()

    def wait() -> T:
        if is_beside:
            thread.join()
        return run.result()

    return wait


def apart(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a call in a thread that does nothing else, and ends with it; wait for that.

    For what changes the thread that does it: which mount namespace it is in.

    Raises:
        OSError: EAGAIN: no thread can be started; the call is never done in this one.
    """
    run = _Run(partial(call, *args))
    thread = threading.Thread(target=in_worker, args=(run.do,), name="apart")
    if not _is_started(thread):
        raise OSError(errno.EAGAIN, "no thread can be started")
    thread.join()
    return run.result()


class _Run(Generic[T]):
    """A call, and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: list[T] = []
        self._failure: BaseException | None = None

    def do(self) -> None:
        """Do it, in whatever thread."""
        try:
            self._outcome.append(self._call())
        except BaseException as why:  # noqa: BLE001 - raised where it is waited for
            self._failure = why

    def result(self) -> T:
        """Return what it did, or raise that."""
        if self._failure is not None:
            raise self._failure
        return self._outcome[0]


def afterwards(call: Callable[[*Ts], None], *args: *Ts) -> None:
    """Run a call that takes long and whose end nobody needs to know, in a thread.

    For what is given back to the kernel.  One thread does all of it, however much there
    is: each start takes a millisecond here.  A program that ends waits for it.  Where no
    thread can be started it is done here: it has to be done.
    """
    _afterwards.add(partial(call, *args))
    _afterwards.begin(or_here=True)


def eventually(call: Callable[[*Ts], None], *args: *Ts) -> None:
    """Run a call likewise, but never in the thread of the caller.

    For who collects garbage, in the middle of anything and with any lock held.  Where no
    thread can be started it waits for the next call that is left to one.
    """
    _afterwards.add(partial(call, *args))
    _afterwards.begin(or_here=False)


def are_left() -> bool:
    """Tell whether anything that was left to ``afterwards`` or ``eventually`` is to be done.

    What waits for a thread is begun with.
    """
    _afterwards.begin(or_here=True)
    return _afterwards.is_at_work


class _Afterwards:
    """A thread that does what was left to it, for as long as there is anything."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_at_work = threading.Lock()  # of the thread; nobody ever waits for it

    def add(self, call: Callable[[], None]) -> None:
        """Leave a call to the thread; ``begin`` is to follow."""
        self._calls.append(call)

    @property
    def is_at_work(self) -> bool:
        """Whether the thread has something to do."""
        return self._is_at_work.locked()

    def begin(self, *, or_here: bool) -> None:
        """Start the thread, unless it is at work.

        Args:
            or_here: where it cannot be started all is done here.
        """
        if not (self._calls and self._is_at_work.acquire(blocking=False)):
            return
        thread = threading.Thread(
            target=in_worker, args=(self._run,), name="afterwards"
        )
        if _is_started(thread):
            return
        if or_here:
            self._run()
        else:
            self._is_at_work.release()

    def _run(self) -> None:
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._is_at_work.release()
            # What has come since the last look, or behind a fault.
            self.begin(or_here=True)


_afterwards = _Afterwards()


def _is_started(thread: threading.Thread) -> bool:
    """Start a thread; tell whether this process may have it."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class _Worker(threading.local):
    """A worker thread's own: whether it was made deaf."""

    is_deaf = False


_worker = _Worker()


def in_worker(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do a call in this thread, which is deaf to signals from now on.

    They are the Trio thread's: one that a worker took between two programs of the same
    process would be nobody's.
    """
    if not _worker.is_deaf:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _worker.is_deaf = True
    return call(*args)
