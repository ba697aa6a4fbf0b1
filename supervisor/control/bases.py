"""The requests of a fleet about bases of workspaces: pack, send, commit (FL10)."""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.control.server import OrderError, Orders
from supervisor.membership.base_keeper import BASE_STREAM, CommitBase
from supervisor.membership.bases import BaseError
from supervisor.workspace.verbs import VerbError

if TYPE_CHECKING:
    from hostlib.journal import Journal
    from supervisor.control.server import Send
    from supervisor.fleet.messages import Base
    from supervisor.membership.member import Member

PACK, COMMIT = "fleet-pack", "fleet-commit"


class PackArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `fleet-pack`: a directory of this node, its path absolute."""

    path: str


class SendArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the stream `fleet-base`."""

    digest: str


class BaseOrders:
    """The requests about bases.

    Args:
        member: the daemon's membership.
        journal: gets commits.
    """

    def __init__(self, member: Member, journal: Journal) -> None:
        self._member = member
        self._journal = journal

    def add_to(self, orders: Orders) -> None:
        """Offer them."""
        orders.orders[PACK] = self._pack
        orders.orders[COMMIT] = self._commit
        orders.streams[BASE_STREAM] = self._send
        orders.reading[BASE_STREAM] = lambda _: True
        orders.stats.append(self._member.bases.row)

    async def _pack(self, words: dict[str, Any]) -> Base:
        node = self._member.node
        if node is None:
            raise OrderError("cannot pack a base: this daemon is in no fleet; join one")
        path = msgspec.convert(words, PackArgs).path
        try:
            return await self._member.bases.pack(path, node.name)
        except BaseError as why:
            raise OrderError(str(why)) from None

    async def _commit(self, words: dict[str, Any]) -> dict[str, object]:
        args = msgspec.convert(words, CommitBase)
        try:
            done = await self._member.bases.commit(args)
        except (BaseError, VerbError) as why:
            raise OrderError(str(why)) from None
        if done.event is not None:
            name, fields = done.event
            self._journal.write(name, workspace=args.workspace, **fields)
        return {"result": done.result, "notes": done.notes}

    async def _send(self, words: dict[str, Any], send: Send) -> None:
        digest = msgspec.convert(words, SendArgs).digest
        try:
            async with aclosing(self._member.bases.read(digest)) as pieces:
                async for data in pieces:
                    await send({"data": base64.b64encode(data).decode()})
        except BaseError as why:
            raise OrderError(str(why)) from None
