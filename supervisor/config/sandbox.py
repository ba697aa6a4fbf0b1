"""``[sandbox.NAME]``: named profiles, and the search for a profile by its name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import join_key
from supervisor.sandbox.forecast import (
    foreseen,
    keeps_network,
    no_netns,
)
from supervisor.sandbox.groups import HOLDERS, is_held
from supervisor.sandbox.plan import (
    LAYERS,
    NEEDS_MOUNTNS,
    NONE,
    PROFILES,
    SERVES_NETWORK,
    Machine,
    Plan,
    Profile,
    make_profile,
)
from supervisor.spawn.request import SpawnError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

NETWORKS = ("none", "host", "learn")
"""The words of a policy's network; `RULES` stands for a list of rules."""
RULES = "rules"

_SERVED = (RULES, "learn")
"""Networks by name, which the host serves in the child's own net namespace."""


class SandboxSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[sandbox.NAME]``."""

    layers: list[str] | None = None
    required: list[str] = []
    unix_sockets: bool = True


def check_sandboxes(section: Mapping[str, SandboxSection]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each fault in ``[sandbox]``."""
    for name, profile in section.items():
        where = join_key(name)
        if name in PROFILES:
            yield where, f"{name!r} is a profile of its own; choose another name"
        for key in ("layers", "required"):
            for layer in set(getattr(profile, key) or ()) - LAYERS.keys():
                known = ", ".join(LAYERS)
                yield f"{where}.{key}", f"no layer {layer!r}; there are {known}"
        layers = make_profile(
            name, profile.layers
        ).layers  # some are part of every profile
        if not profile.unix_sockets and "seccomp" not in layers:
            why = "false is kept by the layer 'seccomp', which is not among the layers"
            yield f"{where}.unix_sockets", f"{why}; add it there"
        for why in _unavailable_layers(profile.required, layers):
            yield f"{where}.required", why


def _unavailable_layers(
    required: Collection[str], layers: Collection[str]
) -> Iterator[str]:
    """Yield faults of required layers that no machine can give."""
    for layer in required:
        if layer not in LAYERS:
            continue  # reported as that
        if layer not in layers:
            yield f"{layer!r} is required but not among the layers; add it there"
        elif layer in NEEDS_MOUNTNS and "mountns" not in layers:
            why = f"{layer!r} is required and needs the layer 'mountns'"
            yield f"{why}; add it to the layers"


def check_use(
    sandbox: str, network: str | None, known: Collection[str] | None
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each fault of a policy's sandbox and network.

    Args:
        sandbox: the named profile.
        network: a word for it, also for rules; None if not set.
        known: names of the configuration's own profiles; None if not known.
    """
    if known is not None and sandbox not in (*PROFILES, *known):
        names = ", ".join(dict.fromkeys((*PROFILES, *known)))
        yield "sandbox", f"no profile {sandbox!r}; there are {names}"
    if network is not None and network not in (*NETWORKS, RULES):
        yield "network", f"none, host, learn or a list of rules, not {network!r}"
    if sandbox == NONE and network == "none":
        why = "'none' contradicts sandbox 'none', which keeps nobody from the network"
        yield "network", f"{why}; choose another sandbox, or network = 'host'"
    if sandbox == NONE and network in _SERVED:
        why = "sandbox 'none' makes no net namespace, so that rules cannot be kept"
        yield "network", f"{why}; choose another sandbox"


def check_network(profile: Profile, network: str | None) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) if a policy's network contradicts the layers of its profile.

    Args:
        profile: that of the policy.
        network: as for ``check_use``.
    """
    if network in _SERVED and profile.layers:
        yield from _check_served(profile)
    if network == "host" and "netns" in profile.required:
        why = f"'host' contradicts sandbox {profile.name!r}, which requires the layer netns"
        yield "network", f"{why}; take it out of one of them"
    if network == "none" and not keeps_network(profile):
        why = (
            f"'none' contradicts sandbox {profile.name!r}, which keeps nobody from the"
        )
        if "netns" in profile.layers:
            yield "network", f"{why} network here: {netns_fault(profile)}"
        else:
            lacks = "without the layer netns or seccomp; add one to its layers"
            yield "network", f"{why} network {lacks}, or set network = 'host'"


def _check_served(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) if rules cannot be kept in a profile, as far as known."""
    for layer in SERVES_NETWORK:
        if layer not in profile.layers:
            why = f"sandbox {profile.name!r} lacks the layer {layer!r}"
            yield "network", f"cannot keep the rules: {why}; add it to its layers"
        elif layer not in foreseen(profile):
            why = no_netns(profile)[0] or f"the layer {layer!r} cannot be had here"
            how = f"it takes {LAYERS[layer]}"
            yield "network", f"cannot keep the rules: {why}; {how}"
            return


def netns_fault(profile: Profile) -> str:
    """Return why a profile has no netns here, and the remedy."""
    why, how = no_netns(profile)
    return f"{why}; {how} seccomp to its layers, or set network = 'host'"


_OF_GROUPS = ("cpus",)
"""Limits that only a group of processes keeps: no start without one."""


def check_kept(profile: Profile, limits: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (limit, reason) for each limit that a profile keeps on no machine.

    Args:
        profile: that of the policy.
        limits: names of the policy's limits.
    """
    for limit in _OF_GROUPS:
        if limit not in limits:
            continue
        why = f"nothing keeps it in sandbox {profile.name!r}: "
        if "cgroup" not in profile.layers:
            why += "it takes the layer 'cgroup'; name a profile that has it"
            yield limit, f"{why}, or leave the limit out"
        elif not is_held(foreseen(profile)):
            why += f"its children can leave their groups, for want of {HOLDERS}"
            yield limit, f"{why}; add such layers, or leave the limit out"


def way_fault(profile: Profile, network: str | None, to: str, instead: str) -> str:
    """Return why a profile has no way to a service; "" if it has one.

    Args:
        profile: that of the policy.
        network: of the policy.
        to: the service in words.
        instead: the remedy.
    """
    # In its own net namespace the child listens, for the host.
    if profile.unix_sockets or network == "host" or "netns" in foreseen(profile):
        return ""
    why = (
        f"its children have no way to {to}: sandbox {profile.name!r} has unix_sockets ="
        f" false, and the network is none; set network = 'host', {instead}"
    )
    return f"{why}; {no_netns(profile)[0]}" if "netns" in profile.layers else why


def check_kernel(profile: Profile) -> Iterator[str]:
    """Yield why this kernel, or this user, does not have what a profile requires.

    Only what is known without a start: features that a kernel has or lacks for all
    users, and those of root. The rest is tried (``profile_trials``).
    """
    is_root = os.geteuid() == 0
    if not profile.required and not (is_root and "uid" in profile.layers):
        return  # the probe takes a moment to load
    from supervisor.sandbox import attempts  # noqa: PLC0415

    told = () if "mountns" in profile.layers else NEEDS_MOUNTNS  # as a profile's fault
    left = set(profile.required & profile.layers).difference(told)
    profile = replace(profile, layers=profile.layers - (profile.required & {*told}))
    for layer, ask in (("landlock", attempts.landlock), ("seccomp", attempts.seccomp)):
        if layer in left:
            try:
                ask()
            except OSError as why:
                left.remove(layer)
                yield unavailable_phrase(layer, str(why.strerror))
    yield from _unplanned_layers(profile, left)


def _unplanned_layers(profile: Profile, left: set[str]) -> Iterator[str]:
    """Yield required layers that no plan can have, root's ``uid`` included."""
    machine = Machine()
    while True:
        asked = replace(profile, required=frozenset(left))
        try:
            Plan(asked, "none", machine).wanted()
        except SpawnError as why:
            is_required = why.stage in left
            left.discard(why.stage)
            if why.stage == "uid":  # root's children have it, or do not start
                profile = replace(profile, layers=profile.layers - {"uid"})
            yield unavailable_phrase(why.stage, why.reason) if is_required else why.text
        else:
            return


def unavailable_phrase(layer: str, why: str) -> str:
    """Return the text that a required layer is not available here."""
    if layer == "userns" and os.geteuid() == 0:
        # Nothing is missing: a host of root does not need it.
        how = "take it out of 'required'"
        return f"{layer!r}, which is required, is not made here: {why}; {how}"
    return f"{layer!r}, which is required, is missing: {why}; it takes {LAYERS[layer]}"


def profile_named(name: str, known: Mapping[str, SandboxSection]) -> Profile | None:
    """Return a profile; None if there is none with that name."""
    if name in PROFILES:
        return PROFILES[name]
    section = known.get(name)
    if section is None:
        return None
    found = make_profile(name, section.layers, section.required)
    return replace(found, unix_sockets=section.unix_sockets)
