"""What a host with ``[llm]`` offers its children: models, accounts, presets.

What it is: the service.  What it is not: opening it (``opening``).

Rules of this file.

1. The model is a question of rights: the default one for the effective top-level view,
   the restricted one for all others (spec L6), a child's own by its policy.
2. Every client has a node in the quota tree, its parent's above it, the host's on top.
   That of a child which the configuration names is the same one in all its lives.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from supervisor.config.llm import ModelSection
from supervisor.llm import handover, handover_endpoint
from supervisor.llm.apis import ASKABLE, CHAT, has_reasoning
from supervisor.llm.dialogues import PlainDialogues
from supervisor.llm.gateway import LARGE_BYTES, Call, Gateway, Model, encode_chat
from supervisor.llm.ledger import LedgerError, Spending
from supervisor.llm.presets import presets
from supervisor.llm.prompt_size import PromptSize
from supervisor.llm.quota import Node, Weights, quota_text, status_text
from supervisor.llm.redact import MIN_SECRET_CHARS, Redactor
from supervisor.options import parse_duration
from supervisor.session.ports import Account, Doors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack, ExitStack

    from supervisor.config.llm import LlmSection, WeightsSection
    from supervisor.dialogues import Dialogues, Message
    from supervisor.host import Host
    from supervisor.llm.apis import Api
    from supervisor.llm.endpoint import Endpoint
    from supervisor.llm.provider import Provider
    from supervisor.session.ports import Caller, ChildView
    from vfs.filesystem import Client


class LlmService:
    """What ``session.ports.Model`` asks for; made by ``open_llm``.

    Attributes:
        gateway: makes the calls.
        section: the configuration, which holds no key.
        presets: system prompts by name.
        root: the host's own node.
        default: the provider of ``[llm]`` itself.
        dialogues: answers where more than one call belongs together; LLM fds put their
            tool loop here.
        spending: what the host's own node has spent.
        log: of the host.
        fs: likewise; it has the account of the host's descriptors.
        budget: likewise; it has that of the memory of requests.
    """

    def __init__(
        self,
        host: Host,
        section: LlmSection,
        providers: Mapping[str | None, Provider],
        spending: Spending,
        root: Node,
    ) -> None:
        self.section = section
        self.presets = presets({n: p.system for n, p in section.presets.items()})
        self.root = root
        self.default = providers[None]
        self.redactor = Redactor(
            text
            for one in providers.values()
            for text in one.secrets
            if len(text) >= MIN_SECRET_CHARS
        )
        self.gateway = Gateway(
            self.redactor,
            spending,
            parse_duration(section.timeout),
            host.journal,
            host.budget,
        )
        self.endpoint: Endpoint | None = None
        self.dialogues: Dialogues = PlainDialogues(self)
        self._host = host
        self.log = host.log
        self.fs = host.fs
        self.budget = host.budget
        self._providers = providers
        self.spending = spending
        self._left: handover.AccountsState | None = None
        self._nodes: dict[str, Node] = {}
        self._clients: dict[str, Client] = {}
        self._told_dropped: set[str] = set()

    # The seam

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Open an account, and the endpoint if there is one."""
        if child.session is None:
            raise RuntimeError("a child without a conversation has no account")
        client = child.session.client
        (await self._open_account(child, client)).limit = child.spec.quota
        if self.endpoint is None:
            return {}
        return await self.endpoint.admit(child, client, stack)

    async def chat(
        self, caller: Caller, parts: tuple[bytes, ...], *, claim: bool
    ) -> bytes | None:
        """Answer one LLM_CHAT; see ``ports.Model``."""
        from supervisor.llm.chat import answer  # noqa: PLC0415 - it names this class

        return await answer(caller, self, claim, parts)

    def doors_of(self, client: Client) -> Doors | None:
        """Return how programs reach the endpoint for a child; None if there is none."""
        return None if self.endpoint is None else self.endpoint.doors_of(client)

    async def _open_account(self, child: ChildView, client: Client) -> Node:
        if child.spec.account is not None:
            try:
                node = await self.spending.node_of_child(child.spec.account)
            except LedgerError as why:
                raise OSError(errno.EIO, str(why)) from None
            self._nodes[client.id] = node
            self._clients[client.id] = client
        return self.node_of(client)

    def client_gone(self, client: Client) -> None:
        """Close an account; what it has cost stays with its ancestors."""
        self.dialogues.client_gone(client)
        self._nodes.pop(client.id, None)
        self._clients.pop(client.id, None)
        self._told_dropped.discard(client.id)

    # Handed over (see ``ports.Portable``)

    def busy(self) -> str | None:
        """Say what has to end first."""
        return handover.busy(self)

    def rest(self) -> None:
        """Begin no more calls at the endpoint."""
        if self.endpoint is not None:
            self.endpoint.gate.shut()

    def go_on(self) -> None:
        """Begin calls again."""
        if self.endpoint is not None:
            self.endpoint.gate.open()

    def interrupt(self) -> None:
        """Let the endpoint's calls end with an error."""
        if self.endpoint is not None:
            self.endpoint.interrupt()

    def hand_over(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return the accounts, conversations, and the endpoint."""
        del stack
        return handover.hand_over(self)

    async def take_over(self, state: object) -> None:
        """Go on with the accounts that are kept; the others wait for their clients."""
        self._left = handover.read(state)
        await handover.take_over(self, self._left)

    async def child_entered(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Go on with the accounts of a child."""
        if child.session is not None:
            await self._open_account(child, child.session.client)
        if self._left is not None:
            handover.enter(self, self._left, child)
        if self.endpoint is not None:
            handover_endpoint.enter(self.endpoint, child, stack)

    async def all_entered(self) -> None:
        """Go on with the endpoint's connections, and begin calls."""
        self._left = None
        if self.endpoint is not None:
            handover_endpoint.go_on(self.endpoint)
            self.go_on()

    def nodes(self) -> dict[str, Node]:
        """Return the accounts of clients by their ids."""
        return dict(self._nodes)

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may ask, and leave to others (A5).

        The restricted one is another's only by a voluntary drop: for who was given a
        model without the top-level right it would be one more (I8).
        """
        own = self.model_name(client, claim=True)
        found = {own, self.model_name(client, claim=False)}
        if client.policy.top_level and client.policy.model is None:
            found |= self.section.models.keys()
        return frozenset(found)

    def model_for(self, client: Client, api: str, asked: str | None) -> str:
        """Return the model that a program of a client gets at a door (spec MD4).

        Args:
            client: whose.
            api: that it asks by.
            asked: the name that it gives; None for none.
        """
        allowed = self.models_of(client)
        if asked in allowed:
            return str(asked)
        policy = client.policy
        if policy.top_level and policy.model is None and asked is not None:
            found = _aliased(self.section.alias, asked)
            if found is not None:
                return found
        if policy.model is None and not policy.top_level:
            return self.section.restricted_model_for(api)
        return self.model_name(client, claim=True)

    def limit(self, client: Client, quota: float) -> None:
        """Hold a client to so many weighted tokens; a limit only shrinks (A5)."""
        self.node_of(client).lower(quota)

    # Accounts

    def node_of(self, client: Client) -> Node:
        """Return a client's node; a new one for a client that had none."""
        self._begin_window()
        node: Node | None = self._nodes.get(client.id)
        if node is None:
            parent = client.parent
            above = self.root if parent is None else self.node_of(parent)
            node = Node(above)
            self._nodes[client.id] = node
            self._clients[client.id] = client
        return node

    def _begin_window(self) -> None:
        """Begin a new window of the quota, if it is time."""
        if self.spending.begin_anew():
            for known in self._nodes.values():
                known.forget_spending()

    def status_text(self, client: Client) -> str:
        """Return what LLM_CHAT's reply says of a client's quota (spec L7)."""
        return status_text(self.node_of(client))

    def quota_text(self, client: Client) -> str:
        """Return what LLM_QUOTA answers a client (spec L9)."""
        return quota_text(self.node_of(client))

    def quota_rows(self) -> list[dict[str, object]]:
        """Return every account as JSON objects, the host's own first."""
        rows = [_row(self.root, None, None)]
        for client_id, node in self._nodes.items():
            parent = self._clients[client_id].parent
            rows.append(_row(node, client_id, None if parent is None else parent.id))
        return rows

    def accounts(self) -> Iterator[Account]:
        """Yield the host's own account, for metrics and the status page."""
        root = self.root
        yield Account("host", root.spent, root.reserved, root.limit)

    # Calls

    def has_tools(self, preset: str) -> bool:
        """Tell whether a model with this preset may call tools."""
        section = self.section.presets.get(preset)
        return section is not None and section.tools

    def model_name(self, client: Client, *, claim: bool) -> str:
        """Return the model that a client is given (spec L6)."""
        policy = client.policy
        restricted = self.section.restricted_model_for(CHAT.name)
        if policy.top_level:
            if not claim:
                return restricted  # a voluntary drop
            return policy.model or self.section.default_model
        return policy.model or restricted

    def model(self, name: str) -> Model:
        """Return a model by a name of the configuration, or a provider's own."""
        section = self.section
        known = section.models.get(name)
        quota = section.quota
        weights = quota.models.get(name, quota.weights)
        known = known or ModelSection()
        own = name if known.base_url is not None else None
        provider = self._providers[own]
        bound_name = known.max_tokens_as or (own is None and section.max_tokens_as)
        apis = known.api or (own is None and section.api) or ()
        names = (apis,) if isinstance(apis, str) else apis
        return Model(
            name,
            known.model or name,
            provider,
            _weights(known.weights or weights),
            bound_name or provider.bound_name,
            tuple(ASKABLE[name] for name in names) or provider.apis,
            known.reasoning or (own is None and section.reasoning),
        )

    def call(
        self,
        client: Client,
        messages: Sequence[Message],
        *,
        claim: bool,
        size_bytes: int | None = None,
    ) -> Call:
        """Return the call that a client's messages make, by the rules for it.

        Args:
            client: who asks.
            messages: the conversation.
            claim: ``is_top_level``.
            size_bytes: of what they say, where somebody has counted it.
        """
        section = self.section
        body: dict[str, object] = {"messages": list(messages)}
        if section.temperature is not None:
            body["temperature"] = section.temperature
        size = size_bytes
        if size is None:
            size = sum(len(message["content"].encode()) for message in messages)
        return self.prepared(
            client,
            self.model_name(client, claim=claim),
            body,
            size=PromptSize(size, len(messages)),
            max_tokens=section.max_tokens,
        )

    def prepared(
        self,
        client: Client,
        model: str,
        body: Mapping[str, object],
        *,
        size: PromptSize,
        max_tokens: int | None,
        node: Node | None = None,
    ) -> Call:
        """Return a call of a body that was made elsewhere.

        Args:
            client: who asks.
            model: a name, as ``model`` takes it.
            body: the request.
            size: of its messages and all else that is forwarded.
            max_tokens: most tokens of output; None for no bound.
            node: pays; None for the client's own.
        """
        found = self.model(model)
        encode = partial(encode_chat, found, body)
        is_hidden = has_reasoning(CHAT, body)
        call = self.new_call(client, found, CHAT, size, encode, node)
        return replace(call, max_tokens=max_tokens, has_reasoning=is_hidden)

    def new_call(
        self,
        client: Client,
        model: Model,
        api: Api,
        size: PromptSize,
        encode: Callable[[int | None], bytes],
        node: Node | None = None,
    ) -> Call:
        """Return a call without a bound on its output.

        Args:
            client: who asks.
            model: who is asked.
            api: by which API.
            size: of all that is forwarded.
            encode: see ``Call``.
            node: pays; None for the client's own.
        """
        self._begin_window()
        return Call(
            model=model,
            api=api,
            encode=encode,
            is_large=size.size_bytes > LARGE_BYTES,
            prompt_tokens=size.estimated_tokens,
            most_prompt_tokens=size.most_tokens(client.policy.image_tokens),
            likely_prompt_tokens=size.likely_tokens(client.policy.image_tokens),
            max_tokens=None,
            node=self.node_of(client) if node is None else node,
            ledger=client.ledger,
            child_id=self._host.child_of(client),
            client_id=client.id,
        )

    def note_dropped(self, client: Client, api: Api, names: tuple[str, ...]) -> None:
        """Count members of a request that were left out; tell it once for a child.

        Args:
            client: whose.
            api: of the door.
            names: of them (spec MD2).
        """
        if not names:
            return
        child_id = self._host.child_of(client)
        self._host.journal.write(
            "llm.dropped", child_id=child_id, client_id=client.id, api=api.name,
            fields=names,
        )  # fmt: skip
        if client.id not in self._told_dropped:
            self._told_dropped.add(client.id)
            text = f"Left out of requests by {api.path[1:]}: {', '.join(names)}"
            self.log.write("INFO", text, child_id=child_id)

    def config_json(self) -> bytes:
        """Return what LLM_CONFIG answers: the contract's keys and no other (L13)."""
        section = self.section
        weights = section.quota.weights
        return msgspec.json.encode(
            {
                "default_model": section.default_model,
                "api_key_configured": self.default.has_key,
                "base_url": self.redactor.text(self.default.base_url),
                "max_calls": section.max_calls or 0,
                "quota_max_tokens": section.quota.max_tokens or 0,
                "quota_weights": {
                    "input": weights.input,
                    "cached": weights.cached,
                    "output": weights.output,
                },
            }
        )

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors."""
        for one in self._providers.values():
            yield from one.descriptors()
        yield from self.spending.descriptors()
        if self.endpoint is not None:
            yield from self.endpoint.descriptors()


def _weights(section: WeightsSection) -> Weights:
    return Weights(section.input, section.cached, section.output, section.cache_write)


def _aliased(alias: Mapping[str, str], asked: str) -> str | None:
    """Return the model that a name stands for; of several patterns the longest counts."""
    for pattern in sorted(alias, key=len, reverse=True):
        if fnmatchcase(asked, pattern):
            return alias[pattern]
    return None


def _row(node: Node, client_id: str | None, parent_id: str | None) -> dict[str, object]:
    return {
        "client_id": client_id,
        "parent_id": parent_id,
        "spent": round(node.spent, 4),
        "reserved": round(node.reserved, 4),
        "limit": node.limit,
        "calls": node.calls,
        "under_way": node.under_way,
        "max_calls": node.max_calls,
    }
