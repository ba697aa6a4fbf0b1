"""A merge of text that both the workspace and the base have changed.

Rules:
 1. A text that cannot be merged for certain stays a conflict: no marker is ever
    written.
 2. The base's file is merged as one descriptor shows it, and only if it rests: a write that
    follows the look gets a later time of change, so the commit notices it.
 3. Mode bits are merged as the text is. Owners and attributes have to be alike: what they
    were is not known, so the side that has changed them cannot be told.

Spec WS11a; git-merge-file(1).
"""

from __future__ import annotations

import os
import select
import stat
import tempfile
import time
from collections import Counter
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd
from supervisor.workspace.attributes import program_attributes
from supervisor.workspace.commit_journal import identity_of
from supervisor.workspace.commit_staging import MergedFile
from supervisor.workspace.git import find_git, run_git
from supervisor.workspace.texts import MAX_TEXT_BYTES, is_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.layers import LayeredTree, TreeNode

MERGE_TIMEOUT_S = 30.0
"""Longest merge: texts of many equal lines can take git minutes."""

_NAMES = ("base", "begun", "workspace")
_CAPABILITY = "security.capability"
_ATTRIBUTES = ("user.", "system.posix_acl_", _CAPABILITY)
"""Prefixes of the attributes that have to be alike."""

_ID_BITS = stat.S_ISUID | stat.S_ISGID
_COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE, as files' times have it: clock_gettime(2)."""

_TICK_S = 0.01
"""The longest that the kernel's coarse clock rests: 100 ticks in a second."""

_MOST_TICKS = 3


Attributes = tuple[tuple[str, bytes], ...]


class CannotMergeError(Exception):
    """Two sides of a file cannot be merged; the text says why."""


class Merger:
    """Merges files that both sides have changed."""

    def __init__(
        self, base: LayeredTree, merged: LayeredTree, rows: Sequence[Row]
    ) -> None:
        self._base = base
        self._merged = merged
        # The number of links does not tell: sealed layers share their files.
        self._names = Counter(_inode(row.new) for row in rows)

    def merge(self, row: Row, begun: bytes, begun_mode: int) -> MergedFile:
        """Return what a file becomes with the changes of both sides.

        Args:
            row: of the file.
            begun: the text that both sides began from.
            begun_mode: the permission bits that it had.

        Raises:
            CannotMergeError: it stays a conflict.
            NoGitError: git(1) is not installed.
            OSError: a side cannot be read.
        """
        if row.old is None or row.new is None:
            raise CannotMergeError("one side has removed it")
        if self._names[_inode(row.new)] > 1:
            raise CannotMergeError("the workspace has it under another name too")
        status, ours, attributes = self._read_base(row.old)
        theirs, others = self._read_workspace(row.new)
        new = row.new.status
        if (status.st_uid, status.st_gid) != (new.st_uid, new.st_gid):
            raise CannotMergeError("the two sides have two owners")
        if attributes != others:
            raise CannotMergeError("the two sides have other attributes")
        if any(name == _CAPABILITY for name, _ in attributes):
            raise CannotMergeError("it is run with capabilities")
        modes = (stat.S_IMODE(status.st_mode), begun_mode, stat.S_IMODE(new.st_mode))
        return MergedFile(
            merge_text(ours, begun, theirs),
            _merge_mode(*modes),
            attributes,
            identity_of(status),
            status.st_ctime_ns,
        )

    def _read_base(self, node: TreeNode) -> tuple[os.stat_result, bytes, Attributes]:
        """Return status, content and attributes of a file of the base that rests."""
        with closing_fd(self._base.open_file(node)) as fd:
            status = os.fstat(fd)
            _wait_for_tick(status.st_ctime_ns)
            content, attributes = _read(fd), _attributes(fd)
            now = os.fstat(fd)
        if (identity_of(now), now.st_ctime_ns) != (
            identity_of(status),
            status.st_ctime_ns,
        ):
            raise CannotMergeError("it is being written to")
        return status, content, attributes

    def _read_workspace(self, node: TreeNode) -> tuple[bytes, Attributes]:
        with closing_fd(self._merged.open_file(node)) as fd:
            return _read(fd), _attributes(fd)


def merge_text(ours: bytes, begun: bytes, theirs: bytes) -> bytes:
    """Return a text with the changes of both sides, as ``git merge-file`` makes it.

    Args:
        ours: the base's side.
        begun: the text from which both began.
        theirs: the workspace's side.

    Raises:
        CannotMergeError: both changed the same lines, or one side is no text.
        NoGitError: git(1) is not installed.
    """
    texts = (ours, begun, theirs)
    if not all(map(is_text, texts)):
        raise CannotMergeError("only text up to 1 MiB is merged")
    if theirs in {ours, begun}:
        return ours
    if ours == begun:  # as after a checkout of another branch, and back
        return theirs
    git = find_git("merge text", "leave out --merge")
    with tempfile.TemporaryDirectory(prefix="sandhost-merge-") as top:
        for name, text in zip(_NAMES, texts, strict=True):
            with open(os.path.join(top, name), "wb") as file:
                file.write(text)
        words = ["merge-file", "--stdout", "--quiet", *_NAMES]
        try:
            done = run_git(git, words, top, MERGE_TIMEOUT_S)
        except TimeoutError as why:
            raise CannotMergeError(str(why)) from None
    if done.returncode != 0:
        raise CannotMergeError("both sides changed the same lines")
    return done.stdout


def _merge_mode(ours: int, begun: int, theirs: int) -> int:
    """Return the permission bits with the changes of both sides.

    Raises:
        CannotMergeError: they changed them in two ways, or one has another user's rights.
    """
    if (ours | begun | theirs) & _ID_BITS:
        raise CannotMergeError("it is a set-user-ID or set-group-ID file")
    if begun not in {ours, theirs} and ours != theirs:
        raise CannotMergeError("both sides changed its mode")
    return theirs if ours == begun else ours


def _wait_for_tick(ctime_ns: int) -> None:
    """Wait until a change that follows gets a later time than the last one has.

    Raises:
        CannotMergeError: that time is in the future.
    """
    for _ in range(_MOST_TICKS):
        if time.clock_gettime_ns(_COARSE_CLOCK) > ctime_ns:
            return
        select.select((), (), (), _TICK_S)  # no host's loop: a worker, or a command
    raise CannotMergeError("its time of change is in the future")


def _read(fd: int) -> bytes:
    """Return a file's content, or as much of it as shows that it is too large."""
    with open(fd, "rb", closefd=False) as file:
        return file.read(MAX_TEXT_BYTES + 1)


def _attributes(fd: int) -> Attributes:
    """Return the attributes that a program or the operator gave a file, sorted."""
    return tuple(
        (own_name, os.getxattr(fd, name))
        for name, own_name in program_attributes(fd)
        if name.startswith(_ATTRIBUTES)
    )


def _inode(node: TreeNode | None) -> tuple[int, int] | None:
    return None if node is None else (node.status.st_dev, node.status.st_ino)
