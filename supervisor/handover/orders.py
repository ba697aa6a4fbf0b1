"""The order to replace the program of a daemon: SIGUSR2, or ``reload --exec``.

A client of the control socket gets the reason of a refusal. After a success its
connection ends with the old program, and the new one shows its ``generation``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from supervisor.control.server import OrderError, Orders
from supervisor.handover.exchange import replace
from supervisor.handover.next_program import own_program
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from hostlib.sd_notify import Notifier
    from supervisor.handover.exchange import Surroundings
    from supervisor.host import Host

ORDER = "replace"


class Change:
    """Replaces a daemon's program.

    Args:
        host: the host of the daemon.
        around: the daemon's parts around it.
        notifier: told before, and after a failure.

    Attributes:
        host: as above.
    """

    def __init__(self, host: Host, around: Surroundings, notifier: Notifier) -> None:
        self.host = host
        self._around = around
        self._notifier = notifier

    def add_to(self, orders: Orders) -> None:
        """Register the order and its counter."""
        orders.orders[ORDER] = self._order
        orders.stats.append(self._row)

    def _row(self) -> dict[str, object]:
        network = self.host.services.network
        return {
            "generation": self.host.generation,
            "connections_reset": network.connections_reset if network else 0,
        }

    async def _order(self, words: dict[str, Any]) -> NoReturn:
        if words:
            raise OrderError(f"{ORDER} takes no arguments")
        try:
            await self._replace()
        except HandoverError as why:
            raise OrderError(f"not replaced: {why}") from None

    async def try_replace(self) -> None:
        """Replace the program; log the reason of a failure."""
        with suppress(HandoverError):
            await self._replace()

    async def _replace(self) -> NoReturn:
        host = self.host
        self._notifier.reloading()
        host.log.write("INFO", "Replacing the program", generation=host.generation)
        try:
            await replace(host, own_program(), self._around)
        except HandoverError as why:
            host.log.write("ERROR", f"Not replaced: {why}", reason=str(why))
            raise
        finally:
            count = len(self.host.children)
            self._notifier.ready(f"{count} children")
