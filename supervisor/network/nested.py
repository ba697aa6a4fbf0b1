"""The network of a nested child: a part of its parent's rules (spec NET2).

It is served by the relay, in a namespace beneath the parent's, and dials by the parent's
names: what the parent may not reach, the host refuses once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.network.contradictions import contradictions
from supervisor.network.narrowing import narrow
from supervisor.network.rule import RuleError, parse_rule
from supervisor.network.rules import Rules, parse_rules
from supervisor.network.settings import NetworkSettings

if TYPE_CHECKING:
    from collections.abc import Iterable


def nested_settings(texts: Iterable[str], parent: str) -> NetworkSettings:
    """Return what a nested child's network is.

    Args:
        texts: the rules that it asks for.
        parent: the parent's network as its environment has it: `host`, its rules with
            spaces between them, or nothing.

    Raises:
        RuleError: a rule cannot be read, means nothing, or the parent lacks it.
    """
    asked = [parse_rule(text) for text in texts]
    if not parent:
        why = "this child has no network; leave it out"
        raise RuleError(f"cannot allow '{asked[0].written}': {why}")
    is_hosts = parent == "host"
    own = Rules() if is_hosts else parse_rules(parent.split())
    for fault in contradictions(asked, tuple(own)):
        raise RuleError(fault)
    rules = Rules(asked) if is_hosts else narrow(own, asked)
    return NetworkSettings("rules", rules, outer_pool=not is_hosts)
