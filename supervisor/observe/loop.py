"""Tasks that watch: the watchdog, children's states and limits.

Rules of this file.

1. The watchdog is fed by a task of the loop that serves clients: if the loop hangs, the
   service manager kills the host.
2. A state is reported only if it lasts: stuck in the kernel for two samples, or
   stopped.
3. One sample of each child tells both its state and how near it is to its limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from supervisor.usage.limits import needs_process_count
from supervisor.usage.samples import Watcher

if TYPE_CHECKING:
    from hostlib.systemd import Notifier
    from supervisor.host import Host
    from supervisor.usage.samples import ProcessIdentity, Samples

CONDITIONS = {
    "stopped": "stopped",
    "tracing-stop": "stopped",
    "disk-sleep": "stuck",
    "zombie": "zombie",
}
"""psutil's word -> the host's; other states are not reported."""


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
