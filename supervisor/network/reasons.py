"""Reasons for refusing a name, an address or a connection, for journal and `ps`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reason(StrEnum):
    """The reasons of `network.refused`, to the letter."""

    NO_RULE = "no-rule"
    REFUSED_BY_RULE = "refused-by-rule"
    PRIVATE_ADDRESS = "private-address"
    OWN_ADDRESS = "own-address"
    FLEET_PORT = "fleet-port"
    NO_SUCH_NAME = "no-such-name"
    NO_NAME = "no-name"
    TOO_MANY_NAMES = "too-many-names"
    TLS_NO_SNI = "tls-no-sni"
    TLS_NO_HELLO = "tls-no-hello"
    TLS_OTHER_NAME = "tls-other-name"
    LIMIT_CONNECTIONS = "limit-connections"
    LIMIT_NET_BYTES = "limit-net_bytes"


@dataclass(frozen=True, slots=True)
class NetworkRefusal:
    """A decision against something that a child asked for.

    Attributes:
        reason: why.
        rule: the rule that would allow it, or the `!` rule that refuses it; None if no
            rule would.
    """

    reason: Reason
    rule: str | None = None


def describe_refusal(event: Mapping[str, object]) -> str:
    """Return a `network.refused` or `network.failed` as people read it."""
    port, reason = event.get("port"), event.get("reason")
    place = event.get("name") if port is None else f"{event.get('name')}:{port}"
    return f"{place}: {reason}{describe_rule(reason, event.get('rule'))}"


def describe_rule(reason: object, rule: object) -> str:
    """Return what a rule has to do with a refusal, to follow the reason."""
    if rule is None:
        return ""
    does = "refuses" if reason == Reason.REFUSED_BY_RULE else "would allow"
    return f"; the rule '{rule}' {does} it"
