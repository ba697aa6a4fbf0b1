"""The host: its parts, its children, and the nursery that runs them.

1. Each task runs in a nursery of this file; nothing outlives ``open_host``.
2. The caller starts the launchpad before it imports Trio; a host without it ends.
3. Descriptors have the hard limit, with a reserve that clients cannot take.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from hostlib.journal import Journal
from hostlib.linux.descriptors import CHILDRENS_DESCRIPTORS
from hostlib.linux.syscalls import SHORT_SLICE_NS, ask_for_slices
from hostlib.log import Log
from hostlib.readiness import report_unwatched_to
from hostlib.user_values import parse_duration, parse_size
from supervisor.children.child import Child
from supervisor.config.directories import hidden_from_children
from supervisor.parts import Parts, Settings
from supervisor.sandbox.groups import Reserve
from supervisor.spawn.launcher import Launcher

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable

    from supervisor.config.document import Config
    from supervisor.spawn.launcher import RecordState
    from supervisor.spawn.launchpad.start import LaunchpadProcess
    from supervisor.spec import ChildSpec


def settings_of(config: Config | None) -> Settings:
    """Return the bounds that a checked configuration sets."""
    if config is None:
        return Settings(hidden=hidden_from_children(None))
    limits = config.limits
    return Settings(
        max_write_bytes=parse_size(limits.write),
        payload_budget_bytes=parse_size(limits.payload_budget),
        clients_per_child=limits.clients_per_child,
        written=config.places_written(),
        hidden=hidden_from_children(config.host),
        deadline_s=parse_duration(limits.deadline),
        grace_s=parse_duration(config.host.grace),
        max_children=config.host.max_children,
        open_files_per_client=limits.open_files_per_client,
    )


class LeftState(Protocol):
    """The processes of the program before; see ``Launcher.restore``."""

    last_ident: int
    records: list[RecordState]


class Host(Parts):
    """A host and its children; see ``open_host``.

        host nursery
        |- launcher              the launchpad's messages
        |- forks.run             children whose forks are refused on and on
        |- pump.run              every client's fast requests
        |- pump.watch_deadlines  messages that began and do not end
        |- pump.look_at_unwatched  clients for whom no epoll watch is left
        |- door_sockets.run      programs of all children without FD 3
        |- child nursery
           |- child.run          one task a child: start, wait for its exit, clean up
              |- session.run     its session's slow work
              |- session.run     ... of each attached client

    Attributes:
        children: those that are there, by id.
        next_child: the number of the next one.
        metrics: attached by ``attach_metrics``; None where nothing counts events.
        on_overdue: told of each child that a stop's grace period did not end; set
            before there are children.
    """

    def __init__(
        self, launcher: Launcher, settings: Settings, journal: Journal, log: Log
    ) -> None:
        super().__init__(launcher, settings, journal, log)
        self.children: dict[str, Child] = {}
        self.metrics: object = None
        self.on_overdue: Callable[[Child], None] = lambda _child: None
        self.next_child = 1
        self._has_told_stop = False

    def absent_rows(self) -> list[dict[str, object]]:
        """Return the rows of kept children that have no process now, as in ``ps``."""
        if self.roster is None:
            return []
        names = {child.spec.name for child in self.children.values()}
        return [row for row in self.roster.absent_rows() if row["name"] not in names]

    def report_omitted(self) -> None:
        """Tell which events were left out so far, and count anew."""
        self.events.report_omitted()
        for child in self.children.values():
            child.report_omitted()

    def refusals(self) -> Counter[str]:
        """Return how often limits of children refused something, by limit."""
        found = self.refused.copy()
        for child in self.children.values():
            if not child.limits.is_counted:
                found.update(child.limits.count_refusals())
        return found

    async def spawn(self, spec: ChildSpec, launcher: Launcher | None = None) -> Child:
        """Start a child and return it; look at ``failure`` for one that did not start.

        Args:
            spec: its description.
            launcher: starts it; None for the host's own.

        Raises:
            OSError: ``EAGAIN``: as many children as there may be; ``EMFILE``: too few
                descriptors for one more; or its root or a grant cannot be reached.
            LaunchpadLost: no child can be started any more.

        Cancellation: a child that was started all the same is killed; no table knows
        it.
        """
        nursery = self._opened()
        if (most := self.settings.max_children) <= len(self.children):
            why = f"there are {most} children already; raise host.max_children"
            raise OSError(errno.EAGAIN, why)
        if self.fs.descriptor_account.excess > CHILDRENS_DESCRIPTORS:
            why = "too few descriptors for one more child; raise ulimit -n"
            raise OSError(errno.EMFILE, why)
        number, self.next_child = self.next_child, self.next_child + 1
        child = Child(
            self, f"child-{number}", spec, self.children, self.on_overdue, launcher
        )
        await self.begin(child)
        if launcher is None and "cgroup" in spec.sandbox.layers:
            # After the caller has this child.
            nursery.start_soon(self.restock)
        return child

    async def begin(self, child: Child) -> None:
        """Let a child live; returns when its session begins, or never will.

        Raises, cancellation: as ``spawn``.
        """
        nursery = self._opened()
        self.children[child.id] = child
        # Not `nursery.start`: its nursery and its turns of the loop are a tenth of a
        # start.
        nursery.start_soon(child.run)
        try:
            await child.begun.wait()
        except trio.Cancelled:
            child.scope.cancel()
            # As bounded as its clean-up.
            with trio.CancelScope(shield=True):
                await child.gone.wait()
            raise
        if child.process is None:
            self.launcher.check()

    def _opened(self) -> trio.Nursery:
        if self.nursery is None:
            raise RuntimeError("the host is not open")
        return self.nursery

    def request_stop(self, grace_s: float | None = None) -> None:
        """Ask every child to end; ``grace_s`` seconds until SIGKILL, None as set."""
        for child in tuple(self.children.values()):
            child.stop(grace_s)

    def tell_stop(self) -> None:
        """Write, once, that the host is stopping and how many children it has."""
        if not self._has_told_stop:
            self._has_told_stop = True
            self.journal.write("host.stopping", children=len(self.children))

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop every child and wait until all are gone (spec S6)."""
        self.tell_stop()
        self.request_stop(grace_s)
        for child in tuple(self.children.values()):
            await child.gone.wait()


@asynccontextmanager
async def open_host(
    launchpad: LaunchpadProcess,
    settings: Settings | None = None,
    *,
    journal: Journal | None = None,
    log: Log | None = None,
    left: LeftState | None = None,
) -> AsyncIterator[Host]:
    """Open a host around a launchpad; everything in it ends with the block.

    Args:
        launchpad: from ``start_launchpad``; the host's from now on.
        settings: bounds.
        journal: where events go.
        log: where lines go.
        left: the processes of a program before; the caller puts its
            children in (``handover.host_state.restore_host``).

    Raises:
        LaunchpadLost: the launchpad ended by itself.
    """
    log = log or Log()
    journal = journal or Journal(-1, lambda text: log.write("WARNING", text))
    report_unwatched_to(lambda text: log.write("WARNING", text))
    with contextlib.closing(Reserve()) as groups:  # removed when all in them are dead
        async with trio.open_nursery() as nursery:
            launcher = Launcher(launchpad)
            if left is not None:
                launcher.restore(left.last_ident, left.records)
            await nursery.start(launcher.run)
            host = Host(launcher, settings or Settings(), journal, log)
            host.groups = groups
            nursery.start_soon(host.forks.run)
            nursery.start_soon(host.pump.run)
            nursery.start_soon(host.pump.watch_deadlines)
            nursery.start_soon(host.pump.look_at_unwatched)
            nursery.start_soon(host.door_sockets.run, log)
            if left is None:
                journal.write("host.started", pid=os.getpid())
            ask_for_slices(SHORT_SLICE_NS)  # many wait for it, each for a little
            gc.enable()
            gc.freeze()  # these objects stay: collections need not look at them
            try:
                async with trio.open_nursery() as children:
                    host.nursery = children
                    yield host
                    await host.stop()
            finally:
                gc.unfreeze()
                host.apart.close()
                ask_for_slices(0)
                nursery.cancel_scope.cancel()
