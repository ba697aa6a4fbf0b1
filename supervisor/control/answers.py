"""The answers of the control socket: rows and figures of a host, made in slices.

One method for each question; none of them changes the host.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from hostlib.clock import timestamp
from hostlib.linux.holdings import process_facts
from supervisor.doctor.leaks import check_host
from supervisor.network.statistics import NetworkRow, NetworkStatistics
from supervisor.observe.registry import attach_metrics
from supervisor.usage.samples import Watcher
from vfs.clients import file_row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from supervisor.children.child import Child
    from supervisor.host import Host
    from vfs.clients import Client

SLICE_S = 0.0005
"""Longest stretch without a checkpoint: some 100 rows."""

_ENCODER = msgspec.json.Encoder()

T = TypeVar("T")


class Answers:
    """The answers of a host to questions about itself.

    Args:
        host: answers.
        stats_of: functions whose figures are added to ``stats``.

    Attributes:
        known: the answering method of each question.
    """

    def __init__(
        self, host: Host, stats_of: Sequence[Callable[[], dict[str, object]]]
    ) -> None:
        self._host = host
        self._metrics = attach_metrics(host)
        self._stats_of = stats_of
        self.watcher = Watcher()
        self._own = Watcher()
        self._started_at = time.time()
        self.known: dict[str, Callable[[], Awaitable[object]]] = {
            "ps": self._ps,
            "clients": self._clients,
            "files": self._files,
            "stats": self._stats,
            "leaks": self._leaks,
            "quota": self._quota,
        }

    async def _ps(self) -> list[msgspec.Raw]:
        roster, tokens = self._host.roster, self._metrics.tokens
        specs = [child.spec for child in self._host.children.values()]
        await self._host.sizes.look(specs)
        children = tuple(self._host.children.values())
        # At the same moment: a child between two processes could have a new one before
        # the samples are there, and would be in neither list.
        absent = () if roster is None else tuple(roster.absent_rows())
        running = [child.process for child in children if child.process is not None]
        samples = await self.watcher.sample(
            [(process.pid, process.create_time) for process in running]
        )

        def row(child: Child) -> dict[str, object]:
            process = child.process
            name = None if process is None else (process.pid, process.create_time)
            sample = None if name is None else samples.get(name)
            more = {} if roster is None else roster.extra_fields_of(child)
            usage = None if sample is None else sample.row()
            own = tokens.get(child.id)
            llm = None if own is None else own.row()
            network = _network_row(self._host, child)
            figures = {"usage": usage, "llm": llm, "network": network}
            return {**child.row(), **more, **figures}

        shown = {child.spec.name for child in children}
        rows = await _rows(children, row)
        others = (its_row for its_row in absent if its_row["name"] not in shown)
        return rows + await _rows(others, lambda its_row: its_row)

    async def _clients(self) -> list[msgspec.Raw]:
        clients = tuple(self._host.fs.tables.clients.values())
        return await _rows(clients, lambda c: {**c.row(), "child": self._child_of(c)})

    async def _files(self) -> list[msgspec.Raw]:
        files = tuple(self._host.fs.tables.files.values())
        return await _rows(
            files, lambda f: {**file_row(f), "child": self._child_of(f.client)}
        )

    async def _stats(self) -> dict[str, object]:
        host = self._host
        own = process_facts(os.getpid())
        samples = await self._own.sample(
            [] if own is None else [(own.pid, own.create_time)]
        )
        return {
            "pid": os.getpid(),
            "control_since": timestamp(self._started_at),
            "children": len(host.children),
            "clients": len(host.fs.tables.clients),
            "files": len(host.fs.tables.files),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "payload_bytes": host.budget.payload_memory.used,
            "payloads_spooled": host.budget.spooled,
            "sampling_longest_s": round(self.watcher.longest_slice_s, 6),
            "usage": next((sample.row() for sample in samples.values()), None),
            **{key: value for more in self._stats_of for key, value in more().items()},
        }

    async def _leaks(self) -> dict[str, object]:
        return await check_host(self._host)

    async def _quota(self) -> list[msgspec.Raw]:
        llm = self._host.services.llm
        rows = [] if llm is None else llm.quota_rows()
        clients = self._host.fs.tables.clients

        def name_child(row: dict[str, object]) -> dict[str, object]:
            client = clients.get(str(row["client_id"]))
            return {**row, "child": None if client is None else self._child_of(client)}

        return await _rows(rows, name_child)

    def _child_of(self, client: Client) -> str:
        """Return the name of the child that a client belongs to; its id if it has none."""
        child_id = self._host.child_of(client)
        child = self._host.children.get(child_id)
        return (None if child is None else child.spec.name) or child_id


def network_figures(host: Host, child: Child) -> dict[str, object]:
    """Return all figures of a child's network, also of one that has no names."""
    names, spec = host.services.network, child.spec
    figures = None if names is None else names.network_figures(child.id)
    if figures is None:
        none = NetworkStatistics(child.id, spec.name, spec.network)
        figures = msgspec.to_builtins(none)
    return figures


def _network_row(host: Host, child: Child) -> dict[str, object]:
    """Return the fields of a child's network in a row of ``ps``."""
    names = host.services.network
    row = None if names is None else names.network_row(child.id)
    if row is None:
        row = msgspec.to_builtins(NetworkRow(child.spec.network))
    return row


async def _rows(
    items: Iterable[T], make: Callable[[T], dict[str, object]]
) -> list[msgspec.Raw]:
    """Make and encode the rows of a table, in slices."""
    rows = []
    slice_end = time.monotonic() + SLICE_S
    for item in items:
        rows.append(msgspec.Raw(_ENCODER.encode(make(item))))
        if time.monotonic() > slice_end:
            await trio.lowlevel.checkpoint()
            slice_end = time.monotonic() + SLICE_S
    return rows
