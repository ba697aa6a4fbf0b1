"""Reasons for refusing a name, an address or a connection, for journal and `ps`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """The reasons of `network.refused`, to the letter."""

    NO_RULE = "no-rule"
    REFUSED_BY_RULE = "refused-by-rule"
    PRIVATE_ADDRESS = "private-address"
    OWN_ADDRESS = "own-address"
    NO_SUCH_NAME = "no-such-name"
    NO_NAME = "no-name"
    TOO_MANY_NAMES = "too-many-names"
    TLS_NO_SNI = "tls-no-sni"
    TLS_NO_HELLO = "tls-no-hello"
    TLS_OTHER_NAME = "tls-other-name"
    LIMIT_CONNECTIONS = "limit-connections"
    LIMIT_NET_BYTES = "limit-net_bytes"


@dataclass(frozen=True, slots=True)
class Refused:
    """A decision against something that a child asked for.

    Attributes:
        reason: why.
        rule: the rule that would allow it, or the `!` rule that refuses it; None if no
            rule would.
    """

    reason: Reason
    rule: str | None = None
