"""Which addresses a name never reaches: the ranges of the contract, edge by edge."""

from collections.abc import Callable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.network.addresses import Network, Opening, judge
from supervisor.network.hosts import Address
from supervisor.network.reasons import Reason
from supervisor.network.rule import parse_rule

PRIVATE_V4 = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
OTHER_V4 = (
    *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "198.18.0.0/15"),
    *("224.0.0.0/4", "240.0.0.0/4"),
    *("168.63.129.16/32", "100.100.100.200/32"),
)
OTHER_V6 = (
    *("::/128", "::1/128", "fe80::/10", "fec0::/10", "ff00::/8"),
    *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128"),
    *("fd00:42::42/128", "64:ff9b:1::/48"),
)
ALL_ONES = 0xFFFFFFFF
# Every form in which a v6 address holds a v4 one, with what stands around it.
FORMS: dict[str, Callable[[int], int]] = {
    "mapped": lambda v4: 0xFFFF << 32 | v4,
    "compatible": lambda v4: v4,
    "translated": lambda v4: 0xFFFF << 48 | v4,
    "nat64": lambda v4: 0x64FF9B << 96 | v4,
    "6to4": lambda v4: 0x2002 << 112 | v4 << 80 | 0x1234,
    "teredo client": lambda v4: 0x20010000 << 96 | 0x08080808 << 64 | v4 ^ ALL_ONES,
    "teredo server": lambda v4: 0x20010000 << 96 | v4 << 64 | 0x08080808 ^ ALL_ONES,
}
CLOSED_V4 = tuple(map(IPv4Network, (*PRIVATE_V4, *OTHER_V4)))
CLOSED_V6 = tuple(map(IPv6Network, ("fc00::/7", *OTHER_V6)))
PUBLIC: tuple[Address, ...] = (
    *map(IPv4Address, ("1.1.1.1", "9.255.255.255", "11.0.0.0", "172.15.255.255")),
    *map(IPv4Address, ("172.32.0.0", "100.63.255.255", "100.128.0.0", "198.17.0.1")),
    *map(IPv4Address, ("198.20.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0")),
    *map(IPv4Address, ("126.255.255.255", "128.0.0.0", "223.255.255.255")),
    *map(IPv4Address, ("169.253.255.255", "169.255.0.0", "168.63.129.15")),
    *map(IPv6Address, ("2606:4700::1111", "2001:db8::1", "64:ff9b:2::1")),
)
NAME = Opening()
PRIVATE = Opening(private=True)
NONE = frozenset[Address]()


def edges(network: Network) -> list[Address]:
    """Return the first and the last address of a network, and their neighbours."""
    first, last = int(network.network_address), int(network.broadcast_address)
    kind = type(network.network_address)
    numbers = {first, last, first - 1, last + 1}
    most = (1 << network.max_prefixlen) - 1
    return [kind(number) for number in sorted(numbers) if 0 <= number <= most]


def is_closed_v4(address: IPv4Address, networks: tuple[IPv4Network, ...]) -> bool:
    """Tell whether an address is in one of some networks."""
    return any(address in network for network in networks)


# spec NET3
# attack 57
@pytest.mark.parametrize("network", CLOSED_V4, ids=str)
def test_the_edges_of_a_v4_range(network: IPv4Network) -> None:
    for address in edges(network):
        assert isinstance(address, IPv4Address)
        expected = Reason.PRIVATE_ADDRESS if is_closed_v4(address, CLOSED_V4) else None
        assert judge([address], NAME, NONE) is expected, address


# spec NET3: every v6 form that holds one of them.
# attack 57
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("network", CLOSED_V4, ids=str)
def test_the_edges_of_a_v4_range_within_v6(network: IPv4Network, form: str) -> None:
    for held in edges(network):
        assert isinstance(held, IPv4Address)
        address = IPv6Address(FORMS[form](int(held)))
        is_closed = is_closed_v4(held, CLOSED_V4)
        expected = Reason.PRIVATE_ADDRESS if is_closed else None
        assert judge([address], NAME, NONE) is expected, (held, address)
        # `private` opens none of these forms.
        assert judge([address], PRIVATE, NONE) is expected, (held, address)


# spec NET3
# attack 57
@pytest.mark.parametrize("network", CLOSED_V6, ids=str)
def test_the_edges_of_a_v6_range(network: IPv6Network) -> None:
    for address in edges(network):
        # The address after ::1 is 0.0.0.2 in v6 form, in 0/8.
        is_closed = any(address in other for other in CLOSED_V6) or int(address) == 2
        expected = Reason.PRIVATE_ADDRESS if is_closed else None
        assert judge([address], NAME, NONE) is expected, address


@pytest.mark.parametrize("address", PUBLIC, ids=str)
def test_a_public_address_is_reached(address: Address) -> None:
    assert judge([address], NAME, NONE) is None


# spec NET3: `private` opens five ranges, without the metadata services in them.
@pytest.mark.parametrize("text", [*PRIVATE_V4, "fc00::/7"])
def test_private_opens_the_private_ranges(text: str) -> None:
    network = ip_network(text)
    for address in edges(network):
        if address in network:
            assert judge([address], NAME, NONE) is Reason.PRIVATE_ADDRESS
            assert judge([address], PRIVATE, NONE) is None
            assert judge([address], PRIVATE, {address}) is Reason.OWN_ADDRESS


# spec NET3
# attack 57
@pytest.mark.parametrize("text", [*OTHER_V4, *OTHER_V6])
def test_private_opens_nothing_else(text: str) -> None:
    network = ip_network(text)
    for address in (network.network_address, network.broadcast_address):
        assert judge([address], PRIVATE, NONE) is Reason.PRIVATE_ADDRESS


# spec NET3: one such answer refuses the name.
# attack 57
@given(st.lists(st.sampled_from(PUBLIC), min_size=1), st.data())
def test_one_closed_answer_refuses_the_name(
    answers: list[Address], data: st.DataObject
) -> None:
    assert judge(answers, NAME, NONE) is None
    where = data.draw(st.integers(0, len(answers)))
    closed = ip_address(data.draw(st.sampled_from(["10.0.0.1", "::1", "127.0.0.1"])))
    mixed = [*answers[:where], closed, *answers[where:]]
    assert judge(mixed, NAME, NONE) is Reason.PRIVATE_ADDRESS


def test_a_name_without_an_answer_does_not_exist() -> None:
    assert judge([], NAME, NONE) is Reason.NO_SUCH_NAME


# spec NET3: own addresses, in all forms.
# attack 57
def test_an_own_address_is_never_reached_by_a_name() -> None:
    own: frozenset[Address] = frozenset(
        {IPv4Address("1.2.3.4"), IPv6Address("2001:db8::9"), IPv4Address("10.0.0.9")}
    )
    for address in own:
        assert judge([address], NAME, own) is Reason.OWN_ADDRESS
        assert judge([address], PRIVATE, own) is Reason.OWN_ADDRESS
    for make in FORMS.values():
        held = IPv6Address(make(int(IPv4Address("1.2.3.4"))))
        assert judge([held], NAME, own) is Reason.OWN_ADDRESS
    zoned = IPv6Address("2001:db8::9%lo")
    assert judge([zoned], NAME, own) is Reason.OWN_ADDRESS
    assert judge([IPv4Address("1.2.3.5")], NAME, own) is None


# spec NET3: an address rule opens a range only from inside of it.
# attack 58
@pytest.mark.parametrize(
    ("rule", "address", "reason"),
    [
        ("0.0.0.0/0", "1.1.1.1", None),
        ("0.0.0.0/0", "169.254.169.254", Reason.PRIVATE_ADDRESS),
        ("0.0.0.0/0", "10.0.0.1", Reason.PRIVATE_ADDRESS),
        ("0.0.0.0/0@private", "10.0.0.1", None),
        ("0.0.0.0/0@private", "169.254.169.254", Reason.PRIVATE_ADDRESS),
        ("8.0.0.0/5", "10.0.0.1", Reason.PRIVATE_ADDRESS),
        ("10.0.0.0/8", "10.0.0.1", None),
        ("10.0.0.1", "10.0.0.1", None),
        ("169.254.169.254", "169.254.169.254", None),
        ("169.254.0.0/16", "169.254.169.254", None),
        ("100.64.0.0/10", "100.64.0.1", None),
        ("100.64.0.0/10", "100.100.100.200", Reason.PRIVATE_ADDRESS),
        ("100.100.100.200", "100.100.100.200", None),
        ("168.63.0.0/16", "168.63.129.16", Reason.PRIVATE_ADDRESS),
        ("168.63.129.16", "168.63.129.16", None),
        ("[fd00:ec2::/32]", "fd00:ec2::254", None),
        ("[fd00::/8]", "fd00:ec2::254", Reason.PRIVATE_ADDRESS),
        ("[fd00::/8]", "fd00::1", None),
        ("[::/0]", "::1", Reason.PRIVATE_ADDRESS),
        ("[::1]", "::1", None),
        ("[64:ff9b::/96]", "64:ff9b::808:808", None),
        ("[64:ff9b::/96]", "64:ff9b::a00:1", Reason.PRIVATE_ADDRESS),
        ("[64:ff9b::a00:0/104]", "64:ff9b::a00:1", None),
        ("[2002:a00::/24]", "2002:a00:1::1", None),
        ("[2002::/16]", "2002:a00:1::1", Reason.PRIVATE_ADDRESS),
        ("[2001::/32]", "2001:0:808:808::f5ff:fffe", Reason.PRIVATE_ADDRESS),
        ("[2001:0:808:808::f5ff:fffe]", "2001:0:808:808::f5ff:fffe", None),
        ("[64:ff9b:1::/48]", "64:ff9b:1::a00:1", None),
    ],
)
def test_an_address_rule_opens_what_it_lies_in(
    rule: str, address: str, reason: Reason | None
) -> None:
    parsed = parse_rule(rule)
    assert not isinstance(parsed.target, str)
    opening = Opening(parsed.private, (parsed.target,))
    assert judge([ip_address(address)], opening, NONE) is reason


# spec NET3: and an own address only if it names exactly that one.
# attack 58
@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("10.0.0.9", None),
        ("10.0.0.8/31", Reason.OWN_ADDRESS),
        ("10.0.0.8", Reason.OWN_ADDRESS),
        ("0.0.0.0/0", Reason.OWN_ADDRESS),
    ],
)
def test_an_own_address_is_opened_by_its_own_rule(
    rule: str, reason: Reason | None
) -> None:
    target = parse_rule(rule).target
    assert not isinstance(target, str)
    address = IPv4Address("10.0.0.9")
    assert judge([address], Opening(networks=(target,)), {address}) is reason


# spec NET3: a sandhost inside a sandhost.
def test_the_pool_of_an_outer_host_is_opened_by_its_setting() -> None:
    outer = Opening(outer_pool=True)
    for text in ("198.18.0.2", "198.19.255.255", "fd5a:6e64:686f::2"):
        address = ip_address(text)
        assert judge([address], NAME, NONE) is Reason.PRIVATE_ADDRESS
        assert judge([address], outer, NONE) is None
        assert judge([address], outer, {address}) is Reason.OWN_ADDRESS
    for text in ("10.0.0.1", "fd5a:6e64:686f:1::2", "127.0.0.1", "64:ff9b::c612:2"):
        assert judge([ip_address(text)], outer, NONE) is Reason.PRIVATE_ADDRESS
