"""The model's accounts, handed from one program of a host to the next.

What it is: what was spent, by the host and by each client, and the limits that were set.
What it is not: calls; those under way have ended, and are paid for, before.

Rules of this file.

1. What is spent stays spent: the next program takes the larger of what it is told and
   what it finds in its own ledger.
2. An endpoint has connections of its own, which stay here: a service with one is not
   handed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.handover_secrets import KEY
from supervisor.llm.ledger import LedgerError
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from supervisor.child import Child
    from supervisor.llm.quota import Node
    from supervisor.llm.service import LlmService


class NodeState(msgspec.Struct):
    """An account; see ``Node``."""

    limit: float | None
    max_calls: int | None
    spent: float
    calls: int


class AccountsState(msgspec.Struct):
    """All accounts, and the window that they are of.

    Attributes:
        period: the window.
        root: the host's own.
        nodes: those of clients, by their ids.
        children: those that outlive their children, by name.
    """

    period: str
    root: NodeState
    nodes: dict[str, NodeState]
    children: dict[str, NodeState] = {}


def busy(service: LlmService) -> str | None:
    """Say what has to end first: calls, and charges that are being written."""
    if service.root.under_way:
        return "a model is being called"
    if service.spending.is_writing:
        return "a charge is being written"
    return None


def hand_over(service: LlmService) -> tuple[object, tuple[int, ...]]:
    """Return the accounts as plain values; no descriptor goes with them.

    Raises:
        HandoverError: it has an endpoint.
    """
    if service.endpoint is not None:
        text = "the endpoint of [llm] stays here; restart the host instead"
        raise HandoverError(text)
    state = AccountsState(
        period=service.spending.period,
        root=_state(service.root),
        nodes={name: _state(node) for name, node in service.nodes().items()},
        children={name: _state(node) for name, node in service.spending.children()},
    )
    plain = msgspec.to_builtins(state)
    if service.section.api_key_file is None and service.default.has_key:
        plain[KEY] = service.default.secrets[0]
    return plain, ()


def read(left: object) -> AccountsState:
    """Return the accounts that were handed over.

    Raises:
        HandoverError: they are another program's.
    """
    try:
        return msgspec.convert(left, AccountsState)
    except msgspec.ValidationError as why:
        raise HandoverError(f"cannot take the accounts over: {why}") from None


async def take_over(service: LlmService, left: AccountsState) -> None:
    """Go on with the accounts that are kept; limits are those that are configured now.

    Raises:
        HandoverError: what the ledger has of them cannot be read.
    """
    spending = service.spending
    if left.period != spending.period:
        return
    _go_on(service.root, left.root)
    for name, state in left.children.items():
        try:
            _go_on(await spending.node_of_child(name), state)
        except LedgerError as why:
            raise HandoverError(str(why)) from None


def enter(service: LlmService, left: AccountsState, child: Child) -> None:
    """Go on with the accounts of a child and of all that are nested in it."""
    for session in child.sessions():
        state = left.nodes.get(session.client.id)
        if state is not None:
            node = service.node_of(session.client)
            node.limit, node.max_calls = state.limit, state.max_calls
            if left.period == service.spending.period:
                _go_on(node, state)


def _go_on(node: Node, state: NodeState) -> None:
    """Count what was spent before; what the ledger knows may be more."""
    node.spent = max(node.spent, state.spent)
    node.calls = max(node.calls, state.calls)


def _state(node: Node) -> NodeState:
    return NodeState(node.limit, node.max_calls, node.spent, node.calls)
