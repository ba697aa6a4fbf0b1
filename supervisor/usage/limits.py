"""How near a child is to its limits, from samples of it and its ledger.

Pure: ``children.child_limits`` asks with every sample.

1. A limit is news once when it becomes near (``NEAR`` of it is used) and once when it
   is reached; then only after its use fell below ``WELL``.
2. Only children with limits are looked at.
3. The child learns of a refusal at once; the operator at the next sample or at its end.
4. A refusal counts as reached, however little is used: a child with 1 MiB left may ask
   for 2 again and again. The ledger counts its refusals, the kernel those of groups;
   refusals of rlimits (RLIMIT_AS, RLIMIT_NPROC) are not counted.
5. Memory is measured as it is bounded: by RLIMIT_AS or by the group.
"""

from __future__ import annotations

import resource
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from supervisor.spec import ChildSpec
    from supervisor.usage.samples import Sample
    from vfs.ledger import Ledger

NEAR = 0.9
"""Part of a limit at which an operator has time left to act."""

WELL = 0.8
"""Part of a limit below which a child is no longer near it."""


class Level(IntEnum):
    """How near a limit is; the journal has these names in lower case."""

    WELL = 0
    NEAR = 1
    REACHED = 2


class Use(NamedTuple):
    """The use of one limit.

    Attributes:
        limit: its name in ``--limit``.
        used: now; bytes, seconds or a number.
        allowed: the limit.
        refused: how often the limit refused something so far.
        is_refusing: whether it has since the last look (rule 4).
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


def uses(
    spec: ChildSpec,
    ledger: Ledger,
    sample: Sample | None,
    in_groups: int | None = None,
    refused: Mapping[str, int] | None = None,
) -> list[Use]:
    """Return the use of each limit that a child has.

    Args:
        spec: has its limits.
        ledger: has the use of the child and all nested in it.
        sample: of its process; None leaves out the limits that need one.
        in_groups: bytes of memory of all its processes, where its groups bound that;
            None where each process has a bound of its own.
        refused: how often its limits refused something, by limit.
    """
    listed = [
        Use(name, account.used, allowed)
        for name, account, allowed in (
            ("open_files", ledger.open_files, spec.max_open_files),
            ("bytes", ledger.size_bytes, spec.max_bytes),
            ("files", ledger.files, spec.max_files),
        )
        if allowed is not None
    ]
    if sample is not None:
        listed += _process_uses(spec, sample, in_groups)
    found = {use.limit: use for use in listed}
    # These are left out until they refuse something.
    bounds = {
        "clients_per_child": (ledger.clients.used, ledger.clients.limit),
        "file_size": (0, ledger.max_file_bytes),
        "memory": (sample.rss_bytes if sample else 0, spec.group_limits.memory),
        "processes": (
            sample.descendants + 1 if sample else 0,
            spec.group_limits.processes,
        ),
    }
    for limit, count in (refused or {}).items():
        if count:
            used, allowed = bounds.get(limit, (0, None))
            use = found.get(limit, Use(limit, used, allowed or 0))
            found[limit] = use._replace(refused=count)
    return list(found.values())


def needs_process_count(spec: ChildSpec) -> bool:
    """Return whether a child's limits need the number of its processes."""
    return any(number == resource.RLIMIT_NPROC for number, *_ in spec.rlimits)


def _process_uses(
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
    """The limits of one child that were reported."""

    def __init__(self) -> None:
        self._told: dict[str, Level] = {}
        self._refused: dict[str, int] = {}

    def find_news(self, found: Sequence[Use]) -> list[Use]:
        """Return the uses that are news (rule 1)."""
        news = []
        for each in found:
            use, limit = each, each.limit
            if use.refused > self._refused.get(limit, 0):
                self._refused[limit] = use.refused
                use = use._replace(is_refusing=True)
            if use.level > self._told.get(limit, Level.WELL):
                self._told[limit] = use.level
                news.append(use)
            elif not use.is_refusing and use.used < WELL * use.allowed:
                self._told.pop(limit, None)
        return news
