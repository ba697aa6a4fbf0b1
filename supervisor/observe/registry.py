"""Figures of a host: counted events, tables, sums.

Counts the events of the journal; ``families`` takes snapshots of every figure.

1. Each writer to the journal is counted by its events, whether a journal is kept or
   not.
2. A label has few values: a state, a command, a reason from a list, one of
   ``MAX_NAMES`` models. No label holds a file's name, a command line or an id: children
   cannot make the host grow.
3. A snapshot of 1,000 children takes the loop half a millisecond; its text is made
   elsewhere.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from supervisor.fsproxy.counts import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from supervisor.host import Host

MAX_NAMES = 64
"""Models with figures of their own; further ones are ``other``."""

RECENT_EVENTS = 50
"""Events that the status page shows."""

LAG_INTERVAL_S = 1.0
"""Time between two looks at the loop; only a scraped host wakes up for it."""


class RecentEvent(NamedTuple):
    """An event for people.

    Attributes:
        at: seconds since the epoch.
        event: its name.
        fields: as in the journal.
    """

    at: float
    event: str
    fields: Mapping[str, object]


@dataclass(slots=True)
class ChildTokens:
    """The use of models by one child.

    Attributes:
        calls: calls that were made for it.
        tokens: prompt and completion together.
        denials: calls that its quota refused.
    """

    calls: int = 0
    tokens: int = 0
    denials: int = 0

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {"calls": self.calls, "tokens": self.tokens, "denials": self.denials}


class Build(NamedTuple):
    """This program and what runs it.

    Attributes:
        version: of this program; ``unknown`` where it was not installed.
        python: the interpreter's version.
    """

    version: str
    python: str


@cache
def find_build() -> Build:
    """Return this program and interpreter; the first call reads a file or two."""
    from importlib.metadata import (  # noqa: PLC0415 - 8 ms, for those who ask
        PackageNotFoundError,
        version,
    )

    try:
        own = version("sandhost")
    except PackageNotFoundError:
        own = "unknown"
    return Build(own, platform.python_version())


def process_start_s() -> float:
    """Return when this process was started, in seconds since the epoch.

    Source: proc(5), ``starttime`` of ``/proc/PID/stat`` and ``btime`` of
        ``/proc/stat``.
    """
    since_boot = int(
        Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]
    )
    for line in Path("/proc/stat").read_bytes().splitlines():
        if line.startswith(b"btime "):
            return int(line.split()[1]) + since_boot / os.sysconf("SC_CLK_TCK")
    return time.time()


@dataclass(slots=True)
class Metrics:
    """The figures of one host that its parts do not count themselves.

    Attributes:
        host: has the figures.
        spawned: children that were started.
        exits: children that ended, by reason.
        auto_closed: files closed for clients that were gone, by what ended them.
        denied: requests for what a client may not reach, by command.
        llm_calls: by (model, outcome).
        llm_tokens: by (model, kind).
        llm_dropped: members left out of requests, by (API, name).
        quota_denied: by model.
        limits: that children came near to or reached, by (limit, level).
        executions: tool executions that began.
        executions_ended: those that ended, by outcome.
        sidecar_restarts: starts after an end or a failure, by sidecar.
        commits: of workspaces that were applied.
        conflicts: paths that commits could not take.
        lag: how late the loop was, looked at every ``LAG_INTERVAL_S``.
        lag_last_s: the lag at the last look; None before the first.
        lag_worst_s: the worst lag.
        started_s: when this process was started, seconds since the epoch.
        tokens: by child that is there.
        recent: the newest events.
        changed: set with every event.
        address: where they are served, if they are.
    """

    host: Host
    spawned: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    auto_closed: Counter[str] = field(default_factory=Counter)
    denied: Counter[str] = field(default_factory=Counter)
    llm_calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    llm_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    llm_dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    quota_denied: Counter[str] = field(default_factory=Counter)
    limits: Counter[tuple[str, str]] = field(default_factory=Counter)
    executions: int = 0
    executions_ended: Counter[str] = field(default_factory=Counter)
    sidecar_restarts: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    conflicts: int = 0
    lag: Histogram = field(default_factory=Histogram)
    lag_last_s: float | None = None
    lag_worst_s: float = 0.0
    started_s: float = field(default_factory=process_start_s)
    tokens: dict[str, ChildTokens] = field(default_factory=dict)
    recent: deque[RecentEvent] = field(
        default_factory=lambda: deque(maxlen=RECENT_EVENTS)
    )
    changed: int = 0
    address: tuple[str, int] | None = None
    _models: set[str] = field(default_factory=set)

    def take(self, event: str, fields: dict[str, Any]) -> None:
        """Count an event of the journal."""
        self.changed += 1
        self.recent.append(RecentEvent(time.time(), event, fields))
        count = _EVENTS.get(event)
        if count is not None:
            count(self, fields)

    def model(self, name: object) -> str:
        """Return a model's name in figures (rule 2)."""
        text = str(name)
        if text not in self._models:
            if len(self._models) >= MAX_NAMES:
                return "other"
            self._models.add(text)
        return text

    def tokens_of(self, fields: dict[str, Any]) -> ChildTokens:
        """Return the sums of the child of an event."""
        child_id = str(fields.get("child_id"))
        if child_id not in self.host.children:
            return ChildTokens()  # an answer after its end
        return self.tokens.setdefault(child_id, ChildTokens())

    async def watch_lag(self) -> None:
        """Measure how late the loop is until cancelled."""
        while True:
            due_s = time.monotonic() + LAG_INTERVAL_S
            await trio.sleep(LAG_INTERVAL_S)
            self.note_lag(max(0.0, time.monotonic() - due_s))

    def note_lag(self, late_s: float) -> None:
        """Record how late the loop was, seconds."""
        self.lag.add(late_s)
        self.lag_last_s = late_s
        self.lag_worst_s = max(self.lag_worst_s, late_s)


def attach_metrics(host: Host) -> Metrics:
    """Begin to count a host's events; earlier ones are not known."""
    found = host.metrics
    if not isinstance(found, Metrics):
        found = host.metrics = Metrics(host)
        host.journal.taps.append(found.take)
    return found


def exit_reason(fields: Mapping[str, Any]) -> str:
    """Return why a child ended: ``timeout``, ``SIGKILL``, ``status 0``, ``failed``."""
    if fields.get("timed_out"):
        return "timeout"
    number = fields.get("signal")
    if number is not None:
        return signal_name(number)
    return "status 0" if fields.get("code") == 0 else "failed"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def descriptors_open() -> int | None:
    """Return the number of open descriptors; None on an old kernel."""
    # Since Linux 6.2 the directory's size is their number.
    return Path("/proc/self/fd").stat().st_size or None


# Events


def _spawned(metrics: Metrics, _fields: dict[str, Any]) -> None:
    metrics.spawned += 1


def _exited(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.exits[exit_reason(fields)] += 1


def _child_gone(metrics: Metrics, fields: dict[str, Any]) -> None:
    if fields.get("failure") is not None:
        metrics.exits["not started"] += 1
    metrics.tokens.pop(str(fields.get("child_id")), None)


def _client_gone(metrics: Metrics, fields: dict[str, Any]) -> None:
    closed = len(fields.get("closed_files") or ())
    if closed:
        metrics.auto_closed[str(fields.get("reason"))] += closed


def _denied(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.denied[str(fields.get("command"))] += 1


def _llm_called(metrics: Metrics, fields: dict[str, Any]) -> None:
    model = metrics.model(fields.get("model"))
    metrics.llm_calls[model, str(fields.get("outcome"))] += 1
    own = metrics.tokens_of(fields)
    own.calls += 1
    for kind in ("prompt", "cached", "cache_write", "completion", "reasoning"):
        tokens = int(fields.get(f"{kind}_tokens") or 0)
        metrics.llm_tokens[model, kind] += tokens
        if kind in ("prompt", "completion"):  # the other kinds are parts of these
            own.tokens += tokens


def _llm_dropped(metrics: Metrics, fields: dict[str, Any]) -> None:
    for name in fields.get("fields") or ():
        metrics.llm_dropped[str(fields.get("api")), str(name)] += 1


def _quota_denied(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.quota_denied[metrics.model(fields.get("model"))] += 1
    metrics.tokens_of(fields).denials += 1


def _exec_started(metrics: Metrics, _fields: dict[str, Any]) -> None:
    metrics.executions += 1


def _exec_ended(metrics: Metrics, fields: dict[str, Any]) -> None:
    outcome = "timeout" if fields.get("timed_out") else "failed"
    if fields.get("code") == 0:
        outcome = "ok"
    metrics.executions_ended[outcome] += 1


def _sidecar_restarting(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.sidecar_restarts[str(fields.get("sidecar"))] += 1


def _committed(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.commits += 1
    metrics.conflicts += fields["conflicts"]


def _conflict(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.conflicts += fields["conflicts"]


def _limit(metrics: Metrics, fields: dict[str, Any]) -> None:
    metrics.limits[str(fields.get("limit")), str(fields.get("level"))] += 1


_EVENTS: Mapping[str, Callable[[Metrics, dict[str, Any]], None]] = {
    "child.spawned": _spawned,
    "child.exited": _exited,
    "child.gone": _child_gone,
    "client.gone": _client_gone,
    "security.denied": _denied,
    "workspace.committed": _committed,
    "workspace.conflict": _conflict,
    "llm.called": _llm_called,
    "llm.dropped": _llm_dropped,
    "quota.denied": _quota_denied,
    "child.limit": _limit,
    "exec.started": _exec_started,
    "exec.ended": _exec_ended,
    "sidecar.restarting": _sidecar_restarting,
}
"""The counter of each counted event; others are only shown."""
