"""Models of clients: which one a client gets, and the call that is made of its request.

A model is a question of rights: the default one for the effective top-level view, the
restricted one for all others (spec L6), a child's own by its policy.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hostlib.redact import MIN_SECRET_CHARS, Redactor
from hostlib.user_values import parse_duration
from supervisor.llm.apis import ASKABLE, CHAT, has_reasoning
from supervisor.llm.gateway import LARGE_BYTES, Call, Gateway, Model, encode_chat
from supervisor.llm.presets import presets
from supervisor.llm.prompt_size import PromptSize
from supervisor.llm.quota import Weights
from supervisor.llm.section import ModelSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from supervisor.llm.accounts import Accounts
    from supervisor.llm.apis import Api
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node
    from supervisor.llm.section import LlmSection, WeightsSection
    from supervisor.parts import Parts
    from vfs.clients import Client


class Models:
    """The models of ``[llm]``, as clients may ask them.

    Args:
        parts: of the host.
        section: the configuration, which holds no key.
        providers: by the name of the model that has its own; None: that of ``[llm]``.
        accounts: who pays.

    Attributes:
        gateway: makes the calls.
        presets: system prompts by name.
        default: the provider of ``[llm]`` itself.
        redactor: takes secrets out of answers.
        fs: has the account of the host's descriptors.
        budget: has that of the memory of requests.
        log: of the host.
    """

    def __init__(
        self,
        parts: Parts,
        section: LlmSection,
        providers: Mapping[str | None, Provider],
        accounts: Accounts,
    ) -> None:
        self.section = section
        self.accounts = accounts
        self.presets = presets({n: p.system for n, p in section.presets.items()})
        self.default = providers[None]
        self.redactor = Redactor(
            text
            for one in providers.values()
            for text in one.secrets
            if len(text) >= MIN_SECRET_CHARS
        )
        self.gateway = Gateway(
            self.redactor,
            accounts.spending,
            parse_duration(section.timeout),
            parts.journal,
            parts.budget,
            parts.fence,
        )
        self.fs = parts.fs
        self.budget = parts.budget
        self.log = parts.log
        self._journal = parts.journal
        self._child_of = parts.child_of
        self._providers = providers
        self._told_dropped: set[str] = set()

    def models_of(self, client: Client) -> frozenset[str]:
        """Return the models that a client may ask, and leave to others (A5).

        The restricted one is another's only by a voluntary drop: a client
        that was given a model without the top-level right would have one more (I8).
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
        messages: Sequence[dict[str, str]],
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
        self.accounts.begin_window()
        return Call(
            model=model,
            api=api,
            encode=encode,
            is_large=size.size_bytes > LARGE_BYTES,
            prompt_tokens=size.estimated_tokens,
            most_prompt_tokens=size.most_tokens(client.policy.image_tokens),
            likely_prompt_tokens=size.likely_tokens(client.policy.image_tokens),
            max_tokens=None,
            node=self.accounts.node_of(client) if node is None else node,
            ledger=client.ledger,
            child_id=self._child_of(client),
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
        child_id = self._child_of(client)
        self._journal.write(
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

    def forget(self, client: Client) -> None:
        """Forget what was told of a client that is gone."""
        self._told_dropped.discard(client.id)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors."""
        for one in self._providers.values():
            yield from one.descriptors()
        yield from self.accounts.spending.descriptors()


def _weights(section: WeightsSection) -> Weights:
    return Weights(section.input, section.cached, section.output, section.cache_write)


def _aliased(alias: Mapping[str, str], asked: str) -> str | None:
    """Return the model that a name stands for; of several patterns the longest counts."""
    for pattern in sorted(alias, key=len, reverse=True):
        if fnmatchcase(asked, pattern):
            return alias[pattern]
    return None
