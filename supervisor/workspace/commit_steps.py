"""The steps of a commit in the base: each is done by a rename, and can be undone.

Rules:
 1. An object that a step replaces or removes is looked at again when it has come out.
    If that is not what was judged, the operator was quicker: every step is undone, in
    reverse order.
 2. A replaced or removed object goes back to its directory, wherever the operator has
    moved that. If its place is taken by then, or gone, it gets a name of its own near
    it.
 3. Nothing is reached through a link: directories are opened beneath the base exactly.

Spec WS12, WS13.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, assert_never

import msgspec

from hostlib.linux.files import closing_fd, open_directory
from supervisor.workspace.attributes import attribute_names
from supervisor.workspace.commit_journal import (
    STAGING_PREFIX,
    BaseChangedError,
    Identity,
    Put,
    SetAttributes,
    SetMode,
    SetTimes,
    Step,
    Take,
    content_of,
    identity_of,
)
from supervisor.workspace.layers import (
    GONE,
    GoneError,
    LayeredTree,
    is_beneath,
    join,
    split,
)
from supervisor.workspace.linux import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    held_entry,
    read_file_handle,
    rename,
    set_mode,
    set_times,
)
from supervisor.workspace.record import digest_inside

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_CHANGED, _REMOVED = "it was changed in the base", "it was removed in the base"
_NAME_BYTES = 255
"""Longest name: ``NAME_MAX``."""


class Steps:
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
        mark: bytes,
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
            if isinstance(step, Put | Take) and self._holds_old(step):
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
            if one == path or is_beneath(one, path):
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
            if not isinstance(step, Put | Take):
                continue
            for path in self._paths_aside(step):
                with contextlib.suppress(BaseChangedError), self._directory(path) as at:
                    if _is_old(step, _inode(*at)):
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
                if self._holds_old(step):
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
        return self._holds_old(step)

    def _put(self, step: Put, directory: int, name: bytes) -> None:
        is_done = _inode(directory, name) == step.inode
        with _base_changed(step.path, _CHANGED, errno.EEXIST):
            if step.expected is None:
                if not is_done:
                    rename(
                        self._staging, step.staged, directory, name, RENAME_NOREPLACE
                    )
                return
            with held_entry(self._staging, step.staged) as fd:
                if not is_done:
                    if os.fstat(fd).st_ino != step.inode:
                        # A commit that was cut has put it; the operator has saved since.
                        raise BaseChangedError(step.path, _CHANGED)
                    self._exchange(directory, name, step.staged)
                if self._is_out(step.staged, step.expected):
                    return
                self._bring_back(step, directory, name)
        raise BaseChangedError(step.path, _CHANGED)

    def _bring_back(self, step: Put, directory: int, name: bytes) -> None:
        """Bring back the file that a step has replaced, or a later one of the operator."""
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
            return  # the operator's files in it stay
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
        # Files that the operator has made in it meanwhile stay.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=directory)

    def _take(self, step: Take, directory: int, name: bytes) -> None:
        if self._is_moved_on(step):
            return
        if not self._holds_old(step):
            with _base_changed(step.path, _REMOVED, errno.EEXIST):
                rename(directory, name, self._staging, step.staged, RENAME_NOREPLACE)
        if not self._is_out(step.staged, step.expected):
            self._undo_take(step, directory, name)
            raise BaseChangedError(step.path, _CHANGED)

    def _holds_old(self, step: Put | Take) -> bool:
        """Tell whether the staging directory has what came out of a step's path."""
        return _is_old(step, _inode(self._staging, step.staged))

    def _is_moved_on(self, step: Take) -> bool:
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
            if why.errno not in GONE:
                raise

    def _set_mode(
        self, step: SetMode, directory: int, name: bytes, old: int, new: int
    ) -> None:
        with _base_changed(step.path, _REMOVED), held_entry(directory, name) as fd:
            status = os.fstat(fd)
            is_link = stat.S_ISLNK(status.st_mode)
            is_same = status.st_ino == step.inode and not is_link
            mode = stat.S_IMODE(status.st_mode)
            is_known = step.expected in {identity_of(status), None}
            is_edited = new == step.new and mode != new and not is_known
            if not is_same or mode not in {old, new} or is_edited:
                raise BaseChangedError(step.path, _CHANGED)
            set_mode(fd, new)

    def _set_attributes(
        self,
        step: SetAttributes,
        directory: int,
        name: bytes,
        *,
        is_undone: bool = False,
    ) -> None:
        """Set attributes as a step says, or as they were, if all are one or the other."""
        with (
            _base_changed(step.path, _CHANGED, errno.ENODATA),
            held_entry(directory, name) as fd,
        ):
            place = f"/proc/self/fd/{fd}"
            now = {one: os.getxattr(place, one) for one in attribute_names(place)}
            is_known = all(now.get(one) in pair for one, pair in step.values.items())
            if os.fstat(fd).st_ino != step.inode or not is_known:
                raise BaseChangedError(step.path, _CHANGED)
            for one, (old, new) in step.values.items():
                value = old if is_undone else new
                if value is not None:
                    os.setxattr(place, one, value)
                elif one in now:
                    os.removexattr(place, one)

    @contextlib.contextmanager
    def _directory(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Hold the directory of a path, and its name there."""
        directory, name = split(path)
        with _base_changed(path, "its directory is not there"):
            fd = open_directory(directory, self._base)
        with closing_fd(fd):
            yield fd, name


@contextlib.contextmanager
def _base_changed(path: bytes, reason: str, *more: int) -> Iterator[None]:
    """Turn errors which say that something is gone into a change of the base."""
    try:
        yield
    except OSError as why:
        if why.errno not in {*GONE, *more}:
            raise
        raise BaseChangedError(path, reason) from None


def _find_directories(top: int, handles: Collection[bytes]) -> dict[bytes, bytes]:
    """Return where directories are beneath a top by now: handle -> path."""
    wanted, found = set(handles), dict[bytes, bytes]()
    pending = [b""]
    while pending and wanted:
        path = pending.pop()
        with contextlib.suppress(OSError):  # gone meanwhile, or not to be read
            with closing_fd(open_directory(path, top)) as fd:
                handle = read_file_handle(fd)
                if handle in wanted:
                    wanted.discard(handle)
                    found[handle] = path
                pending += [join(path, name) for name in _directories_in(fd)]
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
    return status.st_ino == step.inode and content_of(status) != step.content


def _is_old(step: Put | Take, inode: int) -> bool:
    """Tell whether an inode, -1 for none, is of what a step took out of the base.

    That may be a newer file than was expected. A directory that moves on has one name in
    the staging directory for two steps, so there only the expected one counts.
    """
    if step.expected is None:
        return False
    if isinstance(step, Put):
        is_shared, is_new = step.is_moved, inode == step.inode
    else:
        is_shared, is_new = step.goes_to is not None, False
    if is_shared:
        return inode == step.expected.inode
    return inode >= 0 and not is_new


def _inode(directory: int, name: bytes) -> int:
    """Return the inode of an entry; -1 if there is none."""
    try:
        status = os.stat(name or b".", dir_fd=directory, follow_symlinks=False)
    except OSError as why:
        if why.errno not in GONE:
            raise
        return -1
    return status.st_ino
