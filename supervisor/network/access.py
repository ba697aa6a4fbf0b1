"""The present rules of one child, and the connections that it has tried.

1. Each question is answered by the rules of its moment: a connection that waits for
   something is judged once more before it is dialled.
2. Rules say what a name has; `addresses` says which of its addresses are out of reach
   all the same (spec NET3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from supervisor.network.addresses import (
    Opening,
    held_addresses,
    judge,
    without_zone,
)
from supervisor.network.contradictions import clashing_ports, contradictions
from supervisor.network.hosts import shorten
from supervisor.network.pool import Pool
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.rule import RuleError, rule_for
from supervisor.network.rule_changes import change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from supervisor.network.hosts import Address
    from supervisor.network.rule import Rule
    from supervisor.network.rules import Grant, Rules
    from supervisor.network.settings import NetworkSettings


class DeniedError(Exception):
    """A connection that a child may not have.

    Attributes:
        refused: why.
        host: the name or the address that the report names.
        port: of the connection.
    """

    def __init__(self, host: str | Address, port: int, refused: NetworkRefusal) -> None:
        super().__init__(refused.reason.value)
        self.host = host
        self.port = port
        self.refused = refused


def _nowhere(_address: Address, _port: int, _own: AbstractSet[Address]) -> bool:
    return False


class Access:
    """The rules of one child in force, and the names that it has addresses for.

    Args:
        is_kept_from: tells of an address without a zone, a port and the host's addresses
            whether the child may not reach it whatever its rules say.

    Attributes:
        rules: of this moment.
        pool: the child's names.
    """

    def __init__(
        self,
        settings: NetworkSettings,
        own_addresses: Callable[[], AbstractSet[Address]],
        names: Iterable[str] = (),
        is_kept_from: Callable[[Address, int, AbstractSet[Address]], bool] = _nowhere,
    ) -> None:
        self.rules = settings.rules
        self.pool = Pool(names)
        self._outer_pool = settings.outer_pool
        self._credentials = tuple(terms.inner_rule for terms in settings.credentials)
        self._published = tuple(one.port for one in settings.publish)
        self._own_addresses = own_addresses
        self._is_kept_from = is_kept_from

    def changed(self, allow: Sequence[Rule], deny: Sequence[Rule]) -> Rules:
        """Return the rules after a change that is not made yet.

        Raises:
            RuleError: it cannot be made.
        """
        self._check_allowed(allow)
        return change(self.rules, allow, deny)

    def _check_allowed(self, allow: Sequence[Rule]) -> None:
        """Refuse what `check-config` refuses of a child's rules."""
        for fault in contradictions(allow, self._credentials):
            raise RuleError(fault)
        for rule in allow:
            for port in clashing_ports([rule], self._published):
                problem = f"cannot allow '{shorten(rule.written, 32)}'"
                why = f"port {port} is published, and the host would listen on it"
                raise RuleError(f"{problem}: {why}; leave the port out")

    def host_at(self, address: Address, port: int) -> str | Address:
        """Return what a child means by an address: a name, or the address itself.

        Raises:
            DeniedError: it is one of the child's own, or stands for no name.
        """
        if address in self.pool:
            name = self.pool.name_of(address)
            if name is not None:
                return name
        elif not address.is_loopback:
            return address
        raise DeniedError(address, port, NetworkRefusal(Reason.NO_NAME))

    def decide(self, host: str | Address, port: int) -> Grant:
        """Return what allows a connection.

        Raises:
            DeniedError: nothing does.
        """
        if isinstance(host, str):
            decision = self.rules.decide(host, port)
        else:
            decision = self.rules.decide_address(host, port)
        if isinstance(decision, NetworkRefusal):
            raise DeniedError(host, port, decision)
        return decision

    def check_sni(self, grant: Grant, host: str | Address, sni: str) -> None:
        """Refuse a ClientHello for a name that a connection may not be for.

        Raises:
            DeniedError: it is for such a name.
        """
        refused = None if sni == host else self.rules.check_sni(grant, sni)
        if refused is not None:
            raise DeniedError(host, grant.port, refused)

    def check_answer(
        self, grant: Grant, host: str | Address, addresses: Sequence[Address]
    ) -> None:
        """Refuse a host for the addresses that it has (spec NET3).

        Raises:
            DeniedError: one of them is out of reach, or there is none.
        """
        own = self._own_addresses()
        for address in addresses:
            for one in (without_zone(address), *held_addresses(address)):
                if self._is_kept_from(one, grant.port, own):
                    raise DeniedError(
                        host, grant.port, NetworkRefusal(Reason.FLEET_PORT)
                    )
        opening = grant.opening(outer_pool=self._outer_pool)
        reason = judge(addresses, opening, own)
        if reason is not None:
            rule = self._rule_for(grant, host, addresses, own)
            raise DeniedError(host, grant.port, NetworkRefusal(reason, rule))
        for address in addresses:
            refused = self.rules.refuse_answer(address, grant.port)
            if refused is not None:
                raise DeniedError(host, grant.port, refused)

    def _rule_for(
        self,
        grant: Grant,
        host: str | Address,
        addresses: Sequence[Address],
        own: AbstractSet[Address],
    ) -> str | None:
        """Return the narrowest rule that would open such addresses, None if none would."""
        rule = rule_for(host, grant.port)
        if isinstance(rule.target, str):
            rule = replace(rule, private=True)
            opening = Opening(private=True, outer_pool=self._outer_pool)
        else:
            opening = Opening(networks=(rule.target,))
        return str(rule) if judge(addresses, opening, own) is None else None
