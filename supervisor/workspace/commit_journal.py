"""The journal of a commit: its steps in their order, and how far it has come.

A step says what it expects of the base. It is written to the disk before it is done, so a
commit that a crash has cut off is ended by the next command.

Spec WS12.
"""

from __future__ import annotations

import os
import stat
from typing import Literal

import msgspec

from supervisor.workspace.layers import is_beneath
from supervisor.workspace.record import RecordUpdate

STAGING_PREFIX = b".sandhost-commit-"


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """A step's expectation of an object: it tells another one, or other content.

    The time of change is not part of it, because a rename changes that.
    """

    device: int
    inode: int
    mode: int
    owner: tuple[int, int]
    size: int
    mtime_ns: int
    inside: bytes = b""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Bring a staged object to a path, in exchange for what is there.

    Attributes:
        path: in the base.
        staged: its name in the staging directory.
        inode: of the staged object.
        expected: the file that is there now; None for none.
        is_moved: the base had it at another path; else it is new.
        content: (size, time of change in ns) of a file as it was staged: by these an
            edit of it in place is seen; None for anything else.
    """

    path: bytes
    staged: bytes
    inode: int
    expected: Identity | None
    is_moved: bool = False
    content: tuple[int, int] | None = None


class Take(msgspec.Struct, frozen=True, tag=True):
    """Bring what is at a path to the staging directory: it is removed, or moved on.

    Attributes:
        path: in the base.
        staged: its name in the staging directory.
        expected: the file that is there now.
        goes_to: the path to which a later step moves it on; None if it is removed.
    """

    path: bytes
    staged: bytes
    expected: Identity
    goes_to: bytes | None = None


class SetMode(msgspec.Struct, frozen=True, tag=True):
    """Set the permission bits of what is at a path.

    Attributes:
        path: in the base.
        inode: of what is there.
        old: its bits now.
        new: its bits then.
        expected: the file that is there now; None in a journal of an older program.
    """

    path: bytes
    inode: int
    old: int
    new: int
    expected: Identity | None = None


class SetAttributes(msgspec.Struct, frozen=True, tag=True):
    """Set or remove extended attributes of a directory that the base has.

    Attributes:
        path: in the base.
        inode: of what is there.
        values: by name what it has now and what it gets; None for no such attribute.
    """

    path: bytes
    inode: int
    values: dict[str, tuple[bytes | None, bytes | None]]


class SetTimes(msgspec.Struct, frozen=True, tag=True):
    """Set the times of a new directory, which its entries have changed."""

    path: bytes
    inode: int
    times_ns: tuple[int, int]


Step = Put | Take | SetMode | SetAttributes | SetTimes


Progress = Literal["staging", "applying", "undoing", "applied", "undone"]


class CommitJournal(msgspec.Struct):
    """A commit that has begun.

    Attributes:
        state: ``staging``: the base is as it was; ``applying``: some steps are done, and
            all will be; ``undoing``: none will stay; ``applied`` and ``undone``: only the
            staging directory is left to be removed.
        staging: the name of the staging directory in ``holder``.
        holder: the directory that it is in: the base, or the workspace's own.
        steps: in their order.
        merged: paths of files that get a merge of both sides.
        update: of the record.
        aside: of what could not go back to its place: path -> path where it is.
        dropped: paths of which the base's side was chosen: what the layer has there goes.
        directories: in which steps were done, when they are to be undone: number of the
            step -> handle.
        is_in_use: a child had the layer, and was stopped. One that is cut off is undone: the
            child has gone on since, and has marked nothing of what the base has not shown.
    """

    state: Progress
    staging: bytes
    holder: Literal["base", "own"]
    steps: list[Step] = []
    merged: list[bytes] = []
    update: RecordUpdate = RecordUpdate()
    aside: dict[bytes, bytes] = {}
    dropped: list[bytes] = []
    directories: dict[int, bytes] = {}
    is_in_use: bool = False

    def old_path(self, path: bytes) -> bytes:
        """Return where the base had what a step has at a path, before any was done."""
        for step in self.steps:
            goes_to = step.goes_to if isinstance(step, Take) else None
            if goes_to is not None and is_beneath(path, goes_to):
                return step.path + path[len(goes_to) :]
        return path

    def put_paths(self) -> list[bytes]:
        """Return where it puts something into the base."""
        return [step.path for step in self.steps if isinstance(step, Put)]


class BaseChangedError(Exception):
    """The base is not what was judged: path, and what is wrong."""

    def __init__(self, path: bytes, reason: str) -> None:
        super().__init__(f"{os.fsdecode(path)!r}: {reason}")
        self.path = path
        self.reason = reason


def identity_of(status: os.stat_result) -> Identity:
    """Return what a step expects of an object, but not what is inside."""
    is_directory = stat.S_ISDIR(status.st_mode)
    return Identity(
        status.st_dev,
        status.st_ino,
        status.st_mode,
        (status.st_uid, status.st_gid),
        0 if is_directory else status.st_size,
        0 if is_directory else status.st_mtime_ns,
    )


def content_of(status: os.stat_result) -> tuple[int, int] | None:
    """Return what tells the content of a file; None for anything else."""
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns


def takes_directory(step: Step) -> bool:
    """Tell whether a step takes away what lies in a directory of the base."""
    if not isinstance(step, Put | Take) or step.expected is None:
        return False
    return stat.S_ISDIR(step.expected.mode)
