"""Compares a living host's tables with ``/proc``, and reports differences.

The check behind ``doctor --leaks`` with a host.

1. A descriptor is explained if a part of the host names it (``descriptors``), if the
   process had it before it was a host (``Baseline``), or if it is a standard one;
   others are leaks, shown by their link in ``/proc``.
2. A host at work changes all the time: only findings of each of ``ROUNDS`` looks count.
3. Each look takes descriptors and tables at one moment, without a checkpoint; looks at
   processes are sliced.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import trio

from hostlib.large_files import closing_files
from hostlib.linux import holdings, processes
from hostlib.threads import in_thread
from supervisor.children.lifecycle import State
from supervisor.doctor.leftovers import LeftoverSearch, crashed_workspaces, staged_row
from vfs.mounts import mount_table_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.children.child import Child
    from supervisor.host import Host

ROUNDS = 5
"""Looks that must all have a finding."""

PAUSE_S = 0.05
"""Time between two looks; a spawn, a sweep or a close takes a few milliseconds."""

SLICE_PROCESSES = 50
"""Processes looked at between two checkpoints: about 2 ms."""

_ALIVE = frozenset({State.RUNNING, State.STOPPING})

Row = dict[str, object]
Key = tuple[object, ...]


async def check_host(host: Host) -> dict[str, object]:
    """Return the differences between a host's tables and the kernel's.

    Returns:
        A JSON object: ``clean``, ``counts``, then the lists ``descriptors`` that are
        not explained, ``rows`` of tables without an object, ``processes`` beneath the
        host without a living child, ``zombies``, ``staged`` names and crashed
        ``workspaces``; and ``explained``: the number of explained descriptors of each
        kind.
    """
    suspects: dict[Key, Row] = {}
    for round_ in range(ROUNDS):
        if round_:
            await trio.sleep(PAUSE_S)
        now = list_descriptors(host)
        await trio.lowlevel.checkpoint()
        now |= _rows(host)
        now |= await _processes(host)
        suspects = {k: row for k, row in now.items() if k in suspects or not round_}
        if not suspects:
            break
    lists: dict[str, list[Row]] = {
        kind: [row for key, row in suspects.items() if key[0] == kind]
        for kind in ("descriptors", "rows", "processes", "zombies")
    }
    lists["staged"], is_complete = await _find_staged(host)
    uses = (use for child in host.children.values() for use in child.spec.workspaces)
    tops = {*host.settings.hidden, *(use.state_dir for use in uses)}
    lists["workspaces"] = await in_thread(partial(crashed_workspaces, *sorted(tops)))
    explained = Counter(named_descriptors(host).values())
    return {
        "pid": os.getpid(),
        "launchpad_pid": host.launcher.launchpad_pid,
        "clean": not any(lists.values()),
        "counts": {kind: len(rows) for kind, rows in lists.items()},
        **lists,
        "explained": dict(explained),
        "staged_search_complete": is_complete,
    }


PIDFD = "pidfd"
"""The word for it among the descriptors."""


def named_descriptors(host: Host) -> dict[int, str]:
    """Return every descriptor that a part of the host names, with its word."""
    found = dict.fromkeys(range(3), "standard")
    found.update(dict.fromkeys(host.pump.descriptors(), "pump"))
    found.update(dict.fromkeys(host.door_sockets.descriptors(), "door sockets"))
    found.update(dict.fromkeys(host.launcher.descriptors(), "launchpad"))
    found.update(dict.fromkeys(host.journal.descriptors(), "journal"))
    found.update(dict.fromkeys(host.fs.descriptors(), "open file"))
    found.update(dict.fromkeys(closing_files(), "file being closed"))
    found.update(dict.fromkeys(mount_table_descriptors(), "table of mounts"))
    found.update(dict.fromkeys(host.forks.descriptors(), "refused forks"))
    for child in host.children.values():
        found.update(child.descriptors())
    for holder in host.holders:
        found.update(holder())
    return found


def list_descriptors(host: Host) -> dict[Key, Row]:
    """Return the open descriptors that no part of a host names."""
    explained = named_descriptors(host)
    baseline = host.baseline.descriptors
    # A payload's mapped file has a duplicate descriptor whose number is not known.
    payloads = {
        holdings.link_of(fd) for fd, kind in explained.items() if kind == "payload"
    }
    found: dict[Key, Row] = {}
    for fd in holdings.open_descriptors():
        if fd in explained:
            continue
        link = holdings.link_of(fd)
        if link is None or baseline.get(fd) == link or link in payloads:
            continue
        text = os.fsencode(link).decode(errors="replace")
        found["descriptors", fd, link] = {"fd": fd, "link": text}
    return found


def _rows(host: Host) -> dict[Key, Row]:
    """Return the rows of clients and files without an object behind them."""
    tables = host.fs.tables
    served = {s.client.id for child in host.children.values() for s in child.sessions()}
    found: dict[Key, Row] = {}
    for client in tables.clients.values():
        if host.child_of(client) not in host.children:
            _add_row(found, "clients", client.id, "its child is gone")
        elif client.id not in served:
            _add_row(found, "clients", client.id, "no connection is its")
    for file in tables.files.values():
        if file.client.id not in tables.clients:
            _add_row(found, "files", file.fileno, "its client is gone")
    for session in host.pump.sessions.values():
        if session.client.id not in tables.clients:
            _add_row(found, "connections", session.client.id, "its client is gone")
    return found


def _add_row(found: dict[Key, Row], table: str, ident: object, why: str) -> None:
    found["rows", table, ident] = {"table": table, "id": ident, "why": why}


async def _processes(host: Host) -> dict[Key, Row]:
    """Return children without a process, processes without a child, and zombies."""
    launchpad = host.launcher.launchpad_pid
    known = {*host.baseline.children, *await host.launcher.stock()}
    found: dict[Key, Row] = {}
    known.update(_service_processes(host))
    for number, child in enumerate(tuple(host.children.values()), 1):
        process = child.process
        if process is not None:
            known.add((process.pid, process.create_time))
            known.update(holdings.identities([process.init]))
        if _is_hollow(child):
            _add_row(found, "children", child.id, "its process is gone")
        await _let_others_run(number)
    beneath = [*processes.children_of(launchpad), *processes.children_of(os.getpid())]
    for number, pid in enumerate(beneath, 1):
        facts = holdings.process_facts(pid)
        if facts is not None and pid != launchpad:
            identity = (facts.pid, facts.create_time)
            if identity not in known:
                found["processes", *identity] = facts.row()
            if (
                facts.state == holdings.ZOMBIE
                and identity not in host.baseline.children
            ):
                found["zombies", *identity] = facts.row()
        await _let_others_run(number)
    return found


def _service_processes(host: Host) -> Iterator[tuple[int, int]]:
    """Yield the processes of tools and sidecars, as the holders of pidfds name them."""
    inits = host.launcher.inits()
    for holder in tuple(host.holders):
        for fd, kind in holder():
            if kind == PIDFD and (pid := holdings.pid_of(fd)) is not None:
                yield from holdings.identities([pid, inits.get(pid, -1)])


def _is_hollow(child: Child) -> bool:
    """Return whether a child lives by its row and is dead by /proc."""
    process = child.process
    if child.state is State.GONE:
        return True
    if child.state not in _ALIVE or process is None:
        return False
    return not holdings.is_same_process(process.pid, process.create_time)


async def _let_others_run(number: int) -> None:
    if number % SLICE_PROCESSES == 0:
        await trio.lowlevel.checkpoint()


async def _find_staged(host: Host) -> tuple[list[Row], bool]:
    """Return staged names where children may write, except those under way."""
    search = LeftoverSearch()
    places = {
        (holdings.link_of(fd), place.only is None)
        for child in host.children.values()
        for place in child.places
        if place.write and not place.is_lasting  # their paths mean nothing here
        for fd in place.backend.descriptors()
    }
    for path, is_deep in places:
        if path is not None:
            await in_thread(partial(search.look, path, is_deep=is_deep))
    own = set()
    for fd in host.fs.descriptors():
        with contextlib.suppress(OSError):  # a thread has just closed it
            status = os.fstat(fd)
            own.add((status.st_dev, status.st_ino))
    found = [
        (where, name) for where, name, *file in search.found if tuple(file) not in own
    ]
    if found:
        await trio.sleep(PAUSE_S)  # a name that is being published goes away
        found = [pair for pair in found if _is_there("/".join(pair))]
    return [staged_row(*pair) for pair in found], search.is_complete


def _is_there(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError:
        return False
    return True
