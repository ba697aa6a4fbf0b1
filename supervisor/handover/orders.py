"""The order to be replaced, as a daemon gets it: by SIGUSR2, or ``reload --exec``.

The client of the control socket hears why it was refused; if it was not, that
connection ends with the program that had it, and the next one tells its ``generation``.
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
    """The change of a daemon's program.

    Args:
        host: whose.
        around: the daemon's parts around it.
        notifier: told before and, should it fail, after.

    Attributes:
        host: as above.
    """

    def __init__(self, host: Host, around: Surroundings, notifier: Notifier) -> None:
        self.host = host
        self._around = around
        self._notifier = notifier

    def add_to(self, orders: Orders) -> None:
        """Offer it, and tell how often it has happened."""
        orders.orders[ORDER] = self._order
        orders.stats.append(lambda: {"generation": self.host.generation})

    async def _order(self, words: dict[str, Any]) -> NoReturn:
        if words:
            raise OrderError(f"{ORDER} takes no arguments")
        try:
            await self._now()
        except HandoverError as why:
            raise OrderError(f"not replaced: {why}") from None

    async def try_now(self) -> None:
        """Be replaced; if that cannot be, say why in the log."""
        with suppress(HandoverError):
            await self._now()

    async def _now(self) -> NoReturn:
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
