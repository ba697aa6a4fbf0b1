"""Models of clients: the choice of a client's model, and the call for its request.

A client's rights choose its model: the default one for the effective top-level view, the
restricted one otherwise (spec L6), or the model of a child's policy.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hostlib.redact import MIN_SECRET_CHARS, Redactor
from hostlib.threads import LARGE_BYTES
from hostlib.user_values import parse_duration
from supervisor.llm.apis import ASKABLE, CHAT, has_reasoning
from supervisor.llm.gateway import Call, Gateway, Model, encode_chat
from supervisor.llm.presets import BUILT_IN
from supervisor.llm.prompt_size import PromptSize
from supervisor.llm.section import ModelSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from supervisor.llm.accounts import Accounts
    from supervisor.llm.apis import Api
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node
    from supervisor.llm.section import LlmSection
    from supervisor.parts import Parts
    from vfs.clients import Client


class Models:
    """The models of ``[llm]``, for clients.

    Args:
        parts: the host's parts.
        section: the configuration, which holds no key.
        providers: model with a provider of its own -> provider; None: that of ``[llm]``.
        accounts: the accounts of clients.

    Attributes:
        gateway: makes the calls.
        presets: system prompts by name.
        default: the provider of ``[llm]`` itself.
        redactor: removes secrets from answers.
        fs: the file system, with the account of the host's descriptors.
        budget: the account of the memory of requests.
        log: the host's log.
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
        self.presets = BUILT_IN | {n: p.system for n, p in section.presets.items()}
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
        """Return the models that a client may use, and pass to nested clients (A5).

        The restricted model is added only for a client with the top-level right: another
        client with a model of its own would gain a second one (I8).
        """
        own = self.model_name(client, claim=True)
        found = {own, self.model_name(client, claim=False)}
        if client.policy.top_level and client.policy.model is None:
            found |= self.section.models.keys()
        return frozenset(found)

    def model_for(self, client: Client, api: str, asked: str | None) -> str:
        """Return the model for a request at the endpoint (spec MD4).

        Args:
            client: the client.
            api: the API of the request.
            asked: the model's name in the request; None for none.
        """
        allowed = self.models_of(client)
        if asked in allowed:
            return str(asked)
        policy = client.policy
        if policy.top_level and policy.model is None and asked is not None:
            found = _resolve_alias(self.section.alias, asked)
            if found is not None:
                return found
        if policy.model is None and not policy.top_level:
            return self.section.restricted_model_for(api)
        return self.model_name(client, claim=True)

    def has_tools(self, preset: str) -> bool:
        """Return whether a model with this preset may call tools."""
        section = self.section.presets.get(preset)
        return section is not None and section.tools

    def model_name(self, client: Client, *, claim: bool) -> str:
        """Return the model of a client in a view (spec L6)."""
        policy = client.policy
        if policy.top_level and claim:
            return policy.model or self.section.default_model
        own = None if policy.top_level else policy.model  # None for a voluntary drop
        return own or self.section.restricted_model_for(CHAT.name)

    def model(self, name: str) -> Model:
        """Return a model by its name in the configuration or at its provider."""
        section = self.section
        known = section.models.get(name, ModelSection())
        quota = section.quota
        weights = quota.models.get(name, quota.weights)
        own = name if known.base_url is not None else None
        provider = self._providers[own]
        bound_name = known.max_tokens_as or (own is None and section.max_tokens_as)
        apis = known.api or (own is None and section.api) or ()
        names = (apis,) if isinstance(apis, str) else apis
        return Model(
            name,
            known.model or name,
            provider,
            known.weights or weights,
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
        size_bytes: int,
    ) -> Call:
        """Return the call for a client's messages.

        Args:
            client: the client.
            messages: the conversation.
            claim: the effective view (spec A1).
            size_bytes: size of its texts.
        """
        section = self.section
        body: dict[str, object] = {"messages": list(messages)}
        if section.temperature is not None:
            body["temperature"] = section.temperature
        return self.call_for_body(
            client,
            self.model_name(client, claim=claim),
            body,
            size=PromptSize(size_bytes, len(messages)),
            max_tokens=section.max_tokens,
        )

    def call_for_body(
        self,
        client: Client,
        model: str,
        body: Mapping[str, object],
        *,
        size: PromptSize,
        max_tokens: int | None,
        node: Node | None = None,
    ) -> Call:
        """Return the call for a request body.

        Args:
            client: the client.
            model: the model's name.
            body: the request.
            size: size of everything that is passed on.
            max_tokens: most tokens of output; None for no bound.
            node: the node that pays; None for the client's own.
        """
        found = self.model(model)
        encode = partial(encode_chat, found, body)
        call = self.new_call(client, found, CHAT, size, encode, node)
        is_hidden = has_reasoning(CHAT, body)
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
        """Return the call for a request, without a bound on its output.

        Args:
            client: the client.
            model: the model.
            api: the API.
            size: size of everything that is passed on.
            encode: see ``Call``.
            node: the node that pays; None for the client's own.
        """
        if node is None:
            node = self.accounts.node_of(client)
        return Call(
            model=model,
            api=api,
            encode=encode,
            is_large=size.size_bytes > LARGE_BYTES,
            prompt_tokens=size.estimated_tokens,
            most_prompt_tokens=size.most_tokens(client.policy.image_tokens),
            likely_prompt_tokens=size.likely_tokens(client.policy.image_tokens),
            max_tokens=None,
            node=node,
            ledger=client.ledger,
            child_id=self._child_of(client),
            client_id=client.id,
        )

    def note_dropped(self, client: Client, api: Api, names: tuple[str, ...]) -> None:
        """Count members that were left out of a request; report once for each child.

        Args:
            client: the client.
            api: the API of the request.
            names: names of the members (spec MD2).
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
        """Return the answer to LLM_CONFIG, with the contract's keys only (L13)."""
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
        """Forget the reports about a client that is gone."""
        self._told_dropped.discard(client.id)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield each descriptor, with a word for it."""
        for one in self._providers.values():
            yield from one.descriptors()
        yield from self.accounts.spending.descriptors()


def _resolve_alias(alias: Mapping[str, str], asked: str) -> str | None:
    """Return the model of an alias; of several patterns the longest is used."""
    for pattern in sorted(alias, key=len, reverse=True):
        if fnmatchcase(asked, pattern):
            return alias[pattern]
    return None
