"""The time that the host's tasks keep the Trio thread, and others' waits.

The longest step of any task of the host, by the thread's own time, which a busy machine
does not lengthen.
"""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf

import trio

from tests.helpers.delays import Stopwatch
from tests.helpers.sessions import Line

OURS = ("supervisor.", "vfs.")
"""Tasks of the host; the test's own and its provider's are others."""


class Turns(trio.abc.Instrument):
    """Looks at each step of each task.

    Attributes:
        longest_s: of the host's, in seconds of this thread.
        task: whose it was.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.task = ""
        self._begun = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Begin a step."""
        del task
        self._begun = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """End it."""
        took = time.thread_time() - self._begun
        if took > self.longest_s and task.name.startswith(OURS):
            self.longest_s, self.task = took, task.name


@contextmanager
def watched() -> Iterator[Turns]:
    """Look at what the host does in the block, whose garbage is its own.

    A full collection looks at all that a process of tests has made: tens of milliseconds.
    """
    gc.collect()
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    try:
        yield turns
    finally:
        trio.lowlevel.remove_instrument(turns)


MOST_TRIES = 3


async def find_longest_turn(
    do: Callable[[], Awaitable[object]], bound_s: float
) -> tuple[float, str]:
    """Do something until its longest step is short; return that step and its task.

    The least of a few: a long turn is long each time, while the garbage of the tests before,
    or a thread that other load keeps from giving the interpreter back, comes once.
    """
    found = inf, ""
    for _ in range(MOST_TRIES):
        with watched() as turns:
            await do()
        found = min(found, (turns.longest_s, turns.task))
        if found[0] < bound_s:
            break
    return found


PAUSE_S = 0.002
"""Between two reads: they have the host's own thread, and would take half of it."""


class Reader:
    """A client that reads a byte of a file again and again.

    Attributes:
        longest_s: its longest wait for one, without the time of other load.
        reads: how many there were.
        has_to_end: it is enough.
    """

    def __init__(self, line: Line, fileno: int) -> None:
        self.longest_s = 0.0
        self.reads = 0
        self.has_to_end = False
        self._line = line
        self._request = b"SEEK %d 0\nREAD %d 1\n" % (fileno, fileno)

    async def run(self) -> None:
        """Read, once at least."""
        while not (self.reads and self.has_to_end):
            watch = Stopwatch()  # a turn may begin in the pause
            await trio.sleep(PAUSE_S)
            await self._line.send(self._request)
            assert await self._line.line() == b"OK 0"
            await self._line.body()
            self.longest_s = max(self.longest_s, watch.own_s - PAUSE_S)
            self.reads += 1
