"""The workspaces of one child: mounted at its start, held, recorded at its end.

Rules of this file.

1. The lock of a workspace is held longer than its mount: the changes are recorded
   between the two.
2. The launchpad holds the lock as well; a process that is about to become another child
   has it open for a moment. So a lock is opened by flock(2), and not by close(2) alone.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from hostlib.threads import in_thread
from supervisor.children.shared_workspaces import (
    Sharer,
    has_sharers,
    mount_of_sharers,
    sharer_that_ends,
    user_of_sharers,
)
from supervisor.sandbox import refusals, start
from supervisor.spawn.inner_pair import InnerMounts
from supervisor.spawn.launchpad import words
from supervisor.workspace import view
from supervisor.workspace.audit import WorkspaceAudit, watch_use, watch_word
from supervisor.workspace.bounds import LayerBounds
from supervisor.workspace.directory import WorkspaceError, add_mount, add_process
from supervisor.workspace.run import (
    MountedWorkspace,
    clear_volatile_mark,
    drop_ended,
    mount_for_child,
    record_end,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AsyncExitStack

    from supervisor.children.held_descriptors import HeldDescriptors
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import WantedWalls
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.workspace.branches import Rollback
    from supervisor.workspace.use import WorkspaceUse
    from vfs.places import Place

RECORD_TIMEOUT_S = 30.0
"""Longest wait, at a child's end, for a thread that records what it has changed."""

LOCK = "workspace lock"
"""The word for the lock of a workspace among the descriptors of a child."""


class WorkspaceOwner(Sharer, Protocol):
    """A child that has workspaces.

    Attributes:
        process: its process; None before the start.
    """

    process: SpawnedProcess | None

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        ...

    def log_fields(self) -> dict[str, object]:
        """Return the fields that identify it in a line of the log."""
        ...

    def end_for(self, reason: str) -> None:
        """End it at once, and record the reason."""
        ...


class ChildWorkspaces:
    """The workspaces that one child sees.

    Args:
        host: its journal, its launcher, and the lock of shared mounts.
        child: sees the workspaces.
        siblings: the children of the host, by id; this one among them.
        held: gets mounts, locks and watches.
    """

    def __init__(
        self,
        host: Parts,
        child: WorkspaceOwner,
        siblings: Mapping[str, Sharer],
        held: HeldDescriptors,
    ) -> None:
        self._host = host
        self._child = child
        self._siblings = siblings
        self._held = held
        self._bounds: dict[str, LayerBounds] = {}
        self._audits: dict[str, WorkspaceAudit] = {}
        self._cut: set[str] = set()  # with a commit that is not in the base
        self._sent: InnerMounts | None = None

    @property
    def sent(self) -> InnerMounts | None:
        """The socket pair of the mounts that the child makes itself; None for none."""
        return self._sent

    def user_of_sharers(self) -> int | None:
        """Return the user that the child must have; None for any."""
        return user_of_sharers(self._child, self._siblings.values())

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors on the way of the child's own mounts."""
        return () if self._sent is None else self._sent.descriptors()

    # The start

    def drop_at_end(self, stack: AsyncExitStack) -> None:
        """Have those removed at the end that go with the child; called first of all."""
        for use in self._child.spec.workspaces:
            if use.drop != "never":
                stack.push_async_callback(self._drop, use)

    async def mount(self, stack: AsyncExitStack, wanted: WantedWalls) -> Place | None:
        """Mount them until the child is gone; return FD 3's root if that is one.

        Raises:
            SpawnError: this machine or this profile cannot give it.
            OSError: it cannot be held.
        """
        spec = self._child.spec
        for index, use in enumerate(spec.workspaces):
            mounted = await self._mount_one(use, wanted)
            self._tell_mounted(use, mounted)
            if mounted.lock >= 0:  # the launchpad holds it as well
                wanted.locks = (*wanted.locks, mounted.lock)
                self._hold_lock(stack, mounted.lock)
            if use.mode == "review":
                # The changes are recorded after the unmount and before the unlock.
                stack.push_async_callback(self._close, use)
            self._held.keep(stack, mounted.fd, view.mount_word(index))
            self._held.keep(stack, mounted.namespace, view.namespace_word(index))
            self._host.journal.write(
                "workspace.opened",
                child_id=self._child.id,
                workspace=use.name,
                mode=use.mode,
            )
            view.show(wanted, use, mounted.mount, mounted.own)
            # Last: it waits, and sharers look only for mounts that are shown.
            await _name_mount(mounted.lock, mounted.fd)
            if spec.audit:
                self._begin_audit(stack, index, use, mounted.fd)
            if use.mode == "review":
                bounds = self._bounds[use.name] = LayerBounds(use)
                await in_thread(bounds.look)  # count the old entries before it writes
        if next(view.own_mounts(wanted), None) is not None:
            self._sent = InnerMounts()
            stack.callback(self._sent.close)
        self._count_descriptors(stack, self._held.words.values())
        if not spec.has_workspace_root:
            return None
        return await in_thread(view.open_root, spec, wanted)

    async def take_mounts(
        self, stack: AsyncExitStack, wanted: WantedWalls, root: Place | None
    ) -> None:
        """Hold the mounts that the child has made, for FD 3 and for its tools.

        Args:
            stack: closes them.
            wanted: the walls of the child; its tools join the namespaces.
            root: FD 3's, if that is a workspace.

        Raises:
            OSError: there is no descriptor for them.
        """
        if self._sent is None:
            return
        *mounts, users, seen = self._sent.receive()
        self._sent.close()
        for lock, mount in zip(wanted.locks, mounts, strict=True):
            await _name_mount(lock, mount)
        for fd, word in ((users, view.USERS), (seen, view.VIEW)):
            self._held.keep(stack, fd, word)
        self._count_descriptors(stack, (view.USERS, view.VIEW))
        wanted.joined = {words.USERS: users, words.VIEW: seen}
        await in_thread(view.fill_root, root, mounts)

    async def name_process(self, process: SpawnedProcess) -> None:
        """Write into their locks which process the child is."""
        for lock in self._held.find_by_word(LOCK):
            await in_thread(add_process, lock, (process.pid, process.create_time))

    def restore(self, stack: AsyncExitStack, left: Mapping[int, str]) -> None:
        """Restore the descriptors of the program before, for the same order of release.

        Args:
            stack: closes them.
            left: all descriptors of the child with their words.
        """
        uses = self._child.spec.workspaces
        for lock in (fd for fd, word in left.items() if word == LOCK):
            self._hold_lock(stack, lock)
        for use in (use for use in uses if use.mode == "review"):
            stack.push_async_callback(self._close, use)
        for fd, word in left.items():
            if word != LOCK:
                self._held.keep(stack, fd, word)
        if self._child.spec.audit:
            for index, use in enumerate(uses):
                self._add_audit(stack, index, use)
        self._count_descriptors(stack, left.values())

    def restore_shown(self, wanted: WantedWalls, left: Mapping[int, str]) -> None:
        """Show in the walls of a running child what the program before showed."""
        wanted.locks = self._held.find_by_word(LOCK)
        view.restore_shown(wanted, self._child.spec, left)

    # Its life

    def start_tasks(self, nursery: trio.Nursery) -> None:
        """Start the tasks that keep their limits and report opened files."""
        for use in self._child.spec.workspaces:
            if use.mode == "review":
                nursery.start_soon(self._keep_bounds, use)
        for audit in self._audits.values():
            nursery.start_soon(audit.tell_opens)

    def report_omitted(self) -> None:
        """Write the number of events that its audits left out so far."""
        for audit in self._audits.values():
            audit.report_omitted()

    async def _keep_bounds(self, use: WorkspaceUse) -> None:
        """End the child when it passes the bounds of a workspace's layer (spec WS17)."""
        child, host = self._child, self._host
        bounds = self._bounds.get(use.name) or LayerBounds(use)
        try:
            why = await bounds.wait_passed()
        except OSError as error:
            text = f"cannot look at the layer of workspace {use.name}: {error.strerror}"
            host.log.write("WARNING", text, **child.log_fields())
            return
        if child.has_ended:
            return
        reason = f"workspace {use.name}: {why}"
        host.journal.write(
            "workspace.limit",
            child_id=child.id,
            workspace=use.name,
            limit=why.limit,
            used=why.used,
            allowed=why.allowed,
        )
        host.log.write(
            "WARNING",
            f"Child {child.id} is ended: {reason}",
            workspace=use.name,
            limit=why.limit,
            **child.log_fields(),
        )
        child.end_for(reason)

    def _begin_audit(
        self, stack: AsyncExitStack, index: int, use: WorkspaceUse, mount: int
    ) -> None:
        """Write events for the files that are opened in a workspace."""
        fd, why_not = watch_use(use, mount)
        self._held.keep(stack, fd, watch_word(index))
        told = self._host.told_of_audits
        if why_not and why_not not in told:
            told.add(why_not)
            self._host.log.write("WARNING", why_not, **self._child.log_fields())
        self._add_audit(stack, index, use)

    def _add_audit(self, stack: AsyncExitStack, index: int, use: WorkspaceUse) -> None:
        """Audit a workspace until it is closed."""
        watch = next(iter(self._held.find_by_word(watch_word(index))), -1)
        audit = WorkspaceAudit(self._host.journal, self._child.id, use, watch)
        self._audits[use.name] = audit
        stack.push_async_callback(audit.finish_opens)

    # Mounts and locks

    async def _mount_one(
        self, use: WorkspaceUse, wanted: WantedWalls
    ) -> MountedWorkspace:
        """Mount a workspace, or take the mount of a child that shares it."""
        if not use.is_shared:
            return await self._mount_new(use, wanted)
        while True:
            async with self._host.mounting:
                children = self._siblings.values()
                try:
                    mounted = mount_of_sharers(self._child, use, children)
                except OSError as why:
                    reason = why.strerror or str(why)
                    raise refusals.no_workspace(use.base, reason) from None
                last = sharer_that_ends(self._child, use, children)
                if mounted is not None or last is None:
                    return mounted or await self._mount_new(use, wanted)
            await last.gone.wait()

    async def _mount_new(
        self, use: WorkspaceUse, wanted: WantedWalls
    ) -> MountedWorkspace:
        if "mountns" not in wanted.profile.layers:
            how = "add it to its layers, or name another profile (--sandbox)"
            raise refusals.no_workspace(use.base, start.NO_MOUNTNS, how)
        owners = -1
        try:
            if use.mode == "review" and await in_thread(clear_volatile_mark, use):
                self._tell_cut_off(use)
            user, owner = wanted.user, (await in_thread(os.stat, use.base)).st_uid
            if user is None and use.is_writable and os.geteuid() == 0:
                user = 0  # it stays 0, and owns the operator's files
            if user not in {None, owner}:
                owners = await self._host.launcher.owners(user, owner)
            return await in_thread(mount_for_child, use, self._child.id, owners)
        except WorkspaceError as why:
            raise refusals.no_workspace(use.base, str(why)) from None
        except OSError as why:
            reason = why.strerror or str(why)
            raise refusals.no_workspace(use.base, reason) from None
        finally:
            if owners >= 0:
                os.close(owners)

    def _count_descriptors(self, stack: AsyncExitStack, names: Iterable[str]) -> None:
        """Count the workspace descriptors among some names until the child is gone."""
        count = sum(name.startswith("workspace") for name in names)
        stack.enter_context(self._host.fs.descriptor_account.holding(count))

    def _hold_lock(self, stack: AsyncExitStack, fd: int) -> None:
        """Hold the lock of a workspace until the child is gone."""
        self._held.add(fd, LOCK)
        stack.callback(self._unlock, fd)

    def _unlock(self, fd: int) -> None:
        """Close a lock; unlock it if no process of the child is left (rule 2)."""
        process = self._child.process
        is_gone = process is None or process.is_swept
        if is_gone and not self._is_locked_by_others(fd):
            fcntl.flock(fd, fcntl.LOCK_UN)
        self._held.close(fd)

    def _is_locked_by_others(self, fd: int) -> bool:
        """Return whether another child holds the lock of a workspace that it shares."""
        status = os.fstat(fd)
        return any(
            os.path.samestat(status, os.fstat(lock))
            for other in self._siblings.values()
            if other is not self._child
            for lock, word in other.held.items()
            if word == LOCK
        )

    async def _close(self, use: WorkspaceUse) -> None:
        """Record the changes in a workspace; log those that cannot be recorded."""
        child, host = self._child, self._host
        recorded = None
        siblings = self._siblings.values()
        is_last = not (use.is_shared and has_sharers(child, use, siblings))
        try:
            # Bounded by a shield: a host that ends does not wait for a slow disk.
            with trio.move_on_after(RECORD_TIMEOUT_S, shield=True):
                recorded = await in_thread(partial(record_end, use, is_last=is_last))
            why = "" if recorded is not None else "no thread was free for it"
        except (WorkspaceError, OSError) as error:
            why = str(error)
        rows, cut = ((), "") if recorded is None else recorded
        if recorded is None:
            text = (
                f"Workspace {use.name} is left behind, its changes not recorded: {why}"
            )
            host.log.write("WARNING", text, **child.log_fields(), reason=why)
            found: dict[str, object] = {"changed": None, "bytes": None, "reason": why}
        else:
            size = sum(row.size_bytes for row in rows)
            found = {"changed": len(rows), "bytes": size}
        if cut:
            self._cut.add(use.name)
            text = f"Workspace {use.name} is left behind: {cut}"
            host.log.write("WARNING", text, **child.log_fields(), reason=cut)
        audit = self._audits.get(use.name)
        if audit is not None and rows:
            with trio.CancelScope(shield=True):  # so many rows at most
                await audit.tell_changes(rows)
        host.journal.write(
            "workspace.closed", child_id=child.id, workspace=use.name, **found
        )

    async def _drop(self, use: WorkspaceUse) -> None:
        """Remove a workspace that is to go with its child; log why it cannot.

        One with a commit that is not in the base stays.
        """
        if use.name in self._cut:
            return
        found: int | str | None = "no thread was free for it"
        try:
            with trio.move_on_after(RECORD_TIMEOUT_S, shield=True):
                found = await in_thread(drop_ended, use)
        except (WorkspaceError, OSError) as why:
            found = str(why)
        if isinstance(found, str):
            text = f"Workspace {use.name} is left behind: {found}"
            self._host.log.write("WARNING", text, **self._child.log_fields())
        elif found is not None:
            self._host.journal.write(
                "workspace.discarded", workspace=use.name, changed=found
            )

    # Reports

    def _tell_mounted(self, use: WorkspaceUse, mounted: MountedWorkspace) -> None:
        """Log how long the search for names to hide took, and a rollback."""
        walked_s = mounted.walked_s
        if mounted.went_back is not None:
            self._tell_rollback(use, mounted.went_back)
        if walked_s is not None:
            self._host.log.write(
                "INFO",
                f"Looked for what workspace {use.name} hides, in {walked_s:.3f} s",
                workspace=use.name,
                duration_s=round(walked_s, 3),
                **self._child.log_fields(),
            )

    def _tell_rollback(self, use: WorkspaceUse, done: Rollback) -> None:
        """Log that a workspace was rolled back to a snapshot, as its last child had asked."""
        self._host.log.write(
            "INFO",
            f"Workspace {use.name} went back to snapshot {done.label}, as its last child"
            f" had asked: {done.lost} changes were dropped",
            workspace=use.name,
            label=done.label,
            **self._child.log_fields(),
        )
        self._host.journal.write(
            "workspace.restored",
            child_id=self._child.id,
            workspace=use.name,
            label=done.label,
            lost=done.lost,
        )

    def _tell_cut_off(self, use: WorkspaceUse) -> None:
        """Warn that a workspace's last run was cut off before its layer was synced."""
        text = (
            f"Workspace {use.name} (durable = false) was cut off in its last run: if the"
            " machine went down, what was written in it may be damaged; look at its diff"
        )
        fields = self._child.log_fields()
        self._host.log.write("WARNING", text, workspace=use.name, **fields)


async def _name_mount(lock: int, mount: int) -> None:
    """Write into the lock of a workspace the id of its mount; -1 for none."""
    if lock >= 0 and mount >= 0:
        await in_thread(add_mount, lock, mount)
