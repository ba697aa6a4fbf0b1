"""What a dead predecessor left, and its removal, before a daemon begins (attack 39).

The daemon's own directories, and processes that carry their names.

Rules of this file.

1. Only what is provably dead is removed: the lock of the directories is ours, so nobody
   else makes anything in them; a scratch directory is nobody's if nobody locks it.
2. A process is ended only if its start time is the one that was written down, or if its
   environment leads into a scratch directory that is nobody's; by pidfd, and looked at
   again once that is held.
3. What was found is said, and what could not be removed too.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux import holdings
from supervisor.control.client import is_deaf
from supervisor.doctor.leftovers import LAUNCHPAD_NAME, STAGED_PREFIX, Search
from supervisor.sandbox import groups as sandbox_groups
from supervisor.sandbox.scratch import PREFIX, is_abandoned, remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from supervisor.config.directories import Places, Predecessor
    from supervisor.config.document import Config

LAUNCHPAD_S = 2.0
"""A launchpad whose host died ends 50 processes in 20 ms; then it is ended."""

STAGED_AGE_S = 60.0
"""A staged file that was touched later may be a living host's."""


def sweep(
    places: Places, config: Config, before: Predecessor | None, now: float
) -> Iterator[str]:
    """Remove what a dead predecessor left; yield what was found, a line each.

    Blocks for at most some seconds: call it before there are clients.

    Args:
        places: whose lock is held.
        config: its policies name roots in which files may have been staged.
        before: what the predecessor wrote into the lock; None if it ended in order.
        now: seconds since 1970.
    """
    if before is not None:
        yield f"the host before (pid {before.get('pid', '?')}) did not end in order"
        yield from _launchpad(before)
    if is_deaf(places.control):
        yield f"a control socket that nobody listens on: {places.control} (replaced)"
    abandoned = list(_abandoned(places.scratch))
    yield from _orphans(abandoned)
    for path in abandoned:
        failure = remove_tree(path)
        done = "removed" if failure is None else f"not removed: {failure.strerror}"
        yield f"a scratch directory: {path} ({done})"
    groups = sandbox_groups.remove_stale()
    if groups:
        yield f"{groups} groups of processes that are gone (removed)"
    if before is not None:
        yield from _staged(config, now)
    if os.path.isdir(f"{places.state_dir}/workspaces"):  # noqa: PTH112 - a str
        from supervisor.workspace.sweep import sweep_workspaces  # noqa: PLC0415 - with one

        yield from sweep_workspaces(places.state_dir)


def _launchpad(before: Predecessor) -> Iterator[str]:
    pid, create_time = (
        before.get("launchpad_pid", 0),
        before.get("launchpad_create_time", 0),
    )
    facts = holdings.process_facts(pid) if pid > 0 else None
    if facts is None or (facts.create_time, facts.name) != (
        create_time,
        LAUNCHPAD_NAME,
    ):
        return
    ended = _ended(pid, create_time, LAUNCHPAD_S)
    yield f"its launchpad (pid {pid}) {'ended' if ended else 'was killed'}"


def _ended(pid: int, create_time: int, patience_s: float) -> bool:
    """Wait for a process's end, then kill it; tell whether it ended by itself."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not holdings.is_same_process(pid, create_time):
            return True
        if select.select([pidfd], [], [], patience_s)[0]:
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], LAUNCHPAD_S)
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)
    return False


def _abandoned(scratch_dir: str) -> Iterator[Path]:
    for path in Path(scratch_dir).glob(f"{PREFIX}*"):
        try:
            if is_abandoned(path):
                yield path
        except OSError:  # gone, or no directory: nothing that we made
            continue


def _orphans(abandoned: Iterable[Path]) -> Iterator[str]:
    """End processes whose private directory is one of those that are nobody's."""
    homes = tuple(b"TMPDIR=" + os.fsencode(path) + b"/" for path in abandoned)
    if not homes:
        return
    for name in os.listdir("/proc"):  # noqa: PTH208 - numbers, not paths
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        facts = holdings.process_facts(pid)
        environment = holdings.read_file(f"/proc/{pid}/environ") or b""
        if facts is None or facts.state == holdings.ZOMBIE:
            continue
        if any(text.startswith(homes) for text in environment.split(b"\0")):
            _ended(pid, facts.create_time, 0.0)
            yield f"an orphan: pid {pid} ({facts.name}) (killed)"


def _staged(config: Config, now: float) -> Iterator[str]:
    """Remove files that were being published, in the places that may be written to."""
    search = Search()
    policies = config.policy.values()
    tops = {p.root for p in policies if p.root} | {w for p in policies for w in p.write}
    for top in sorted(tops):
        search.look(top)
    for where, name, _, _ in search.found:
        path = Path(where) / name
        try:
            if now - path.lstat().st_mtime < STAGED_AGE_S:
                yield f"a staged file that may be in use: {path} (left alone)"
                continue
            path.unlink()
        except OSError as why:
            yield f"a staged file: {path} (not removed: {why.strerror})"
        else:
            yield f"a staged file: {path} (removed)"
    if not search.is_complete:
        yield f"not all of {', '.join(sorted(tops))} was searched for {STAGED_PREFIX}*"
