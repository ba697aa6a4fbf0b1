"""``[llm]``: the model, its key, its quota, its presets (face: configuration)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from hostlib.user_values import OptionError, join_key, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator


WINDOWS = ("run", "day", "never")

APIS = ("chat", "responses", "messages")
"""The APIs of models."""

HOSTED_TOOLS = ("refuse", "drop", "pass")
"""The treatments of tools that a provider runs itself."""

QUOTA_STATUSES = (429, 400)
"""The statuses with which the endpoint refuses an unpaid call."""

BOUNDS = ("max_tokens", "max_completion_tokens")
"""The names under which servers take the bound on the output."""

DOOR_VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_AUTH_TOKEN",
)
"""The variables that the endpoint sets for a child and its tools."""

MOST_IMAGE_TOKENS = 1_000_000
"""Most tokens of one image: the longest context of today's models."""

MAX_TIMEOUT_S = 3600.0
"""Longest timeout: more than an hour is a mistake of units."""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of tokens by kind, in weighted tokens (spec L8).

    Attributes:
        input: cost of a token of the prompt.
        cached: cost of a token that the provider had cached.
        output: cost of a token of the completion, reasoning included.
        cache_write: cost of a token that the provider caches now; None: as ``input``.
    """

    input: float = 1.0
    cached: float = 0.25
    output: float = 4.0
    cache_write: float | None = None

    @property
    def written(self) -> float:
        """The cost of a token that the provider caches now."""
        return self.input if self.cache_write is None else self.cache_write

    @property
    def prompt(self) -> float:
        """The highest cost of a token of a prompt."""
        return max(self.input, self.written)


class ModelSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[llm.models.NAME]``; NAME is usable wherever a model is named."""

    base_url: str | None = None
    api_key_file: str | None = None
    model: str | None = None
    max_tokens_as: str | None = None
    weights: Weights | None = None
    api: str | list[str] | None = None
    reasoning: bool = False


class QuotaSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[llm.quota]``."""

    max_tokens: int | float | None = None
    window: str = "run"
    weights: Weights = msgspec.field(default_factory=Weights)
    models: dict[str, Weights] = {}


class PresetSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[llm.presets.NAME]``."""

    system: str
    tools: bool = False


class LlmSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[llm]``."""

    default_model: str = "gpt-4o-mini"
    restricted_model: str | dict[str, str] = "gpt-4o-mini"
    base_url: str | None = None
    api_key_file: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_tokens_as: str | None = None
    max_calls: int | None = None
    timeout: str = "60s"
    endpoint: bool = False
    endpoint_port: int = 0
    # None: not set, so that a recipe may set it.
    quota_status: int | None = None
    hosted_tools: str | None = None
    api: str | list[str] | None = None
    reasoning: bool = False
    alias: dict[str, str] = {}
    models: dict[str, ModelSection] = {}
    quota: QuotaSection = msgspec.field(default_factory=QuotaSection)
    presets: dict[str, PresetSection] = {}

    def restricted_model_for(self, api: str) -> str:
        """Return the model of restricted children for an API."""
        found = self.restricted_model
        if isinstance(found, str):
            return found
        return found.get(api) or found.get("default") or self.default_model

    def key_files(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) of each named key file, as written."""
        if self.api_key_file is not None:
            yield "api_key_file", self.api_key_file
        for name, model in self.models.items():
            if model.api_key_file is not None:
                yield f"models.{join_key(name)}.api_key_file", model.api_key_file


def check(section: LlmSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that ``[llm]`` cannot have."""
    yield from _check_calls(section)
    yield from _check_endpoint(section)
    yield from _check_models(section)
    yield from _check_quota(section.quota)
    for name in section.presets:
        key = f"presets.{join_key(name)}"
        if not name or any(not c.isprintable() or c in " @" for c in name):
            yield key, "a name without blanks, control characters and @"


def _check_calls(section: LlmSection) -> Iterator[tuple[str, str]]:
    try:
        timeout_s = parse_duration(section.timeout)
    except OptionError as why:
        yield "timeout", str(why)
    else:
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            yield "timeout", "more than nothing, and an hour at most"
    for key in ("max_tokens", "max_calls"):
        value = getattr(section, key)
        if value is not None and value < 1:
            yield key, "at least 1; leave it out for no bound"
    temperature = section.temperature
    if temperature is not None and not 0 <= temperature <= 2:
        yield "temperature", "between 0 and 2"


def _check_endpoint(section: LlmSection) -> Iterator[tuple[str, str]]:
    if section.quota_status not in (None, *QUOTA_STATUSES):
        yield "quota_status", "429 or 400"
    if not 0 <= section.endpoint_port <= 65_535:
        yield "endpoint_port", "a port from 1 to 65535; 0 for any that is free"
    if section.hosted_tools not in (None, *HOSTED_TOOLS):
        yield "hosted_tools", "refuse, drop or pass"


def _check_models(section: LlmSection) -> Iterator[tuple[str, str]]:
    if not section.default_model.strip():
        yield "default_model", "a model's name"
    yield from _check_restricted(section.restricted_model)
    yield from _check_apis("api", section.api)
    for pattern, name in section.alias.items():
        if not pattern or not name.strip():
            yield f"alias.{join_key(pattern)}", "a pattern, and a model's name"
    yield from _check_place("", section.base_url, section.api_key_file)
    yield from _check_bound("", section.max_tokens_as)
    for name, model in section.models.items():
        where = f"models.{join_key(name)}."
        if model.api_key_file is not None and model.base_url is None:
            yield f"{where}api_key_file", "a key needs its own base_url beside it"
        yield from _check_place(where, model.base_url, model.api_key_file)
        yield from _check_bound(where, model.max_tokens_as)
        yield from _check_apis(f"{where}api", model.api)
        if model.weights is not None:
            yield from _check_weights(f"{where}weights", model.weights)


def _check_restricted(value: str | dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        value = {"default": value}
    elif "default" not in value:
        yield "restricted_model", "a model's name, or a table with one as default"
    for name, model in value.items():
        if name not in (*APIS, "embeddings", "default"):
            text = "chat, responses, messages, embeddings or default"
            yield f"restricted_model.{join_key(name)}", text
        if not model.strip():
            yield "restricted_model", "a model's name"


def _check_apis(where: str, value: str | list[str] | None) -> Iterator[tuple[str, str]]:
    names = [value] if isinstance(value, str) else value
    if names is not None and (not names or any(name not in APIS for name in names)):
        yield where, "chat, responses, messages, or a list of them"


def _check_place(
    where: str, base_url: str | None, key_file: str | None
) -> Iterator[tuple[str, str]]:
    if base_url is not None:
        try:
            parts = urlsplit(base_url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname)
            good = good and (parts.port is None or parts.port > 0)
        except ValueError:
            good = False
        if not good:
            yield f"{where}base_url", "an address such as https://host/v1"
    if key_file is not None:
        from hostlib.keys import (  # noqa: PLC0415
            KeyFileError,
            NoCredentialsError,
            read_key,
        )

        try:
            read_key(key_file)
        except NoCredentialsError:
            return  # ``missing_credentials`` reports it
        except KeyFileError as why:
            yield f"{where}api_key_file", str(why)


def _check_bound(where: str, name: str | None) -> Iterator[tuple[str, str]]:
    if name is not None and name not in BOUNDS:
        yield f"{where}max_tokens_as", "max_tokens or max_completion_tokens"


def _check_quota(quota: QuotaSection) -> Iterator[tuple[str, str]]:
    limit = quota.max_tokens
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        yield "quota.max_tokens", "more than 0; leave it out for no limit"
    if quota.window not in WINDOWS:
        yield "quota.window", "run, day or never"
    yield from _check_weights("quota.weights", quota.weights)
    for name, weights in quota.models.items():
        yield from _check_weights(f"quota.models.{join_key(name)}", weights)


def _check_weights(where: str, weights: Weights) -> Iterator[tuple[str, str]]:
    for name in ("input", "cached", "output", "cache_write"):
        value = getattr(weights, name)
        if value is None:
            continue
        if not (math.isfinite(value) and 0 <= value <= 1_000_000):
            yield f"{where}.{name}", "a number from 0 to 1000000"


def check_policy(
    model: str | None, quota: float | None, image_tokens: int | None
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value of a policy that the model cannot have."""
    if model is not None and not model.strip():
        yield "model", "a model's name"
    if quota is not None and not (math.isfinite(quota) and quota >= 0):
        yield "quota", "weighted tokens, from 0 on"
    if image_tokens is not None and not 0 <= image_tokens <= MOST_IMAGE_TOKENS:
        yield "image_tokens", f"tokens for an image, from 0 to {MOST_IMAGE_TOKENS}"
