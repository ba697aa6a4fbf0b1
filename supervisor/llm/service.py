"""The model service of a host with ``[llm]``: implements ``fsproxy.ports.Model``.

Its hand-over has the spending and limits of the host and each client, and the endpoint;
calls have ended and are paid before.  With LLM fds, conversations belong to
``supervisor.llmfd``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hostlib.handover import state_from
from hostlib.keys import HANDED_OVER
from supervisor.llm.accounts import NodeState, state_of
from supervisor.llm.chat import answer
from supervisor.llm.conversations import PlainDialogues
from supervisor.llm.endpoint import EndpointState  # noqa: TC001 - msgspec

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from contextlib import AsyncExitStack, ExitStack

    from supervisor.fsproxy.ports import Caller, ChildView, Doors, TokenAccount
    from supervisor.llm.conversations import Dialogues
    from supervisor.llm.endpoint import Endpoint
    from supervisor.llm.models import Models
    from vfs.clients import Client


class KeptChatState(msgspec.Struct):
    """A client's conversation with its name."""

    client: str
    name: str
    messages: list[dict[str, str]]
    size_chars: int


class LlmState(msgspec.Struct):
    """The state of the model for a hand-over.

    Attributes:
        period: the window of the spending.
        root: the host's own account.
        nodes: accounts of clients, by their ids.
        children: accounts of named children, by name.
        kept: conversations.
        endpoint: the endpoint; None if there is none.
    """

    period: str
    root: NodeState
    nodes: dict[str, NodeState]
    children: dict[str, NodeState] = {}
    kept: list[KeptChatState] = []
    endpoint: EndpointState | None = None


def read_state(left: object) -> LlmState:
    """Return the state from the program before.

    Raises:
        HandoverError: it comes from another version of the program.
    """
    return state_from(left, LlmState, "the accounts")


class LlmService:
    """Implements ``fsproxy.ports.Model``; made by ``open_llm``.

    Args:
        models: the host's models.

    Attributes:
        endpoint: the HTTP endpoint; None if there is none.
        dialogues: conversations; LLM fds replace it by their tool loop.
    """

    def __init__(self, models: Models) -> None:
        self.models = models
        self.endpoint: Endpoint | None = None
        self.dialogues: Dialogues = PlainDialogues(models)
        self._left: LlmState | None = None

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Open a child's account, also at the endpoint if there is one."""
        if child.session is None:
            raise RuntimeError("a child without a conversation has no account")
        client = child.session.client
        node = await self.models.accounts.open(child, client)
        node.tokens.limit = child.spec.quota
        if self.endpoint is None:
            return {}
        return await self.endpoint.admit(child, client, stack)

    def chat(
        self, caller: Caller, parts: tuple[bytes, ...], *, claim: bool
    ) -> Coroutine[Any, Any, bytes | None]:
        """Answer one LLM_CHAT; see ``ports.Model``."""
        return answer(caller, self.models, self.dialogues, claim, parts)

    def doors_of(self, client: Client) -> Doors | None:
        """Return how a child reaches the endpoint; None if there is none."""
        return None if self.endpoint is None else self.endpoint.doors_of(client)

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may use, and pass to nested clients (A5)."""
        return self.models.models_of(client)

    def limit(self, client: Client, quota: float) -> None:
        """Limit a client to a number of weighted tokens; a limit only shrinks (A5)."""
        self.models.accounts.node_of(client).tokens.lower(quota)

    def quota_text(self, client: Client) -> str:
        """Return the answer to a client's LLM_QUOTA (spec L9)."""
        return self.models.accounts.node_of(client).quota_text()

    def config_json(self) -> bytes:
        """Return the answer to LLM_CONFIG, with the contract's keys only (L13)."""
        return self.models.config_json()

    def quota_rows(self) -> list[dict[str, object]]:
        """Return every account as JSON objects, the host's own first."""
        return self.models.accounts.rows()

    def accounts(self) -> tuple[TokenAccount, ...]:
        """Return the accounts for metrics and the status page."""
        return (self.models.accounts.host_account(),)

    def client_gone(self, client: Client) -> None:
        """Close a client's account; its spending stays with its ancestors."""
        self.dialogues.client_gone(client)
        self.models.accounts.close(client)
        self.models.forget(client)

    # Hand-over (see ``ports.Portable``)

    def busy(self) -> str | None:
        """Return the reason to wait before a hand-over: calls, or charges to write."""
        if self.models.accounts.root.calls.reservations:
            return "a model is being called"
        spending = self.models.accounts.spending
        if spending.is_writing and spending.is_failing:
            return "the quota's file cannot be written"
        if spending.is_writing:
            return "a charge is being written"
        if self.endpoint is not None and self.endpoint.is_answering:
            return "the endpoint of [llm] is answering"
        return None

    def rest(self) -> None:
        """Stop beginning calls at the endpoint."""
        if self.endpoint is not None:
            self.endpoint.gate.shut()

    def resume(self) -> None:
        """Begin calls again."""
        if self.endpoint is not None:
            self.endpoint.gate.open()

    def interrupt(self) -> None:
        """End the endpoint's calls with an error."""
        if self.endpoint is not None:
            self.endpoint.interrupt()

    def snapshot(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return the state of accounts, conversations and endpoint, and descriptors."""
        del stack
        accounts = self.models.accounts
        state = LlmState(
            period=accounts.spending.period,
            root=state_of(accounts.root),
            nodes={name: state_of(node) for name, node in accounts.nodes().items()},
            children={
                name: state_of(node) for name, node in accounts.spending.children()
            },
        )
        fds: set[int] = set()
        if isinstance(self.dialogues, PlainDialogues):
            state.kept = [
                KeptChatState(client_id, name, list(messages), size)
                for client_id, name, messages, size in self.dialogues.kept.all()
            ]
        if self.endpoint is not None:
            state.endpoint, fds = self.endpoint.snapshot()
        plain = msgspec.to_builtins(state, builtin_types=(bytes,))
        default = self.models.default
        if self.models.section.api_key_file is None and default.has_key:
            plain[HANDED_OVER] = default.secrets[0]
        return plain, fds

    async def restore(self, state: object) -> None:
        """Restore the host's and named accounts; others wait for their clients.

        Limits are those of the present configuration.
        """
        left = self._left = read_state(state)
        await self.models.accounts.restore(left.period, left.root, left.children)

    async def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Restore the accounts of a child and of its nested clients."""
        if child.session is not None:
            await self.models.accounts.open(child, child.session.client)
        if self._left is not None:
            for session in child.sessions():
                self._restore_client(self._left, session.client)
        if self.endpoint is not None:
            self.endpoint.restore_child(child, stack)

    def _restore_client(self, left: LlmState, client: Client) -> None:
        node = left.nodes.get(client.id)
        if node is not None:
            self.models.accounts.restore_client(client, left.period, node)
        if isinstance(self.dialogues, PlainDialogues):
            for one in left.kept:
                if one.client == client.id:
                    said = tuple(one.messages)
                    self.dialogues.kept.keep(client, one.name, said, one.size_chars)

    async def restore_rest(self) -> None:
        """Restore the endpoint's connections, and begin calls."""
        self._left = None
        if self.endpoint is not None:
            self.endpoint.restore_connections()
            self.resume()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield each descriptor, with a word for it."""
        yield from self.models.descriptors()
        if self.endpoint is not None:
            yield from self.endpoint.descriptors()
