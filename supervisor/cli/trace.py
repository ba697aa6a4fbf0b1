"""One client's life in order: files, model calls, executions, signals.

Takes events of a journal and returns those of one client (or one child), each with a
sentence.

Rules of this file.

1. A client's timeline has its own events, those of clients nested in it, and, for a
   child's own connection, those of its process and its executions.
2. Ids begin again with each host: the timeline is of the last host with the name.
3. Texts of children are shown without control characters.
"""

from __future__ import annotations

import signal
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from hostlib.messages import printable
from supervisor.network.reasons import describe_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Event = dict[str, Any]

HOST_STARTED = "host.started"


class Entry(NamedTuple):
    """One line of a timeline.

    Attributes:
        at: the time in the journal (RFC 3339).
        since_s: seconds since the first line.
        client: its client; empty for a process.
        depth: nesting depth of that client.
        event: as in the journal.
    """

    at: str
    since_s: float
    client: str
    depth: int
    event: Event


class Timeline:
    """Picks one subject's events out of a journal.

    Args:
        subject: a client's id, a child's id, or a child's name.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._forget()

    def _forget(self) -> None:
        self._depths: dict[str, int] = {}
        self._children: set[str] = set()
        self._is_child = False
        self._began: datetime | None = None

    def take(self, event: Event) -> Entry | None:
        """Return the line of an event; None if it is about another subject."""
        if event.get("event") == HOST_STARTED:
            self._forget()
            return None
        self._learn(event)
        client = str(event.get("client_id") or "")
        child = str(event.get("child_id") or "")
        is_named = _child_name(event) == self._subject
        by_child = child in self._children and (self._is_child or not client)
        if client not in self._depths and not by_child and not is_named:
            return None
        at = str(event.get("time"))
        return Entry(
            at, self._seconds_since(at), client, self._depths.get(client, 0), event
        )

    def _learn(self, event: Event) -> None:
        """Record the clients and children that belong to the subject."""
        client = str(event.get("client_id") or "")
        child = str(event.get("child_id") or "")
        parent = event.get("parent_id")
        if self._subject in {child, _child_name(event)} and child:
            self._children.add(child)
            self._is_child = True
        if event.get("event") != "client.connected":
            return
        if client == self._subject:
            self._depths[client] = 0
            if parent is None:
                self._children.add(child)
        elif parent in self._depths:
            self._depths[client] = self._depths[str(parent)] + 1
        elif self._is_child and child in self._children:
            self._depths[client] = 0

    def _seconds_since(self, at: str) -> float:
        try:
            moment = datetime.fromisoformat(at)
        except ValueError:
            return 0.0
        if self._began is None:
            self._began = moment
        return (moment - self._began).total_seconds()


def _child_name(event: Event) -> object:
    """Return the name of an event's child; that of a network's event is a host's."""
    is_host = str(event.get("event")).startswith("network.")
    return None if is_host else event.get("name")


def last_timeline(subject: str, events: Iterable[Event]) -> list[Entry]:
    """Return the timeline of the last host with the subject (rule 2)."""
    timeline = Timeline(subject)
    entries: list[Entry] = []
    before: list[Entry] = []
    for event in events:
        if event.get("event") == HOST_STARTED:
            before, entries = entries or before, []
        entry = timeline.take(event)
        if entry is not None:
            entries.append(entry)
    return entries or before


def line(entry: Entry) -> str:
    """Return an entry as a line for people, without its LF."""
    clock = entry.at.partition("T")[2].rstrip("Z")[:12]
    who = "  " * entry.depth + (entry.client or "-")
    name = str(entry.event.get("event"))
    text = printable(sentence(entry.event))
    return f"{clock} +{entry.since_s:9.3f} {who:6} {name:17} {text}".rstrip()


# Sentences


def sentence(event: Event) -> str:
    """Return an event as a sentence."""
    say = _SENTENCES.get(str(event.get("event")))
    if say is not None:
        return say(event)
    pairs = ((k, v) for k, v in event.items() if k not in _USUAL and v is not None)
    return " ".join(f"{key}={value}" for key, value in pairs)


_USUAL = frozenset({"time", "event", "child_id", "client_id"})


def signal_text(number: object) -> str:
    """Return a signal's name, or its number."""
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:
        return f"signal {number}"


def _connection_text(event: Event) -> str:
    parent = event.get("parent_id")
    return f"attached by {parent}" if parent else f"pid {event.get('pid')}"


def _client_gone(event: Event) -> str:
    closed = event.get("closed_files") or []
    files = f"; closed {', '.join(map(str, closed))}" if closed else ""
    return f"{event.get('reason')}{files}"


def _start_text(event: Event) -> str:
    command = " ".join(map(str, event.get("command") or []))
    return f"pid {event.get('pid')}: {command}"


def _exited(event: Event) -> str:
    number = event.get("signal")
    end = f"status {event.get('code')}" if number is None else signal_text(number)
    late = ", its time was up" if event.get("timed_out") else ""
    cpu_s = float(event.get("utime_s") or 0) + float(event.get("stime_s") or 0)
    memory = float(event.get("maxrss_kib") or 0) / 1024
    return f"{end}{late}; {cpu_s:.2f} s of processor, {memory:.0f} MiB"


def _child_gone(event: Event) -> str:
    failure = event.get("failure")
    return str(failure) if failure else f"status {event.get('status')}; nothing is left"


def _file(event: Event) -> str:
    mode = f" {event['mode']}" if "mode" in event else ""
    reason = f" ({event['reason']})" if "reason" in event else ""
    return f"{event.get('fileno')}{mode} {event.get('filename')}{reason}"


def _call_text(event: Event) -> str:
    tokens = f"{event.get('prompt_tokens')} + {event.get('completion_tokens')} tokens"
    took = f"{float(event.get('latency_ms') or 0):.0f} ms"
    return f"{event.get('model')} {event.get('outcome')}: {tokens}, {took}"


def _exec_started(event: Event) -> str:
    where = f" in {event['sidecar']}" if event.get("sidecar") else ""
    return f"{event.get('exec_id')}: {event.get('tool')}{where}, pid {event.get('pid')}"


def _exec_ended(event: Event) -> str:
    late = ", its time was up" if event.get("timed_out") else ""
    output = f"{event.get('output_bytes')} bytes of output"
    return f"{event.get('exec_id')}: status {event.get('code')}{late}, {output}"


def _exec_failed(event: Event) -> str:
    where = f" in {event['sidecar']}" if event.get("sidecar") else ""
    why = f"status {event.get('code')}; {event.get('reason')}"
    return f"{event.get('exec_id')}: {event.get('tool')}{where}, {why}"


def _network_changed(event: Event) -> str:
    words = [f"--allow {rule}" for rule in event.get("allow") or ()]
    words += [f"--deny {rule}" for rule in event.get("deny") or ()]
    return " ".join([*words, *(["--cut"] if event.get("cut") else [])])


_SENTENCES: Mapping[str, Callable[[Event], str]] = {
    "client.connected": _connection_text,
    "client.gone": _client_gone,
    "child.spawned": _start_text,
    "child.signalled": lambda e: (
        f"{signal_text(e.get('signal'))} to pid {e.get('pid')}"
    ),
    "child.exited": _exited,
    "child.gone": _child_gone,
    "file.opened": _file,
    "file.closed": _file,
    "file.auto_closed": _file,
    "security.denied": lambda e: f"{e.get('command')} {e.get('filename')}",
    "network.refused": describe_refusal,
    "network.failed": describe_refusal,
    "network.reset": lambda e: f"{e.get('connections')}: the host was replaced",
    "network.changed": _network_changed,
    "network.narrowed": lambda e: " ".join(e.get("rules") or ("no rules",)),
    "security.left_out": lambda e: f"{e.get('denials')} more denials",
    "llm.called": _call_text,
    "quota.denied": lambda e: f"a call of {e.get('model')}",
    "exec.started": _exec_started,
    "exec.ended": _exec_ended,
    "exec.failed": _exec_failed,
}
