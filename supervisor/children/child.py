"""One child: its process, its conversations, its end; one task owns it (I2).

Rules of this file.

1. What is acquired is released in reverse order by one stack, whether the child ran for
   a month or was never started.
2. The exit of the process ends the child (spec S2); what it had sent is done first,
   nested clients are closed before the client they hang on (spec S3).
3. Nothing here decides: ``lifecycle`` says what an event means, this file does it.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, assert_never

import trio

from hostlib.linux.syscalls import open_exactly
from hostlib.threads import in_thread
from supervisor.children.clients import ChildClients
from supervisor.children.lifecycle import Action, Event, State, step
from supervisor.children.templates import MissingPlaceError, fill
from supervisor.fsproxy.door_socket import VARIABLE, has_door_socket, open_door_socket
from supervisor.fsproxy.ports import KEYS, is_withheld
from supervisor.fsproxy.replies import PROCESS_EXIT
from supervisor.sandbox import start
from supervisor.sandbox.groups import Groups
from supervisor.sandbox.home import check_owner, fill_home
from supervisor.sandbox.plan import PROFILES, Wanted
from supervisor.spawn.ends import Ends
from supervisor.spawn.launchpad import words
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError, SpawnRequest, find_executable
from vfs.policy import Ledger, Policy, close_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from supervisor.fsproxy.door_socket import DoorSocket
    from supervisor.fsproxy.session import Session
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import Machine
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.spec import ChildSpec
    from supervisor.workspace.bounds import LayerBounds
    from supervisor.workspace.branches import WentBack
    from supervisor.workspace.held_mount import MountedWorkspace
    from supervisor.workspace.use import WorkspaceUse
    from vfs.policy import Place

SWEEP_TIMEOUT_S = 5.0
"""Longest wait for the rest of a dead child's processes; they are killed at once, and
only one that is stuck in the kernel takes longer."""

RECORD_TIMEOUT_S = 30.0
"""Longest wait, at a child's end, for a thread that records what it has changed."""

STANDARD = (0, 1, 2)

WORKSPACE_LOCK = "workspace lock"
"""What the lock of a workspace is called among what a child holds."""


class Child(ChildClients):
    """One child of a host, from its start to its end.

    Args:
        host: what the parts of the host share whose child it is.
        child_id: unique in the host.
        spec: what it is to be.
        siblings: the children that the host has, by id; this one among them.
        on_overdue: told if a stop's grace period does not end it.
    """

    def __init__(
        self,
        host: Parts,
        child_id: str,
        spec: ChildSpec,
        siblings: Mapping[str, Child],
        on_overdue: Callable[[Child], None],
    ) -> None:
        super().__init__(host, child_id, spec)
        self._siblings = siblings
        self._on_overdue = on_overdue

    # Orders from outside

    def stop(self, grace_s: float | None = None) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after the grace period (spec S6).

        Args:
            grace_s: seconds between the two; None for the host's setting.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        is_first = not self._is_stopped
        self._is_stopped = True
        if is_first and self.state is State.RUNNING and self._nursery is not None:
            self._nursery.start_soon(self._enforce_end)
        self._happened(Event.STOP)

    def session_closed(self, session: Session) -> None:
        """Tell that a conversation is over; the process may go on (spec S3)."""
        super().session_closed(session)
        if session is self.session and session.why_closed != PROCESS_EXIT:
            self._happened(Event.EOF)

    async def wait_gone(self) -> int:
        """Wait until nothing of it is left; return its exit status, 128+n by signal."""
        await self.gone.wait()
        return self.status

    @property
    def status(self) -> int:
        """The exit status as a shell would see it (face: exit statuses of ``run``)."""
        if self.failure is not None:
            return self.failure.exit_status
        if self.exit is None or (self.exit.code is None and self.exit.signal is None):
            return 125
        if self.exit.signal is not None:
            return 128 + self.exit.signal
        return self.exit.code or 0

    @property
    def ending(self) -> str:
        """How its process ended, in words; who starts it again reads them, too."""
        ended = self.exit
        if ended is None or (ended.code is None and ended.signal is None):
            return "ended, nobody knows how"
        why = f": {self.ended_for}" if self.ended_for else ""
        if self.timed_out:
            why = ": its time limit was up"
        if ended.signal is None:
            return f"exited with {self.status}{why}"
        try:
            name = signal.Signals(ended.signal).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {ended.signal}"
        return f"was killed by {name}{why}"

    # Its life

    async def run(self) -> None:
        """Own the child from its start until it is gone."""
        try:
            async with AsyncExitStack() as stack:
                try:
                    await self._start(stack)
                except SpawnError as why:
                    self.failure = why
                    self._happened(Event.SPAWN_FAILED)
                    return
                except OSError as why:
                    self.failure = start.not_prepared(why)
                    self._happened(Event.SPAWN_FAILED)
                    return
                except LaunchpadLost:
                    raise
                except Exception as why:  # noqa: BLE001 - one start, and not the host
                    self.failure = start.unforeseen(why)
                    self._happened(Event.SPAWN_FAILED)
                    return
                await self._live()
        finally:
            if self.state is not State.REAPING:
                # Cancelled: the host is being torn down with everything in it.
                self.state = State.REAPING
            self._happened(Event.CLEANED)

    def _offer(self, env: dict[str, str], offered: Mapping[str, str]) -> None:
        """Add what a service sets to an environment, but what was set for this child.

        A key is not set beside an address that was: the child would send it there.
        """
        own = self.spec.own_env
        for name, value in offered.items():
            if name in own:
                key = KEYS.get(name)
                is_keyless = key is not None and key not in own
                without = f", and {key} is not set" if is_keyless else ""
                self._host.log.write(
                    "WARNING",
                    f"{name} is as --env or [child] env has it{without}; leave it out"
                    " there to have the host's own",
                    child_id=self.id,
                )
            elif is_withheld(name, own):
                env.pop(name, None)  # nor one that was only passed on
            else:
                env[name] = value

    def _fill_in(self, env: dict[str, str]) -> None:
        """Fill in a recipe's variables and files, and write HOME's first entries.

        Raises:
            SpawnError: a service that the recipe counts on is not there.
            OSError: HOME cannot be written to.
        """
        spec = self.spec
        try:
            found = {name: fill(text, env) for name, text in spec.template_env.items()}
            files = {n: fill(text, env) for n, text in spec.template_files.items()}
        except MissingPlaceError as name:
            raise start.no_place(str(name)) from None
        env.update(found)
        files.update(spec.home_files)
        home = spec.kept_home or spec.home_dir
        if home is None or fill_home(home, files) or not spec.template_files:
            return
        self._host.log.write(
            "WARNING",
            "The recipe's files are not written, for HOME has entries already; name an"
            " empty directory, or keep them with a fixed [llm] endpoint_port",
            child_id=self.id,
        )

    async def _start(self, stack: AsyncExitStack) -> None:
        host = self._host
        spec = self.spec
        cwd_fd = self._hold_directory(stack, spec.cwd)
        wanted = self.wanted = self._wanted(stack)
        if wanted.home:
            check_owner(wanted.home, wanted.user)
        root = await self._show_workspaces(stack, wanted)
        policy = self._make_policy(stack, cwd_fd, root)
        wanted.readable = spec.readable(self.places)
        ledger = Ledger(
            open_files=spec.max_open_files,
            clients=host.settings.clients_per_child,
            size_bytes=spec.max_bytes,
            files=spec.max_files,
            file_bytes=spec.max_file_bytes,
        )
        pairs = self._ends = Ends(spec.transport, spec.dialect)
        stack.callback(pairs.close)
        client = host.fs.connect(policy, ledger, f"{self.id}:{spec.transport}")
        self._nursery = await self._open_nursery(stack)
        self.session = host.open_session(
            client, pairs.host_fds(), spec.dialect, self.session_closed
        )
        self.session.on_attach = self._attach
        self._side = pairs.side
        self._nursery.start_soon(self.session.run)
        stack.push_async_callback(self._wait_swept)
        env = {**spec.env, **pairs.env, "FSPROXY_TOP_LEVEL": spec.top_level_word}
        env.update(spec.walls_env)
        env.pop(VARIABLE, None)
        if has_door_socket(spec):
            door = open_door_socket(spec)
            self._hold_door_socket(door, stack)
            env[VARIABLE] = door.path
        for service in host.services:
            self._offer(env, await service.child_starting(self, stack))
        self._fill_in(env)
        start_fd = self._open_start(stack, cwd_fd, wanted)
        self.process = await self._spawn(start_fd, pairs, env, wanted)
        stack.callback(self.process.close)
        stack.callback(self._kill_unless_ended)
        await self._name_process()
        await self._take_mounts(stack, wanted)
        self._watch_forks(stack)
        pairs.close_child_ends()
        if self._inner is not None:
            self._inner.hand_on()

    def _hold_door_socket(self, door: DoorSocket, stack: AsyncExitStack) -> None:
        """Have a socket beside FD 3 until the child's end."""
        self._door_socket = door
        stack.callback(door.close)
        self._host.fs.set_aside(1)
        stack.callback(self._host.fs.set_aside, -1)

    def _watch_forks(self, stack: AsyncExitStack) -> None:
        forks = self._host.forks
        spec = self.spec
        forks.watch(self.id, spec.name, spec.group_limits, self._groups.made)
        stack.callback(forks.forget, self.id)

    async def _open_nursery(self, stack: AsyncExitStack) -> trio.Nursery:
        """Open where its conversations run; they are closed before it is left."""
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        stack.push_async_callback(self._close_sessions)
        return nursery

    def _make_policy(
        self, stack: AsyncExitStack, cwd_fd: int, root: Place | None
    ) -> Policy:
        spec = self.spec
        places = self.places = spec.open_places(self._host.settings.written, root)
        stack.callback(close_places, places)
        return Policy(
            places,
            top_level=spec.top_level,
            cwd_fd=cwd_fd,
            tools=spec.tools,
            model=spec.model,
            image_tokens=spec.image_tokens,
        )

    def _hold_directory(self, stack: AsyncExitStack, path: str) -> int:
        """Open a directory that is held until the child is gone."""
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held[fd] = "working directory"
        stack.callback(self._give_back, fd)
        return fd

    async def _show_workspaces(
        self, stack: AsyncExitStack, wanted: Wanted
    ) -> Place | None:
        """Mount its workspaces, until it is gone; return FD 3's root if that is one.

        Raises:
            SpawnError: this machine or this profile cannot give it.
            OSError: it cannot be held.
        """
        spec = self.spec
        if not spec.workspaces:
            return None
        from supervisor.spawn.inner_pair import InnerMounts  # noqa: PLC0415 - with one
        from supervisor.workspace import view  # noqa: PLC0415 - with a workspace
        from supervisor.workspace.bounds import LayerBounds  # noqa: PLC0415 - with a workspace

        for index, use in enumerate(spec.workspaces):
            mounted = await self._mount_workspace(use, wanted)
            self._tell_mounted(use, mounted)
            self._hold_lock(stack, mounted.lock, wanted)
            if use.mode == "review":
                # While it is locked still, and when the mount is gone.
                stack.push_async_callback(self._close_workspace, use)
            self._hold(stack, mounted.fd, view.mount_word(index))
            self._hold(stack, mounted.namespace, view.namespace_word(index))
            self._host.journal.write(
                "workspace.opened", child_id=self.id, workspace=use.name, mode=use.mode
            )
            view.show(wanted, use, mounted.mount, mounted.own)
            # Only now: it waits, and a child that shares the mount looks for what is shown.
            await self._name_mount(mounted.lock, mounted.fd)
            if spec.audit:
                self._begin_audit(stack, index, use, mounted.fd)
            if use.mode == "review":
                bounds = self._bounds[use.name] = LayerBounds(use)
                await in_thread(bounds.look)  # what is there before it writes
        if next(view.own_mounts(wanted), None) is not None:
            self._sent = InnerMounts()
            stack.callback(self._sent.close)
        self._set_aside(stack, self._held.values())
        if not spec.has_workspace_root:
            return None
        return await in_thread(view.open_root, spec, wanted)

    def _begin_audit(
        self, stack: AsyncExitStack, index: int, use: WorkspaceUse, mount: int
    ) -> None:
        """Have the journal told of the files that are opened in a workspace."""
        from supervisor.workspace.audit import watch_use, watch_word  # noqa: PLC0415 - rare

        fd, why_not = watch_use(use, mount)
        self._hold(stack, fd, watch_word(index))
        told = self._host.told_of_audits
        if why_not and why_not not in told:
            told.add(why_not)
            self._host.log.write("WARNING", why_not, **self.log_fields())
        self._add_audit(stack, index, use)

    def _add_audit(self, stack: AsyncExitStack, index: int, use: WorkspaceUse) -> None:
        """Audit a workspace until it is closed."""
        from supervisor.workspace.audit import WorkspaceAudit, watch_word  # noqa: PLC0415

        fds = {word: fd for fd, word in self._held.items()}
        watch = fds.get(watch_word(index), -1)
        audit = WorkspaceAudit(self._host.journal, self.id, use, watch)
        self._audits[use.name] = audit
        stack.push_async_callback(audit.finish_opens)

    def tell_left_out(self) -> None:
        """Tell which events of its audits were left out so far."""
        for audit in self._audits.values():
            audit.tell_left_out()

    def _tell_mounted(self, use: WorkspaceUse, mounted: MountedWorkspace) -> None:
        """Tell how long it took to look for names to hide, and what was gone back to."""
        walked_s = mounted.walked_s
        if mounted.went_back is not None:
            self._tell_went_back(use, mounted.went_back)
        if walked_s is not None:
            self._host.log.write(
                "INFO",
                f"Looked for what workspace {use.name} hides, in {walked_s:.3f} s",
                workspace=use.name,
                duration_s=round(walked_s, 3),
                **self.log_fields(),
            )

    def _tell_went_back(self, use: WorkspaceUse, done: WentBack) -> None:
        """Tell that a workspace is as a snapshot was, as its last child had asked."""
        self._host.log.write(
            "INFO",
            f"Workspace {use.name} went back to snapshot {done.label}, as its last child"
            f" had asked: {done.lost} changes were dropped",
            workspace=use.name,
            label=done.label,
            **self.log_fields(),
        )
        self._host.journal.write(
            "workspace.restored",
            child_id=self.id,
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
        self._host.log.write("WARNING", text, workspace=use.name, **self.log_fields())

    async def _take_mounts(self, stack: AsyncExitStack, wanted: Wanted) -> None:
        """Hold the mounts that the child has made, for FD 3 and for its tools.

        Raises:
            OSError: there is no descriptor for them.
        """
        if self._sent is None:
            return
        from supervisor.workspace import view  # noqa: PLC0415 - with one

        *mounts, users, seen = self._sent.receive()
        self._sent.close()
        for lock, mount in zip(wanted.locks, mounts, strict=True):
            await self._name_mount(lock, mount)
        for fd, word in ((users, view.USERS), (seen, view.VIEW)):
            self._hold(stack, fd, word)
        self._set_aside(stack, (view.USERS, view.VIEW))
        wanted.joined = {words.USERS: users, words.VIEW: seen}
        root = self.places[0] if self.spec.has_workspace_root else None
        await in_thread(view.fill_root, root, mounts)

    async def _name_process(self) -> None:
        """Write into the locks of its workspaces which process it is."""
        locks = [fd for fd, what in self._held.items() if what == WORKSPACE_LOCK]
        process = self.process
        if process is None or not locks:
            return
        from supervisor.workspace.store import add_process  # noqa: PLC0415 - with one

        for lock in locks:
            await in_thread(add_process, lock, (process.pid, process.create_time))

    async def _name_mount(self, lock: int, mount: int) -> None:
        """Write into the lock of a workspace which mount it is; -1: there is none."""
        if lock >= 0 and mount >= 0:
            from supervisor.workspace.store import add_mount  # noqa: PLC0415 - with one

            await in_thread(add_mount, lock, mount)

    def _hold(self, stack: AsyncExitStack, fd: int, word: str) -> None:
        """Hold a descriptor until the child is gone; -1 is none."""
        if fd >= 0:
            self._held[fd] = word
            stack.callback(self._give_back, fd)

    def _set_aside(self, stack: AsyncExitStack, words: Iterable[str]) -> None:
        """Count the descriptors of workspaces among some until the child is gone."""
        count = sum(word.startswith("workspace") for word in words)
        self._host.fs.set_aside(count)
        stack.callback(self._host.fs.set_aside, -count)

    def _hold_lock(self, stack: AsyncExitStack, fd: int, wanted: Wanted) -> None:
        """Hold the lock of a workspace; the launchpad is to hold it as well."""
        if fd >= 0:
            wanted.locks = (*wanted.locks, fd)
            self._held[fd] = WORKSPACE_LOCK
            stack.callback(self._unlock, fd)

    def _unlock(self, fd: int) -> None:
        """Close a lock; open it if nothing is left that it is for.

        A process that is about to become another child has it open for a moment: that is
        why to close it is not enough.
        """
        is_gone = self.process is None or self.process.is_swept
        if is_gone and not self._locks_of_others(fd):
            fcntl.flock(fd, fcntl.LOCK_UN)
        self._give_back(fd)

    def _locks_of_others(self, fd: int) -> bool:
        """Tell whether another child holds the lock of a workspace that it shares."""
        status = os.fstat(fd)
        return any(
            os.path.samestat(status, os.fstat(lock))
            for other in self._siblings.values()
            if other is not self
            for lock, word in other.held.items()
            if word == WORKSPACE_LOCK
        )

    async def _close_workspace(self, use: WorkspaceUse) -> None:
        """Record what was changed in a workspace; what cannot be is told."""
        from supervisor.workspace.run import record_end  # noqa: PLC0415 - with one
        from supervisor.workspace.store import WorkspaceError  # noqa: PLC0415 - with a workspace

        host = self._host
        rows = None
        is_last = not (use.is_shared and self._has_sharers(use))
        try:
            # Also at the end of the host, which waits for no slow disk then.
            with trio.move_on_after(RECORD_TIMEOUT_S, shield=True):
                rows = await in_thread(partial(record_end, use, is_last=is_last))
            why = "" if rows is not None else "no thread was free for it"
        except (WorkspaceError, OSError) as error:
            why = str(error)
        if rows is None:
            text = (
                f"Workspace {use.name} is left behind, its changes not recorded: {why}"
            )
            host.log.write("WARNING", text, **self.log_fields(), reason=why)
            found: dict[str, object] = {"changed": None, "bytes": None, "reason": why}
        else:
            size = sum(row.size_bytes for row in rows)
            found = {"changed": len(rows), "bytes": size}
        audit = self._audits.get(use.name)
        if audit is not None and rows:
            with trio.CancelScope(shield=True):  # so many rows at most
                await audit.tell_changes(rows)
        host.journal.write(
            "workspace.closed", child_id=self.id, workspace=use.name, **found
        )

    def _has_sharers(self, use: WorkspaceUse) -> bool:
        from supervisor.children.shared_workspaces import has_sharers  # noqa: PLC0415 - with one

        return has_sharers(self, use, self._siblings.values())

    async def _mount_workspace(
        self, use: WorkspaceUse, wanted: Wanted
    ) -> MountedWorkspace:
        """Mount a workspace, or take the mount of a child that shares it."""
        if not use.is_shared:
            return await self._mount_anew(use, wanted)
        from supervisor.children.shared_workspaces import (  # noqa: PLC0415 - with a workspace
            mount_of_sharers,
            sharer_that_ends,
        )

        host = self._host
        while True:
            async with host.mounting:
                children = self._siblings.values()
                try:
                    mounted = mount_of_sharers(self, use, children)
                except OSError as why:
                    reason = why.strerror or str(why)
                    raise start.no_workspace(use.base, reason) from None
                last = sharer_that_ends(self, use, children)
                if mounted is not None or last is None:
                    return mounted or await self._mount_anew(use, wanted)
            await last.gone.wait()

    async def _mount_anew(self, use: WorkspaceUse, wanted: Wanted) -> MountedWorkspace:
        from supervisor.workspace.run import (  # noqa: PLC0415
            clear_volatile_mark,
            mount_for_child,
        )
        from supervisor.workspace.store import WorkspaceError  # noqa: PLC0415 - with one

        if "mountns" not in wanted.profile.layers:
            how = "add it to its layers, or name another profile (--sandbox)"
            raise start.no_workspace(use.base, start.NO_MOUNTNS, how)
        owners = -1
        try:
            if use.mode == "review" and await in_thread(clear_volatile_mark, use):
                self._tell_cut_off(use)
            user, owner = wanted.user, (await in_thread(os.stat, use.base)).st_uid
            if user is None and use.is_writable and os.geteuid() == 0:
                user = 0  # it stays that, and is to own what the operator owns
            if user not in {None, owner}:
                owners = await self._host.launcher.owners(user, owner)
            return await in_thread(mount_for_child, use, self.id, owners)
        except WorkspaceError as why:
            raise start.no_workspace(use.base, str(why)) from None
        except OSError as why:
            reason = why.strerror or str(why)
            raise start.no_workspace(use.base, reason) from None
        finally:
            if owners >= 0:
                os.close(owners)

    def _open_start(self, stack: AsyncExitStack, cwd_fd: int, wanted: Wanted) -> int:
        """Return a descriptor of where the child starts, as its mounts show it."""
        path = self.spec.cwd
        mount = wanted.mount_of(path)
        if mount is None or mount.fd < 0:
            return cwd_fd
        fd = open_exactly(os.fsencode(mount.inside(path)), mount.fd)
        self._held[fd] = "working directory"
        stack.callback(self._give_back, fd)
        return fd

    def _give_back(self, fd: int) -> None:
        del self._held[fd]
        os.close(fd)

    def _wanted(self, stack: AsyncExitStack) -> Wanted:
        """Say what it is to run in; what is taken for that is given back at its end."""
        spec = self.spec
        wanted = self._described()
        machine = self._host.machine
        groups = Groups()
        if "uid" in spec.sandbox.layers and "uid" not in machine.lacking:
            wanted.user = user = self._take_user(machine)
            stack.callback(machine.give_user_back, user)
        if "cgroup" in spec.sandbox.layers:
            groups = self._host.groups.take(self.id, spec.group_limits)
            stack.callback(self._host.give_groups_back, groups)
            wanted.groups, wanted.no_groups = groups.procs(), groups.why_not
        wanted.needs_groups = spec.group_limits.cpus is not None
        if groups.keep_memory(spec.group_limits):
            wanted.kept_memory = spec.group_limits.memory
        wanted.processes = groups.kept_processes(spec.group_limits)
        if wanted.needs_groups and not groups.keeps_cpus:
            raise start.cpus_not_kept(wanted.no_groups)
        self._groups = groups
        return wanted

    def _take_user(self, machine: Machine) -> int:
        """Take a user that is its own, or that of who shares a workspace with it."""
        if any(use.is_shared for use in self.spec.workspaces):
            from supervisor.children.shared_workspaces import user_of_sharers  # noqa: PLC0415 - as above

            user = user_of_sharers(self, self._siblings.values())
            if user is not None:
                machine.keep_user(user)
                return user
        return machine.take_user()

    def _described(self) -> Wanted:
        """Say what it is to run in, as far as that is in its description."""
        spec = self.spec
        others = dict.fromkeys(self._host.settings.written, False)
        hidden = self._host.apart.locations(spec.made_in) if spec.sandbox.layers else ()
        return Wanted(
            spec.sandbox,
            spec.network,
            spec.cwd,
            spec.own_dirs,
            theirs={**others, **spec.written_dirs},
            hidden=hidden,
            made_in=spec.made_in,
            share=self.threads if spec.sandbox.layers else None,
            home=spec.kept_home or "",
            has_command=True,
            exposed=spec.expose,
        )

    async def _spawn(
        self, cwd_fd: int, pairs: Ends, env: dict[str, str], wanted: Wanted
    ) -> SpawnedProcess:
        spec = self.spec
        stdio = zip(spec.stdio, STANDARD, strict=True)
        path = spec.env.get("PATH")
        executable = find_executable(spec.command[0], path, spec.cwd, wanted.shown)
        request = SpawnRequest(
            executable=executable,
            argv=spec.command,
            env=env,
            cwd_fd=cwd_fd,
            fds=(*stdio, *pairs.child_fds()),
            rlimits=spec.rlimits,
            umask=spec.umask,
            listener=self._inner,
            sends=self._sent,
        )
        host, limit_s = self._host, spec.timeout_s or math.inf
        self._timeout_at = trio.current_time() + limit_s
        # An exec can hang, and that time is the child's too.
        with trio.CancelScope(deadline=self._timeout_at) as patience:
            process, self.walls = await start.spawn(
                host.launcher, host.machine, request, wanted
            )
        if patience.cancelled_caught:
            self.timed_out = True
            raise start.too_late(executable, limit_s)
        self.walls.missing.update(self._unheard())
        for text in start.shortfalls(self.walls, spec.sandbox):
            fields = {**self.log_fields(), "pid": process.pid}
            host.log.write("WARNING", f"Child {self.id} {text}", **fields)
        self._tell_lost_layers()
        return process

    def _tell_lost_layers(self) -> None:
        """Warn of each layer that the machine did not give, once for each policy.

        A child of ``run`` that is under no policy has its report alone.
        """
        host, spec = self._host, self.spec
        if spec.policy is None and spec.name is None:
            return
        children = f"policy {spec.policy!r}" if spec.policy else "no policy"
        for layer, why in self.walls.lost.items():
            if (spec.policy, layer) not in host.machine.told:
                host.machine.told.add((spec.policy, layer))
                text = f"Children of {children} run without the sandbox layer {layer!r}"
                how = f"require it in [sandbox.{self.walls.profile}] to refuse them"
                if self.walls.profile in PROFILES:
                    how = "name a profile that requires it to refuse them"
                host.log.write(
                    "WARNING",
                    f"{text}: {why}; {how}",
                    layer=layer,
                    policy=spec.policy,
                    reason=why,
                )

    async def _live(self) -> None:
        # Cancelled while it was born: its conversation is closed already.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._happened(Event.SPAWNED)
        await self._live_on()

    async def _live_on(self) -> None:
        """Wait for its process's end."""
        process, session, nursery = self.process, self.session, self._nursery
        if process is None or session is None or nursery is None:
            raise RuntimeError("a child that was not started cannot live")
        self._start_bounds(nursery)
        door = self._door_socket
        if door is not None:
            nursery.start_soon(door.serve, self._let_in, self._tell_of_door_socket)
        try:
            self.exit = await process.wait_exit()
        except LaunchpadLost:
            self._host.log.write(
                "ERROR",
                "The launchpad is lost, and with it the child",
                **self.log_fields(),
            )
            raise
        self._tell_end(process, session)
        if door is not None:  # what it leaves behind comes too late
            door.close()
        self._happened(Event.EXITED)
        await self._close_sessions()
        self.look_at_groups()
        self.count_refusals()

    def _start_bounds(self, nursery: trio.Nursery) -> None:
        """Start what waits for its limits."""
        # Only what the child has a bound for: each task here delays the start of a child.
        if self._is_stopped:
            nursery.start_soon(self._enforce_end)
        if self._timeout_at < math.inf:
            nursery.start_soon(self._enforce_timeout)
        for use in self.spec.workspaces:
            if use.mode == "review":
                nursery.start_soon(self._keep_bounds, use, self._bounds.get(use.name))
        for audit in self._audits.values():
            nursery.start_soon(audit.tell_opens)

    def log_fields(self) -> dict[str, object]:
        """Return who this is, for a line of the log."""
        session = self.session
        client_id = None if session is None else session.client.id
        pid = None if self.process is None else self.process.pid
        name = self.spec.name
        fields: dict[str, object] = {} if name is None else {"child": name}
        return {**fields, "child_id": self.id, "client_id": client_id, "pid": pid}

    def end_fields(self) -> dict[str, object]:
        """Return who this is and how it ended, for a line of the log."""
        ended = self.exit
        if ended is None:
            return self.log_fields()
        return {**self.log_fields(), "code": ended.code, "signal": ended.signal}

    def _tell_end(self, process: SpawnedProcess, session: Session) -> None:
        """Log its end: a warning where it failed and an operator has to hear of it.

        A child that was asked to end and did is none, nor is any of ``run``, which
        passes the status on.
        """
        ended = self.exit
        if ended is None:
            raise RuntimeError("a child that runs has not ended")
        was_asked = self._is_stopped and not (self.timed_out or self.ended_for)
        is_obeying = was_asked and ended.signal == self.spec.stop_signal
        is_kept = self._host.roster is not None
        failed = bool(self.status) and is_kept and not is_obeying
        self._host.log.write(
            "WARNING" if failed else "INFO",
            f"Process {process.pid} terminated, cleaning up client {session.client.id}",
            **self.end_fields(),
            status=self.status,
            reason=self.ending,
        )

    def _kill_unless_ended(self) -> None:
        """Kill a process for which nobody waits any more: its life was cancelled."""
        if self.process is not None and self.exit is None:
            self.process.send_signal(signal.SIGKILL)

    async def _wait_swept(self) -> None:
        """Wait until nothing that the dead process left behind is alive."""
        if self.process is not None and self.exit is not None:
            with trio.move_on_after(SWEEP_TIMEOUT_S):
                await self.process.wait_swept()

    async def _enforce_end(self) -> None:
        """After a stop, kill what does not end within the grace period (spec S6)."""
        self._killed_at = trio.current_time() + self._grace_s
        await trio.sleep_until(self._killed_at)
        if self.exit is not None:
            return
        self._on_overdue(self)
        self._happened(Event.GRACE_OVER)

    async def _enforce_timeout(self) -> None:
        await trio.sleep_until(self._timeout_at)
        if self.exit is None:
            self.timed_out = True
            self.stop()

    async def _keep_bounds(self, use: WorkspaceUse, bounds: LayerBounds | None) -> None:
        """End it when it passes what bounds its workspace's layer (spec WS17)."""
        from supervisor.workspace.bounds import LayerBounds  # noqa: PLC0415 - with one

        try:
            why = await (bounds or LayerBounds(use)).wait_passed()
        except OSError as error:
            text = f"cannot look at the layer of workspace {use.name}: {error.strerror}"
            self._host.log.write("WARNING", text, **self.log_fields())
            return
        if self.exit is not None:
            return
        self.ended_for = f"workspace {use.name}: {why}"
        self._host.journal.write(
            "workspace.limit",
            child_id=self.id,
            workspace=use.name,
            limit=why.limit,
            used=why.used,
            allowed=why.allowed,
        )
        self._host.log.write(
            "WARNING",
            f"Child {self.id} is ended: {self.ended_for}",
            workspace=use.name,
            limit=why.limit,
            **self.log_fields(),
        )
        self.stop(0.0)

    async def _close_sessions(self) -> None:
        """Close every conversation, nested ones first (spec S3)."""
        if self.session is not None:
            # Bounded: what a job may still do is a call into the kernel (I1).
            with trio.CancelScope(shield=True):
                await self.session.finish(PROCESS_EXIT)

    def _happened(self, event: Event) -> None:
        """Take an event in, and do what the table says."""
        self.state, action = step(self.state, event)
        match action:
            case Action.SERVE:
                self._serve()
            case Action.SERVE_AND_TERMINATE:
                self._serve()
                self._signal(self.spec.stop_signal)
            case Action.TERMINATE:
                self._signal(self.spec.stop_signal)
            case Action.KILL:
                self._signal(signal.SIGKILL)
            case Action.REPORT:
                self._report()
            case Action.CLEAN_UP | Action.NOTHING:
                pass  # `run` unwinds its stack as soon as there is nothing to wait for
            case Action.FAULT:
                raise AssertionError("`step` has raised")
            case _:
                assert_never(action)

    def _serve(self) -> None:
        """Begin its conversation: its process is there."""
        process, session, journal = self.process, self.session, self._host.journal
        if process is None or session is None:
            raise RuntimeError("a child that was not started cannot be served")
        client = session.client
        client.pid = process.pid
        self._host.pump.add(session)
        journal.write(
            "client.connected", child_id=self.id, client_id=client.id, pid=client.pid
        )
        # As soon as it can be: what is written down of it goes beside it.
        self.begun.set()
        journal.write(
            "child.spawned",
            child_id=self.id,
            name=self.spec.name,
            client_id=client.id,
            pid=client.pid,
            command=[
                os.fsencode(a).decode(errors="replace") for a in self.spec.command
            ],
            isolation=self.walls.row(),
        )
        self._host.log.write(
            "INFO", f"Child {self.spec.name or self.id} started", **self.log_fields()
        )

    def _signal(self, number: int) -> None:
        if self.process is not None:
            self._host.forks.signalled(self.id, number)
            self.process.send_signal(number)
            self._host.journal.write(
                "child.signalled",
                child_id=self.id,
                pid=self.process.pid,
                signal=int(number),
            )

    def _report(self) -> None:
        journal = self._host.journal
        self._host.denials.forget(self.id)
        if self.exit is not None:
            journal.write(
                "child.exited",
                child_id=self.id,
                code=self.exit.code,
                signal=self.exit.signal,
                utime_s=self.exit.utime_s,
                stime_s=self.exit.stime_s,
                maxrss_kib=self.exit.maxrss_kib,
                timed_out=self.timed_out,
            )
        reason = None if self.failure is None else self.failure.text
        journal.write(
            "child.gone", child_id=self.id, status=self.status, failure=reason
        )
