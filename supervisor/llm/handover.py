"""The model's accounts, handed from one program of a host to the next.

What it is: what was spent, by the host and by each client, and the limits that were set.
What it is not: calls; those under way have ended, and are paid for, before.

Rules of this file.

1. What is spent stays spent: the next program takes the larger of what it is told and
   what it finds in its own ledger.
2. Conversations that are messages and nothing else go with their clients; those of a
   host with LLM fds are theirs (``supervisor.fds.handover``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.handover.secrets import KEY
from supervisor.handover.state import taken
from supervisor.llm import handover_endpoint
from supervisor.llm.dialogues import PlainDialogues
from supervisor.llm.handover_endpoint import EndpointState  # noqa: TC001 - msgspec
from supervisor.llm.ledger import LedgerError
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from supervisor.llm.quota import Node
    from supervisor.llm.service import LlmService
    from supervisor.session.ports import ChildView


class NodeState(msgspec.Struct):
    """An account; see ``Node``."""

    limit: float | None
    max_calls: int | None
    spent: float
    calls: int


class KeptState(msgspec.Struct):
    """A conversation that is kept for a client under a name."""

    client: str
    name: str
    messages: list[dict[str, str]]
    size_chars: int


class AccountsState(msgspec.Struct):
    """All accounts, and the window that they are of.

    Attributes:
        period: the window.
        root: the host's own.
        nodes: those of clients, by their ids.
        children: those that outlive their children, by name.
        kept: conversations.
        endpoint: see ``handover_endpoint``.
    """

    period: str
    root: NodeState
    nodes: dict[str, NodeState]
    children: dict[str, NodeState] = {}
    kept: list[KeptState] = []
    endpoint: EndpointState | None = None


def busy(service: LlmService) -> str | None:
    """Say what has to end first: calls, and charges that are being written."""
    if service.root.under_way:
        return "a model is being called"
    if service.spending.is_writing:
        return "a charge is being written"
    if service.endpoint is not None and service.endpoint.is_answering:
        return "the endpoint of [llm] is answering"
    return None


def hand_over(service: LlmService) -> tuple[object, set[int]]:
    """Return accounts, conversations and the endpoint, and its descriptors."""
    state = AccountsState(
        period=service.spending.period,
        root=_state(service.root),
        nodes={name: _state(node) for name, node in service.nodes().items()},
        children={name: _state(node) for name, node in service.spending.children()},
    )
    fds: set[int] = set()
    if isinstance(service.dialogues, PlainDialogues):
        state.kept = [
            KeptState(client_id, name, list(messages), size)
            for client_id, name, messages, size in service.dialogues.kept.all()
        ]
    if service.endpoint is not None:
        state.endpoint, fds = handover_endpoint.state_of(service.endpoint)
    plain = msgspec.to_builtins(state, builtin_types=(bytes,))
    if service.section.api_key_file is None and service.default.has_key:
        plain[KEY] = service.default.secrets[0]
    return plain, fds


def read(left: object) -> AccountsState:
    """Return the accounts that were handed over.

    Raises:
        HandoverError: they are another program's.
    """
    return taken(left, AccountsState, "the accounts")


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


def enter(service: LlmService, left: AccountsState, child: ChildView) -> None:
    """Go on with the accounts of a child and of all that are nested in it."""
    for session in child.sessions():
        state = left.nodes.get(session.client.id)
        if state is not None:
            node = service.node_of(session.client)
            node.limit, node.max_calls = state.limit, state.max_calls
            if left.period == service.spending.period:
                _go_on(node, state)
        if isinstance(service.dialogues, PlainDialogues):
            for one in left.kept:
                if one.client == session.client.id:
                    service.dialogues.kept.keep(
                        session.client, one.name, tuple(one.messages), one.size_chars
                    )


def _go_on(node: Node, state: NodeState) -> None:
    """Count what was spent before; what the ledger knows may be more."""
    node.spent = max(node.spent, state.spent)
    node.calls = max(node.calls, state.calls)


def _state(node: Node) -> NodeState:
    return NodeState(node.limit, node.max_calls, node.spent, node.calls)
