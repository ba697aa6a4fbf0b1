"""The directory of one workspace: what is kept of it, and its locks.

Files, all beneath a directory of mode 0700: ``state`` (what it is), ``upper`` and ``work``
(overlayfs's), ``hidden`` (what hides names of the base), ``record`` (what the base had),
``commit`` (a commit that has begun), ``lock`` (held while a child has it mounted),
``sealed`` and ``volatile`` (how the mount is to be made, as ``launchpad.overlay`` reads it).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import select
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.sandbox.scratch import remove_tree
from supervisor.spawn.launchpad.layers.overlay import VOLATILE_FILE
from supervisor.workspace.attributes import read_acls, set_acls
from supervisor.workspace.linux import (
    is_on_overlay,
    read_birth_time_ns,
    set_mode,
    set_owner,
)
from supervisor.workspace.settings import USUAL, WorkspaceSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hostlib.linux.processes import ProcessIdentity

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_WORKSPACES = "workspaces"
COPIES = "fleet-bases"
"""Directory with copies of other machines' bases, in the state directory."""

_LOCK_BYTES = 256
HALF = ".discarded-"
"""Mark in the name of a workspace that is half made or half removed."""

IN_THE_MAKING = f"{HALF}new-"
"""Mark in the name of a workspace until it is whole."""

_MOUNT = b"mount"
_VOLATILE_MARK = ("work/work", "work/work/incompat", "work/work/incompat/volatile")
"""The mark that overlayfs leaves of a mount that synced nothing, and the directories
above it."""

_PAUSE_S = 0.02

PATIENCE_S = 10.0
"""Longest wait of a child's start and end for a command that looks at its workspace."""


class WorkspaceError(Exception):
    """A workspace cannot be used as asked; the text has the reason and the remedy."""


class NoWorkspaceError(WorkspaceError):
    """There is no workspace of that name."""


class BaseGoneError(WorkspaceError):
    """The base is not there any more, or another directory is."""


class InUseError(WorkspaceError):
    """A child has the workspace, or another command works on it."""


class Top(NamedTuple):
    """The top of a tree, as a layer over it shows it.

    Attributes:
        owner: user and group.
        mode: its permission bits.
        acls: of ``read_acls``.
    """

    owner: tuple[int, int]
    mode: int
    acls: dict[str, bytes]


class Snapshot(msgspec.Struct, frozen=True):
    """The state of a workspace at one moment.

    Attributes:
        label: its name in the workspace.
        layers: the sealed layers above the base, newest first.
        made_ns: when it was made.
        of_checkpoint: a checkpoint of its child names it, and no operator has made it.
    """

    label: str
    layers: tuple[str, ...]
    made_ns: int
    of_checkpoint: bool = False


class State(msgspec.Struct, kw_only=True):
    """The description of a workspace.

    Attributes:
        base: the path of the operator's directory.
        device: of the base.
        inode: of the base.
        born_ns: when the base was made, for another directory may get its inode; None
            where that is not kept, or not for good.
        marks: how the names of overlayfs's attributes begin.
        created_ns: when it was made.
        started_ns: when the run began of which there is no record yet.
        is_running: a run has begun and its end was not recorded.
        settings: of the operator.
        hidden: patterns of what was hidden in some run; a child may not know of it.
        layers: the sealed layers between its upper and the base, newest first.
        snapshots: oldest first.
        outgoing: as which layer the upper is to go away; "" if it stays. An upper that
            has gone is one that no state names, or the newest of the layers.
        may_redirect: its upper may have directories that point to others.
        texts: the directory among the layers with the texts that its files began from;
            forks share it. "" if there is none yet.
        goes_back_to: the label of the snapshot that its child has asked for, and that it
            goes back to before the next run; "" for none.
    """

    base: bytes
    device: int
    inode: int
    born_ns: int | None = None
    marks: bytes
    created_ns: int
    started_ns: int
    is_running: bool = False
    settings: WorkspaceSettings = USUAL
    hidden: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    outgoing: str = ""
    may_redirect: bool = True
    texts: str = ""
    goes_back_to: str = ""

    def layers_named(self) -> set[str]:
        """Return all that it needs of the layers' store."""
        found = {*self.layers, self.outgoing, self.texts} - {""}
        return found.union(*(snapshot.layers for snapshot in self.snapshots))

    def labels(self) -> list[str]:
        """Return the labels of its snapshots, oldest first."""
        return [snapshot.label for snapshot in self.snapshots]

    def snapshot(self, label: str) -> Snapshot | None:
        """Return the snapshot of a label; None if there is none."""
        for snapshot in self.snapshots:
            if snapshot.label == label:
                return snapshot
        return None


class WorkspaceDirectory:
    """One workspace on the disk; it holds a descriptor and a lock until ``close``.

    Args:
        patience_s: how long to wait for another command's end.

    Raises:
        NoWorkspaceError: there is none.
        InUseError: another command works on it.
    """

    def __init__(self, path: str, name: str, patience_s: float = 0.0) -> None:
        self.name = name
        self._path = path
        while True:
            self._open()
            if not self._is_alone(patience_s):
                self.close()
                text = f"cannot use workspace {name!r}: another command works on it"
                raise InUseError(f"{text}; wait for its end")
            if self._is_there():
                return
            self.close()  # the command that was waited for has discarded it

    def _open(self) -> None:
        try:
            self.fd = os.open(self._path, DIRECTORY)
        except OSError as why:
            if why.errno != errno.ENOENT:
                raise
            where = os.path.dirname(self._path)
            text = f"cannot find workspace {self.name!r}: there is none in {where}"
            raise NoWorkspaceError(f"{text}; see 'sandhost workspace list'") from None

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _is_alone(self, patience_s: float) -> bool:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    return False
                select.select((), (), (), _PAUSE_S)  # in a worker thread
            else:
                return True

    def close(self) -> None:
        """Let others work on it."""
        os.close(self.fd)

    def read_state(self) -> State:
        """Return what it is.

        Raises:
            WorkspaceError: the file is damaged.
        """
        return _state_in(self.read("state") or b"", self.name)

    def write_state(self, state: State) -> None:
        """Keep what it is."""
        self.write("state", _state_as_bytes(state))

    def write_new_state(self, state: State) -> None:
        """Write what it is for the first time; a power cut may leave an empty file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open("state", flags, 0o600, dir_fd=self.fd), "wb") as file:
            file.write(_state_as_bytes(state))

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it is not there."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes | None) -> None:
        """Replace a file, on the disk when this returns; None removes it."""
        if data is None:
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                return
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            new = f"{name}.new"
            try:
                with open(os.open(new, flags, 0o600, dir_fd=self.fd), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:  # on a full disk, it takes room for nothing
                with contextlib.suppress(OSError):
                    os.unlink(new, dir_fd=self.fd)
                raise
            os.rename(new, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def find_volatile_mark(self) -> bool:
        """Tell whether the last mount synced nothing and its layer was not synced since.

        The kernel makes no other mount with that mark. Overlayfs makes the directories
        above it with mode 0: they get another mode, so that their owner can enter them.
        """
        if self.read(VOLATILE_FILE) is None:
            return False
        for name in _VOLATILE_MARK:
            try:
                os.chmod(name, 0o700, dir_fd=self.fd)
            except FileNotFoundError:
                return False
        return True

    def clear_volatile_mark(self) -> None:
        """Remove the mark of a mount that synced nothing, which the kernel never does.

        Raises:
            OSError: it cannot be removed.
        """
        why = remove_tree(Path(_VOLATILE_MARK[-1]), self.fd)
        if why is not None:
            raise why

    def remove(self) -> None:
        """Remove all of it from the disk."""
        gone = f"{self._path}{HALF}{secrets.token_hex(4)}"
        os.rename(self._path, gone)  # another command finds it whole or not at all
        why = remove_tree(Path(gone))
        if why is not None:
            raise why

    def lock_for(self, child: str) -> int:
        """Take the lock of a mount; return its descriptor, which the caller closes.

        Raises:
            InUseError: another child has it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open("lock", flags, 0o600, dir_fd=self.fd)
        try:
            self._lock_alone(fd)
            os.ftruncate(fd, 0)
            os.write(fd, child.encode() + b"\n")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def user(self) -> str:
        """Return the child that has it mounted; "" for none."""
        try:
            self.check_idle()
        except InUseError:
            return _child_in(self.read("lock") or b"")
        return ""

    def processes(self) -> list[ProcessIdentity]:
        """Return the first process of each child that has it mounted."""
        pairs = (line.split() for line in self._lock_lines())
        return [(int(pid), int(start)) for pid, start in pairs if pid != _MOUNT]

    def mount_device(self) -> bytes | None:
        """Return the device of the mount, as mount tables name it; None: none yet."""
        pairs = (line.split() for line in self._lock_lines())
        return next((device for word, device in pairs if word == _MOUNT), None)

    def _lock_lines(self) -> list[bytes]:
        return (self.read("lock") or b"").splitlines()[1:]

    def check_idle(self) -> None:
        """Raise if a child has it.

        Raises:
            InUseError: that is so.
        """
        with contextlib.suppress(FileNotFoundError):
            with closing_fd(
                os.open("lock", os.O_RDWR | os.O_CLOEXEC, dir_fd=self.fd)
            ) as fd:
                self._share(fd)

    def _lock_alone(self, fd: int) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            self._share(fd)
            # No child has it: it is being looked at, which ends at once.
            select.select((), (), (), _PAUSE_S)  # in a worker thread

    def _share(self, fd: int) -> None:
        """Take a lock together with those that look, as long as no child has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _child_in(os.pread(fd, _LOCK_BYTES, 0))
            text = f"cannot use workspace {self.name!r}: child {who} has it"
            raise InUseError(
                f"{text}; wait for its end; diff and commit have --freeze"
            ) from None


def add_process(lock: int, process: ProcessIdentity) -> None:
    """Write into a lock which process its child is, so that a command can stop it."""
    os.write(lock, b"%d %d\n" % process)


def add_mount(lock: int, mount: int) -> None:
    """Write into a lock which mount its child has; a child cannot be asked."""
    device = os.fstat(mount).st_dev
    os.write(lock, b"%s %d:%d\n" % (_MOUNT, os.major(device), os.minor(device)))


def _child_in(lock: bytes) -> str:
    return (lock.partition(b"\n")[0] or b"?").decode(errors="replace")


def workspaces_dir(state_dir: str) -> str:
    """Return the directory of a state directory that has the workspaces."""
    return os.path.join(state_dir, _WORKSPACES)


def _state_as_bytes(state: State) -> bytes:
    return msgspec.json.format(msgspec.json.encode(state))


def _state_in(data: bytes, name: str) -> State:
    try:
        return msgspec.json.decode(data, type=State)
    except msgspec.DecodeError as why:
        text = f"cannot read workspace {name!r}: its state is damaged ({why})"
        raise WorkspaceError(f"{text}; discard it") from None


def read_state(state_dir: str, name: str) -> State:
    """Return what a workspace is while another command may work on it.

    Raises:
        WorkspaceError: the file is damaged.
        OSError: it cannot be read.
    """
    return _state_in(Path(path_of(state_dir, name), "state").read_bytes(), name)


def read_states(state_dir: str) -> list[State]:
    """Return what each workspace is, those in use included.

    Raises:
        WorkspaceError: one cannot be read.
    """
    found = []
    for name in workspaces_in(state_dir):
        try:
            data = Path(path_of(state_dir, name), "state").read_bytes()
        except FileNotFoundError:  # it was discarded meanwhile
            continue
        if data:  # a fork that a power cut left empty was never worked in
            found.append(_state_in(data, name))
    return found


def read_bases(state_dir: str) -> Iterator[bytes]:
    """Yield the base of each workspace that a state directory has.

    A workspace whose state is damaged has none that could be told.
    """
    for name in workspaces_in(state_dir):
        with contextlib.suppress(OSError, WorkspaceError):
            yield read_state(state_dir, name).base


def workspaces_in(state_dir: str) -> list[str]:
    """Return the names of the workspaces that a state directory has, sorted."""
    try:
        names = os.listdir(workspaces_dir(state_dir))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if NAME.fullmatch(name) and HALF not in name)


def look_at_state(state_dir: str, name: str) -> str | None:
    """Return ``in use``, ``idle`` or ``left behind``; None if it cannot be told.

    For figures: no command is kept from the workspace meanwhile.
    """
    path = path_of(state_dir, name)
    try:
        with open(os.path.join(path, "lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "in use"
    except FileNotFoundError:
        pass  # no child had it yet
    except OSError:
        return None
    try:
        state = read_state(state_dir, name)
    except (OSError, WorkspaceError):
        return None
    return "left behind" if state.is_running else "idle"


def path_of(state_dir: str, name: str) -> str:
    """Return where a workspace of a name is.

    Raises:
        WorkspaceError: a workspace cannot have that name.
    """
    if not NAME.fullmatch(name) or HALF in name:
        text = f"cannot use the workspace name {name!r}: it is not {NAME.pattern}"
        raise WorkspaceError(f"{text}; choose another")
    return os.path.join(state_dir, _WORKSPACES, name)


def new_name(base: bytes) -> str:
    """Return a name for a workspace of a base that has been given none."""
    last = os.fsdecode(base).rpartition("/")[2].lower()
    plain = re.sub(r"[^a-z0-9._-]+", "-", last).lstrip("._-")[:40] or "workspace"
    return f"{plain}-{secrets.token_hex(3)}"


def make_workspace(
    state_dir: str,
    name: str,
    base: bytes,
    marks: bytes,
    settings: WorkspaceSettings | None = None,
) -> None:
    """Make the directory of a workspace, empty.

    Args:
        state_dir: where workspaces live.
        name: of the new one.
        base: the path of the operator's directory.
        marks: how the names of overlayfs's attributes will begin.
        settings: of the operator; None for the usual ones.

    Raises:
        WorkspaceError: the name is taken or is none, or the base is no directory.
        OSError: it cannot be made.
    """
    path = path_of(state_dir, name)
    status, top, born_ns = _look_at_base(base)
    now_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
    state = State(
        base=base,
        device=status.st_dev,
        inode=status.st_ino,
        born_ns=born_ns,
        marks=marks,
        created_ns=now_ns,
        started_ns=now_ns,
        settings=settings or USUAL,
        may_redirect=False,
    )
    make_from_state(path, state, top)


def make_from_state(
    path: str,
    state: State,
    below: Top,
    links: Mapping[str, str] | None = None,
    source: int = -1,
    *,
    is_synced: bool = True,
) -> None:
    """Make the directory of a workspace that is as a state says.

    Args:
        path: of the new one, of ``path_of``.
        state: of it.
        below: of the top of what its upper will lie on.
        links: files that it shares with another workspace: name -> name there.
        source: a descriptor of the other's directory.
        is_synced: it is on the disk when this returns.

    Raises:
        WorkspaceError: the name is taken.
        OSError: it cannot be made.
    """
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    # All of it under another name, then it gets its own.
    new = f"{path}{IN_THE_MAKING}{secrets.token_hex(4)}"
    os.mkdir(new, 0o700)
    try:
        directory = WorkspaceDirectory(new, os.path.basename(path))
        try:
            os.mkdir("work", 0o700, dir_fd=directory.fd)
            make_upper(directory.fd, "upper", below)
            for name, other in (links or {}).items():
                with contextlib.suppress(FileNotFoundError):
                    os.link(other, name, src_dir_fd=source, dst_dir_fd=directory.fd)
            if is_synced:
                directory.write_state(state)
            else:
                directory.write_new_state(state)
        finally:
            directory.close()
        try:
            os.rename(new, path)
        except OSError as why:
            if why.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
            text = (
                f"cannot make workspace {os.path.basename(path)!r}: it is there already"
            )
            raise WorkspaceError(f"{text}; choose another name") from None
    except BaseException:
        remove_tree(Path(new))
        raise


def _look_at_base(base: bytes) -> tuple[os.stat_result, Top, int | None]:
    """Return what a base is, its top, and when it was made, if that is kept for good."""
    shown = os.fsdecode(base)
    try:
        fd = os.open(base, os.O_PATH | os.O_CLOEXEC)
    except OSError as why:
        text = f"cannot use {shown!r} as a workspace: {why.strerror}"
        raise WorkspaceError(f"{text}; name a directory") from None
    with closing_fd(fd):
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            text = f"cannot use {shown!r} as a workspace: it is no directory"
            raise WorkspaceError(f"{text}; name a directory")
        held = f"/proc/self/fd/{fd}"
        # On an overlay it is that of a copy, which the first change makes.
        born_ns = None if is_on_overlay(held) else read_birth_time_ns(fd)
        return status, read_top(held), born_ns


def read_top(of: int | str) -> Top:
    """Return what a layer over a directory has of it.

    Args:
        of: a descriptor that may be read, or a path.
    """
    status = os.stat(of)
    owner = status.st_uid, status.st_gid
    return Top(owner, stat.S_IMODE(status.st_mode), read_acls(of))


def make_upper(directory: int, name: str, below: Top) -> None:
    """Make an empty upper layer that is as what it lies on."""
    os.mkdir(name, 0o700, dir_fd=directory)
    with closing_fd(os.open(name, DIRECTORY, dir_fd=directory)) as fd:
        set_owner(fd, *below.owner)
        set_mode(fd, below.mode)
        set_acls(fd, below.acls)  # after the mode, which is a part of them
