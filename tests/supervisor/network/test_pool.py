"""The addresses of a child's names."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from supervisor.network.pool import MAX_NAMES, NAMESPACE_V4, NAMESPACE_V6, Pool


# spec NET5: an address of its own, for the child's life.
def test_a_name_keeps_its_addresses() -> None:
    pool = Pool()
    first = pool.assign("a.test")
    assert first is not None
    assert first == (IPv4Address("198.18.0.2"), IPv6Address("fd5a:6e64:686f::2"))
    second = pool.assign("b.test")
    assert second is not None
    assert not {*first} & {*second}
    assert pool.assign("a.test") == first
    for address in first:
        assert address in pool
        assert pool.name_of(address) == "a.test"
    assert pool.name_of(second.v6) == "b.test"


# spec NET4: the first address is the namespace's own.
@pytest.mark.parametrize(
    "text",
    [
        *("198.18.0.0", "198.18.0.3", "198.19.255.255", "fd5a:6e64:686f::"),
        *("fd5a:6e64:686f::3", "fd5a:6e64:686f:0:ffff:ffff:ffff:ffff"),
    ],
)
def test_an_address_that_was_not_given_out_has_no_name(text: str) -> None:
    pool = Pool(["a.test"])
    assert ip_address(text) in pool
    assert pool.name_of(ip_address(text)) is None
    assert pool.name_of(NAMESPACE_V4) is None
    assert pool.name_of(NAMESPACE_V6) is None


@pytest.mark.parametrize(
    "text",
    ["198.17.255.255", "198.20.0.2", "fd5a:6e64:686f:1::2", "::ffff:198.18.0.2", "::2"],
)
def test_an_address_outside_of_the_pool_has_no_name(text: str) -> None:
    pool = Pool(["a.test"])
    assert ip_address(text) not in pool
    assert pool.name_of(ip_address(text)) is None


# spec NET5: 4,096 names a child.
def test_a_pool_is_full_at_its_bound() -> None:
    pool = Pool()
    pairs = {pool.assign(f"n{number}.test") for number in range(MAX_NAMES)}
    assert len(pairs) == len(pool) == MAX_NAMES == 4096
    assert None not in pairs
    assert pool.assign("one.more.test") is None
    assert pool.assign("n0.test") in pairs
    assert len(pool) == MAX_NAMES


def test_a_pool_is_made_again_from_its_names() -> None:
    pool = Pool()
    pairs = [pool.assign(name) for name in ("a.test", "b.test")]
    again = Pool(pool.names())
    assert [again.assign(name) for name in ("a.test", "b.test")] == pairs
    assert again.assign("c.test") not in pairs
