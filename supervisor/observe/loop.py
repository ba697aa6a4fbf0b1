"""Tasks that watch: the loop's lag, the watchdog, children's states and limits.

Rules of this file.

1. The watchdog is fed by a task of the loop that serves clients: if the loop hangs, the
   service manager kills the host.
2. A state is reported only if it lasts: stuck in the kernel for two samples, or
   stopped.
3. One sample of each child tells both its state and how near it is to its limits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from supervisor.usage.limits import needs_process_count
from supervisor.usage.samples import Watcher

if TYPE_CHECKING:
    from hostlib.sd_notify import Notifier
    from supervisor.host import Host
    from supervisor.usage.samples import ProcessIdentity, Samples

LAG_INTERVAL_S = 0.5
"""Time between two looks at the lag; wakes an idle host twice a second."""

LAG_WARNING_S = 0.25
"""Lag from which clients notice."""

CONDITIONS = {
    "stopped": "stopped",
    "tracing-stop": "stopped",
    "disk-sleep": "stuck",
    "zombie": "zombie",
}
"""psutil's word -> the host's; other states are not reported."""


class Lag:
    """How late the loop is.

    Attributes:
        last_s: at the last look, seconds.
        worst_s: since the start.
        warnings: how often it was over ``LAG_WARNING_S``.
    """

    def __init__(self, host: Host) -> None:
        self.last_s = 0.0
        self.worst_s = 0.0
        self.warnings = 0
        self._host = host

    def row(self) -> dict[str, object]:
        """Return it as part of ``stats``."""
        return {
            "loop_lag_s": round(self.last_s, 6),
            "loop_lag_worst_s": round(self.worst_s, 6),
            "loop_lag_warnings": self.warnings,
        }

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            # The monotonic clock: a jump of the wall clock is no lag.
            due = time.monotonic() + LAG_INTERVAL_S
            await trio.sleep(LAG_INTERVAL_S)
            self.last_s = max(0.0, time.monotonic() - due)
            self.worst_s = max(self.worst_s, self.last_s)
            if self._host.metrics is not None:
                self._host.metrics.note_lag(self.last_s)
            if self.last_s > LAG_WARNING_S:
                self.warnings += 1
                lag_s = round(self.last_s, 3)
                self._host.journal.write("host.lagged", lag_s=lag_s)
                text = f"The loop was {lag_s} s late"
                self._host.log.write("WARNING", text, lag_s=lag_s)


async def feed_watchdog(notifier: Notifier, interval_s: float) -> None:
    """Feed the service manager's watchdog until cancelled (rule 1)."""
    while True:
        notifier.alive()
        await trio.sleep(interval_s)


class Conditions:
    """Children that are stopped, stuck, unreaped zombies, or near their limits.

    Args:
        host: has the children.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watcher = Watcher()
        self._seen: dict[ProcessIdentity, str] = {}
        self._told: dict[ProcessIdentity, str] = {}
        self._is_blind = False

    def row(self) -> dict[str, object]:
        """Return its cost as part of ``stats``."""
        return {"watching_longest_s": round(self._watcher.longest_slice_s, 6)}

    async def run(self, interval_s: float) -> None:
        """Sample and report until cancelled."""
        while True:
            await trio.sleep(interval_s)
            owners = {
                (child.process.pid, child.process.create_time): child
                for child in self._host.children.values()
                if child.process is not None
            }
            families = {
                i for i, child in owners.items() if needs_process_count(child.spec)
            }
            try:
                samples = await self._watcher.glance(owners, families)
            except OSError as why:  # no descriptor for a moment: the next look reports
                self._blind(why)
                continue
            self._is_blind = False
            for identity, condition in self.news(samples).items():
                child = owners[identity]
                self._host.journal.write(
                    "child.condition",
                    child_id=child.id,
                    name=child.spec.name,
                    pid=identity[0],
                    condition=condition,
                )
            self._host.limits.forget_all_but({child.id for child in owners.values()})
            for identity, child in owners.items():
                if child.limits.look():  # reads a file or two
                    await trio.lowlevel.checkpoint()
                child.limits.tell(samples.get(identity))

    def _blind(self, why: OSError) -> None:
        """Log once that children cannot be looked at."""
        if not self._is_blind:
            text = f"cannot look at the children: {why.strerror}; trying again"
            self._host.log.write("WARNING", text)
        self._is_blind = True

    def news(self, samples: Samples) -> dict[ProcessIdentity, str]:
        """Return the conditions that lasted for two samples, or have passed (``well``)."""
        now = {
            identity: CONDITIONS[sample.state]
            for identity, sample in samples.items()
            if sample.state in CONDITIONS
        }
        lasting = {i: c for i, c in now.items() if self._seen.get(i) == c}
        news = {i: c for i, c in lasting.items() if self._told.get(i) != c}
        passed = [i for i in self._told if i not in now]
        news.update({i: "well" for i in passed if i in samples})
        told = {i: c for i, c in self._told.items() if i in now}
        self._told = {**told, **lasting}
        self._seen = now
        return news
