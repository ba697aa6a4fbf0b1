"""How near a child is to its limits, from samples of it and its ledger.

Figures in, news out; ``loop`` asks with every sample.

Rules of this file.

1. A limit is news when it becomes near (``NEAR`` of it is used) and when it is reached,
   once each; and again only after its use fell below ``WELL``: a child that wavers at a
   mark is told once.
2. Nothing is looked at that has no limit.
3. What a request was refused for is told to the child at once; this is for the operator,
   who hears of it at the next sample, or when the child ends.
4. A refusal is a limit that was reached, however little is used: a child with 1 MiB left
   that asks for 2 is refused, again and again.  The ledger counts refusals where they are
   made, the kernel those of groups; those of rlimits (RLIMIT_AS, RLIMIT_NPROC) nobody does.
5. Memory is measured as it is bounded: by the addresses of the process (RLIMIT_AS), or by
   what all of the child's processes take, where a group bounds that.
"""

from __future__ import annotations

import resource
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from supervisor.fsproxy.ports import Conversation
    from supervisor.spec import ChildSpec
    from supervisor.usage.samples import Sample
    from vfs.policy import Ledger

NEAR = 0.9
"""Part of a limit at which an operator has time left to do something."""

WELL = 0.8
"""Part of a limit below which a child is no longer near it."""


class Level(IntEnum):
    """How near; the words of the journal are the names in small letters."""

    WELL = 0
    NEAR = 1
    REACHED = 2


class Use(NamedTuple):
    """What is used of one limit.

    Attributes:
        limit: its name in ``--limit``.
        used: now; bytes, seconds or a number.
        allowed: most.
        refused: how often it refused something so far.
        is_refusing: it has since the last look (rule 4).
    """

    limit: str
    used: float
    allowed: int
    refused: int = 0
    is_refusing: bool = False

    @property
    def level(self) -> Level:
        """How near this is to its limit."""
        if self.is_refusing or self.used >= self.allowed:
            return Level.REACHED
        return Level.NEAR if self.used >= NEAR * self.allowed else Level.WELL


class Limited(Protocol):
    """A child, as far as its limits go.

    Attributes:
        memory_in_groups: bytes that its processes take; None where no group bounds them.
    """

    memory_in_groups: int | None

    @property
    def spec(self) -> ChildSpec:
        """Which limits it has."""
        ...

    @property
    def session(self) -> Conversation | None:
        """Its own conversation; None before it has one."""
        ...

    def refused(self) -> dict[str, int]:
        """Return how often its limits refused something, by limit."""
        ...


def uses(
    spec: ChildSpec,
    ledger: Ledger,
    sample: Sample | None,
    in_groups: int | None = None,
) -> list[Use]:
    """Return what a child uses of each limit that it has.

    Args:
        spec: its limits.
        ledger: what it has used, with all that is nested in it.
        sample: of its process; None leaves out what only a sample tells.
        in_groups: bytes of memory of all its processes, where its groups bound that;
            None where each process has a bound of its own.
    """
    found = [
        Use(name, account.used, allowed)
        for name, account, allowed in (
            ("open_files", ledger.open_files, spec.max_open_files),
            ("bytes", ledger.size_bytes, spec.max_bytes),
            ("files", ledger.files, spec.max_files),
        )
        if allowed is not None
    ]
    if sample is not None:
        found += _of_process(spec, sample, in_groups)
    return found


def uses_of(child: Limited, sample: Sample | None) -> list[Use]:
    """Return what a living child uses of each limit, and what these have refused."""
    session, spec = child.session, child.spec
    if session is None:
        return []
    ledger = session.client.ledger
    in_groups = child.memory_in_groups
    found = {use.limit: use for use in uses(spec, ledger, sample, in_groups)}
    # Of these nothing is told before they refuse something.
    bounds = {
        "clients_per_child": (ledger.clients.used, ledger.clients.limit),
        "file_size": (0, ledger.max_file_bytes),
        "memory": (sample.rss_bytes if sample else 0, spec.group_limits.memory),
        "processes": (
            sample.descendants + 1 if sample else 0,
            spec.group_limits.processes,
        ),
    }
    for limit, count in child.refused().items():
        if count:
            used, allowed = bounds.get(limit, (0, None))
            use = found.get(limit, Use(limit, used, allowed or 0))
            found[limit] = use._replace(refused=count)
    return list(found.values())


def refused_by(ledger: Ledger) -> dict[str, int]:
    """Return how often a ledger's own bounds refused something, by limit."""
    return {
        "open_files": ledger.open_files.refused,
        "clients_per_child": ledger.clients.refused,
        "bytes": ledger.size_bytes.refused,
        "files": ledger.files.refused,
        "file_size": ledger.too_large,
    }


def counts_processes(spec: ChildSpec) -> bool:
    """Tell whether a child's limits ask how many processes it has."""
    return any(number == resource.RLIMIT_NPROC for number, *_ in spec.rlimits)


def _of_process(
    spec: ChildSpec, sample: Sample, in_groups: int | None
) -> Iterator[Use]:
    soft = {number: soft for number, soft, _ in spec.rlimits}
    memory = soft.get(resource.RLIMIT_AS)
    if memory is not None:
        used = sample.address_space_bytes if in_groups is None else in_groups
        yield Use("memory", used, memory)
    cpu = soft.get(resource.RLIMIT_CPU)
    if cpu is not None:
        yield Use("cpu", round(sample.cpu_time_s, 2), cpu)
    processes = soft.get(resource.RLIMIT_NPROC)
    if processes is not None:
        yield Use("processes", sample.descendants + 1, processes)


class LimitNews:
    """What was told of each child's limits."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], Level] = {}
        self._refused: dict[tuple[str, str], int] = {}

    def of(self, child_id: str, found: Sequence[Use]) -> list[Use]:
        """Return what is news of a child (rule 1)."""
        news = []
        for each in found:
            use, key = each, (child_id, each.limit)
            if use.refused > self._refused.get(key, 0):
                self._refused[key] = use.refused
                use = use._replace(is_refusing=True)
            if use.level > self._told.get(key, Level.WELL):
                self._told[key] = use.level
                news.append(use)
            elif not use.is_refusing and use.used < WELL * use.allowed:
                self._told.pop(key, None)
        return news

    def forget(self, child_id: str) -> None:
        """Forget a child that is gone."""
        for told in (self._told, self._refused):
            for key in [key for key in told if key[0] == child_id]:
                del told[key]

    def forget_all_but(self, child_ids: set[str]) -> None:
        """Forget children that are gone."""
        for told in (self._told, self._refused):
            for key in [key for key in told if key[0] not in child_ids]:
                del told[key]
