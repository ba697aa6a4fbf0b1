"""Refusals of one child's limits, and the use of its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.linux.cgroup_files import memory_use, refusals
from supervisor.sandbox.groups import Groups, is_held
from supervisor.usage.limits import LimitNews, uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.usage.limits import Use
    from supervisor.usage.samples import Sample


class ChildLimits:
    """The limits of one child, as they are used and refuse.

    Args:
        host: has the journal, and the sum over children that are gone.
        child: has the limits.

    Attributes:
        groups: those of its processes.
        is_counted: whether its refusals are part of ``Parts.refused`` already.
        memory_in_groups: bytes that its processes took at the last ``look``; None
            where no group bounds them.
    """

    def __init__(self, host: Parts, child: ChildView) -> None:
        self._host = host
        self._child = child
        self.groups = Groups()
        self.is_counted = False
        self.memory_in_groups: int | None = None
        self._news = LimitNews()
        self._refused_before: dict[str, int] = {}
        self._refused_by_groups: dict[str, int] = {}

    def restore(self, groups: Groups) -> None:
        """Restore the groups of a child that runs; their refusals were counted before."""
        self.groups = groups
        self.look()
        self._refused_before = self._refused_by_groups

    def look(self) -> bool:
        """Read what its groups have refused; return False if it has none."""
        limits = self._child.spec.group_limits
        if not self.groups.made or (limits.memory, limits.processes) == (None, None):
            return False
        self._refused_by_groups = refusals(self.groups.made)
        layers = dict(self._child.walls.applied).keys()
        is_bounded = "cgroup" in layers and is_held(layers)
        if is_bounded and self.groups.keep_memory(limits):
            self.memory_in_groups = memory_use(self.groups.made)
        return True

    def count_refusals(self) -> dict[str, int]:
        """Return how often its limits refused something, by limit.

        Those of its groups as they were at the last ``look``.
        """
        session = self._child.session
        found: dict[str, int] = {}
        if session is not None:
            ledger = session.client.ledger
            found = {
                "open_files": ledger.open_files.refused,
                "clients_per_child": ledger.clients.refused,
                "bytes": ledger.size_bytes.refused,
                "files": ledger.files.refused,
                "file_size": ledger.too_large,
            }
        for limit, count in self._refused_by_groups.items():
            found[limit] = count - self._refused_before.get(limit, 0)
        return found

    def uses(self, sample: Sample | None = None) -> list[Use]:
        """Return the use and the refusals of each limit; see ``limits.uses``."""
        session = self._child.session
        if session is None:
            return []
        return uses(
            self._child.spec,
            session.client.ledger,
            sample,
            self.memory_in_groups,
            self.count_refusals(),
        )

    def tell(self, sample: Sample | None) -> None:
        """Write events for the limits that it comes near to, or that refuse it something."""
        self._write(self.uses(sample))

    def count(self) -> None:
        """Add its refusals to the host's: its process has ended."""
        self.look()
        refused = self.count_refusals()
        if any(refused.values()):
            self._write([use for use in self.uses() if use.refused])
        self._host.refused.update(refused)
        self.is_counted = True

    def _write(self, found: Sequence[Use]) -> None:
        child = self._child
        for use in self._news.find_news(found):
            self._host.journal.write(
                "child.limit",
                child_id=child.id,
                name=child.spec.name,
                limit=use.limit,
                level=use.level.name.lower(),
                used=use.used,
                allowed=use.allowed,
                refused=use.refused,
            )
