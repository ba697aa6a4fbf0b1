"""The used part of a wide bound, as the smallest list of rules (spec NET13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.network.rule import TLS_PORT, Rule, parse_rule, rule_for

if TYPE_CHECKING:
    from supervisor.network.addresses import Network
    from supervisor.network.hosts import Address

MAX_USES = 4096
"""Hosts and ports that are noted of a child: as many as it may have names."""


class LearnedState(msgspec.Struct):
    """The state for a hand-over: a rule of one port for each use."""

    uses: list[str]
    left_out: int


class UsedRules:
    """The hosts and ports that one child has asked for, and was allowed.

    Attributes:
        left_out: uses that were not noted, for there were too many.
    """

    def __init__(self, state: LearnedState | None = None) -> None:
        self._uses: dict[tuple[str | Network, int], Rule] = {}
        self.left_out = 0
        if state is not None:
            self.left_out = state.left_out
            for rule in map(parse_rule, state.uses):
                self._uses[rule.target, rule.ports[0]] = rule

    def snapshot(self) -> LearnedState:
        """Return what is handed over."""
        return LearnedState([*map(str, self._uses.values())], self.left_out)

    def add(
        self,
        host: str | Address,
        port: int,
        *,
        private: bool = False,
        any_tls: bool = False,
    ) -> None:
        """Note a connection that was allowed.

        Args:
            host: a name in the form of the rules, or an address.
            port: of the connection.
            private: the name stood for a private address.
            any_tls: it was to port 443 and did not begin with a ClientHello for the name.
        """
        plain = rule_for(host, port)
        key = (plain.target, port)
        known = self._uses.get(key)
        if known is None and len(self._uses) >= MAX_USES:
            self.left_out += 1
            return
        # An address opens itself, and has no name that a ClientHello could be for.
        is_name = isinstance(host, str)
        was_private = known is not None and known.private
        was_any = known is not None and known.tls == "any"
        is_any = is_name and port == TLS_PORT and (any_tls or was_any)
        self._uses[key] = Rule(
            plain.target,
            plain.ports,
            private=is_name and (private or was_private),
            tls="any" if is_any else "",
        )

    def rules(self) -> tuple[Rule, ...]:
        """Return the smallest list of rules that would have sufficed, sorted.

        No rule allows more than was used: the ports of a host share a rule if they need
        the same options, and no name is widened to what is beside it.
        """
        ports: dict[tuple[str | Network, bool], list[int]] = {}
        any_tls: set[str | Network] = set()
        for rule in self._uses.values():
            ports.setdefault((rule.target, rule.private), []).extend(rule.ports)
            if rule.tls:
                any_tls.add(rule.target)
        found = [
            # The option is about port 443 alone, and changes nothing for the others.
            Rule(
                target,
                tuple(sorted(numbers)),
                private=private,
                tls="any" if target in any_tls and TLS_PORT in numbers else "",
            )
            for (target, private), numbers in ports.items()
        ]
        return tuple(sorted(found, key=str))
