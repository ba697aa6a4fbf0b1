"""Parts that several of those hand over who hand something over: processes, directories.

What it is: their plain forms, and the way back.  What it is not: children, which have a
form of their own (``handover.leave``).
"""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from supervisor.scratch import Scratch
from supervisor.spawned import ExitStatus, Record, SpawnedProcess

if TYPE_CHECKING:
    from supervisor.launcher import Launcher


class ProcessState(msgspec.Struct):
    """A process that the launchpad has started.

    Attributes:
        status: how it ended, if nothing is left of it and the launchpad has forgotten
            it; None else, for then it says so to the next program.
    """

    ident: int
    pid: int
    create_time: int
    pidfd: int
    init: int
    status: tuple[int | None, int | None, float, float, int] | None = None


class ScratchState(msgspec.Struct):
    """See ``Scratch``; paths as bytes: base, root, tmp, run."""

    fd: int
    keep: bool
    paths: list[bytes]


def process_state(process: SpawnedProcess) -> ProcessState:
    """Take a process down; its owner has not closed it."""
    record = process._record
    status = None
    if record.swept.is_set():
        status = astuple(record.status or ExitStatus())
    return ProcessState(
        process._ident,
        process.pid,
        process.create_time,
        process._pidfd,
        process.init,
        status,
    )


def process_from(launcher: Launcher, state: ProcessState) -> SpawnedProcess:
    """Return the process that was taken down; it is the caller's from now on."""
    record = launcher.handed_over.pop(state.ident, None)
    if record is None:
        record = Record()
        if state.status is not None:
            record.status = ExitStatus(*state.status)
        for event in (record.started, record.exited, record.swept):
            event.set()
    born = (state.pid, state.create_time, (), state.init, state.pidfd)
    record.born = born
    return SpawnedProcess(launcher, state.ident, record, born)


def scratch_state(scratch: Scratch) -> ScratchState:
    """Take a scratch directory down."""
    paths = (scratch._base, scratch.root, scratch.tmp, scratch.run)
    return ScratchState(
        scratch._fd, scratch._keep, [os.fsencode(path) for path in paths]
    )


def scratch_from(state: ScratchState) -> Scratch:
    """Return the scratch directory that was taken down."""
    # Not by its class: that would make new ones.
    scratch = Scratch.__new__(Scratch)
    base, scratch.root, scratch.tmp, scratch.run = map(os.fsdecode, state.paths)
    scratch._base, scratch._fd, scratch._keep = Path(base), state.fd, state.keep
    return scratch
