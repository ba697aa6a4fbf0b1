"""``[policy.NAME]``: everything a child may do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from hostlib.linux.descriptors import open_files_warnings
from hostlib.user_values import (
    OptionError,
    check_value,
    join_key,
    limit_faults,
    network_limit_faults,
    parse_limits,
)
from supervisor.config.sandbox import NETWORKS, RULES
from supervisor.llm.section import check_policy
from supervisor.sandbox.home import is_home_file
from supervisor.toolexec.kinds import is_tool_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.network.section import NetworkSection


_WORDS = {
    "durability": ("none", "close", "write"),
    "pool": ("own", "outer"),
}

_PUBLISH_WORDS = ("direct", "on-close")
"""The words about publication; other words in the list are ports."""


class PolicySection(msgspec.Struct, forbid_unknown_fields=True):
    """``[policy.NAME]``; ``run`` takes its defaults from ``[policy.run]``."""

    top_level: bool = False
    root: str | None = None
    read: list[str] = []
    write: list[str] = []
    sandbox: str = "auto"
    publish: str | list[str] = "direct"
    durability: str = "none"
    limits: dict[str, int | float | str] = {}
    network: str | list[str] | None = None
    within: list[str] = []
    upstream: str | None = None
    proxy_env: bool = False
    pool: str = "own"
    credentials: list[str] = []
    model: str | None = None
    quota: float | None = None
    image_tokens: int | None = None
    tools: list[str] | None = None
    home: str | None = None
    home_files: dict[str, str] = {}
    workspace: list[str] = []
    expose: list[str] = []
    recipe: str | None = None
    audit: bool = False


def check_policies(section: Mapping[str, PolicySection]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a policy cannot have."""
    for name, policy in section.items():
        for key, reason in _check(policy):
            yield f"{join_key(name)}.{key}", reason


def _check(policy: PolicySection) -> Iterator[tuple[str, str]]:
    yield from check_policy(policy.model, policy.quota, policy.image_tokens)
    for key, allowed in _WORDS.items():
        value = getattr(policy, key)
        if value not in allowed:
            yield key, f"one of {', '.join(allowed)}, not {value!r}"
    yield from _check_publish(policy)
    yield from _check_network(policy)
    yield from _check_lists(policy)
    if policy.recipe is not None:
        from supervisor.llm.recipe import (  # noqa: PLC0415 - with one
            RecipeError,
            usable_recipe,
        )

        yield from check_value("recipe", usable_recipe, policy.recipe, RecipeError)
    for name, reason in limit_faults(policy.limits):
        yield f"limits.{join_key(name)}", reason


def _check_publish(policy: PolicySection) -> Iterator[tuple[str, str]]:
    value = policy.publish
    if isinstance(value, str):
        if value not in _PUBLISH_WORDS:
            allowed = ", ".join(_PUBLISH_WORDS)
            yield "publish", f"one of {allowed}, or a list of ports, not {value!r}"
    elif len([word for word in value if word in _PUBLISH_WORDS]) > 1:
        yield "publish", "direct or on-close, not both; leave one out"


def _check_network(policy: PolicySection) -> Iterator[tuple[str, str]]:
    if isinstance(policy.network, str) and policy.network not in NETWORKS:
        return  # reported with the profile
    section = network_keys_of(policy)
    if section is None:
        for name, reason in network_limit_faults(policy.limits):
            yield f"limits.{name}", reason
        return
    from supervisor.network.settings import faults  # noqa: PLC0415 - with one

    yield from faults(section)


def network_word(policy: PolicySection) -> str | None:
    """Return a word for the network of a policy, also for rules; None if it has none."""
    return RULES if isinstance(policy.network, list) else policy.network


def publish_word(policy: PolicySection) -> str:
    """Return when a written file becomes visible."""
    value = [policy.publish] if isinstance(policy.publish, str) else policy.publish
    return next((word for word in value if word in _PUBLISH_WORDS), _PUBLISH_WORDS[0])


def network_keys_of(policy: PolicySection) -> NetworkSection | None:
    """Return the keys of a network with rules; None if the policy has a word."""
    value = [] if isinstance(policy.publish, str) else policy.publish
    ports = [port for port in value if port not in _PUBLISH_WORDS]
    is_more = bool(policy.within or ports or policy.upstream or policy.proxy_env)
    is_more = is_more or bool(policy.credentials)
    is_word = policy.network in (None, "none", "host")
    if is_word and not is_more and policy.pool == "own":
        return None
    from supervisor.network.section import NetworkSection  # noqa: PLC0415 - with one

    return NetworkSection(
        network=cast("Any", "none" if policy.network is None else policy.network),
        within=policy.within,
        publish=ports,
        upstream=policy.upstream,
        proxy_env=policy.proxy_env,
        pool="outer" if policy.pool == "outer" else "own",
        credentials=policy.credentials,
    )


def odd_policy_limits(policy: PolicySection) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of a policy's limits that are probably a mistake."""
    try:
        limits = parse_limits(limit_texts(policy))
    except OptionError:
        return  # reported as a fault
    for text in open_files_warnings(limits.open_files):
        yield "limits.open_files", text


def _check_lists(policy: PolicySection) -> Iterator[tuple[str, str]]:
    for key in ("read", "write", "expose"):
        for path in getattr(policy, key):
            yield from check_value(key, _path, path, OptionError)
    if policy.home is not None:
        yield from check_value("home", _path, policy.home, OptionError)
    for name in policy.home_files:
        yield from check_value("home_files", _home_file, name, OptionError)
    for tool in policy.tools or ():
        yield from check_value("tools", _tool, tool, OptionError)


def _path(path: str) -> None:
    if not path or "\0" in path:
        raise OptionError(f"not a path: {path!r}")


def _home_file(name: str) -> None:
    if not is_home_file(name):
        raise OptionError(f"not a name within HOME: {name!r}; leave out '/' and '..'")


def _tool(name: str) -> None:
    if not is_tool_name(name):
        raise OptionError(f"not the name of a tool: {name!r}")


def limit_texts(policy: PolicySection) -> list[str]:
    """Return a policy's limits in the form of ``--limit``."""
    return [f"{name}={value}" for name, value in policy.limits.items()]
