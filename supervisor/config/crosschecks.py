"""Checks of one section of the configuration against another.

A check yields (key, reason). One of names gets the document beside the ``Config``, where a
section with faults of its own is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostlib.extras import missing_package
from hostlib.user_values import join_key
from supervisor.config.fds import check_tools, is_enabled, odd_fds
from supervisor.config.read import names_of
from supervisor.fleet.store_address import is_postgres
from supervisor.llm.section import DOOR_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from supervisor.config.document import Config
    from supervisor.config.policy import PolicySection


def check_policy_names(
    config: Config, document: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each unknown policy that a child names."""
    policies = names_of(document, "policy")
    if policies is None:
        return
    for name, child in config.child.items():
        # A policy with faults is known all the same.
        if child.policy is not None and child.policy not in policies:
            known = ", ".join(policies) or "none"
            yield (
                f"child.{join_key(name)}.policy",
                f"there is no policy {child.policy!r}; there are: {known}",
            )


def check_after(
    config: Config, document: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each unknown child that another one waits for."""
    known = names_of(document, "child")
    for name, child in config.child.items():
        for other in child.after:
            if known is not None and other not in known:
                yield f"child.{join_key(name)}.after", f"there is no child {other!r}"


def check_fd_tools(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of contradictions between the sections of LLM fds."""
    yield from check_tools(config.tools, config.file_descriptor)


def check_preset_tools(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of presets with tools in a host without tools."""
    if config.llm is None or is_enabled(config.tools, config.file_descriptor):
        return
    for name, preset in config.llm.presets.items():
        if preset.tools:
            text = "true, but there are no LLM fds; list read_fd in [tools] enabled"
            yield f"llm.presets.{join_key(name)}.tools", text


def check_uses(
    config: Config, document: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each workspace that a policy cannot use."""
    known = names_of(document, "workspace")
    for policy_name, policy in config.policy.items():
        key = f"policy.{join_key(policy_name)}.workspace"
        for index, name in enumerate(policy.workspace):
            if known is not None and name not in known:
                shown = ", ".join(known) or "none"
                yield key, f"there is no workspace {name!r}; there are: {shown}"
            if name in policy.workspace[:index]:
                yield key, f"{name!r} is named twice; leave one out"


def check_credential_uses(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each credential that a policy cannot use."""
    for name, policy in config.policy.items():
        if policy.credentials:
            from supervisor.network.credential import (  # noqa: PLC0415 - with one
                uses_faults,
            )

            for why in uses_faults(policy.credentials, config.credential):
                yield f"policy.{join_key(name)}.credentials", why


def odd_fd_sections(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of probable mistakes in the sections of LLM fds."""
    has_model = config.llm is not None
    yield from odd_fds(config.tools, config.file_descriptor, has_model=has_model)


def odd_tool_doors(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of sidecars whose tools have an address past the endpoint."""
    for name, sidecar in config.sidecar.items():
        if sidecar.backend == "local":  # a container cannot reach it
            yield from _odd_doors(config, f"sidecar.{join_key(name)}.env", sidecar.env)


def odd_child_doors(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of children with an address past the endpoint."""
    for name, child in config.child.items():
        yield from _odd_doors(config, f"child.{join_key(name)}.env", child.env)


def _odd_doors(
    config: Config, key: str, env: Collection[str]
) -> Iterator[tuple[str, str]]:
    if config.llm is None or not config.llm.endpoint:
        return
    for variable in DOOR_VARIABLES:
        if variable in env:
            text = (
                f"{variable} is set here and wins, so the model's endpoint is not used;"
                " leave it out if that is not meant"
            )
            yield key, text


def odd_upstreams(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of policies whose names a proxy looks up (spec NET8)."""
    for name, policy in config.policy.items():
        if policy.upstream is not None:
            text = (
                f"{policy.upstream} looks names up: their addresses are not judged here"
            )
            yield f"policy.{join_key(name)}.upstream", text


def odd_policy(policy: PolicySection, config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of parts of a policy without any effect here."""
    of_sections = {
        "model": "llm",
        "quota": "llm",
        "image_tokens": "llm",
        "tools": "toolexec",
    }
    for key, section in of_sections.items():
        if getattr(policy, key) and getattr(config, section) is None:
            yield key, f"has no effect: there is no [{section}] section"
    if policy.recipe is not None:
        yield from _odd_recipe(policy.recipe, config)
    if policy.audit and policy is not config.policy.get("run") and not policy.workspace:
        yield "audit", "has no effect: there is no workspace"


def _odd_recipe(agent: str, config: Config) -> Iterator[tuple[str, str]]:
    """Yield what a policy's recipe needs of ``[llm]`` and does not find there."""
    if config.llm is None or not config.llm.endpoint:
        yield "recipe", "has no model: there is no [llm] endpoint = true"
        return
    from supervisor.llm.recipe import (  # noqa: PLC0415 - with one
        RecipeError,
        usable_recipe,
    )

    try:
        needed = usable_recipe(agent).llm
    except RecipeError:
        return  # reported as a fault
    for key, value in needed.items():
        if getattr(config.llm, key) != value:
            yield "recipe", f"{agent} needs [llm] {key} = {value!r}"


def missing_credentials(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of key files that only the service manager provides.

    Without them a host cannot run; checking its configuration is no fault.
    """
    from hostlib.keys import NoCredentialsError, expand_path  # noqa: PLC0415

    for key, path in config.key_files():
        try:
            expand_path(path)
        except NoCredentialsError as why:
            yield key, str(why)


def missing_packages(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of each section whose extra is not installed."""
    needed = (
        ("llm", config.llm is not None, "llm"),
        ("tools", is_enabled(config.tools, config.file_descriptor), "fds"),
        ("metrics", config.metrics is not None, "metrics"),
        (
            "fleet",
            config.fleet is not None and is_postgres(config.fleet.store),
            "postgres",
        ),
    )
    for section, is_asked, extra in needed:
        if is_asked and (why := missing_package(extra)):
            yield section, why
