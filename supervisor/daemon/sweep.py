"""Removes what a dead predecessor left, before a daemon begins (attack 39).

Looks in the daemon's directories, and at processes that carry their names.

Rules of this file.

1. Only remains of a dead host are removed: the lock of the directories is ours, so no
   other host uses them; a scratch directory is abandoned if it is not locked.
2. A process is ended only if its start time was recorded, or its environment leads into
   an abandoned scratch directory; by pidfd, and checked again once that is open.
3. Each finding is reported, and each failed removal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux import holdings, processes
from hostlib.unix_names import is_deaf
from supervisor.doctor.leftovers import LAUNCHPAD_NAME, STAGED_PREFIX, LeftoverSearch
from supervisor.sandbox import groups as sandbox_groups
from supervisor.sandbox.scratch import PREFIX, is_abandoned, remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from supervisor.config.directories import Places, Predecessor
    from supervisor.config.document import Config

LAUNCHPAD_S = 2.0
"""Patience with a launchpad, which ends 50 processes in 20 ms; then it is killed."""

STAGED_AGE_S = 60.0
"""Least age of a staged file; a younger one may belong to a living host."""


def sweep(
    places: Places, config: Config, before: Predecessor | None, now: float
) -> Iterator[str]:
    """Remove what a dead predecessor left; yield one line for each finding.

    Blocks for at most some seconds: call it before there are clients.

    Args:
        places: directories whose lock is held.
        config: its policies name roots in which files may have been staged.
        before: the predecessor's record in the lock; None after an ordered end.
        now: seconds since 1970.
    """
    if before is not None:
        yield f"the host before (pid {before.get('pid', '?')}) did not end in order"
        yield from _end_launchpad(before)
    if is_deaf(places.control):
        yield f"a control socket that nobody listens on: {places.control} (replaced)"
    abandoned = list(_find_abandoned(places.scratch))
    yield from _end_orphans(abandoned)
    for path in abandoned:
        failure = remove_tree(path)
        done = "removed" if failure is None else f"not removed: {failure.strerror}"
        yield f"a scratch directory: {path} ({done})"
    groups = sandbox_groups.remove_stale()
    if groups:
        yield f"{groups} groups of processes that are gone (removed)"
    if before is not None:
        yield from _remove_staged(config, now)
    if os.path.isdir(f"{places.state_dir}/workspaces"):  # noqa: PTH112 - a str
        from supervisor.workspace.sweep import sweep_workspaces  # noqa: PLC0415 - with one

        yield from sweep_workspaces(places.state_dir)


def _end_launchpad(before: Predecessor) -> Iterator[str]:
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
    ended = _end((pid, create_time), LAUNCHPAD_S)
    yield f"its launchpad (pid {pid}) {'ended' if ended else 'was killed'}"


def _end(process: processes.ProcessIdentity, patience_s: float) -> bool:
    """Wait for a process's end, then kill it; return whether it ended by itself."""
    pidfd = processes.open_process(process)
    if pidfd is None:
        return True
    try:
        if processes.end_processes([pidfd], 0, patience_s):
            return True
        processes.end_processes([pidfd], signal.SIGKILL, LAUNCHPAD_S)
    finally:
        os.close(pidfd)
    return False


def _find_abandoned(scratch_dir: str) -> Iterator[Path]:
    for path in Path(scratch_dir).glob(f"{PREFIX}*"):
        try:
            if is_abandoned(path):
                yield path
        except OSError:  # removed, or no directory: not made by a host
            continue


def _end_orphans(abandoned: Iterable[Path]) -> Iterator[str]:
    """End processes whose private directory is an abandoned one."""
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
            _end((pid, facts.create_time), 0.0)
            yield f"an orphan: pid {pid} ({facts.name}) (killed)"


def _remove_staged(config: Config, now: float) -> Iterator[str]:
    """Remove staged files in the places that children may write."""
    search = LeftoverSearch()
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
