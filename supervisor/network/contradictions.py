"""Rules that cannot mean what they say, for `check-config` and live changes.

Each is legal alone. Rules for a child's own addresses never come to the host, for a
child's own loopback and its pool end in its namespace (spec NET4).
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import TYPE_CHECKING

from supervisor.network.addresses import POOL_V4, POOL_V6, Network, is_within
from supervisor.network.hosts import is_credential_name, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from supervisor.network.rule import Rule

_OWN: tuple[tuple[Network, str], ...] = (
    (IPv4Network("127.0.0.0/8"), "is the child's own loopback"),
    (IPv4Network("0.0.0.0/8"), "is the child itself"),
    (IPv6Network("::1/128"), "is the child's own loopback"),
    (IPv6Network("::/128"), "is the child itself"),
    (POOL_V4, "holds the addresses of the child's names"),
    (POOL_V6, "holds the addresses of the child's names"),
)


def contradictions(
    rules: Iterable[Rule], granted: Collection[Rule] = ()
) -> Iterator[str]:
    """Yield what is wrong with rules beside each other, one sentence for each fault.

    Args:
        rules: of a child, or to be added to those that it has.
        granted: rules that it may have in any case, as those for its credentials.
    """
    rules = tuple(rules)
    allowing = [rule for rule in rules if not rule.is_refusal]
    refusing = [rule for rule in rules if rule.is_refusal]
    for rule in allowing:
        if rule not in granted:
            yield from _own_fault(rule)
        yield from _unused_fault(rule, refusing)
    for rule in refusing:
        yield from _idle_fault(rule, allowing)


def clashing_ports(rules: Iterable[Rule], published: Iterable[int]) -> tuple[int, ...]:
    """Return the published ports that the host listens on, for rules grant them."""
    granted = {port for rule in rules if not rule.is_refusal for port in rule.ports}
    return tuple(port for port in published if port in granted)


def _own_fault(rule: Rule) -> Iterator[str]:
    """Yield why a rule is for what a child has without it."""
    why = _own_reason(rule.target)
    if why:
        yield f"cannot keep the rule {_quoted(rule)}: it {why}; leave it out"


def _own_reason(target: str | Network) -> str:
    if isinstance(target, str):
        if is_credential_name(target):
            return "is for a credential, which 'credentials' grants"
        is_own = target in {"localhost", "*.localhost"} or target.endswith(".localhost")
        return "is the child's own loopback" if is_own else ""
    return next((why for network, why in _OWN if is_within(target, network)), "")


def _unused_fault(rule: Rule, refusing: Sequence[Rule]) -> Iterator[str]:
    """Yield which refusals leave nothing of a rule."""
    stronger = [other for other in refusing if other.covers(rule.target)]
    left = {*rule.ports}.difference(*(other.ports for other in stronger))
    if not left:
        quoted = " and ".join(map(_quoted, stronger[:2]))
        yield f"cannot use the rule {_quoted(rule)}: {quoted} refuses it; drop one"


def _idle_fault(rule: Rule, allowing: Sequence[Rule]) -> Iterator[str]:
    """Yield which ports a refusal leaves open that names another port only.

    `!a.com` is for 443 alone: beside `*:80` it refuses nothing, and reads as if it did.
    """
    meant = [
        other
        for other in allowing
        if other.covers(rule.target) or rule.covers(other.target)
    ]
    ports = {port for other in meant for port in other.ports}
    if ports and not ports & {*rule.ports}:
        port = min(ports)
        yield (
            f"cannot use the rule {_quoted(rule)}: the rules allow other ports of it;"
            f" write port {port}, or drop it"
        )


def _quoted(rule: Rule) -> str:
    return f"'{shorten(rule.written, 32)}'"
