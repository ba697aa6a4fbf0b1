"""Addresses of this machine."""

from supervisor.network.own_addresses import read_own_addresses


def own_address() -> str | None:
    """Return an address of this machine that others would reach; None: it has none."""
    found = [one for one in read_own_addresses() if one.version == 4]
    named = [str(one) for one in found if not (one.is_loopback or one.is_link_local)]
    return min(named, default=None)
