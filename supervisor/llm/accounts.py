"""Accounts of clients: the payers of calls, and the spent and remaining quota.

Every client has a node in the quota tree, beneath that of its parent; the host's is on
top.  A child that the configuration names keeps its node over restarts.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import msgspec

from hostlib.handover import HandoverError
from supervisor.fsproxy.ports import TokenAccount
from supervisor.llm.ledger import LedgerError
from supervisor.llm.quota import Node

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import ChildView
    from supervisor.llm.ledger import Spending
    from vfs.clients import Client


class NodeState(msgspec.Struct):
    """An account; see ``Node``."""

    limit: float | None
    max_calls: int | None
    spent: float
    calls: int
    refusals: int = 0
    factors: dict[str, float] = {}


class Accounts:
    """The quota tree of a host's clients.

    Args:
        root: the host's own node.
        spending: stores the spent tokens, over restarts.
    """

    def __init__(self, root: Node, spending: Spending) -> None:
        self.root = root
        self.spending = spending
        self._nodes: dict[str, tuple[Client, Node]] = {}

    async def open(self, child: ChildView, client: Client) -> Node:
        """Return the account of a child; the kept account if the child has a name.

        Raises:
            OSError: its earlier spending cannot be read.
        """
        if child.spec.account is not None:
            try:
                node = await self.spending.node_of_child(child.spec.account)
            except LedgerError as why:
                raise OSError(errno.EIO, str(why)) from None
            self._nodes[client.id] = client, node
        return self.node_of(client)

    def close(self, client: Client) -> None:
        """Close an account; its spending stays with its ancestors."""
        self._nodes.pop(client.id, None)

    def node_of(self, client: Client) -> Node:
        """Return a client's node; make one if it has none."""
        self.begin_window()
        known = self._nodes.get(client.id)
        if known is not None:
            return known[1]
        parent = client.parent
        node = Node(self.root if parent is None else self.node_of(parent))
        self._nodes[client.id] = client, node
        return node

    def begin_window(self) -> None:
        """Begin a new window of the quota, if it is time."""
        if self.spending.reset():
            for _, node in self._nodes.values():
                node.forget_spending()

    def rows(self) -> list[dict[str, object]]:
        """Return every account as JSON objects, the host's own first."""
        rows = [_row(self.root, None, None)]
        for client, node in self._nodes.values():
            parent = client.parent
            rows.append(_row(node, client.id, None if parent is None else parent.id))
        return rows

    def host_account(self) -> TokenAccount:
        """Return the host's own account, for metrics and the status page."""
        tokens = self.root.tokens
        return TokenAccount("host", tokens.used, tokens.reserved, tokens.limit)

    # Hand-over: spending is kept

    def nodes(self) -> dict[str, Node]:
        """Return the accounts of clients by their ids."""
        return {client_id: node for client_id, (_, node) in self._nodes.items()}

    async def restore(
        self, period: str, root: NodeState, children: dict[str, NodeState]
    ) -> None:
        """Restore spending: the larger of the state and the ledger's file.

        Args:
            period: the window of the spending.
            root: state of the host's own account.
            children: states of accounts of named children.

        Raises:
            HandoverError: the ledger's file cannot be read.
        """
        is_on = period == self.spending.period
        _restore(self.root, root, is_on=is_on)
        for name, state in children.items():
            try:
                node = await self.spending.node_of_child(name)
            except LedgerError as why:
                raise HandoverError(str(why)) from None
            _restore(node, state, is_on=is_on)

    def restore_client(self, client: Client, period: str, state: NodeState) -> None:
        """Restore a client's spending in a window, and its limits."""
        node = self.node_of(client)
        node.tokens.limit, node.calls.limit = state.limit, state.max_calls
        _restore(node, state, is_on=period == self.spending.period)


def state_of(node: Node) -> NodeState:
    """Return the state of a node."""
    return NodeState(
        node.tokens.limit,
        node.calls.limit,
        node.tokens.used,
        node.calls.used,
        node.refusals,
        dict(node.factors),
    )


def _restore(node: Node, state: NodeState, *, is_on: bool) -> None:
    """Restore the factors of providers and, in the same window, the spending."""
    for model, factor in state.factors.items():
        node.learn(model, factor)
    if is_on:
        node.tokens.used = max(node.tokens.used, state.spent)
        node.calls.used = max(node.calls.used, state.calls)
        node.refusals = max(node.refusals, state.refusals)


def _row(node: Node, client_id: str | None, parent_id: str | None) -> dict[str, object]:
    return {
        "client_id": client_id,
        "parent_id": parent_id,
        "spent": round(node.tokens.used, 4),
        "reserved": round(node.tokens.reserved, 4),
        "limit": node.tokens.limit,
        "calls": node.calls.used,
        "under_way": node.calls.reservations,
        "max_calls": node.calls.limit,
    }
