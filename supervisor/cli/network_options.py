"""The network of a run, from the options of ``run`` and a policy.

The command line takes precedence: ``--network`` replaces a policy's list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hostlib.user_values import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.config.document import Config
    from supervisor.config.policy import PolicySection
    from supervisor.network.section import NetworkSection

FAULTY_NETWORK = 2
"""The exit status of ``run`` for a rule that cannot be read (spec, Forms)."""

_LISTS = ("within", "publish")
_OPTIONS = ("network", *_LISTS, "upstream", "proxy_env", "credential")

_OPTION_OF = {"credentials": "credential"}
"""Keys of a policy whose options have another name."""


class NetworkFault(OptionError):  # noqa: N818 - beside the words of options
    """An option of the network that cannot be used."""


class NetworkOptions(NamedTuple):
    """The network of a run.

    Attributes:
        word: ``none``, ``host``, ``learn`` or ``rules``; None if not set.
        section: the keys of a network by name; None for none.
        key: the option or the key of a fault.
    """

    word: str | None
    section: NetworkSection | None
    key: str


def network_of(
    given: Mapping[str, Any],
    policy: PolicySection | None,
    config: Config | None = None,
) -> NetworkOptions:
    """Return the network of a run.

    Args:
        given: the options by name, as click gives them.
        policy: ``[policy.run]``, checked; None if there is none.
        config: the document of the policy and of credentials; None if there is none.

    Raises:
        NetworkFault: a rule or another value cannot be used.
    """
    asked = given["network"]
    key = "--network" if asked else "policy.run.network"
    if given["credential"] and not asked:
        key = "--credential"
    if not any(given[name] for name in _OPTIONS):
        return _policy_network(policy, key)
    section = _section(given, policy)
    _check(section, given, has_policy=policy is not None)
    _check_credentials(given["credential"], config)
    is_word = section.network in ("none", "host")
    word = section.mode if asked else _policy_network(policy, key).word
    is_more = bool(section.publish or section.credentials)
    return NetworkOptions(word, section if is_more or not is_word else None, key)


def _policy_network(policy: PolicySection | None, key: str) -> NetworkOptions:
    if policy is None:
        return NetworkOptions(None, None, key)
    from supervisor.config.policy import (  # noqa: PLC0415 - with a policy
        network_keys_of,
        network_word,
    )

    return NetworkOptions(network_word(policy), network_keys_of(policy), key)


def _section(given: Mapping[str, Any], policy: PolicySection | None) -> NetworkSection:
    """Return the keys that a policy and the options set, which may have faults."""
    from supervisor.network.section import NetworkSection  # noqa: PLC0415 - with one

    section = _policy_network(policy, "").section or NetworkSection()
    if given["network"]:
        network = _read_network(given["network"])
        if network in ("none", "host"):  # the rest of a policy is unused then
            section = NetworkSection()
        section.network, section.within = network, []
    for name in _LISTS:
        if given[name]:
            setattr(section, name, list(given[name]))
    if given["credential"]:
        section.credentials = list(given["credential"])
    section.upstream = given["upstream"] or section.upstream
    section.proxy_env = given["proxy_env"] or section.proxy_env
    return section


def _read_network(
    asked: Sequence[str],
) -> Literal["none", "host", "learn"] | list[str]:
    """Return the value of ``--network``.

    Raises:
        NetworkFault: it has two contradicting values.
    """
    for word in asked:
        if word in {"none", "host", "learn"}:
            if len({*asked}) > 1:
                why = f"{word!r} stands alone; leave it or the others out"
                raise NetworkFault(f"--network: {why}")
            return "none" if word == "none" else "host" if word == "host" else "learn"
    return list(asked)


def _check_credentials(names: Sequence[str], config: Config | None) -> None:
    """Refuse credentials that a configuration does not have.

    Raises:
        NetworkFault: with the name of the option.
    """
    if not names:
        return
    from supervisor.network.credential import uses_faults  # noqa: PLC0415 - with one

    known = {} if config is None else config.credential
    for why in uses_faults(names, known):
        raise NetworkFault(f"--credential: {why}")


def _check(
    section: NetworkSection, given: Mapping[str, Any], *, has_policy: bool
) -> None:
    """Refuse the first value that cannot be used.

    Raises:
        NetworkFault: with the name of its option, or of its key in the policy.
    """
    from supervisor.network.settings import faults  # noqa: PLC0415 - with one

    for key, why in faults(section):
        is_option = bool(given.get(_OPTION_OF.get(key, key))) or not has_policy
        option = _OPTION_OF.get(key, key)
        name = f"--{option.replace('_', '-')}" if is_option else f"policy.run.{key}"
        raise NetworkFault(f"{name}: {why}")
