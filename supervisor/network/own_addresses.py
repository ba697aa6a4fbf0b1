"""The host's own addresses, as they are at this moment (spec NET3; rtnetlink(7))."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.network.hosts import Address

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_ERROR = struct.Struct("=i")

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_REQUEST_AND_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2

_READ_BYTES = 65_536


def read_own_addresses() -> frozenset[Address]:
    """Return the addresses of all interfaces of the host, without zones.

    Raises:
        OSError: the kernel does not tell them.
    """
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as sock:
        size = _HEADER.size + _ADDRESS.size
        head = _HEADER.pack(size, _RTM_GETADDR, _REQUEST_AND_DUMP, 1, 0)
        sock.send(head + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        return frozenset(_read_answer(sock))


def _read_answer(sock: socket.socket) -> Iterator[Address]:
    """Yield the addresses of an answer; it comes at once, in parts."""
    while True:
        data = sock.recv(_READ_BYTES)
        at = 0
        while at < len(data):
            size, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_DONE:
                return
            body = data[at + _HEADER.size : at + size]
            if kind == _NLMSG_ERROR:
                code = -_ERROR.unpack_from(body)[0]
                raise OSError(code, os.strerror(code))
            if kind == _RTM_NEWADDR:
                yield from _parse_address(body)
            at += _aligned(size)


def _parse_address(body: bytes) -> Iterator[Address]:
    """Yield the own address of a record; IFA_ADDRESS is the peer's where both are."""
    family, *_ = _ADDRESS.unpack_from(body)
    attributes = {}
    at = _ADDRESS.size
    while at < len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, at)
        attributes[kind] = body[at + _ATTRIBUTE.size : at + size]
        at += _aligned(size)
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if packed is not None and family == socket.AF_INET:
        yield IPv4Address(packed)
    elif packed is not None and family == socket.AF_INET6:
        yield IPv6Address(packed)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
