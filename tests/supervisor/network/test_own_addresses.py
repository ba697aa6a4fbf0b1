"""The host's own addresses are those that the kernel has at the moment."""

from ipaddress import ip_address

import psutil
import pytest

from supervisor.network.own_addresses import read_own_addresses
from tests.supervisor.network.netns import CHILD, Namespace


def test_all_addresses_of_all_interfaces_are_read() -> None:
    rows = [row for rows in psutil.net_if_addrs().values() for row in rows]
    texts = [row.address.partition("%")[0] for row in rows if row.family in {2, 10}]
    assert read_own_addresses() == frozenset(map(ip_address, texts))


# spec NET3: own addresses are read anew for each judgement.
@pytest.mark.parametrize("count", [1, 3000])
def test_addresses_that_are_new_are_read(count: int) -> None:
    added = [f"10.9.{n // 250}.{n % 250 + 1}" for n in range(count)]
    lines = "".join(f"address add {text}/32 dev lo\n" for text in added)
    # The peer of a point-to-point interface is no own address.
    namespace = Namespace(f"{CHILD}{lines}address add 10.8.0.1 peer 10.8.0.2 dev lo\n")
    own = ["127.0.0.1", "::1", "198.18.0.1", "fd5a:6e64:686f::1", "10.8.0.1", *added]
    try:
        with namespace.entered():
            assert read_own_addresses() == frozenset(map(ip_address, own))
    finally:
        namespace.close()
