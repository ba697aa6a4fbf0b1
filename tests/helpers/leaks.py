"""The leak check of tests: holdings of a process before and after.

Looks at descriptors and direct children of the process that asks, through `/proc`, so
it sees what the kernel sees and not what a table claims. A zombie counts as a child:
somebody did not wait. Does not look at memory, tasks or files on disk; tests that make
those count them themselves. Used by `tests/conftest.py` for every test marked `slow`
or naming the fixture `no_leaks`. `no_descriptor_left` is for who is to hold nothing more.
"""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holdings:
    """The holdings of one process at one moment.

    Attributes:
        descriptors: number -> what it refers to, as `/proc/self/fd` names it.
        children: (pid, start time in clock ticks) -> command name and state.
    """

    descriptors: dict[int, str]
    children: dict[tuple[int, int], str]


def holdings() -> Holdings:
    """Return what this process holds, once what it closes in threads is closed."""
    give_back()
    return Holdings(_descriptors(), _children())


def give_back() -> None:
    """Return once background calls are done (`hostlib.threads.in_background`)."""
    while here := [t for t in threading.enumerate() if t.name == "background"]:
        for thread in here:
            thread.join()


def left_over(before: Holdings, after: Holdings) -> tuple[str, ...]:
    """Return one line for each thing that `after` has and `before` had not.

    A number that refers to something else than before counts as new: it was closed
    and opened again, and the second one is still there.
    """
    descriptors = (
        f"descriptor {number} -> {target}"
        for number, target in sorted(after.descriptors.items())
        if before.descriptors.get(number) != target
    )
    children = (
        f"child process {pid} {what}"
        for (pid, start), what in sorted(after.children.items())
        if (pid, start) not in before.children
    )
    return (*descriptors, *children)


def open_here(*beginnings: str) -> set[tuple[int, str]]:
    """Return the descriptors of this process that refer to what begins so.

    Others open and close here, too: worker threads, the collector, the fixtures.

    Args:
        beginnings: as in ``socket:``, ``pipe:``, or a directory.
    """
    found = _descriptors().items()
    return {(fd, what) for fd, what in found if what.startswith(beginnings)}


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return found


def _children() -> dict[tuple[int, int], str]:
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                pids = file.read().split()
        except FileNotFoundError:
            continue  # a thread that ended meanwhile
        for pid in pids:
            described = _describe(int(pid))
            if described is not None:
                start, what = described
                found[int(pid), start] = what
    return found


def _describe(pid: int) -> tuple[int, str] | None:
    """Return (start time, "name state") of a process, None if it is gone.

    Fields after the command name of `/proc/PID/stat` (proc(5)): state is the first,
    start time the twentieth.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = rest.split()
    return int(fields[19]), f"{head.partition('(')[2]} ({fields[0]})"


@contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    """Let this process open nothing inside, but for so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(but + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
