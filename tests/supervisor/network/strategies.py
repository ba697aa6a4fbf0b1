"""Rules, names and addresses drawn from few words, so that they meet each other."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from hypothesis import strategies as st

from supervisor.network.addresses import Network
from supervisor.network.hosts import Address
from supervisor.network.rule import Rule, parse_rule

PORTS = (80, 443, 5432)
NAMES = ("a.test", "b.test", "x.a.test", "y.x.a.test", "test", "other")
TARGETS = (*NAMES, "*", "*.test", "*.a.test", "*.x.a.test")
NETWORKS: tuple[Network, ...] = (
    IPv4Network("0.0.0.0/0"),
    IPv4Network("10.0.0.0/8"),
    IPv4Network("10.1.0.0/16"),
    IPv4Network("10.1.2.3/32"),
    IPv4Network("203.0.113.0/24"),
    IPv4Network("203.0.113.7/32"),
    IPv6Network("::/0"),
    IPv6Network("2001:db8::/32"),
    IPv6Network("2001:db8::7/128"),
    IPv6Network("64:ff9b::/96"),
    IPv6Network("fd00::/8"),
)
ADDRESSES: tuple[Address, ...] = (
    IPv4Address("10.1.2.3"),
    IPv4Address("10.1.2.4"),
    IPv4Address("10.2.0.1"),
    IPv4Address("203.0.113.7"),
    IPv4Address("203.0.113.8"),
    IPv4Address("8.8.8.8"),
    IPv4Address("169.254.169.254"),
    IPv6Address("2001:db8::7"),
    IPv6Address("2001:db8::8"),
    IPv6Address("64:ff9b::cb00:7107"),
    IPv6Address("64:ff9b::a01:203"),
    IPv6Address("fd00::1"),
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Return rules as if they had been written."""
    target = draw(st.sampled_from((*TARGETS, *NETWORKS)))
    ports = draw(st.lists(st.sampled_from(PORTS), min_size=1, unique=True))
    rule = Rule(target, tuple(sorted(ports)), is_refusal=draw(st.booleans()))
    if rule.is_refusal:
        return rule
    options = [word for word in ("private",) if draw(st.booleans())]
    choices = ("", "tls=any", "tls=sni") if isinstance(target, str) else ("", "tls=any")
    options += filter(None, [draw(st.sampled_from(choices))])
    tail = f"@{','.join(options)}" if options else ""
    return parse_rule(f"{rule}{tail}")


rule_lists = st.lists(rules(), max_size=8)
