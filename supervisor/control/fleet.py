"""The requests of a node actor to its daemon: a link, and to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.control.server import OrderError, Orders
from supervisor.fleet.link import (
    LEAVE_REQUEST,
    REQUEST,
    LeaveAnswer,
    LeaveArgs,
    LinkArgs,
    LinkError,
    refuse_link,
)

if TYPE_CHECKING:
    from supervisor.control.server import Serve
    from supervisor.membership.member import Member


class FleetOrders:
    """The requests of a node actor.

    Args:
        member: the daemon's membership; None without ``[fleet]``.
    """

    def __init__(self, member: Member | None) -> None:
        self._member = member

    def add_to(self, orders: Orders) -> None:
        """Offer them."""
        orders.links[REQUEST] = self._link
        orders.orders[LEAVE_REQUEST] = self._leave

    def _link(self, words: dict[str, Any]) -> tuple[object, Serve]:
        args = msgspec.convert(words, LinkArgs)
        try:
            if self._member is None:
                refuse_link(args)
            return self._member.link(args)
        except LinkError as why:
            raise OrderError(str(why)) from None

    async def _leave(self, words: dict[str, Any]) -> LeaveAnswer:
        msgspec.convert(words, LeaveArgs)
        if self._member is None:
            return LeaveAnswer(None)
        try:
            return await self._member.leave()
        except LinkError as why:
            raise OrderError(str(why)) from None
