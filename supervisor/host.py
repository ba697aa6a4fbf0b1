"""The host: the nursery tree with everything that lives in it, on one screen.

    host nursery
    |- launcher              the launchpad's messages
    |- pump.run              every client's fast requests
    |- pump.watch_deadlines  messages that began and do not end
    |- pump.look_at_unwatched  clients for whom no epoll watch is left
    |- child nursery
       |- child.run          one task a child: start, wait for its exit, clean up
          |- session.run     its conversation's slow work
          |- session.run     ... of each attached client

Rules of this file.

1. What runs, runs in a nursery that this file opens; nothing outlives ``open_host``.
2. The launchpad is started by the caller, before Trio is imported; a host whose
   launchpad is lost ends with ``LaunchpadLost``.
3. Descriptors are raised to the hard limit, and a reserve is kept from clients, so that
   one that opens too much sees EMFILE while the host can still accept, log and close.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import traceback
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

import trio

from supervisor.allocator import return_free_pages, return_large_pieces
from supervisor.child import Child
from supervisor.daemon_places import hidden_from_children
from supervisor.denials import Denials
from supervisor.descriptors import (
    CHILDRENS_DESCRIPTORS,
    clients_share,
    raise_limit,
)
from supervisor.holdings import Baseline
from supervisor.host_proc import shows_host
from supervisor.journal import FileEvents, Journal
from supervisor.launcher import Launcher
from supervisor.launchpad.kernel import SHORT_SLICE_NS, ask_for_slices
from supervisor.limit_watch import LimitNews, uses_of
from supervisor.logs import Log
from supervisor.options import parse_duration, parse_size
from supervisor.sandbox.apart import Apart
from supervisor.sandbox.cgroups import Groups, Reserve
from supervisor.sandbox.fork_watch import ForkWatch
from supervisor.sandbox.plan import Machine
from supervisor.services import Services
from supervisor.session.base import FAULT, SLOW
from supervisor.session.pump import Pump
from supervisor.session.session import Session
from supervisor.spawned import LaunchpadLost
from supervisor.watches import tell_by
from supervisor.workspace_sizes import WorkspaceSizes
from vfs.filesystem import Filesystem
from vfs.payload import DEFAULT_BUDGET_BYTES, PayloadBudget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from supervisor.config.document import Config
    from supervisor.launchpad.start import LaunchpadProcess
    from supervisor.limit_watch import Use
    from supervisor.metrics.registry import Metrics
    from supervisor.spec import ChildSpec
    from supervisor.watcher import Sample
    from vfs.clients import Client

TIDY_AFTER_S = (0.02, 0.1, 0.5)
"""When groups are tried again that somebody who dies was still in; then with the next
child that starts."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of a host (face: [host] and [limits]).

    Attributes:
        max_write_bytes: largest WRITE (spec W3).
        payload_budget_bytes: memory for payloads over all clients (spec W3).
        clients_per_child: connections of one child, itself included (spec S7).
        deadline_s: for a message that began and a reply that is not taken (spec F8).
        grace_s: between SIGTERM and SIGKILL (spec S6).
        max_children: children at once.
        open_files_per_client: of a child for which nothing else is said.
        written: directories in which children and tools may have made links.
        hidden: directories that children see empty (``sandbox.apart``).
    """

    max_write_bytes: int = 16 * 1024 * 1024
    payload_budget_bytes: int = DEFAULT_BUDGET_BYTES
    clients_per_child: int = 64
    deadline_s: float = 30.0
    grace_s: float = 5.0
    max_children: int = 1000
    open_files_per_client: int = 256
    written: frozenset[str] = frozenset()
    hidden: tuple[str, ...] = ()


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


class Roster(Protocol):
    """Knows more of children than their processes tell: names, restarts, reasons.

    Attributes:
        log_dropped_bytes: what children said and no log could keep.
    """

    log_dropped_bytes: int

    @property
    def configured(self) -> int:
        """How many children stand in the configuration."""
        ...

    def more_of(self, child: Child) -> dict[str, object]:
        """Return what is to be added to a child's row of ``ps``."""
        ...

    def absent(self) -> Iterable[dict[str, object]]:
        """Yield rows of children that have no process now."""
        ...


class Host:
    """What the parts of one host share; see ``open_host``.

    Attributes:
        generation: programs that this process was before (``handover``).
        baseline: what the process held before, for the leak check.
        roster: adds to ``ps``; None where nobody knows more.
        services: what it offers its children beside files.
        metrics: counts events; None where nobody wants to know.
        machine: what it knows of the layers that this machine gives.
        groups: where its children's groups of processes come from.
        limits: what was told of each child's limits.
        refused: how often limits of children that are gone refused something, by limit.
        forks: who of them runs into its limit of processes again and again.
        sizes: how much was changed in the workspaces that children have.
        told_of_audits: what the log tells of already that an audit lacks.
        mounting: held while a workspace that children share is mounted.
        on_overdue: told of each child that a stop's grace period did not end.
        apart: its own directories, which no child sees into.
        holders: each yields (descriptor, a word for it) that something beside the
            host's own parts holds: a control socket, a scratch directory.
    """

    def __init__(
        self, launcher: Launcher, settings: Settings, journal: Journal, log: Log
    ) -> None:
        self.generation = 0
        self.baseline = Baseline.now()
        self.holders: set[Callable[[], Iterable[tuple[int, str]]]] = set()
        self.apart = Apart(settings.hidden)
        self.holders.add(self.apart.descriptors)
        self.launcher = launcher
        self.settings = settings
        self.journal = journal
        self.log = log
        self.pump = Pump()
        self.services = Services()
        self.metrics: Metrics | None = None
        self.machine = Machine(launcher.launchpad_pid)
        self.groups = Reserve()
        self.limits = LimitNews()
        self.refused: Counter[str] = Counter()
        self.forks = ForkWatch(journal)
        self.budget = PayloadBudget(settings.payload_budget_bytes)
        self.budget.on_freed = return_free_pages
        self.children: dict[str, Child] = {}
        soft = raise_limit()
        return_large_pieces()
        self.fs = Filesystem(max_host_files=clients_share(soft))
        events = FileEvents(journal, self.child_of, log.write)
        self.fs.shows_host = shows_host
        self.denials = Denials(journal, self.child_of, log.write)
        self.fs.on_denied = self.denials.tell
        if journal.is_on or log.writes("INFO"):
            self.fs.observer = events
        self.on_overdue: Callable[[Child], None] = lambda _child: None
        self.roster: Roster | None = None
        self.nursery: trio.Nursery | None = None
        self.told_of_audits: set[str] = set()
        self.mounting = trio.Lock()
        self.sizes = WorkspaceSizes()
        self._is_tidying = False
        self._child_ids = count(1)
        self._owners: dict[str, str] = {}

    def child_of(self, client: Client) -> str:
        """Return the id of the child behind a client."""
        return client.pipe_id.partition(":")[0]

    def absent(self) -> list[dict[str, object]]:
        """Return the rows of kept children that have no process now, as in ``ps``."""
        if self.roster is None:
            return []
        names = {child.spec.name for child in self.children.values()}
        return [row for row in self.roster.absent() if row["name"] not in names]

    def open_session(
        self, client: Client, read_fd: int, write_fd: int, dialect: int
    ) -> Session:
        """Make the conversation of a client; its descriptors are the session's."""
        return Session(
            self.pump,
            self.fs,
            client,
            read_fd,
            write_fd,
            self.budget,
            dialect=dialect,
            max_write_bytes=self.settings.max_write_bytes,
            deadline_s=self.settings.deadline_s,
            on_closed=self._session_closed,
            services=self.services,
        )

    def _session_closed(self, session: Session) -> None:
        client = session.client
        self.pump.counts.gone_in += session.bytes_in
        self.pump.counts.gone_out += session.bytes_out
        child = self.children.get(self.child_of(client))
        if child is not None:
            child.session_closed(session)
        for service in self.services:
            service.client_gone(client)
        self._tell_failure(session)
        if client.parent is None and client.pid is None:
            return  # of a child that could not be started: nobody heard of it
        self.journal.write(
            "client.gone",
            child_id=self.child_of(client),
            client_id=client.id,
            reason=session.why_closed,
            closed_files=session.closed_files,
        )

    def _tell_failure(self, session: Session) -> None:
        failure = session.failure
        name = session.client.id
        who = {"child_id": self.child_of(session.client), "client_id": name}
        if session.why_closed == FAULT and failure is not None:
            where = "".join(traceback.format_tb(failure.__traceback__)[-1:]).split()
            text = f"Fault serving client {name}: {failure!r} at {' '.join(where)}"
            self.log.write("ERROR", text, **who, reason=session.why_closed)
        elif isinstance(failure, OSError):
            # The usual ends of a connection are no news.
            usual = isinstance(failure, BrokenPipeError | ConnectionResetError)
            text = f"Connection of client {name} failed: {failure.strerror}"
            level = "DEBUG" if usual else "WARNING"
            self.log.write(level, text, **who, reason=failure.strerror)
        elif session.why_closed == SLOW:
            text = f"Client {name} missed its deadline: closed"
            self.log.write("WARNING", text, **who, reason=session.why_closed)

    def tell_limits(self, child: Child, sample: Sample | None = None) -> None:
        """Write down which limits a child has come near to, or is refused by."""
        self._write_limits(child, uses_of(child, sample))

    def _write_limits(self, child: Child, found: list[Use]) -> None:
        for use in self.limits.of(child.id, found):
            self.journal.write(
                "child.limit",
                child_id=child.id,
                name=child.spec.name,
                limit=use.limit,
                level=use.level.name.lower(),
                used=use.used,
                allowed=use.allowed,
                refused=use.refused,
            )

    def tell_left_out(self) -> None:
        """Tell which events were left out so far: what comes next counts anew."""
        self.denials.tell_all()
        for child in self.children.values():
            child.tell_left_out()

    def refusals(self) -> Counter[str]:
        """Return how often limits of children refused something, by limit."""
        found = self.refused.copy()
        for child in self.children.values():
            if not child.is_counted:
                found.update(child.refused())
        return found

    def note_refusals(self, child: Child) -> None:
        """Keep what was refused to a child whose process has ended."""
        self._write_limits(child, [use for use in uses_of(child, None) if use.refused])
        self.limits.forget(child.id)
        self.refused.update(child.refused())
        child.is_counted = True

    async def spawn(self, spec: ChildSpec) -> Child:
        """Start a child and return it; look at ``failure`` for one that did not start.

        Raises:
            OSError: ``EAGAIN``: as many children as there may be; ``EMFILE``: too few
                descriptors for one more; or its root or a grant cannot be reached.
            LaunchpadLost: no child can be started any more.

        Cancellation: a child that was started all the same is killed; no table knows it.
        """
        nursery = self._opened()
        if (most := self.settings.max_children) <= len(self.children):
            why = f"there are {most} children already; raise host.max_children"
            raise OSError(errno.EAGAIN, why)
        if self.fs.spare < -CHILDRENS_DESCRIPTORS:
            why = "too few descriptors for one more child; raise ulimit -n"
            raise OSError(errno.EMFILE, why)
        child = Child(self, f"child-{next(self._child_ids)}", spec)
        await self.begin(child)
        if "cgroup" in spec.sandbox.layers:
            # After whoever asked for this child has it.
            nursery.start_soon(self._restock)
        return child

    async def begin(self, child: Child) -> None:
        """Let a child live; returns when its conversation begins, or never will.

        Raises, cancellation: as ``spawn``.
        """
        nursery = self._opened()
        self.children[child.id] = child
        # Not `nursery.start`: its nursery and its turns of the loop are a tenth of a start.
        nursery.start_soon(self._run_child, child)
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

    async def _run_child(self, child: Child) -> None:
        try:
            with child.scope:
                await child.run()
        finally:
            del self.children[child.id]
            child.gone.set()  # I5: whoever waits for it finds it in no table
            child.begun.set()

    async def _restock(self) -> None:
        """Make the next child's groups, so that it may wait in them (ADR 47)."""
        spare = self.groups.restock()
        if spare is not None:
            with contextlib.suppress(LaunchpadLost):  # its owner hears of it
                await self.launcher.spare(spare.on_the_wire())

    def give_groups_back(self, groups: Groups) -> None:
        """Remove the groups of a child that is gone, or see to it that they go soon."""
        is_gone = self.groups.give_back(groups)
        if not is_gone and not self._is_tidying and self.nursery is not None:
            self._is_tidying = True
            self.nursery.start_soon(self._tidy)

    async def _tidy(self) -> None:
        for pause_s in TIDY_AFTER_S:
            await trio.sleep(pause_s)
            if self.groups.tidy():
                break
        self._is_tidying = False

    def request_stop(self, grace_s: float | None = None) -> None:
        """Ask every child to end; ``grace_s`` seconds until SIGKILL, None as set."""
        for child in tuple(self.children.values()):
            child.stop(grace_s)

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop every child and wait until all are gone (spec S6)."""
        self.journal.write("host.stopping", children=len(self.children))
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
) -> AsyncIterator[Host]:
    """Open a host around a launchpad; everything in it ends with the block.

    Args:
        launchpad: from ``start_launchpad``; the host's from now on.  From a program
            before: the caller puts its children in (``handover_enter.enter``).
        settings: bounds.
        journal: where events go.
        log: where lines go.

    Raises:
        LaunchpadLost: the launchpad ended by itself.
    """
    log = log or Log()
    journal = journal or Journal(-1, lambda text: log.write("WARNING", text))
    tell_by(lambda text: log.write("WARNING", text))
    with contextlib.closing(Reserve()) as groups:  # removed when all in them are dead
        async with trio.open_nursery() as nursery:
            launcher = Launcher(launchpad)
            if launchpad.handed_over is not None:
                from supervisor.handover.enter import enter_launcher  # noqa: PLC0415

                enter_launcher(launcher, launchpad.handed_over)
            await nursery.start(launcher.run)
            host = Host(launcher, settings or Settings(), journal, log)
            host.groups = groups
            nursery.start_soon(host.forks.run)
            nursery.start_soon(host.pump.run)
            nursery.start_soon(host.pump.watch_deadlines)
            nursery.start_soon(host.pump.look_at_unwatched)
            if launchpad.handed_over is None:
                journal.write("host.started", pid=os.getpid())
            ask_for_slices(SHORT_SLICE_NS)  # many wait for it, each for a little
            gc.enable()
            gc.freeze()  # what is there now stays: collections need not look at it again
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
