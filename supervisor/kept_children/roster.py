"""All children that a daemon keeps: ordered start, reverse stop, reload.

Rules of this file.

1. A child's turn comes when those that it is ``after`` have begun, or failed to: a
   broken child delays its followers and does not block them.
2. Stopping is the reverse: a child is stopped when all that came after it are gone.
3. A reload touches only changed children; a configuration with a fault changes none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio

from hostlib.segments import Segments
from hostlib.user_values import parse_size
from supervisor.kept_children.adhoc_logs import AdhocLogs
from supervisor.kept_children.fleet_place import fence_options
from supervisor.kept_children.kept_child import KeptChild, SharedParts, options_of
from supervisor.kept_children.log_marks import Marks
from supervisor.kept_children.logs import ChildLog
from supervisor.workspace.section import uses_of
from supervisor.workspace.settings import USUAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from supervisor.children.child import Child
    from supervisor.children.specs import ChildOptions
    from supervisor.config.child import ChildSection
    from supervisor.config.directories import Places
    from supervisor.config.document import Config
    from supervisor.fsproxy.ports import ChildView
    from supervisor.host import Host
    from supervisor.kept_children.fleet_place import FleetPlace
    from supervisor.kept_children.kept_state import KeptChildState
    from supervisor.workspace.use import WorkspaceUse

T = TypeVar("T")

STARTS_AT_ONCE = 16
"""A thousand at once would make their directories in one turn of the loop, and a tool's
start would wait for all of them at the launcher."""

PROGRESS_S = 1.0
"""Time between two reports of how many have begun: a thousand take some seconds."""


class RosterChanges(NamedTuple):
    """The effects of a reload, by name."""

    started: list[str]
    stopped: list[str]
    restarted: list[str]
    unchanged: list[str]
    needs_restart: list[str]

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return self._asdict()


class Children:
    """The children that one host keeps.

    Args:
        host: starts them.
        config: the configuration.
        places: the directories of logs, private directories and workspaces.
        nursery: their tasks run in it.

    Attributes:
        config: the configuration now.
        state_dir: has the workspaces.
    """

    def __init__(
        self,
        host: Host,
        config: Config,
        places: Places,
        nursery: trio.Nursery,
    ) -> None:
        self.config = config
        self.state_dir = places.state_dir
        self._host = host
        self._log_dir = places.logs
        self._shared = SharedParts(places.scratch, trio.Semaphore(STARTS_AT_ONCE))
        self._nursery = nursery
        self.by_name: dict[str, KeptChild] = {}
        self._adhoc_logs = AdhocLogs(places.logs)
        self._stopping = False
        self._reloading = trio.Lock()
        self._changing: frozenset[str] = frozenset()
        host.roster = self
        self.log_dropped_bytes = 0
        host.holders.add(self.descriptors)

    def __iter__(self) -> Iterator[KeptChild]:
        """Yield all of them."""
        yield from tuple(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def find(self, name: str) -> KeptChild | None:
        """Return the child of this name, or whose process has this id."""
        kept = self.by_name.get(name)
        if kept is not None:
            return kept
        child = self._host.children.get(name)
        if child is None or child.spec.name is None:
            return None
        return self.by_name.get(child.spec.name)

    # Starting

    def start_configured(self) -> None:
        """Start all configured children, in their order."""
        for name, section in self.config.child.items():
            self._add_configured(name, section)
        for kept in self:
            self.start(kept)

    @property
    def is_reloading(self) -> bool:
        """Whether the configuration is being reloaded."""
        return self._reloading.locked()

    def is_changing(self, name: str) -> bool:
        """Return whether a reload stops or starts the child of this name just now."""
        return name in self._changing

    def restore(
        self, left: Iterable[KeptChildState], children: Iterable[Child]
    ) -> None:
        """Put kept children back, each with its process or its next restart.

        Args:
            left: the records of the program before; there are no children here yet.
            children: the running children that the host has taken over.

        Raises:
            HandoverError: this program has no such children.
        """
        by_id = {child.id: child for child in children}
        for state in left:
            section, options = state.plan()
            log = self.open_log(state.name, section)
            kept = KeptChild(
                self._host, state.name, section, options, log, self._shared
            )
            child = None if state.child_id is None else by_id[state.child_id]
            kept.restore(state, child)
            self.by_name[kept.name] = kept
            if not kept.settled.is_set():
                self._nursery.start_soon(self.run_child, kept, [])

    def start(self, kept: KeptChild) -> None:
        """Start one child; nothing if it runs already, or the host is stopping."""
        if self._stopping:
            kept.begun.set()
        elif kept.begin():
            after = [
                self.by_name[name]
                for name in kept.section.after
                if name in self.by_name
            ]
            self._nursery.start_soon(self.run_child, kept, after)

    async def wait_begun(
        self, tell: Callable[[int, int], None], *, unless: trio.Event
    ) -> bool:
        """Wait until each child was started or never will be; return False if cut short.

        Args:
            tell: called with the number that have begun and the number of all, when it
                has changed and at most once in ``PROGRESS_S``.
            unless: ends the wait.

        Returns:
            Whether all have begun or failed to.
        """

        async def leave() -> None:
            await unless.wait()
            nursery.cancel_scope.cancel()

        async def tell_progress() -> None:
            told = -1
            while True:
                begun = sum(kept.begun.is_set() for kept in self)
                if begun != told:
                    tell(begun, len(self))
                    told = begun
                await trio.sleep(PROGRESS_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            nursery.start_soon(tell_progress)
            for kept in self:
                await kept.begun.wait()
            nursery.cancel_scope.cancel()
        return not unless.is_set()

    async def run_child(self, kept: KeptChild, after: list[KeptChild]) -> None:
        """Run a child until it is over; forget it then, unless it is configured."""
        await kept.run(after)
        if not kept.configured and self.by_name.get(kept.name) is kept:
            del self.by_name[kept.name]
            kept.log.close()
            await self._adhoc_logs.end(kept.name, self.by_name)

    def spawn(
        self,
        name: str | None,
        section: ChildSection,
        placed: FleetPlace | None = None,
    ) -> KeptChild:
        """Start a child that no configuration names; its row goes when it has ended.

        Args:
            name: its own; None for a new one.
            section: its description.
            placed: as for `KeptChild`.

        Raises:
            ValueError: its name is taken or being reloaded, the host is stopping, or a
                child of a fleet could outlive its lease.
        """
        if self._stopping:
            raise ValueError("the host is stopping")
        name = name or self._adhoc_logs.new_name()
        if name in self.by_name:
            raise ValueError(f"there is a child {name!r} already")
        if self.is_changing(name):
            raise ValueError(
                f"the configuration of {name!r} is being reloaded; try again"
            )
        kept = self._add(name, section, placed)
        kept.configured = False
        self._adhoc_logs.begin(name)
        self.start(kept)
        return kept

    def _options(self, section: ChildSection) -> ChildOptions:
        name, config = section.policy, self.config
        policy = None if name is None else config.policy.get(name)
        uses: tuple[WorkspaceUse, ...] = ()
        if policy is not None and policy.workspace:
            uses = uses_of(policy.workspace, config.workspace, self.state_dir)
        return options_of(section, policy, config.sandbox, uses)

    def open_log(self, name: str, section: ChildSection) -> ChildLog:
        """Return the log that keeps a child's output."""
        directory = f"{self._log_dir}/{name}"
        max_bytes, keep = parse_size(section.log.max_size), section.log.keep
        segments = Segments(directory, max_bytes, keep)
        marks = Marks(directory, max_bytes, keep, segments.end)
        return ChildLog(name, segments, marks, self._host.log, self._count_dropped)

    def _add_configured(self, name: str, section: ChildSection) -> KeptChild:
        kept = self._add(name, section)
        self._adhoc_logs.configure(name)
        return kept

    def _add(
        self, name: str, section: ChildSection, placed: FleetPlace | None = None
    ) -> KeptChild:
        options = self._options(section)
        if placed is not None:
            options = placed.options_of(name, options, self.config, self.state_dir)
            if placed.life.is_fenced:
                options = fence_options(options)
        log = self.open_log(name, section)
        kept = KeptChild(self._host, name, section, options, log, self._shared)
        kept.placed = placed
        self.by_name[name] = kept
        return kept

    # Stopping

    async def stop_all(self, grace_s: float | None = None) -> None:
        """Stop all children, each when those that came after it are gone (rule 2)."""
        self._stopping = True
        followers: dict[str, list[KeptChild]] = {}
        for kept in self:
            for name in kept.section.after:
                followers.setdefault(name, []).append(kept)
        async with trio.open_nursery() as nursery:
            for kept in self:
                followed_by = followers.get(kept.name, ())
                nursery.start_soon(self._stop_one, kept, followed_by, grace_s)

    async def _stop_one(
        self, kept: KeptChild, followers: Iterable[KeptChild], grace_s: float | None
    ) -> None:
        for follower in followers:
            await follower.settled.wait()
        if not kept.settled.is_set():
            kept.stop(grace_s)
            await kept.settled.wait()

    def stop_rest_at_once(self) -> None:
        """Stop all children that are left at once, in no order."""
        for kept in self:
            if not kept.settled.is_set():
                kept.stop(0.0)

    # Reloading

    async def finish(self, do: Callable[[], Awaitable[T]]) -> T:
        """Run a function to its end, also if the caller is cancelled meanwhile."""
        done = trio.Event()
        results: list[T] = []
        failures: list[Exception] = []

        async def run() -> None:
            try:
                results.append(await do())
            except Exception as why:  # noqa: BLE001 - the caller's to handle
                failures.append(why)
            done.set()

        self._nursery.start_soon(run)
        await done.wait()
        if failures:
            raise failures[0]
        return results[0]

    async def reload(self, config: Config) -> RosterChanges:
        """Start, stop and restart the children whose configuration has changed.

        Args:
            config: checked; counts from now on.
        """
        async with self._reloading:
            old, self.config = self.config, config
            host = self._host
            host.settings = replace(host.settings, written=config.places_written())
            changes = self._compare(old, config)
            doomed = [self.by_name[n] for n in (*changes.stopped, *changes.restarted)]
            new = (*changes.started, *changes.restarted)
            self._changing = frozenset((*changes.stopped, *new))
            try:
                async with trio.open_nursery() as nursery:
                    for kept in doomed:
                        nursery.start_soon(self._stop_one, kept, (), None)
            finally:
                self._changing = frozenset()
            for kept in doomed:
                # One that was not configured before goes by itself.
                if self.by_name.pop(kept.name, None) is not None:
                    kept.log.close()
            begun = [self._add_configured(name, config.child[name]) for name in new]
            for kept in begun:
                self.start(kept)
        # An exec can hang: the next reload may end that.
        for kept in begun:
            await kept.begun.wait()
        return changes

    def _compare(self, old: Config, new: Config) -> RosterChanges:
        running = {kept.name: kept for kept in self if kept.configured}
        started, restarted, unchanged = [], [], []
        for name, section in new.child.items():
            kept = self.by_name.get(name)
            if kept is None:
                started.append(name)
            elif name in running and self._runs_as_configured(kept, section):
                kept.options = self._options(section)
                unchanged.append(name)
            else:
                restarted.append(name)
        return RosterChanges(
            started=started,
            stopped=[name for name in running if name not in new.child],
            restarted=restarted,
            unchanged=unchanged,
            needs_restart=[
                key
                for key in new.__struct_fields__
                if key not in {"child", "policy", "sandbox", "workspace"}
                and getattr(old, key) != getattr(new, key)
            ],
        )

    def _runs_as_configured(self, kept: KeptChild, section: ChildSection) -> bool:
        """Return whether a child runs as configured, so that it needs no restart.

        Changed settings of its workspaces count from its next start on.
        """
        options = self._options(section)
        now, then = (
            replace(
                some, workspaces=tuple(_strip_settings(use) for use in some.workspaces)
            )
            for some in (options, kept.options)
        )
        return kept.section == section and now == then

    # Views (``host.Roster``)

    @property
    def configured(self) -> int:
        """The number of configured children."""
        return len(self.config.child)

    def extra_fields_of(self, child: ChildView) -> dict[str, object]:
        """Return the fields to add to a child's row of ``ps``."""
        kept = self.by_name.get(child.spec.name or "")
        return {} if kept is None else kept.extra_fields()

    def _count_dropped(self, size_bytes: int) -> None:
        self.log_dropped_bytes += size_bytes

    def absent_rows(self) -> Iterator[dict[str, object]]:
        """Yield rows of children that have no process now."""
        for kept in self:
            # The row of its process goes a moment before ``kept`` is told.
            if kept.child is None or kept.child.id not in self._host.children:
                yield kept.row()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield their descriptors of the host."""
        for kept in self:
            yield from kept.descriptors()


def _strip_settings(use: WorkspaceUse) -> WorkspaceUse:
    """Return a workspace without its settings."""
    return replace(use, settings=USUAL)
