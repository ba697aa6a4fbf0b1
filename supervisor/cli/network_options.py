"""What the options of ``run`` and a policy say of the network, put together.

The command line goes first: what a policy lists is gone where ``--network`` is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hostlib.user_values import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.config.policy import PolicySection
    from supervisor.network.section import NetworkSection

FAULTY_NETWORK = 2
"""The exit status of ``run`` for a rule that cannot be read (spec, Forms)."""

_LISTS = ("within", "publish")
_OPTIONS = ("network", *_LISTS, "upstream", "proxy_env")


class NetworkFault(OptionError):  # noqa: N818 - beside the words of options
    """An option of the network that cannot be."""


class Network(NamedTuple):
    """The network of a run.

    Attributes:
        word: ``none``, ``host``, ``learn`` or ``rules``; None if nothing is said.
        section: the keys of a network by name; None for none.
        key: the option or the key that a fault names.
    """

    word: str | None
    section: NetworkSection | None
    key: str


def network_of(given: Mapping[str, Any], policy: PolicySection | None) -> Network:
    """Return the network that is asked for.

    Args:
        given: the options by name, as click gives them.
        policy: ``[policy.run]``, checked; None if there is none.

    Raises:
        NetworkFault: a rule or another value cannot be used.
    """
    asked = given["network"]
    key = "--network" if asked else "policy.run.network"
    if not any(given[name] for name in _OPTIONS):
        return _of_policy(policy, key)
    section = _section(given, policy)
    _check(section, given, has_policy=policy is not None)
    is_word = section.network in ("none", "host")
    word = section.mode if asked else _of_policy(policy, key).word
    return Network(word, None if is_word and not section.publish else section, key)


def _of_policy(policy: PolicySection | None, key: str) -> Network:
    if policy is None:
        return Network(None, None, key)
    from supervisor.config.policy import (  # noqa: PLC0415 - with a policy
        network_keys_of,
        network_word,
    )

    return Network(network_word(policy), network_keys_of(policy), key)


def _section(given: Mapping[str, Any], policy: PolicySection | None) -> NetworkSection:
    """Return the keys that a policy and the options set; they may have faults."""
    from supervisor.network.section import NetworkSection  # noqa: PLC0415 - with one

    section = _of_policy(policy, "").section or NetworkSection()
    if given["network"]:
        network = _asked_network(given["network"])
        if network in ("none", "host"):  # nothing else that a policy says is of use
            section = NetworkSection()
        section.network, section.within = network, []
    for name in _LISTS:
        if given[name]:
            setattr(section, name, list(given[name]))
    section.upstream = given["upstream"] or section.upstream
    section.proxy_env = given["proxy_env"] or section.proxy_env
    return section


def _asked_network(
    asked: Sequence[str],
) -> Literal["none", "host", "learn"] | list[str]:
    """Return what ``--network`` says.

    Raises:
        NetworkFault: it says two things.
    """
    for word in asked:
        if word in {"none", "host", "learn"}:
            if len({*asked}) > 1:
                why = f"{word!r} stands alone; leave it or the others out"
                raise NetworkFault(f"--network: {why}")
            return "none" if word == "none" else "host" if word == "host" else "learn"
    return list(asked)


def _check(
    section: NetworkSection, given: Mapping[str, Any], *, has_policy: bool
) -> None:
    """Refuse the first value that cannot be.

    Raises:
        NetworkFault: with the name of its option, or of its key in the policy.
    """
    from supervisor.network.settings import faults  # noqa: PLC0415 - with one

    for key, why in faults(section):
        is_option = bool(given.get(key)) or not has_policy
        name = f"--{key.replace('_', '-')}" if is_option else f"policy.run.{key}"
        raise NetworkFault(f"{name}: {why}")
