"""One rule of a policy: `[!]TARGET[:PORTS][@OPTIONS]` (spec NET1).

A target is a name, `*.NAME` (the names below it, at any depth), `*`, or a network. A rule
keeps the operator's text; two rules are equal if their canonical forms are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Literal

from supervisor.network.addresses import Network, is_within
from supervisor.network.hosts import (
    Address,
    HostError,
    is_credential_name,
    parse_name,
    parse_port,
    parse_v4,
    parse_v6,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Tls = Literal["", "any", "sni"]

TLS_PORT = 443
"""The port of a rule that names none, and the one whose ClientHello is read (NET7)."""

MAX_RULE_LENGTH = 1024
"""Characters of a rule: the longest name, and 64 ports with options, take 670."""

_V4 = re.compile(r"[0-9.]+(?:/.*)?")
_V6 = re.compile(r"\[(?P<inner>[^\[\]]*)\](?P<after>/[^:]*)?")
_OPTIONS = ("private", "tls=any", "tls=sni")


class RuleError(ValueError):
    """A rule that cannot be read, or not be had; its text names the rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a target that a child may reach, or may not.

    Attributes:
        target: a name, `*.NAME`, `*`, or a network.
        ports: sorted.
        is_refusal: it begins with `!`.
        private: the name may stand for private addresses.
        tls: `any` and `sni` where they differ from what the ports say; else empty.
        cut_from: the network of a parent's rule that this one was narrowed from: a part
            of a wide network opens no more than the whole does.
        text: as written.
    """

    target: str | Network
    ports: tuple[int, ...] = (TLS_PORT,)
    is_refusal: bool = False
    private: bool = False
    tls: Tls = ""
    cut_from: Network | None = None
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the canonical form; every port is written."""
        options = [word for word in ("private",) if self.private]
        if self.tls:
            options.append(f"tls={self.tls}")
        ports = ",".join(map(str, self.ports))
        mark = "!" if self.is_refusal else ""
        tail = f"@{','.join(options)}" if options else ""
        return f"{mark}{format_target(self.target)}:{ports}{tail}"

    @property
    def written(self) -> str:
        """The rule as it was written, or its canonical form."""
        return self.text or str(self)

    def on_ports(self, ports: Iterable[int]) -> Rule:
        """Return this rule for some of its ports."""
        left = tuple(sorted(ports))
        if left == self.ports:
            return self
        tls = _differing(self.tls, self.target, left)
        return replace(self, ports=left, tls=tls, text="")

    def checks_tls(self, port: int) -> bool:
        """Tell whether a connection has to begin with a ClientHello for its name."""
        if not isinstance(self.target, str) or self.tls == "any":
            return False  # an address has no name that a ClientHello could be for
        return port == TLS_PORT or self.tls == "sni"

    def covers(self, target: str | Network) -> bool:
        """Tell whether all that a target stands for is this rule's as well."""
        own = self.target
        if isinstance(own, str):
            return isinstance(target, str) and _covers_name(own, target)
        return not isinstance(target, str) and is_within(target, own)


def _covers_name(wide: str, target: str) -> bool:
    if is_credential_name(target):
        return wide == target  # a credential is granted by itself alone
    if wide in {"*", target}:
        return True
    return wide.startswith("*.") and target.endswith(wide[1:])


def format_target(target: str | Network) -> str:
    """Return a target as a rule writes it."""
    if isinstance(target, str):
        return target
    bits = "" if target.num_addresses == 1 else f"/{target.prefixlen}"
    if isinstance(target, IPv6Network):
        return f"[{target.network_address}{bits}]"
    return f"{target.network_address}{bits}"


def rule_for(host: str | Address, port: int) -> Rule:
    """Return the narrowest rule that allows a host and a port."""
    if isinstance(host, str):
        return Rule(host, (port,))
    is_v6 = isinstance(host, IPv6Address)
    return Rule(IPv6Network(host) if is_v6 else IPv4Network(host), (port,))


def parse_rule(text: str) -> Rule:
    """Return the rule that a text states.

    Raises:
        RuleError: it states none.
    """
    try:
        return _parse(text)
    except HostError as why:
        raise RuleError(f"cannot read the rule '{shorten(text)}': {why}") from None


def _parse(text: str) -> Rule:
    if len(text) > MAX_RULE_LENGTH:
        raise HostError(f"it is longer than {MAX_RULE_LENGTH}; write several rules")
    if "://" in text:
        raise HostError("a URL is no rule; write its host and port: a.example.com:80")
    is_refusal = text.startswith("!")
    head, at, tail = text.removeprefix("!").partition("@")
    target_text, colon, ports_text = _split_port(head)
    ports = _parse_ports(ports_text) if colon else (TLS_PORT,)
    target = _parse_target(target_text)
    options = _parse_options(tail, target) if at else frozenset()
    tls: Tls = "any" if "tls=any" in options else "sni" if "tls=sni" in options else ""
    if is_refusal and options:
        raise HostError("a refusal has no options; leave them out")
    return Rule(
        target,
        ports,
        is_refusal,
        private="private" in options,
        tls=_differing(tls, target, ports),
        text=text,
    )


def _split_port(head: str) -> tuple[str, str, str]:
    """Split what stands before the options into target, colon and ports."""
    if head.startswith("["):
        end = head.find(":", head.find("]"))
        return (head, "", "") if end < 0 else (head[:end], ":", head[end + 1 :])
    if head.count(":") > 1 and _is_v6(head):
        raise HostError("a v6 address stands in brackets; write [2001:db8::1]")
    return head.partition(":")


def _is_v6(text: str) -> bool:
    address, _, _ = text.partition("%")
    try:
        IPv6Address(address.partition("/")[0])
    except ValueError:
        return False
    return True


def _parse_target(text: str) -> str | Network:
    if text.startswith("["):
        return _parse_v6_network(text)
    if _V4.fullmatch(text):
        address, slash, bits = text.partition("/")
        return _network(parse_v4(address), bits if slash else None)
    if "/" in text:
        raise HostError("a path is no part of a rule; write the host alone")
    if text == "*":
        return text
    name = text.removeprefix("*.")
    if "*" in name:
        raise HostError("* stands alone or as the first label; write *.example.com")
    return text[: len(text) - len(name)] + parse_name(name)


def _parse_v6_network(text: str) -> Network:
    match = _V6.fullmatch(text)
    if match is None:
        raise HostError("it is no v6 address; write [2001:db8::1]")
    address, slash, bits = match["inner"].partition("/")
    if match["after"] is not None:
        if slash:
            raise HostError("it has two lengths; write [2001:db8::]/32")
        slash, bits = "/", match["after"][1:]
    return _network(parse_v6(address), bits if slash else None)


def _network(address: Address, bits: str | None) -> Network:
    most = address.max_prefixlen
    length = most if bits is None else _parse_length(bits, most)
    if length is None:
        raise HostError(f"a length is 0 to {most}; write /{most} or none")
    kind = IPv6Network if isinstance(address, IPv6Address) else IPv4Network
    try:
        return kind((int(address), length))
    except ValueError:
        network = kind((int(address), length), strict=False)
        text = format_target(network)
        raise HostError(f"it has host bits set; write {text}") from None


def _parse_ports(text: str) -> tuple[int, ...]:
    """Return the different ports of a list, sorted."""
    ports = set()
    for word in text.split(","):
        port = parse_port(word)
        if port is None:
            raise HostError(
                f"'{shorten(word, 12)}' is no port; write numbers from 1 to 65535"
            )
        ports.add(port)
    return tuple(sorted(ports))


def _parse_length(text: str, most: int) -> int | None:
    """Return a number in plain decimal, None for another text or one above `most`."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,2}", text):
        return None
    return number if (number := int(text)) <= most else None


def _parse_options(text: str, target: str | Network) -> frozenset[str]:
    options = text.split(",")
    for option in options:
        if option not in _OPTIONS:
            known = ", ".join(_OPTIONS)
            raise HostError(f"'{shorten(option, 12)}' is no option; known are {known}")
    found = frozenset(options)
    if len(found) < len(options) or {"tls=any", "tls=sni"} <= found:
        raise HostError("an option is given twice; leave one out")
    if "tls=sni" in found and not isinstance(target, str):
        raise HostError("an address has no name to be checked; leave tls=sni out")
    return found


def _differing(tls: Tls, target: str | Network, ports: tuple[int, ...]) -> Tls:
    """Return an option if it differs from what the ports say."""
    if tls == "any" and isinstance(target, str) and TLS_PORT in ports:
        return tls
    if tls == "sni" and ports != (TLS_PORT,):
        return tls
    return ""
