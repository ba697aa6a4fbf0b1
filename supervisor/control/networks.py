"""The order ``network``: a child's figures and changes of its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.control.answers import network_figures
from supervisor.control.server import OrderError, Orders

if TYPE_CHECKING:
    from supervisor.children.child import Child
    from supervisor.host import Host


class NetworkArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``network``: a child by name or id, and the changes of its rules."""

    name: str
    allow: list[str] = []
    deny: list[str] = []
    cut: bool = False


class NetworkOrders:
    """The orders about the networks of one host's children."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def add_to(self, orders: Orders) -> None:
        """Register the orders."""
        orders.orders["network"] = self._do
        orders.reading["network"] = _is_reading

    async def _do(self, words: dict[str, Any]) -> dict[str, object]:
        """Change a child's rules, if the order has changes, and return its figures."""
        args = msgspec.convert(words, NetworkArgs)
        child = self._find(args.name)
        names = self._host.services.network
        if args.allow or args.deny or args.cut:
            if names is None or not names.has_network(child.id):
                raise OrderError(
                    f"cannot change the network of {args.name!r}: it has no rules;"
                    " start it with some"
                )
            try:
                await names.change_network(
                    child.id, args.allow, args.deny, cut=args.cut
                )
            except ValueError as why:
                raise OrderError(str(why)) from None
        learned = None if names is None else names.learned_rules(child.id)
        return {"network": network_figures(self._host, child), "learned": learned}

    def _find(self, name: str) -> Child:
        for child in self._host.children.values():
            if name in {child.id, child.spec.name}:
                return child
        raise OrderError(
            f"cannot tell of {name!r}: no such child runs; see sandhost ps"
        )


def _is_reading(arguments: dict[str, Any]) -> bool:
    """Return whether an order changes nothing, so that the journal omits it."""
    return not any(arguments.get(key) for key in ("allow", "deny", "cut"))
