"""The host's own addresses, as they are at this moment (spec NET3)."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from supervisor.network.hosts import Address

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def read_own_addresses() -> frozenset[Address]:
    """Return the addresses of all interfaces of the host, without zones."""
    return frozenset(
        ip_address(row.address.partition("%")[0])
        for rows in psutil.net_if_addrs().values()
        for row in rows
        if row.family in _FAMILIES
    )
