"""The facts of the status page as plain values, taken in the loop.

Rules of this file.

1. A page shows ``MAX_CHILDREN`` children at most, first those that are down, then the
   busiest, and ``MAX_ROWS`` rows of other tables; only shown children are sampled, so a
   host of 1,000 children pays as one of 100.
2. Of a command only the program's name is shown: arguments may hold secrets, and every
   user of the machine can read a loopback port.
3. Open pages share one look every ``FRESH_S``.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from supervisor.fsproxy.ports import Accounting
from supervisor.observe.registry import find_build
from supervisor.observe.tables import network_word
from supervisor.spawn.restarts import DOWN
from supervisor.usage.samples import Watcher
from vfs.clients import file_row
from vfs.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from supervisor.children.child import Child
    from supervisor.observe.registry import Metrics, RecentEvent
    from supervisor.usage.samples import Sample

MAX_CHILDREN = 100
MAX_DOWN = 50
"""Most of those that are down; they come first."""

MAX_ROWS = 50
"""Most clients, and most files, of a page."""

MAX_NAMES = 10
"""Most names, and most refusals, of a child: the newest."""

MAX_EVENTS = 30

FRESH_S = 0.8
"""Time for which a look serves all pages; a little less than their interval."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bound and what is used of it.

    Attributes:
        title: its subject.
        used: how much.
        limit: the bound; None where there is none.
        is_bytes: whether these are sizes.
        reserved: beside the use, taken for calls under way.
        unit: of numbers, for people.
    """

    title: str
    used: float
    limit: float | None
    is_bytes: bool = False
    reserved: float = 0
    unit: str = ""


@dataclass(frozen=True, slots=True)
class ChildFacts:
    """One row of the table of children; None for unknown values.

    Attributes:
        last_error: of a child without a process, the reason.
    """

    name: str
    program: str
    state: str
    pid: int | None = None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    descriptors: int | None = None
    requests: int = 0
    requests_per_s: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    tokens: int | None = None
    isolation: str = "-"
    last_error: str | None = None
    files: Bar | None = None
    growth: Bar | None = None
    workspace: str | None = None
    changed: int | None = None
    changed_bytes: int | None = None
    network: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at a host.

    Attributes:
        totals: (word, figure) pairs of the whole host.
        bars: bounds of the whole host.
        children: rows, those that are down first, then the busiest.
        clients: the contract's rows (spec S1).
        files: as above.
        more: how many rows each table would have beyond those shown.
        events: the newest first.
        reached: names that shown children have connected to, with their figures.
        refused: names that they were refused.
        more_names: how many rows these two would have beyond those shown.
        version: of this program.
        python: that runs it.
        up_s: since the process was started, seconds.
    """

    pid: int
    totals: tuple[tuple[str, str], ...]
    bars: tuple[Bar, ...]
    children: tuple[ChildFacts, ...]
    clients: tuple[Mapping[str, object], ...]
    files: tuple[Mapping[str, object], ...]
    more: tuple[int, int, int]
    events: tuple[RecentEvent, ...]
    version: str = ""
    python: str = ""
    up_s: float = 0.0
    reached: tuple[Mapping[str, object], ...] = ()
    refused: tuple[Mapping[str, object], ...] = ()
    more_names: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Watch:
    """Looks at a host for all open pages."""

    metrics: Metrics
    _watcher: Watcher = field(default_factory=Watcher)
    _looking: trio.Lock = field(default_factory=trio.Lock)
    _facts: Facts | None = None
    _looked_s: float = 0.0
    _before: dict[str, tuple[int, float]] = field(default_factory=dict)
    _total_before: tuple[int, float] = (0, 0.0)

    async def look(self) -> Facts:
        """Return the facts of now or of a moment ago."""
        async with self._looking:
            if self._facts is None or time.monotonic() - self._looked_s > FRESH_S:
                self._facts = await self._look()
                self._looked_s = time.monotonic()
            return self._facts

    async def _look(self) -> Facts:
        host = self.metrics.host
        down = sorted(host.absent_rows(), key=_gravity)
        down_rows = tuple(_down_row(row) for row in down[:MAX_DOWN])
        children = sorted(host.children.values(), key=_requests, reverse=True)
        shown = children[: MAX_CHILDREN - len(down_rows)]
        samples = await self._watcher.sample(
            (c.process.pid, c.process.create_time) for c in shown if c.process
        )
        by_pid = {identity[0]: sample for identity, sample in samples.items()}
        tables = host.fs.tables
        clients, files = tables.clients, tables.files
        now_s = time.monotonic()
        rows = tuple(
            self._child(c, by_pid.get(c.process.pid if c.process else 0), now_s)
            for c in shown
        )
        self._before = {row.name: (row.requests, now_s) for row in rows}
        reached, refused = self._names(shown)
        return Facts(
            os.getpid(),
            self._totals(now_s),
            tuple(self._bars()),
            down_rows + rows,
            tuple(c.row() for c in list(clients.values())[:MAX_ROWS]),
            tuple(file_row(f) for f in list(files.values())[:MAX_ROWS]),
            (
                len(down) - len(down_rows) + len(children) - len(shown),
                max(0, len(clients) - MAX_ROWS),
                max(0, len(files) - MAX_ROWS),
            ),
            tuple(reversed(self.metrics.recent))[:MAX_EVENTS],
            *find_build(),
            max(0.0, time.time() - self.metrics.started_s),
            tuple(reached[:MAX_ROWS]),
            tuple(refused[:MAX_ROWS]),
            (max(0, len(reached) - MAX_ROWS), max(0, len(refused) - MAX_ROWS)),
        )

    def _names(
        self, children: Iterable[Child]
    ) -> tuple[list[Mapping[str, object]], list[Mapping[str, object]]]:
        """Return the newest rows of names that were reached, and were refused."""
        names = self.metrics.host.services.network
        reached: list[Mapping[str, object]] = []
        refused: list[Mapping[str, object]] = []
        for child in children if names is not None else ():
            figures = names.network_figures(child.id, MAX_NAMES) if names else None
            if figures is not None:
                of = {"child": figures["name"] or child.id}
                reached += ({**row, **of} for row in _rows(figures["names"]))
                refused += ({**row, **of} for row in _rows(figures["refused"]))
        return reached, refused

    def _totals(self, now_s: float) -> tuple[tuple[str, str], ...]:
        host = self.metrics.host
        requests = sum(host.pump.counts.requests.values())
        before, then_s = self._total_before
        self._total_before = (requests, now_s)
        rate = (requests - before) / (now_s - then_s) if then_s else None
        errors = sum(host.pump.counts.errors.values())
        denials = self.metrics.counts["sandhost_security_denials"].total()
        return (
            ("children", f"{len(host.children):,}"),
            ("down", f"{len(host.absent_rows()):,}"),
            ("clients", f"{len(host.fs.tables.clients):,}"),
            ("open files", f"{len(host.fs.tables.files):,}"),
            ("requests", f"{requests:,}"),
            ("requests/s", "\N{EN DASH}" if rate is None else f"{rate:,.0f}"),
            ("loop lag", _late(self.metrics.lag_last_s)),
            ("worst lag", _late(self.metrics.lag_worst_s)),
            ("errors", f"{errors:,}"),
            ("denials", f"{denials:,}"),
        )

    def _bars(self) -> list[Bar]:
        host = self.metrics.host
        settings = host.settings
        bars = [
            Bar("Children", len(host.children), settings.max_children),
            Bar(
                "Payload memory",
                host.budget.payload_memory.used,
                settings.payload_budget_bytes,
                is_bytes=True,
            ),
        ]
        for service in host.services:
            if isinstance(service, Accounting):
                bars += [
                    Bar(a.name, a.spent, a.limit, reserved=a.reserved, unit="tokens")
                    for a in service.accounts()
                ]
        return bars

    def _child(self, child: Child, sample: Sample | None, now_s: float) -> ChildFacts:
        traffic = child.traffic()
        row = child.row()
        name = str(row.get("name") or child.id)
        before = self._before.get(name)
        rate = None
        if before is not None and now_s > before[1]:
            rate = (traffic.requests - before[0]) / (now_s - before[1])
        tokens = self.metrics.tokens.get(child.id)
        files, growth = _bars(child)
        return ChildFacts(
            name,
            _program(child.spec.command[0]),
            child.state.value,
            child.process.pid if child.process else None,
            sample.cpu_percent if sample else None,
            sample.rss_bytes if sample else None,
            sample.descriptors if sample else None,
            traffic.requests,
            rate,
            traffic.bytes_in,
            traffic.bytes_out,
            tokens.tokens if tokens else 0,
            _label(row["isolation"]),
            traffic.last_error,
            files,
            growth,
            *_workspaces(row["workspaces"]),
            network_word(self._network_row(child)),
        )

    def _network_row(self, child: Child) -> Mapping[str, object]:
        names = self.metrics.host.services.network
        row = None if names is None else names.network_row(child.id)
        return row or {"mode": child.spec.network}


_GRAVITY = {phase.value: place for place, phase in enumerate(DOWN)}


def _gravity(row: Mapping[str, object]) -> int:
    """Return the place of a child that is down among its like."""
    return _GRAVITY.get(str(row["state"]), len(_GRAVITY))


def _down_row(row: Mapping[str, object]) -> ChildFacts:
    """Return the row of a child without a process, from its row in ``ps``."""
    command, reason = row["command"], row["reason"]
    program = str(command[0]) if isinstance(command, list) and command else ""
    return ChildFacts(
        name=str(row["name"]),
        program=_program(program),
        state=str(row["state"]),
        last_error=None if reason is None else str(reason),
    )


def _late(lag_s: float | None) -> str:
    return "\N{EN DASH}" if lag_s is None else f"{1000 * lag_s:,.0f} ms"


def _program(command: str) -> str:
    path = os.fsencode(command)
    return os.path.basename(path).decode(errors="replace")  # noqa: PTH119 - or no path


def _requests(child: Child) -> int:
    """Return the number of requests on a child's own connection: cheap for 1,000."""
    return 0 if child.session is None else child.session.requests


def _workspaces(rows: object) -> tuple[str | None, int | None, int | None]:
    """Return the names of a child's workspaces, and the sums of their changes."""
    if not isinstance(rows, list) or not rows:
        return None, None, None
    names = ", ".join(str(row["name"]) for row in rows)
    changed = sum(row["changed"] or 0 for row in rows)
    return names, changed, sum(row["bytes"] or 0 for row in rows)


def _rows(rows: object) -> list[dict[str, object]]:
    return list(rows) if isinstance(rows, (list, tuple)) else []


def _label(isolation: object) -> str:
    return str(isolation.get("label")) if isinstance(isolation, dict) else "-"


def _bars(child: Child) -> tuple[Bar, Bar]:
    """Return the use of a child's limits of open files and of growth."""
    session = child.session
    ledger = Ledger() if session is None else session.client.ledger
    files, growth = ledger.open_files, ledger.size_bytes
    return (
        Bar("Files", files.used, files.limit, is_bytes=False),
        # Below 0 if a child has removed more than it has made.
        Bar("Growth", max(0, growth.used), growth.limit, is_bytes=True),
    )
