"""``[policy.NAME]``: everything a child may do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hostlib.linux.descriptors import odd_open_files
from hostlib.user_values import OptionError, limit_faults, parse_limits
from supervisor.config.llm import check_policy
from supervisor.config.read import joined, named
from supervisor.sandbox.home import is_home_file
from supervisor.toolexec.kinds import is_tool_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_WORDS = {
    "publish": ("direct", "on-close"),
    "durability": ("none", "close", "write"),
}


class PolicySection(msgspec.Struct, forbid_unknown_fields=True):
    """``[policy.NAME]``; ``run`` takes its defaults from ``[policy.run]``."""

    top_level: bool = False
    root: str | None = None
    read: list[str] = []
    write: list[str] = []
    sandbox: str = "auto"
    publish: str = "direct"
    durability: str = "none"
    limits: dict[str, int | float | str] = {}
    network: str | None = None
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
            yield f"{joined(name)}.{key}", reason


def _check(policy: PolicySection) -> Iterator[tuple[str, str]]:
    yield from check_policy(policy.model, policy.quota, policy.image_tokens)
    for key, allowed in _WORDS.items():
        value = getattr(policy, key)
        if value not in allowed:
            yield key, f"one of {', '.join(allowed)}, not {value!r}"
    yield from _check_lists(policy)
    if policy.recipe is not None:
        from supervisor.llm.recipe import (  # noqa: PLC0415 - with one
            RecipeError,
            usable_recipe,
        )

        yield from named("recipe", usable_recipe, policy.recipe, RecipeError)
    for name, reason in limit_faults(policy.limits):
        yield f"limits.{joined(name)}", reason


def odd_policy_limits(policy: PolicySection) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of a policy's limits that look like a mistake."""
    try:
        limits = parse_limits(limit_texts(policy))
    except OptionError:
        return  # a fault
    for text in odd_open_files(limits.open_files):
        yield "limits.open_files", text


def _check_lists(policy: PolicySection) -> Iterator[tuple[str, str]]:
    for key in ("read", "write", "expose"):
        for path in getattr(policy, key):
            yield from named(key, _path, path, OptionError)
    if policy.home is not None:
        yield from named("home", _path, policy.home, OptionError)
    for name in policy.home_files:
        yield from named("home_files", _home_file, name, OptionError)
    for tool in policy.tools or ():
        yield from named("tools", _tool, tool, OptionError)


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
    """Return a policy's limits as ``--limit`` would have them."""
    return [f"{name}={value}" for name, value in policy.limits.items()]
