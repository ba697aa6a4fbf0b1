"""Sizes of the layers in children's workspaces, measured now and then.

Rules of this file.

1. Only layers are walked, never a base, and of each at most ``MOST_ENTRIES``; beyond
   that a size is a lower bound.
2. Layers are measured only on request, and at most every ``EVERY_S``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.linux.syscalls import open_exactly
from hostlib.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from supervisor.spec import ChildSpec
    from supervisor.workspace.use import WorkspaceUse

EVERY_S = 3.0
"""Least time between two measurements, however many readers ask."""

MOST_ENTRIES = 20_000
"""Most entries of one layer: some 100 ms of a worker thread."""

MOST_WORKSPACES = 1000
"""Most workspaces of one state directory whose states are counted."""

STATES = ("in_use", "idle", "left_behind")

_UPPER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Size(NamedTuple):
    """The content of a layer.

    Attributes:
        changed: files and links that were made, changed or removed.
        size_bytes: of the files.
    """

    changed: int
    size_bytes: int


class WorkspaceSizes:
    """The last measurements.

    Attributes:
        states: workspaces by state, in the state directories of children's workspaces.
    """

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self._sizes: dict[tuple[str, str], Size] = {}
        self._next_s = -float("inf")
        self._looking = trio.Lock()

    async def look(self, specs: Collection[ChildSpec]) -> None:
        """Measure the workspaces of some children, if that is due."""
        async with self._looking:
            if trio.current_time() < self._next_s:
                return
            uses = {
                (use.state_dir, use.name)
                for spec in specs
                for use in spec.workspaces
                if use.mode == "review"
            }
            if uses:
                self._sizes, self.states = await in_thread(_measure, uses)
            else:
                self._sizes, self.states = {}, Counter()
            self._next_s = trio.current_time() + EVERY_S

    def total(self) -> Size:
        """Return the sum over all layers."""
        sizes = self._sizes.values()
        return Size(
            sum(size.changed for size in sizes), sum(size.size_bytes for size in sizes)
        )

    def rows(self, uses: Iterable[WorkspaceUse]) -> list[dict[str, object]]:
        """Return a child's workspaces as JSON objects; unknown figures are None."""
        found: list[dict[str, object]] = []
        for use in uses:
            size = self._sizes.get((use.state_dir, use.name))
            found.append(
                {
                    "name": use.name,
                    "mode": use.mode,
                    "changed": None if size is None else size.changed,
                    "bytes": None if size is None else size.size_bytes,
                }
            )
        return found


def _measure(
    uses: set[tuple[str, str]],
) -> tuple[dict[tuple[str, str], Size], Counter[str]]:
    from supervisor.workspace.directory import path_of  # noqa: PLC0415 - with a workspace

    sizes = {}
    for state_dir, name in uses:
        with contextlib.suppress(OSError):  # discarded meanwhile
            sizes[state_dir, name] = measure_layer(f"{path_of(state_dir, name)}/upper")
    states: Counter[str] = Counter()
    for state_dir in {state_dir for state_dir, _ in uses}:
        states += _count_states(state_dir)
    return sizes, states


def measure_layer(upper: str) -> Size:
    """Return the size of a layer; blocks.

    Raises:
        OSError: it cannot be read.
    """
    changed = size_bytes = entries = 0
    pending = [b"."]
    top = os.open(upper, _UPPER)
    try:
        while pending and entries < MOST_ENTRIES:
            path = pending.pop()
            for name, status in _entries(top, path):
                entries += 1
                if stat.S_ISDIR(status.st_mode):
                    pending.append(path + b"/" + name)
                else:
                    changed += 1
                    size_bytes += status.st_size
                if entries >= MOST_ENTRIES:
                    break
    finally:
        os.close(top)
    return Size(changed, size_bytes)


def _entries(top: int, path: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield the entries of a directory of a layer; links are not followed."""
    try:
        found = open_exactly(path, top)
    except OSError:  # removed or replaced meanwhile
        return
    try:
        fd = os.open(".", _UPPER, dir_fd=found)
    except OSError:
        return
    finally:
        os.close(found)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # removed meanwhile
                    yield os.fsencode(entry.name), entry.stat(follow_symlinks=False)
    finally:
        os.close(fd)


def _count_states(state_dir: str) -> Counter[str]:
    from supervisor.workspace.directory import look_at_state, workspaces_in  # noqa: PLC0415

    return Counter(
        state.replace(" ", "_")
        for name in workspaces_in(state_dir)[:MOST_WORKSPACES]
        if (state := look_at_state(state_dir, name)) is not None
    )
