"""Every figure of a host in one list: name, meaning, present values.

Takes a snapshot of a host as plain values, in the loop.

Names follow the usage of Prometheus: ``_total`` only rises, ``_seconds`` and ``_bytes``
are in those units.  ``docs/reference/observability.md`` lists them, and a test
compares.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from supervisor.children.lifecycle import State
from supervisor.fsproxy.counts import NAMES, Histogram
from supervisor.fsproxy.ports import Accounting
from supervisor.observe.registry import COUNTED, descriptors_open, find_build
from supervisor.sandbox.plan import LAYERS
from supervisor.spawn.restarts import DOWN
from supervisor.usage.workspace_sizes import STATES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from protocol.messages import Request
    from supervisor.observe.registry import Labels, Metrics

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class MetricFamily(NamedTuple):
    """One metric with all its values.

    Attributes:
        name: without ``_total``.
        kind: counter, gauge or histogram.
        about: one line.
        labels: the names of its labels.
        values: (values of the labels, figure).
        histograms: (values of the labels, a copy of the histogram).
    """

    name: str
    kind: str
    about: str
    labels: Labels = ()
    values: tuple[tuple[Labels, float], ...] = ()
    histograms: tuple[tuple[Labels, Histogram], ...] = ()


def families(metrics: Metrics) -> list[MetricFamily]:
    """Return every figure of a host as it is now."""
    return [
        *_children(metrics),
        *_requests(metrics),
        *_memory(metrics),
        *_counted(metrics),
        *_quotas(metrics),
        *_workspaces(metrics),
        *_networks(metrics),
        *_process(metrics),
    ]


def _children(metrics: Metrics) -> Iterator[MetricFamily]:
    host, roster = metrics.host, metrics.host.roster
    states = Counter(child.state.value for child in host.children.values())
    down = {phase.value for phase in DOWN}
    for row in host.absent_rows():
        # Beside those that are down: one whose turn to be started comes at once.
        state = str(row["state"])
        states[state if state in down else State.STARTING.value] += 1
    known = (*State, *DOWN)
    yield MetricFamily(
        "sandhost_children",
        GAUGE,
        "Children by the state of their life, those without a process too",
        ("state",),
        tuple(
            ((state.value.replace(" ", "_"),), states[state.value]) for state in known
        ),
    )
    yield _gauge(
        "sandhost_children_configured",
        "Children that the configuration of a daemon names",
        0 if roster is None else roster.configured,
    )
    yield _gauge(
        "sandhost_children_limit",
        "Children that there may be at once",
        host.settings.max_children,
    )
    missing = Counter(
        layer for child in host.children.values() for layer in child.walls.lost
    )
    yield _labelled(
        GAUGE,
        "sandhost_children_missing_layer",
        "Children that run without a sandbox layer of their profile, by layer",
        "layer",
        {layer: missing[layer] for layer in LAYERS if layer != "uid"},
    )
    yield _gauge(
        "sandhost_clients",
        "Connections, nested ones included",
        len(host.fs.tables.clients),
    )
    yield _gauge(
        "sandhost_open_files", "Files that clients have open", len(host.fs.tables.files)
    )


def _requests(metrics: Metrics) -> Iterator[MetricFamily]:
    host = metrics.host
    counts = host.pump.counts
    yield _labelled(
        COUNTER,
        "sandhost_requests",
        "Requests by command",
        "command",
        {name: counts.requests[kind] for kind, name in NAMES.items()},
    )
    yield _labelled(
        COUNTER,
        "sandhost_request_errors",
        "Replies that were errors, by command",
        "command",
        {name: counts.errors[kind] for kind, name in NAMES.items()},
    )
    yield _times(
        "sandhost_request_duration_seconds",
        "Requests answered at once: receiving to sending, one turn in 64",
        counts.inline,
    )
    yield _times(
        "sandhost_job_duration_seconds",
        "Requests that waited for a disk, a model or their client: each of them",
        counts.jobs,
    )
    sessions = [s for child in host.children.values() for s in child.sessions()]
    live = [s for s in sessions if not s.is_over]
    yield _counter(
        "sandhost_received_bytes",
        "Bytes that came from clients",
        counts.gone_in + sum(session.bytes_in for session in live),
    )
    yield _counter(
        "sandhost_sent_bytes",
        "Bytes that went to clients",
        counts.gone_out + sum(session.bytes_out for session in live),
    )


def _memory(metrics: Metrics) -> Iterator[MetricFamily]:
    host = metrics.host
    yield _gauge(
        "sandhost_payload_bytes",
        "Memory that payloads may fill now",
        host.budget.payload_memory.used,
    )
    yield _gauge(
        "sandhost_payload_limit_bytes",
        "Most memory for payloads",
        host.settings.payload_budget_bytes,
    )
    yield _counter(
        "sandhost_payloads_spooled",
        "Payloads that went to a file because memory was short",
        host.budget.spooled,
    )
    yield _counter(
        "sandhost_journal_lost_events",
        "Events that could not be written to the journal",
        host.journal.lost,
    )
    yield _counter(
        "sandhost_log_dropped_bytes",
        "Bytes of children's output that no log could keep",
        0 if host.roster is None else host.roster.log_dropped_bytes,
    )
    yield _labelled(
        COUNTER,
        "sandhost_limit_refusals",
        "Requests that limits of children refused, by limit",
        "limit",
        host.refusals(),
    )


def _counted(metrics: Metrics) -> Iterator[MetricFamily]:
    for one in COUNTED:
        values = tuple(metrics.counts[one.name].items())
        yield MetricFamily(one.name, COUNTER, one.about, one.labels, values)


def _quotas(metrics: Metrics) -> Iterator[MetricFamily]:
    accounts = [
        account
        for service in metrics.host.services
        if isinstance(service, Accounting)
        for account in service.accounts()
    ]
    yield MetricFamily(
        "sandhost_quota",
        GAUGE,
        "Tokens of the host's accounts, weighted as the quota is",
        ("account", "of"),
        tuple(
            ((account.name, word), value)
            for account in accounts
            for word in ("spent", "reserved", "limit")
            if (value := getattr(account, word)) is not None
        ),
    )


def _workspaces(metrics: Metrics) -> Iterator[MetricFamily]:
    sizes = metrics.host.sizes
    total = sizes.total()
    yield _labelled(
        GAUGE,
        "sandhost_workspaces",
        "Workspaces by state, where children that run have theirs",
        "state",
        {state: sizes.states[state] for state in STATES},
    )
    yield _gauge(
        "sandhost_workspace_changed_files",
        "Files that are changed in the workspaces of children that run",
        total.changed,
    )
    yield _gauge(
        "sandhost_workspace_bytes", "Bytes that their layers hold", total.size_bytes
    )


def _networks(metrics: Metrics) -> Iterator[MetricFamily]:
    names = metrics.host.services.network
    if names is None:
        return
    found = tuple(names.granted_figures())
    yield MetricFamily(
        "sandhost_network_connections",
        COUNTER,
        "Connections of children that are there, by granted name",
        ("child", "name"),
        tuple(((one.child, one.name), one.connections) for one in found),
    )
    pairs = [
        ((one.child, one.name, direction), count)
        for one in found
        for direction, count in (("in", one.bytes_in), ("out", one.bytes_out))
    ]
    yield MetricFamily(
        "sandhost_network_bytes",
        COUNTER,
        "Bytes of these connections; in is what the child got",
        ("child", "name", "direction"),
        tuple(pairs),
    )


def _process(metrics: Metrics) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "sandhost_loop_lag_seconds",
        HISTOGRAM,
        "How late the event loop was, looked at twice a second",
        (),
        (),
        (((), _copy(metrics.lag)),),
    )
    yield MetricFamily(
        "sandhost_build_info",
        GAUGE,
        "The versions of this program and of Python; always 1",
        ("version", "python"),
        ((find_build(), 1),),
    )
    yield _gauge(
        "process_start_time_seconds",
        "When the host's process was started, seconds since the epoch",
        metrics.started_s,
    )
    yield _counter(
        "process_cpu_seconds", "User and kernel time of the host", time.process_time()
    )
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    yield _gauge(
        "process_resident_memory_bytes",
        "Resident memory of the host",
        pages * resource.getpagesize(),
    )
    descriptors = descriptors_open()
    if descriptors is not None:
        yield _gauge("process_open_fds", "Descriptors of the host", descriptors)
    yield _gauge(
        "process_max_fds",
        "Descriptors that the host may have",
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _gauge(name: str, about: str, value: float) -> MetricFamily:
    return MetricFamily(name, GAUGE, about, (), (((), value),))


def _counter(name: str, about: str, value: float) -> MetricFamily:
    return MetricFamily(name, COUNTER, about, (), (((), value),))


def _labelled(
    kind: str, name: str, about: str, label: str, values: Mapping[str, float]
) -> MetricFamily:
    pairs = tuple(((key,), value) for key, value in values.items())
    return MetricFamily(name, kind, about, (label,), pairs)


def _times(
    name: str, about: str, among: Mapping[type[Request], Histogram]
) -> MetricFamily:
    copies: Iterable[tuple[Labels, Histogram]] = (
        ((NAMES[kind],), _copy(histogram)) for kind, histogram in among.items()
    )
    return MetricFamily(name, HISTOGRAM, about, ("command",), (), tuple(copies))


def _copy(histogram: Histogram) -> Histogram:
    copy = Histogram()
    copy.counts = histogram.counts.copy()
    copy.sum_s = histogram.sum_s
    return copy
