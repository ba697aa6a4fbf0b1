"""One run of a child in a workspace: checked, made or found, mounted, examined."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd
from supervisor.sandbox.held_mount import hold_directory, hold_overlay
from supervisor.spawn.launchpad.layers.overlay import (
    SEALED_FILE,
    VOLATILE_FILE,
    Layers,
    OwnersError,
)
from supervisor.workspace.attributes import own_marks
from supervisor.workspace.directory import (
    COPIES,
    PATIENCE_S,
    NoWorkspaceError,
    WorkspaceError,
    make_workspace,
    new_name,
    path_of,
    read_bases,
)
from supervisor.workspace.linux import is_on_overlay
from supervisor.workspace.settings import USUAL
from supervisor.workspace.use import WorkspaceUse
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from supervisor.sandbox.held_mount import HeldMount
    from supervisor.workspace.branches import Rollback
    from supervisor.workspace.changes import Row
    from supervisor.workspace.settings import WorkspaceSettings
    from supervisor.workspace.use import Mode

_BASE = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags of open(2) for a base, whose path may end in a link."""


@dataclass(frozen=True, slots=True)
class MountedWorkspace:
    """A workspace while a child sees it: the descriptors that its host holds.

    Attributes:
        mount: None where the child makes it.
        lock: of the workspace's lock; -1 of modes that have none.
        own: the directory of the layer, where the child makes the mount.
        walked_s: how long the base was walked for names to hide; None if it was not.
        went_back: to which snapshot it went before, as its last child had asked.
    """

    mount: HeldMount | None = None
    lock: int = -1
    own: str = ""
    walked_s: float | None = None
    went_back: Rollback | None = None

    @property
    def fd(self) -> int:
        """Return the descriptor of the mount; -1 for none."""
        return -1 if self.mount is None else self.mount.fd

    @property
    def namespace(self) -> int:
        """Return the descriptor of the mount's namespace; -1 for none."""
        return -1 if self.mount is None else self.mount.namespace

    def close(self) -> None:
        """Give back the mount and the lock."""
        if self.mount is not None:
            self.mount.close()
        if self.lock >= 0:
            os.close(self.lock)


def prepare_use(
    path: str,
    mode: Mode,
    state_dir: str,
    name: str | None = None,
    settings: WorkspaceSettings | None = None,
    more: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> WorkspaceUse:
    """Return a workspace for a directory, made if there is none of that name.

    Args:
        path: of the operator's directory, absolute.
        mode: the rights of the child.
        state_dir: where workspaces live.
        name: of the workspace; None for a new one.
        settings: of the operator; None for those that it has, or the usual ones.
        more: patterns that are added to those of what is hidden, and of what is guarded.

    Raises:
        WorkspaceError: the directory cannot be one, or the workspace is another's.
        OSError: something cannot be made.
    """
    base = find_base(path, state_dir)
    wished = (settings or USUAL).with_patterns(*more)
    if mode != "review":
        if wished.hide:
            text = f"cannot hide names of {base!r}: mode {mode!r} shows the base itself"
            raise WorkspaceError(f"{text}; use the mode 'review'")
        if not wished.durable:
            text = (
                f"cannot use {base!r} with durable = false: mode {mode!r} has no layer"
            )
            raise WorkspaceError(f"{text}; use the mode 'review', or leave it out")
        if mode == "direct" and (what := wished.bound_to_layer()):
            text = f"cannot use {base!r} with {what}: mode 'direct' has no layer"
            raise WorkspaceError(f"{text}; use the mode 'review', or leave it out")
        return WorkspaceUse(name or base, base, mode, state_dir, wished)
    wanted = new_name(os.fsencode(base)) if name is None else name
    with _open_or_make(state_dir, wanted, base, wished) as workspace:
        known = os.fsdecode(workspace.state.base)
        if known != base:
            text = (
                f"cannot use workspace {wanted!r} for {base!r}: its base is {known!r}"
            )
            raise WorkspaceError(f"{text}; choose another name")
        wished = (settings or workspace.state.settings).with_patterns(*more)
        if wished != workspace.state.settings:
            workspace.state.settings = wished
            workspace.directory.write_state(workspace.state)
        return WorkspaceUse(wanted, base, mode, state_dir, workspace.state.settings)


def _open_or_make(
    state_dir: str, name: str, base: str, settings: WorkspaceSettings
) -> Workspace:
    """Return a workspace, made if there is none; a command may drop it in between."""
    while True:
        _make_if_new(state_dir, name, base, settings)
        with contextlib.suppress(NoWorkspaceError):
            return Workspace(state_dir, name, PATIENCE_S)


def _make_if_new(
    state_dir: str, name: str, base: str, settings: WorkspaceSettings
) -> None:
    path = path_of(state_dir, name)
    if os.path.exists(path):
        return
    _check_apart(state_dir, base)
    try:
        make_workspace(state_dir, name, os.fsencode(base), own_marks(), settings)
    except WorkspaceError:  # another child that is to have it has been quicker
        if not os.path.exists(path):
            raise


def _check_apart(state_dir: str, base: str) -> None:
    """Refuse a base that lies in another workspace's, or holds it."""
    status = os.stat(base)
    for other in map(os.fsdecode, read_bases(state_dir)):
        try:
            known = os.stat(other)
        except OSError:
            continue
        if os.path.samestat(known, status):
            return  # it was compared with all the others when that one was made
        for way, inner, outer in (("lies in", base, known), ("holds", other, status)):
            if _holds(outer, inner):
                text = f"cannot use {base!r} as a workspace: it {way} {other!r}"
                raise WorkspaceError(f"{text}, the base of another; discard that one")


def prepare_uses(uses: tuple[WorkspaceUse, ...]) -> tuple[WorkspaceUse, ...]:
    """Return configured workspaces as they are on the disk, made where they are new.

    Raises:
        OSError: one cannot be used; ``strerror`` says why.
    """
    found = []
    for use in uses:
        try:
            one = prepare_use(use.base, use.mode, use.state_dir, use.name, use.settings)
        except WorkspaceError as why:
            raise OSError(errno.EINVAL, str(why)) from None
        except OSError as why:
            text = f"cannot keep workspace {use.name!r} in {use.state_dir!r}"
            raise OSError(why.errno, f"{text}: {why.strerror}") from None
        found.append(replace(one, is_configured=True, drop=use.drop))
    return tuple(found)


def find_base(path: str, state_dir: str) -> str:
    """Return the path without links of a directory that can be a base.

    Raises:
        WorkspaceError: it cannot.
    """
    try:
        fd = os.open(path, _BASE)
    except OSError as why:
        reason = "it is no directory" if why.errno == errno.ENOTDIR else why.strerror
        text = f"cannot use {path!r} as a workspace: {reason}"
        raise WorkspaceError(f"{text}; name a directory") from None
    with closing_fd(fd):
        base = os.readlink(f"/proc/self/fd/{fd}")
        status = os.fstat(fd)
    for reason in _faults_of_base(base, status, state_dir):
        raise WorkspaceError(f"cannot use {path!r} as a workspace: {reason}")
    return base


def _faults_of_base(base: str, status: os.stat_result, state_dir: str) -> Iterator[str]:
    if base == "/":
        yield "it is the top of the file system; name a directory in it"
    if os.geteuid() not in {0, status.st_uid}:
        yield f"user {status.st_uid} owns it; run as its owner"
    if _holds(status, state_dir):
        yield f"the state directory {state_dir!r} lies in it; name another (--state-dir)"
    try:
        state = os.stat(state_dir)
    except OSError:
        return
    if _holds(state, base) and not _is_copy(base, state_dir):
        yield f"it lies in the state directory {state_dir!r}; name another directory"


def _is_copy(base: str, state_dir: str) -> bool:
    """Tell whether a base is a copy that the host keeps itself."""
    try:
        copies = os.stat(os.path.join(state_dir, COPIES))
    except OSError:
        return False
    return _holds(copies, base)


def _holds(directory: os.stat_result, path: str) -> bool:
    """Tell whether a path is a directory or lies in it, by device and inode."""
    # The operator's own: a child cannot swap it meanwhile.
    path = os.path.realpath(path)  # noqa: TID251 - as said
    while True:
        try:
            found = os.stat(path)
        except OSError:
            found = None
        if found is not None and os.path.samestat(found, directory):
            return True
        if path in {"/", ""}:
            return False
        path = os.path.dirname(path.rstrip("/"))


def clear_volatile_mark(use: WorkspaceUse) -> bool:
    """Clear the kernel's mark of a run that was cut off before its layer was synced.

    Returns:
        Whether there was one: the caller tells it.

    Raises:
        WorkspaceError: the workspace is not there, or somebody has it.
        OSError: it cannot be cleared.
    """
    if not os.path.lexists(
        os.path.join(path_of(use.state_dir, use.name), VOLATILE_FILE)
    ):
        return False
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        workspace.directory.check_idle()
        if not workspace.directory.find_volatile_mark():
            return False
        workspace.directory.clear_volatile_mark()
    return True


def mount_for_child(
    use: WorkspaceUse, child: str, owners: int = -1
) -> MountedWorkspace:
    """Make the mount that a child sees; the caller's to close at the child's end.

    A host that is not root makes none: the child does, in its user namespace.

    Args:
        use: the workspace.
        child: the child that has it, for ``workspace list``.
        owners: as of ``overlay.copy_layers``.

    Raises:
        WorkspaceError: it is not there, or somebody has it, or a cut commit was given up.
        OSError: the mount cannot be made; the text says what takes its place.
    """
    is_root = os.geteuid() == 0
    if use.mode != "review":
        return MountedWorkspace(_hold_base(use, owners) if is_root else None)
    with _open_or_make(use.state_dir, use.name, use.base, use.settings) as workspace:
        # All before the lock: else the layer would count as in use.
        workspace.finish_commit()
        went_back = workspace.finish_restore()
        workspace.directory.check_idle()
        with contextlib.ExitStack() as undoing:
            undoing.callback(workspace.set_running, workspace.state.is_running)
            walked_s = workspace.begin_run()
            lock = workspace.directory.lock_for(child)
            undoing.callback(os.close, lock)
            _tell_mounter(workspace, use)
            mount = _hold_layers(workspace, use, owners) if is_root else None
            fd = workspace.directory.fd
            own = "" if is_root else os.readlink(f"/proc/self/fd/{fd}")
            undoing.pop_all()
    return MountedWorkspace(mount, lock, own, walked_s, went_back)


def _hold_base(use: WorkspaceUse, owners: int) -> HeldMount:
    """Make a copy of the base's own mount, for a mode without a layer."""
    with closing_fd(os.open(use.base, _BASE)) as base:
        try:
            return hold_directory(base, owners)
        except OwnersError:
            raise _no_owners(use, is_of_layer=False) from None


def _tell_mounter(workspace: Workspace, use: WorkspaceUse) -> None:
    """Write how the mount is to be made, for the host or the child that makes it."""
    layers = workspace.state.layers
    paths = None
    if layers:
        found = workspace.store.paths(layers)
        paths = b"".join(os.fsencode(path) + b"\0" for path in found)
    workspace.directory.write(SEALED_FILE, paths)
    workspace.directory.write(VOLATILE_FILE, None if use.settings.durable else b"")


def _hold_layers(workspace: Workspace, use: WorkspaceUse, owners: int) -> HeldMount:
    """Make the overlay of a workspace."""
    with closing_fd(workspace.open_base()) as base:
        try:
            with workspace.store.open_layers(workspace.state.layers) as sealed:
                layers = Layers(base, workspace.directory.fd, sealed)
                return _hold_overlay(use, layers, owners)
        except OSError as why:
            raise _no_overlay(use, why) from None


def record_end(use: WorkspaceUse, *, is_last: bool) -> tuple[tuple[Row, ...], str]:
    """Record what a run has changed.

    Args:
        use: the workspace.
        is_last: no other child has it.

    Returns:
        The changes, and the end of a cut commit that is not in the base; "" for none.

    Raises:
        WorkspaceError: it is not there any more, or a command has held it for too long.
        OSError: something in it cannot be read.
    """
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        # Else what is undone later would count as removed by the operator.
        text = workspace.finish_and_word()
        return tuple(workspace.end_run() if is_last else workspace.changes()), text


def drop_ended(use: WorkspaceUse) -> int | None:
    """Remove a workspace whose child has ended; return how many changes were in it.

    Returns:
        None if it stays: something was changed in it, or another child has it.

    Raises:
        WorkspaceError: it is not there any more, or a command has held it for too long,
            or a cut commit is not in the base.
        OSError: something in it cannot be read or removed.
    """
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        changed = len(workspace.changes())
        if workspace.directory.user() or (changed and use.drop != "always"):
            return None
        if text := workspace.finish_and_word():
            raise WorkspaceError(text)
        workspace.discard()
        return changed


def _hold_overlay(use: WorkspaceUse, layers: Layers, owners: int) -> HeldMount:
    """Make the overlay; if that fails only for the owners, say so."""
    try:
        return hold_overlay(layers, owners, is_volatile=not use.settings.durable)
    except OSError as why:
        if isinstance(why, OwnersError) or (owners >= 0 and _is_mounted(layers)):
            is_of_layer = _shows_owners(layers.base, owners)
            raise _no_owners(use, is_of_layer=is_of_layer) from None
        raise


def _is_mounted(layers: Layers) -> bool:
    """Tell whether an overlay can be made that shows all owners as they are."""
    try:
        hold_overlay(layers).close()
    except OSError:
        return False
    return True


def _shows_owners(directory: int, owners: int) -> bool:
    """Tell whether a mount of a directory can map owners by a user namespace."""
    try:
        hold_directory(directory, owners).close()
    except OSError:
        return False
    return True


def _no_owners(use: WorkspaceUse, *, is_of_layer: bool) -> WorkspaceError:
    """Word that a workspace cannot show the operator's files as the child's."""
    what = f"cannot mount workspace {use.name!r} over {use.base!r}"
    how = "or a profile without 'uid' (--sandbox) as its owner"
    if is_on_overlay(use.base):
        text = f"{what}, an overlay, for a user of the child's own"
        return WorkspaceError(f"{text}; use a base on a volume, {how}")
    if is_of_layer:
        text = f"{what}: its layer shows no files as another user's"
        use_this = "use --state-dir on ext4, xfs or btrfs (Linux 5.19)"
    else:
        text = f"{what}: its disk shows no files as another user's"
        use_this = "use one on ext4, xfs or btrfs"
    return WorkspaceError(f"{text}; {use_this}, {how}")


def _no_overlay(use: WorkspaceUse, why: OSError) -> WorkspaceError:
    text = f"cannot mount workspace {use.name!r} over {use.base!r}: {why.strerror}"
    how = "use --state-dir on a disk that can hold a layer (ext4, xfs, btrfs, tmpfs)"
    return WorkspaceError(f"{text}; {how}, or the mode 'direct'")
