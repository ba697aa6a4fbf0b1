"""Figures of a host: counted events, tables, sums.

Counts the events of the journal; ``families`` takes snapshots of every figure.

1. Each writer to the journal is counted by its events, whether a journal is kept or
   not.
2. A label has few values: a state, a command, a reason from a list, one of
   ``MAX_NAMES`` models; for the network a child that is there, and a name that its rules
   grant. No label holds a file's name or a command line: children cannot make the host
   grow.
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
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from supervisor.host import Host

Labels = tuple[str, ...]

MAX_NAMES = 64
"""Models with figures of their own; further ones are ``other``."""

RECENT_EVENTS = 50
"""Events that the status page shows."""

LAG_INTERVAL_S = 0.5
"""Time between two looks at the lag; wakes an idle host twice a second."""

LAG_WARNING_S = 0.25
"""Lag from which clients notice."""


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
        counts: of each family of ``COUNTED``, by the values of its labels.
        lag: how late the loop was, looked at every ``LAG_INTERVAL_S``.
        lag_last_s: the lag at the last look; None before the first.
        lag_worst_s: the worst lag.
        lag_warnings: how often it was over ``LAG_WARNING_S``.
        started_s: when this process was started, seconds since the epoch.
        tokens: by child that is there.
        recent: the newest events.
        changed: set with every event.
        address: where they are served, if they are.
    """

    host: Host
    counts: dict[str, Counter[Labels]] = field(
        # One without labels is 0 from the start.
        default_factory=lambda: {
            one.name: Counter() if one.labels else Counter({(): 0}) for one in COUNTED
        }
    )
    lag: Histogram = field(default_factory=Histogram)
    lag_last_s: float | None = None
    lag_worst_s: float = 0.0
    lag_warnings: int = 0
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
        for counted in _BY_EVENT.get(event, ()):
            counts = self.counts[counted.name]
            for values, number in counted.values_of(fields):
                counts[self._bounded(counted.labels, values)] += number
        self._take_tokens(event, fields)

    def _bounded(self, labels: Labels, values: Labels) -> Labels:
        """Return values of labels, the model's as it is in figures (rule 2)."""
        if labels[:1] != ("model",):
            return values
        model, *rest = values
        if model not in self._models:
            if len(self._models) >= MAX_NAMES:
                return ("other", *rest)
            self._models.add(model)
        return values

    def _take_tokens(self, event: str, fields: dict[str, Any]) -> None:
        """Add an event to the sums of its child."""
        child_id = str(fields.get("child_id"))
        if event == "child.gone":
            self.tokens.pop(child_id, None)
        elif event in {"llm.called", "quota.denied"} and child_id in self.host.children:
            own = self.tokens.setdefault(child_id, ChildTokens())
            if event == "quota.denied":
                own.denials += 1
            else:
                own.calls += 1
                for kind in ("prompt", "completion"):  # the other kinds are parts
                    own.tokens += int(fields.get(f"{kind}_tokens") or 0)

    async def watch_lag(self) -> None:
        """Measure how late the loop is until cancelled; tell what clients notice."""
        while True:
            # The monotonic clock: a jump of the wall clock is no lag.
            due_s = time.monotonic() + LAG_INTERVAL_S
            await trio.sleep(LAG_INTERVAL_S)
            late_s = max(0.0, time.monotonic() - due_s)
            self.note_lag(late_s)
            if late_s > LAG_WARNING_S:
                self.lag_warnings += 1
                lag_s = round(late_s, 3)
                self.host.journal.write("host.lagged", lag_s=lag_s)
                text = f"The loop was {lag_s} s late"
                self.host.log.write("WARNING", text, lag_s=lag_s)

    def note_lag(self, late_s: float) -> None:
        """Record how late the loop was, seconds."""
        self.lag.add(late_s)
        self.lag_last_s = late_s
        self.lag_worst_s = max(self.lag_worst_s, late_s)

    def lag_row(self) -> dict[str, object]:
        """Return the lag as part of ``stats``."""
        return {
            "loop_lag_s": round(self.lag_last_s or 0.0, 6),
            "loop_lag_worst_s": round(self.lag_worst_s, 6),
            "loop_lag_warnings": self.lag_warnings,
        }


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


# Counted events


class EventCounter(NamedTuple):
    """A counter of events of the journal.

    Attributes:
        name: of its family, without ``_total``.
        about: one line.
        labels: their names; those of the fields that hold them, unless ``more`` says.
        events: the counted ones.
        more: yields (values of the labels, number) of an event; None for 1 of each.
    """

    name: str
    about: str
    labels: Labels
    events: tuple[str, ...]
    more: Callable[[dict[str, Any]], Iterator[tuple[Labels, int]]] | None = None

    def values_of(self, fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
        """Yield (values of the labels, number) of an event."""
        if self.more is not None:
            yield from self.more(fields)
        else:
            yield tuple(str(fields.get(label)) for label in self.labels), 1


def _exits(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    if "failure" not in fields:  # the end of a process, and not of a child
        yield (exit_reason(fields),), 1
    elif fields.get("failure") is not None:
        yield ("not started",), 1


def _auto_closed(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    if closed := fields.get("closed_files"):
        yield (str(fields.get("reason")),), len(closed)


def _llm_tokens(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    for kind in ("prompt", "cached", "cache_write", "completion", "reasoning"):
        number = int(fields.get(f"{kind}_tokens") or 0)
        yield (str(fields.get("model")), kind), number


def _llm_dropped(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    for name in fields.get("fields") or ():
        yield (str(fields.get("api")), str(name)), 1


def _exec_ended(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    outcome = "timeout" if fields.get("timed_out") else "failed"
    yield ("ok" if fields.get("code") == 0 else outcome,), 1


def _conflicts(fields: dict[str, Any]) -> Iterator[tuple[Labels, int]]:
    yield (), fields["conflicts"]


COUNTED: tuple[EventCounter, ...] = (
    EventCounter(
        "sandhost_children_spawned",
        "Children that were started",
        (),
        ("child.spawned",),
    ),
    EventCounter(
        "sandhost_child_exits",
        "Children that ended, by reason",
        ("reason",),
        ("child.exited", "child.gone"),
        _exits,
    ),
    EventCounter(
        "sandhost_auto_closed_files",
        "Files closed for clients that were gone",
        ("reason",),
        ("client.gone",),
        _auto_closed,
    ),
    EventCounter(
        "sandhost_security_denials",
        "Requests for what a client may not reach",
        ("command",),
        ("security.denied",),
    ),
    EventCounter(
        "sandhost_child_limits",
        "Limits that children came near to or reached",
        ("limit", "level"),
        ("child.limit",),
    ),
    EventCounter(
        "sandhost_llm_calls", "Calls of models", ("model", "outcome"), ("llm.called",)
    ),
    EventCounter(
        "sandhost_llm_tokens",
        "Tokens that providers charged; those of caches are part of the prompt, those of"
        " reasoning of the completion",
        ("model", "kind"),
        ("llm.called",),
        _llm_tokens,
    ),
    EventCounter(
        "sandhost_llm_dropped",
        "Members left out of requests that were translated: they change nothing",
        ("api", "field"),
        ("llm.dropped",),
        _llm_dropped,
    ),
    EventCounter(
        "sandhost_quota_denials",
        "Calls that a quota did not allow",
        ("model",),
        ("quota.denied",),
    ),
    EventCounter(
        "sandhost_executions_started",
        "Tool executions that began",
        (),
        ("exec.started",),
    ),
    EventCounter(
        "sandhost_executions_ended",
        "Tool executions that ended",
        ("outcome",),
        ("exec.ended",),
        _exec_ended,
    ),
    EventCounter(
        "sandhost_sidecar_restarts",
        "Starts of sidecars after an end or a failure",
        ("sidecar",),
        ("sidecar.restarting",),
    ),
    EventCounter(
        "sandhost_workspace_commits",
        "Commits that were ordered and applied",
        (),
        ("workspace.committed",),
    ),
    EventCounter(
        "sandhost_workspace_conflicts",
        "Paths that such commits could not take, for the base had changed",
        (),
        ("workspace.committed", "workspace.conflict"),
        _conflicts,
    ),
)
"""The families that are counted from the journal."""

_BY_EVENT: dict[str, list[EventCounter]] = {}
for _one in COUNTED:
    for _event in _one.events:
        _BY_EVENT.setdefault(_event, []).append(_one)
