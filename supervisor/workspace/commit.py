"""A commit: chosen changes applied to the base, all of them or none.

Rules:
 1. Everything new is written beside the base first, in a staging directory on the same
    mount, and synced. Then the base changes by renames alone.
 2. The steps stand in a journal before the first of them is done. After a crash they are
    done again from the first: a step that was done is known by the inode that it moved.
 3. What a step replaces or removes is looked at before the base is judged for the last
    time, and again when it has come out. If that is not the same, the operator was
    quicker: every step is undone, in reverse order.
 4. What was replaced or removed stays in the staging directory until all is synced. It
    goes back to the directory it was in, wherever the operator has moved that. If its
    place is taken by then, or gone, it gets a name of its own near it.
 5. Between two syncs a disk may keep any of the steps. What is done in a directory that was
    moved counts on that, and comes after a sync.
 6. Nothing is reached through a link: directories are opened beneath the base exactly.

Spec WS11 to WS13.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, assert_never

import msgspec

from hostlib.linux.syscalls import open_exactly
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.attributes import attribute_names, user_attributes
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import GoneError, LayeredTree, Node, join, split
from supervisor.workspace.linux import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    copy_content,
    held_entry,
    read_file_handle,
    read_mount_id,
    rename,
    set_mode,
    set_times,
    sync_file_system,
)
from supervisor.workspace.record import RecordUpdate, digest_inside
from supervisor.workspace.store import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

STAGING_PREFIX = b".sandhost-commit-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MARK_BYTES = 8
_NAME_BYTES = 255
"""Of a name, at most, as ``NAME_MAX`` says."""

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What a step expects of an object: enough to tell another one, or another content.

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
        expected: what is there now; None for nothing.
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
        expected: what is there now.
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
        expected: what is there now; None in a journal of an older program.
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

    state: Literal["staging", "applying", "undoing", "applied", "undone"]
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
            if goes_to is not None and path.startswith(goes_to + b"/"):
                return step.path + path[len(goes_to) :]
        return path


@dataclass(frozen=True, slots=True)
class MergedFile:
    """What a file of the base becomes, made of what both sides have.

    Attributes:
        content: the new one.
        mode: permission bits.
        attributes: extended ones: name, value.
        expected: the base's file that was merged.
        ctime_ns: when that was last changed.
    """

    content: bytes
    mode: int
    attributes: tuple[tuple[str, bytes], ...]
    expected: Identity
    ctime_ns: int

    def is_of(self, node: Node | None) -> bool:
        """Tell whether the base still has what was merged."""
        if node is None or node.status.st_ctime_ns != self.ctime_ns:
            return False
        return identity_of(node.status) == self.expected


class BaseChangedError(Exception):
    """The base is not what was judged: path, and what is wrong."""

    def __init__(self, path: bytes, reason: str) -> None:
        super().__init__(f"{os.fsdecode(path)!r}: {reason}")
        self.path = path
        self.reason = reason


class Chosen(NamedTuple):
    """What a commit is to bring about.

    Attributes:
        rows: of ``choose_rows``, judged to be in no conflict.
        merges: by path, what takes the place of the workspace's file.
        dropped: paths of which the base's side was chosen.
        is_in_use: a child has the layer, and is stopped.
    """

    rows: Sequence[Row]
    merges: Mapping[bytes, MergedFile]
    dropped: list[bytes]
    is_in_use: bool = False


class UnfinishedCommitError(WorkspaceError):
    """A commit that has begun cannot be ended now; the next command tries it again."""

    def __init__(self, why: OSError, journal: CommitJournal) -> None:
        where = {
            "staging": "the base is as it was",
            "undone": "the base is as it was",
            "applied": "its changes are in the base",
        }.get(journal.state, "a part of it is in the base")
        text = f"cannot end the commit: {why.strerror}; {where}"
        super().__init__(f"{text}: mend that, then 'sandhost workspace list' ends it")


class Committer:
    """Applies one commit, or ends one that a crash interrupted.

    Args:
        base: a descriptor of the base's top.
        own: of the workspace's own directory.
        save: writes the journal and syncs it; None removes it.
        settle: called when all is applied or undone, before the journal goes; after a
            crash it is called again.
    """

    def __init__(
        self,
        base: int,
        own: int,
        save: Callable[[CommitJournal | None], None],
        settle: Callable[[CommitJournal], None],
    ) -> None:
        self._base = base
        self._own = own
        self._save = save
        self._settle = settle
        self._tree = LayeredTree((base,))

    def commit(
        self,
        merged: LayeredTree,
        chosen: Chosen,
        update: RecordUpdate,
        judge: Callable[[], None],
    ) -> None:
        """Apply rows to the base.

        Args:
            merged: the workspace's layers.
            chosen: what is to be done.
            update: of ``Judge.update_by_commit``.
            judge: called when each step knows what it expects in the base; raises
                ``BaseChangedError`` if that is in conflict by then.

        Raises:
            BaseChangedError: the base was changed meanwhile; it is as it was.
            OSError: a thing cannot be read or written; the base is as it was.
            UnfinishedCommitError: it has begun, and cannot be ended now.
        """
        name = STAGING_PREFIX + secrets.token_hex(8).encode()
        journal = CommitJournal(
            "staging",
            name,
            self._holder(),
            merged=list(chosen.merges),
            update=update,
            dropped=chosen.dropped,
            is_in_use=chosen.is_in_use,
        )
        self._save(journal)
        os.mkdir(name, 0o700, dir_fd=self._holder_fd(journal))
        try:
            staging = self._open_staging(journal)
            try:
                stage = _Stage(staging, merged, self._tree, chosen.merges)
                journal.steps = stage.prepare(chosen.rows)
                judge()
                sync_file_system(staging)
            finally:
                os.close(staging)
            journal.state = "applying"
            self._save(journal)
        except BaseException:
            self._remove(journal)
            raise
        self.finish(journal)

    def end_cut(self, journal: CommitJournal) -> bool:
        """Bring a commit to its end that another process has begun; as ``finish``."""
        if journal.is_in_use and journal.state == "applying":
            journal.state = "undoing"
            self._save(journal)
        return self.finish(journal)

    def finish(self, journal: CommitJournal) -> bool:
        """Bring a commit to its end, from wherever it is.

        Returns:
            Whether its changes are in the base.

        Raises:
            BaseChangedError: the base was changed meanwhile; all is undone.
            OSError: a step cannot be done; all is undone.
            UnfinishedCommitError: it cannot be ended now; the journal stays.
        """
        try:
            reason = self._end(journal)
        except OSError as why:
            raise UnfinishedCommitError(why, journal) from why
        if reason is not None:
            raise reason
        return journal.state == "applied"

    def _end(self, journal: CommitJournal) -> BaseChangedError | OSError | None:
        """End a commit; return why it was undone, if that was decided now."""
        reason = None
        if journal.state in {"applying", "undoing"}:
            staging = self._open_staging(journal)
            try:
                if journal.state == "applying":
                    reason = self._apply(journal, staging)
                self._undo(journal, staging)
            finally:
                os.close(staging)
        self._remove(journal)
        return reason

    def _apply(
        self, journal: CommitJournal, staging: int
    ) -> BaseChangedError | OSError | None:
        """Do every step; else return why one cannot be done, and have it undone."""
        steps = _Steps(self._base, staging, journal.directories)
        moved: list[bytes] = []
        try:
            for number, step in enumerate(journal.steps):
                if any(step.path.startswith(path + b"/") for path in moved):
                    # After a power cut what is done in it is looked for at its new path.
                    sync_file_system(self._base)
                    moved.clear()
                steps.do(number, step)
                if isinstance(step, Put) and step.is_moved:
                    moved.append(step.path)
        except (BaseChangedError, OSError) as why:
            journal.state = "undoing"
            self._save(journal)
            return why
        sync_file_system(self._base)
        journal.state = "applied"
        self._save(journal)
        return None

    def _undo(self, journal: CommitJournal, staging: int) -> None:
        if journal.state != "undoing":
            return
        mark = journal.staging.removeprefix(STAGING_PREFIX)[:_MARK_BYTES]
        steps = _Steps(self._base, staging, journal.directories, mark)
        for number, step in reversed([*enumerate(journal.steps)]):
            steps.undo(number, step)
        journal.aside = steps.find_aside(journal.steps)
        sync_file_system(self._base)
        journal.state = "undone"
        self._save(journal)

    def _holder(self) -> Literal["base", "own"]:
        """Return where staging can be: a rename works within one mount only."""
        mounts = {read_mount_id(fd) for fd in (self._base, self._own)}
        return "own" if len(mounts) == 1 and None not in mounts else "base"

    def _holder_fd(self, journal: CommitJournal) -> int:
        return self._base if journal.holder == "base" else self._own

    def _open_staging(self, journal: CommitJournal) -> int:
        fd = os.open(
            journal.staging, _DIRECTORY | os.O_CLOEXEC, dir_fd=self._holder_fd(journal)
        )
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            # It was swapped: in another's directory names could be, while it is filled.
            os.close(fd)
            raise NotADirectoryError(
                errno.ENOTDIR, "another directory is there now", journal.staging
            )
        return fd

    def _remove(self, journal: CommitJournal) -> None:
        """Remove the staging directory, settle, then remove the journal."""
        self._remove_staging(journal)
        if journal.state in {"applied", "undone"}:
            # Only now: what is removed there may have other links in the base.
            self._settle(journal)
        self._save(None)

    def _remove_staging(self, journal: CommitJournal) -> None:
        try:
            os.close(self._open_staging(journal))
        except (FileNotFoundError, NotADirectoryError):
            return  # what is there now is not the commit's
        staging = Path(os.fsdecode(journal.staging))
        why = remove_tree(staging, self._holder_fd(journal))
        if why is not None:
            raise why


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


def takes_directory(step: Step) -> bool:
    """Tell whether a step takes away what lies in a directory of the base."""
    if not isinstance(step, Put | Take) or step.expected is None:
        return False
    return stat.S_ISDIR(step.expected.mode)


class _Stage:
    """Writes what is new into the staging directory, and returns the steps."""

    def __init__(
        self,
        staging: int,
        merged: LayeredTree,
        base: LayeredTree,
        merges: Mapping[bytes, MergedFile],
    ) -> None:
        self._staging = staging
        self._merged = merged
        self._base = base
        self._merges = merges
        self._count = 0
        self._moved: frozenset[bytes] = frozenset()
        self._links: dict[tuple[int, int], bytes] = {}

    def prepare(self, rows: Sequence[Row]) -> list[Step]:
        """Return the steps; the base is as it was."""
        renamed = [row for row in rows if row.origin is not None]
        renamed.sort(key=lambda row: (row.origin or b"").count(b"/"), reverse=True)
        self._moved = frozenset(row.origin for row in renamed if row.origin is not None)
        places: dict[bytes, tuple[bytes, int]] = {}
        steps: list[Step] = []
        for row in renamed:
            origin = row.origin or b""
            expected = self._expect(origin, is_whole=False)
            take = Take(origin, self._name(), expected, row.path)
            places[row.path] = take.staged, take.expected.inode
            steps.append(take)
        times: list[Step] = []
        for row in rows:
            if row.path in self._merges:
                steps.append(self._put_merged(row.path, self._merges[row.path]))
            elif row.origin is not None:
                steps += self._move(row, *places[row.path])
            elif row.change is Change.DELETED:
                steps.append(self._removal(row))
            elif row.old is not None and self._is_mode_alone(row, row.old):
                steps += self._facts_steps(row, row.old.status.st_ino)
            elif row.new is not None:
                put = self._put(row, row.new)
                steps.append(put)
                times += _times(row, put)
        return steps + times[::-1]

    def _name(self) -> bytes:
        self._count += 1
        return b"%d" % self._count

    def _move(self, row: Row, staged: bytes, inode: int) -> list[Step]:
        """Return the steps that bring a directory to its new path."""
        replaced = None
        if row.replaced is not None:
            replaced = self._expect(row.replaced.path, is_whole=True)
        put = Put(row.path, staged, inode, replaced, is_moved=True)
        return [put, *self._facts_steps(row, inode)]

    def _removal(self, row: Row) -> Take:
        """Return the step of a deletion; its object may lie in a renamed directory."""
        where = row.path if row.old is None else row.old.path
        expected = self._expect(where, is_whole=True)
        return Take(row.path, self._name(), expected)

    def _expect(self, path: bytes, *, is_whole: bool) -> Identity:
        node = self._base.find(path)
        if node is None:
            raise BaseChangedError(path, "it is not there any more")
        fd = self._base.open(node.parts[0])
        try:
            found = identity_of(os.fstat(fd))
        finally:
            os.close(fd)
        if is_whole and node.is_directory:
            # What is renamed out of it is gone by then.
            inside = digest_inside(self._base, node, self._moved)
            found = msgspec.structs.replace(found, inside=inside)
        return found

    def _is_mode_alone(self, row: Row, old: Node) -> bool:
        """Tell whether a new mode of the base's own object is all that there is to do."""
        new = row.new
        if row.change is not Change.MODE or new is None:
            return False
        if new.is_directory:
            return True
        # A change of the inode shows under each of its names.
        if old.status.st_nlink > 1 or _facts(new.status) != _facts(old.status):
            return False
        if new.kind != stat.S_IFREG:
            return True
        return _xattrs_in(self._merged, new) == _xattrs_in(self._base, old)

    def _facts_steps(self, row: Row, inode: int) -> list[Step]:
        """Return the steps that set the mode and the attributes of a base's object."""
        if row.new is None or row.old is None:
            return []
        steps = self._attribute_steps(row.path, inode, row.new, row.old)
        old = stat.S_IMODE(row.old.status.st_mode)
        new = stat.S_IMODE(row.new.status.st_mode)
        if old != new:
            expected = identity_of(row.old.status)
            # The attributes of what cannot be written to cannot be set.
            at = 0 if new & stat.S_IWUSR else len(steps)
            steps.insert(at, SetMode(row.path, inode, old, new, expected))
        return steps

    def _attribute_steps(
        self, path: bytes, inode: int, new: Node, old: Node
    ) -> list[Step]:
        """Return the step that brings along what was changed of a directory's attributes."""
        if not new.is_directory:
            return []
        olds, news = _xattrs_in(self._base, old), _xattrs_in(self._merged, new)
        values = {
            name: (olds.get(name), news.get(name))
            for name in sorted(olds.keys() | news.keys())
            if olds.get(name) != news.get(name)
        }
        return [SetAttributes(path, inode, values)] if values else []

    def _put(self, row: Row, new: Node) -> Put:
        expected = None
        if row.old is not None:
            expected = self._expect(row.old.path, is_whole=True)
        name = self._name()
        self._make(name, new)
        status = os.stat(name, dir_fd=self._staging, follow_symlinks=False)
        content = _content(status)
        return Put(row.path, name, status.st_ino, expected, content=content)

    def _put_merged(self, path: bytes, merged: MergedFile) -> Put:
        name = self._name()
        with open(self._open_new(name), "wb") as file:
            file.write(merged.content)
            file.flush()
            os.fchown(file.fileno(), *merged.expected.owner)
            for attribute, value in merged.attributes:
                os.setxattr(file.fileno(), attribute, value)
            os.fchmod(file.fileno(), merged.mode)
            status = os.fstat(file.fileno())
        content = _content(status)
        return Put(path, name, status.st_ino, merged.expected, content=content)

    def _open_new(self, name: bytes) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._staging)

    def _make(self, name: bytes, node: Node) -> None:
        status = node.status
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and not node.is_directory and key in self._links:
            os.link(
                self._links[key],
                name,
                src_dir_fd=self._staging,
                dst_dir_fd=self._staging,
                follow_symlinks=False,
            )
            return
        self._links[key] = name
        if node.is_directory:
            self._make_directory(name, node)
        elif stat.S_ISREG(status.st_mode):
            self._copy(name, node)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(self._merged.read_link(node), name, dir_fd=self._staging)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=self._staging)
        self._copy_attributes(name, node)

    def _make_directory(self, name: bytes, node: Node) -> None:
        os.mkdir(name, 0o700, dir_fd=self._staging)
        target = os.open(name, _DIRECTORY, dir_fd=self._staging)
        try:
            source = self._merged.open(node.parts[0], _DIRECTORY)
            try:
                _copy_xattrs(source, target)
            finally:
                os.close(source)
        finally:
            os.close(target)

    def _copy(self, name: bytes, node: Node) -> None:
        target = self._open_new(name)
        try:
            source = self._merged.open_file(node)
            try:
                copy_content(source, target)
                _copy_xattrs(source, target)
            finally:
                os.close(source)
        finally:
            os.close(target)

    def _copy_attributes(self, name: bytes, node: Node) -> None:
        status = node.status
        _set_owner(name, self._staging, status)
        if not stat.S_ISLNK(status.st_mode):
            # After the owner: chown(2) takes set-user-ID away.
            with held_entry(self._staging, name) as fd:
                set_mode(fd, stat.S_IMODE(status.st_mode))
        if not node.is_directory:
            os.utime(
                name,
                ns=(status.st_atime_ns, status.st_mtime_ns),
                dir_fd=self._staging,
                follow_symlinks=False,
            )


def _content(status: os.stat_result) -> tuple[int, int] | None:
    """Return what tells the content of a file; None for anything else."""
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns


def _times(row: Row, put: Put) -> list[Step]:
    """Return the step that sets the times of a new directory when it is full."""
    if row.new is None or not row.new.is_directory:
        return []
    status = row.new.status
    pair = (status.st_atime_ns, status.st_mtime_ns)
    return [SetTimes(row.path, put.inode, pair)]


def _facts(status: os.stat_result) -> tuple[int, int, int]:
    """Return what else comes along than mode and attributes."""
    return status.st_uid, status.st_gid, status.st_mtime_ns


def _xattrs_in(tree: LayeredTree, node: Node) -> dict[str, bytes]:
    """Return the attributes of the user namespace of a file or a directory."""
    is_directory = node.is_directory
    fd = tree.open(node.parts[0], _DIRECTORY) if is_directory else tree.open_file(node)
    try:
        return dict(user_attributes(fd))
    finally:
        os.close(fd)


def _set_owner(name: bytes, directory: int, status: os.stat_result) -> None:
    now = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (now.st_uid, now.st_gid) != (status.st_uid, status.st_gid):
        os.chown(
            name, status.st_uid, status.st_gid, dir_fd=directory, follow_symlinks=False
        )


def _copy_xattrs(source: int, target: int) -> None:
    for name, value in user_attributes(source):
        os.setxattr(target, name, value)


class _Steps:
    """Does and undoes one step after the other; doing one twice is doing it once.

    Args:
        base: a descriptor of the base's top.
        staging: of the staging directory.
        directories: in which steps were done: number -> handle; ``do`` adds to it.
        mark: ends the names of what cannot go back to its place.
    """

    def __init__(
        self,
        base: int,
        staging: int,
        directories: dict[int, bytes],
        mark: bytes = b"",
    ) -> None:
        self._base = base
        self._staging = staging
        self._directories = directories
        self._handles: dict[bytes, bytes] = {}  # of directories, by path
        self._moved: dict[bytes, bytes | None] = {}
        self._mark = mark

    def do(self, number: int, step: Step) -> None:
        """Do a step.

        Raises:
            BaseChangedError: the base has something else there; nothing has changed.
        """
        with self._directory(step.path) as (directory, name):
            self._record_directory(number, step.path, directory)
            match step:
                case Put():
                    self._put(step, directory, name)
                    self._forget_beneath(step.path)
                case Take():
                    self._take(step, directory, name)
                    self._forget_beneath(step.path)
                case SetMode():
                    self._set_mode(step, directory, name, step.old, step.new)
                case SetAttributes():
                    self._set_attributes(step, directory, name)
                case SetTimes():
                    self._set_times(step, directory, name)
                case _:
                    assert_never(step)

    def undo(self, number: int, step: Step) -> None:
        """Undo a step, if it was done."""
        where, name = split(step.path)
        where = self._find_directory(where, self._directories.get(number))
        try:
            with self._directory(join(where, name)) as place:
                self._undo_in(step, *place)
        except BaseChangedError:  # its directory is not there any more
            if not isinstance(step, Put | Take) or step.expected is None:
                return
            if _inode(self._staging, step.staged) == step.expected.inode:
                self._put_aside(step)

    def _record_directory(self, number: int, path: bytes, directory: int) -> None:
        """Record which directory a step is done in, so that it is undone there.

        Raises:
            BaseChangedError: another step was done in another one of that name, and no
                step has put that there.
        """
        where, _ = split(path)
        handle = read_file_handle(directory) if where else None
        if not handle:
            return
        if self._handles.setdefault(where, handle) != handle:
            raise BaseChangedError(path, "its directory is another one")
        self._directories[number] = handle

    def _forget_beneath(self, path: bytes) -> None:
        """Forget which directories were at a path and beneath it: a step changes that."""
        for one in [*self._handles]:
            if one == path or one.startswith(path + b"/"):
                del self._handles[one]

    def _find_directory(self, path: bytes, handle: bytes | None) -> bytes:
        """Return where the base has the directory that a step was done in.

        Args:
            path: where it was then.
            handle: its own; None if the step was not done, or no handle is had.
        """
        if handle is None or self._is_directory_at(path, handle):
            return path
        place = self._moved.get(handle, b"")
        if place is not None and not self._is_directory_at(place, handle):
            wanted = self._directories.values()
            self._moved = dict.fromkeys(wanted) | _find_directories(self._base, wanted)
            place = self._moved[handle]
        return path if place is None else place

    def _is_directory_at(self, path: bytes, handle: bytes) -> bool:
        with contextlib.suppress(BaseChangedError), self._directory(path) as at:
            with contextlib.suppress(OSError), held_entry(*at) as fd:
                return read_file_handle(fd) == handle
        return False

    def find_aside(self, steps: Sequence[Step]) -> dict[bytes, bytes]:
        """Return what did not go back to its place: path -> path where it is."""
        found = {}
        for step in steps:
            if not isinstance(step, Put | Take) or step.expected is None:
                continue
            for path in self._paths_aside(step):
                with contextlib.suppress(BaseChangedError), self._directory(path) as at:
                    if _inode(*at) == step.expected.inode:
                        found[step.path] = path
        return found

    def _paths_aside(self, step: Put | Take) -> Iterator[bytes]:
        """Yield the paths where something may go that cannot go back, the nearest first."""
        directory, name = split(step.path)
        end = b".undone-%s-%s" % (self._mark, step.staged)
        name = name[: _NAME_BYTES - len(end)] + end
        while directory:
            yield join(directory, name)
            directory, _ = split(directory)
        yield name

    def _put_aside(self, step: Put | Take) -> None:
        for path in self._paths_aside(step):
            with contextlib.suppress(BaseChangedError), self._directory(path) as at:
                rename(self._staging, step.staged, *at, RENAME_NOREPLACE)
                return

    def _undo_in(self, step: Step, directory: int, name: bytes) -> None:
        match step:
            case Put():
                self._undo_put(step, directory, name)
            case Take():
                if _inode(self._staging, step.staged) == step.expected.inode:
                    self._undo_take(step, directory, name)
            case SetMode():
                with contextlib.suppress(BaseChangedError):
                    self._set_mode(step, directory, name, step.new, step.old)
            case SetAttributes():
                with contextlib.suppress(BaseChangedError):
                    self._set_attributes(step, directory, name, is_undone=True)
            case SetTimes():
                pass
            case _:
                assert_never(step)

    def _holds_replaced(self, step: Put, *, is_saved_over: bool) -> bool:
        """Tell whether what a step has replaced is to be kept, though its place is gone.

        A file that the operator has saved over what the step put supersedes a file.
        """
        old = step.expected
        if old is None or (is_saved_over and not stat.S_ISDIR(old.mode)):
            return False
        return _inode(self._staging, step.staged) == old.inode

    def _put(self, step: Put, directory: int, name: bytes) -> None:
        if _inode(directory, name) == step.inode:
            return
        try:
            if step.expected is None:
                rename(self._staging, step.staged, directory, name, RENAME_NOREPLACE)
                return
            with held_entry(self._staging, step.staged):
                self._exchange(directory, name, step.staged)
                if self._is_out(step.staged, step.expected):
                    return
                self._bring_back(step, directory, name)
        except OSError as why:
            if why.errno not in {errno.EEXIST, *_GONE}:
                raise
        raise BaseChangedError(step.path, "it was changed in the base")

    def _bring_back(self, step: Put, directory: int, name: bytes) -> None:
        """Bring back what a step has replaced, or what the operator has saved since."""
        superseded = {step.inode}
        # Held, so that no number of these is given to a file that is saved meanwhile.
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(held_entry(directory, name))
            while True:
                fd = held.enter_context(held_entry(self._staging, step.staged))
                older = os.fstat(fd).st_ino
                self._exchange(directory, name, step.staged)
                if _inode(self._staging, step.staged) in superseded:
                    return
                superseded.add(older)

    def _undo_take(self, step: Take, directory: int, name: bytes) -> None:
        try:
            rename(self._staging, step.staged, directory, name, RENAME_NOREPLACE)
        except FileExistsError:  # the operator has made another one meanwhile
            self._put_aside(step)

    def _undo_put(self, step: Put, directory: int, name: bytes) -> None:
        there = _inode(directory, name)
        if there != step.inode:
            if self._holds_replaced(step, is_saved_over=there >= 0):
                self._put_aside(step)
            return
        if _is_edited(step, directory, name):
            return  # what the operator has written into it stays
        if step.expected is not None:
            self._bring_back(step, directory, name)
            if _is_edited(step, self._staging, step.staged):
                self._exchange(directory, name, step.staged)
        elif step.is_moved:
            rename(directory, name, self._staging, step.staged)
        else:
            self._put_back(step, directory, name)

    def _put_back(self, step: Put, directory: int, name: bytes) -> None:
        """Take away what was put where nothing was."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            rename(directory, name, self._staging, step.staged)
            if _inode(self._staging, step.staged) != step.inode or _is_edited(
                step, self._staging, step.staged
            ):
                # The operator has saved another one meanwhile, or twice: then it is older.
                with contextlib.suppress(FileExistsError):
                    rename(
                        self._staging, step.staged, directory, name, RENAME_NOREPLACE
                    )
            return
        # What the operator has made in it meanwhile stays.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=directory)

    def _take(self, step: Take, directory: int, name: bytes) -> None:
        if self._is_taken(step):
            return
        try:
            rename(directory, name, self._staging, step.staged, RENAME_NOREPLACE)
        except OSError as why:
            if why.errno not in _GONE:
                raise
            raise BaseChangedError(step.path, "it was removed in the base") from None
        if not self._is_out(step.staged, step.expected):
            rename(self._staging, step.staged, directory, name, RENAME_NOREPLACE)
            raise BaseChangedError(step.path, "it was changed in the base")

    def _is_taken(self, step: Take) -> bool:
        if _inode(self._staging, step.staged) == step.expected.inode:
            return True
        if step.goes_to is None:
            return False
        try:
            with self._directory(step.goes_to) as (directory, name):
                return _inode(directory, name) == step.expected.inode
        except BaseChangedError:
            return False

    def _exchange(self, directory: int, name: bytes, staged: bytes) -> None:
        rename(self._staging, staged, directory, name, RENAME_EXCHANGE)

    def _is_out(self, staged: bytes, expected: Identity) -> bool:
        """Tell whether what has come out of the base is what a step expects."""
        tree = LayeredTree((self._staging,))
        node = tree.find(staged)
        if node is None:
            return False
        found = identity_of(node.status)
        if expected.inside and node.is_directory:
            try:
                inside = digest_inside(tree, node)
            except GoneError:  # somebody works in it
                return False
            found = msgspec.structs.replace(found, inside=inside)
        return found == expected

    def _set_times(self, step: SetTimes, directory: int, name: bytes) -> None:
        try:
            with held_entry(directory, name) as fd:
                if os.fstat(fd).st_ino == step.inode:
                    set_times(fd, step.times_ns)
        except OSError as why:
            if why.errno not in _GONE:
                raise

    def _set_mode(
        self, step: SetMode, directory: int, name: bytes, old: int, new: int
    ) -> None:
        try:
            with held_entry(directory, name) as fd:
                status = os.fstat(fd)
                is_link = stat.S_ISLNK(status.st_mode)
                is_same = status.st_ino == step.inode and not is_link
                mode = stat.S_IMODE(status.st_mode)
                now = identity_of(status)
                is_known = step.expected in {now, None}
                is_edited = new == step.new and mode != new and not is_known
                if not is_same or mode not in {old, new} or is_edited:
                    raise BaseChangedError(step.path, "it was changed in the base")
                set_mode(fd, new)
        except OSError as why:
            if why.errno not in _GONE:
                raise
            raise BaseChangedError(step.path, "it was removed in the base") from None

    def _set_attributes(
        self,
        step: SetAttributes,
        directory: int,
        name: bytes,
        *,
        is_undone: bool = False,
    ) -> None:
        """Set attributes as a step says, or as they were, if all are one or the other."""
        try:
            with held_entry(directory, name) as fd:
                place = f"/proc/self/fd/{fd}"
                now = {one: os.getxattr(place, one) for one in attribute_names(place)}
                is_known = all(
                    now.get(one) in pair for one, pair in step.values.items()
                )
                if os.fstat(fd).st_ino != step.inode or not is_known:
                    raise BaseChangedError(step.path, "it was changed in the base")
                for one, (old, new) in step.values.items():
                    value = old if is_undone else new
                    if value is not None:
                        os.setxattr(place, one, value)
                    elif one in now:
                        os.removexattr(place, one)
        except OSError as why:
            if why.errno not in {errno.ENODATA, *_GONE}:
                raise
            raise BaseChangedError(step.path, "it was changed in the base") from None

    @contextlib.contextmanager
    def _directory(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Hold the directory of a path, and its name there."""
        directory, name = split(path)
        try:
            fd = open_exactly(directory or b".", self._base, _DIRECTORY)
        except OSError as why:
            if why.errno not in _GONE:
                raise
            raise BaseChangedError(path, "its directory is not there") from None
        try:
            yield fd, name
        finally:
            os.close(fd)


def _find_directories(top: int, handles: Collection[bytes]) -> dict[bytes, bytes]:
    """Return where directories are beneath a top by now: handle -> path.

    Args:
        top: a descriptor of it.
        handles: of the directories, as ``read_file_handle`` returns them.
    """
    wanted, found = set(handles), dict[bytes, bytes]()
    pending = [b""]
    while pending and wanted:
        path = pending.pop()
        with contextlib.suppress(OSError):  # gone meanwhile, or not to be read
            fd = open_exactly(path or b".", top, _DIRECTORY)
            try:
                handle = read_file_handle(fd)
                if handle in wanted:
                    wanted.discard(handle)
                    found[handle] = path
                pending += [join(path, name) for name in _directories_in(fd)]
            finally:
                os.close(fd)
    return found


def _directories_in(fd: int) -> Iterator[bytes]:
    """Yield the names of the directories in one, but of those that commits stage in."""
    with os.scandir(fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            is_staging = name.startswith(STAGING_PREFIX)
            if entry.is_dir(follow_symlinks=False) and not is_staging:
                yield name


def _is_edited(step: Put, directory: int, name: bytes) -> bool:
    """Tell whether the file that a step has put was written to since."""
    if step.content is None:
        return False
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return status.st_ino == step.inode and _content(status) != step.content


def _inode(directory: int, name: bytes) -> int:
    """Return the inode of an entry; -1 if there is none."""
    try:
        status = os.stat(name or b".", dir_fd=directory, follow_symlinks=False)
    except OSError as why:
        if why.errno not in _GONE:
            raise
        return -1
    return status.st_ino
