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
    """All accounts, by client, and the window that they are of."""

    period: str
    root: NodeState
    nodes: dict[str, NodeState]


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


def take_over(service: LlmService, left: AccountsState) -> None:
    """Go on with the host's own account; its limits are those that are configured now."""
    if left.period != service.spending.period:
        return
    service.root.spent = max(service.root.spent, left.root.spent)
    service.root.calls = max(service.root.calls, left.root.calls)


def enter(service: LlmService, left: AccountsState, child: Child) -> None:
    """Go on with the accounts of a child and of all that are nested in it."""
    for session in child.sessions():
        state = left.nodes.get(session.client.id)
        if state is not None:
            node = service.node_of(session.client)
            node.limit, node.max_calls = state.limit, state.max_calls
            if left.period == service.spending.period:
                node.spent, node.calls = state.spent, state.calls


def _state(node: Node) -> NodeState:
    return NodeState(node.limit, node.max_calls, node.spent, node.calls)
