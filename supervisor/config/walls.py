"""Walls of policies and sidecars: what their profiles keep and leave open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hostlib.user_values import join_key
from supervisor.config.policy import network_keys_of, network_word
from supervisor.config.read import names_of
from supervisor.config.sandbox import (
    RULES,
    check_kept,
    check_kernel,
    check_network,
    check_use,
    netns_fault,
    profile_named,
    way_fault,
)
from supervisor.sandbox.forecast import foreseen, keeps_network
from supervisor.sandbox.plan import NONE, PROFILES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from supervisor.config.document import Config
    from supervisor.config.policy import PolicySection
    from supervisor.sandbox.plan import Profile


_LEASES = (
    "its children can take leases (F_SETLEASE) on their files, and the host waits up to"
    " 45 s to open one; add it to its layers"
)


def check_walls(
    config: Config, document: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each policy whose walls contradict it."""
    known = names_of(document, "sandbox")
    for name, policy in config.policy.items():
        network = network_word(policy)
        for key, why in check_use(policy.sandbox, network, known):
            yield f"policy.{join_key(name)}.{key}", why
        profile = profile_named(policy.sandbox, config.sandbox)
        if profile is not None:  # else a fault that is reported elsewhere
            for key, why in _check_network(profile, policy):
                yield f"policy.{join_key(name)}.{key}", why
            for limit, why in check_kept(profile, policy.limits):
                yield f"policy.{join_key(name)}.limits.{limit}", why
            for why in check_kernel(profile):
                yield f"policy.{join_key(name)}.sandbox", why


def _check_network(
    profile: Profile, policy: PolicySection
) -> Iterator[tuple[str, str]]:
    network = network_word(policy)
    yield from check_network(profile, network)
    if network in {None, "none"} and network_keys_of(policy) is not None:
        key = "credentials" if policy.credentials else "publish"
        for _, why in (
            *check_use(policy.sandbox, RULES, None),
            *check_network(profile, RULES),
        ):
            yield key, why


def check_walls_of_sidecars(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each sidecar whose profile this kernel lacks."""
    for name, sidecar in config.sidecar.items():
        # An unknown one is reported elsewhere.
        for why in check_kernel(PROFILES.get(sidecar.sandbox, PROFILES[NONE])):
            yield f"sidecar.{join_key(name)}.sandbox", why


def check_ways(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each policy whose children cannot reach their tools."""
    for name, policy in config.policy.items():
        profile = profile_named(policy.sandbox, config.sandbox)
        if profile is None or config.toolexec is None or policy.tools == []:
            continue
        instead = "have a layer netns, or tools = []"
        if why := way_fault(profile, network_word(policy), "their tools", instead):
            yield f"policy.{join_key(name)}.sandbox", why


def odd_walls(
    config: Config, profile: Profile, network: str | None, *, has_tools: bool
) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of surprising openings and gaps in a policy's walls.

    Args:
        config: has the services within them.
        profile: that of the policy.
        network: of the policy; None if not set.
        has_tools: whether the policy does not switch tools off.
    """
    if network is None and not keeps_network(profile):
        why = f"sandbox {profile.name!r} has neither the layer netns nor seccomp"
        why = f"{why}; add one to its layers, or set network = 'host'"
        if "netns" in profile.layers:
            why = (
                f"sandbox {profile.name!r} keeps nobody from it: {netns_fault(profile)}"
            )
        yield "network", f"its children have the host's network: {why}"
    if profile.layers and "seccomp" not in profile.layers:  # "none" is obvious
        yield "sandbox", f"sandbox {profile.name!r} lacks seccomp: {_LEASES}"
    if why := _open_directory(profile):
        text = "its children can change their working directory"
        yield "sandbox", f"{text}: sandbox {profile.name!r} {why}"
    what, instead = "the model but by FD 3", "or have a layer netns"
    if config.llm is not None and (why := way_fault(profile, network, what, instead)):
        yield "sandbox", why
    if config.toolexec is not None and has_tools:
        for text in _missing_address(profile, network, config.toolexec.listen):
            yield "sandbox", text


def _missing_address(
    profile: Profile, network: str | None, listen: Collection[str]
) -> Iterator[str]:
    """Yield a warning if children reach tools by TCP alone and no address is set.

    Args:
        profile: that of the policy.
        network: of the policy.
        listen: of ``[toolexec]``.
    """
    if not profile.unix_sockets and network == "host" and {*listen} == {"unix"}:
        yield (
            f"its children have no way to their tools: sandbox {profile.name!r} has"
            " unix_sockets = false, and [toolexec] listen no tcp:// address; add one, or"
            " write tools = []"
        )


def _open_directory(profile: Profile) -> str:
    """Return why a profile's children may leave their working directory; "" if not."""
    layers = foreseen(profile)
    if not profile.layers or "landlock" in layers:  # "none" is obvious
        return ""
    if "mountns" not in layers:
        why = "has here neither the layer landlock nor mountns"
        return f"{why}; add one to its layers"
    if os.geteuid() == 0 and layers.isdisjoint({"pidns", "uid"}):
        why = "has mountns, and none of landlock, pidns and uid to close /proc/PID/root"
        return f"{why}; add one to its layers"
    return ""


def odd_sidecars(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of commands with a network beside children without one.

    A sidecar's command acts on files that children leave in a shared workspace
    (attack 49); a tool has its child's network.
    """
    alone = [
        name for name, policy in config.policy.items() if _is_kept_from(config, policy)
    ]
    for name, sidecar in config.sidecar.items():
        if alone and sidecar.start is not None and sidecar.workspace is not None:
            text = (
                "its command has the network and works where children of policy"
                f" {alone[0]!r} write, which have none: they can send by it; leave start or"
                " workspace out"
            )
            yield f"sidecar.{join_key(name)}.start", text


def _is_kept_from(config: Config, policy: PolicySection) -> bool:
    """Return whether a policy's children have tools and no network."""
    profile = profile_named(policy.sandbox, config.sandbox)
    if profile is None or policy.network == "host" or policy.tools == []:
        return False
    return bool(profile.layers) and keeps_network(profile)


def find_required_profiles(config: Config) -> Iterator[tuple[str, Profile, str]]:
    """Yield (key, profile, network) of each policy and sidecar with a required layer."""
    for name, policy in config.policy.items():
        profile = profile_named(policy.sandbox, config.sandbox)
        if profile is not None and profile.required:
            key = f"policy.{join_key(name)}.sandbox"
            yield key, profile, network_word(policy) or "none"
    for name, sidecar in config.sidecar.items():
        # A fault of its name is reported elsewhere.
        profile = PROFILES.get(sidecar.sandbox)
        if profile is not None and profile.required and sidecar.backend == "local":
            yield f"sidecar.{join_key(name)}.sandbox", profile, "host"
