"""The loopback of a child's net namespace: addresses, routes, the host's sockets."""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import struct

from supervisor.spawn.launchpad import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    SocketOrder = tuple[int, int, str, int]
    """(family, kind, address, port) of a socket; port 0: it is bound to nothing."""
    Networks = tuple[tuple[int, bytes, int], ...]
    """(family, address, bits) of networks."""
    LoopbackOrder = tuple[tuple[SocketOrder, ...], Networks, Networks]
    """Sockets, addresses with their prefix, and networks to have a local route to."""

BACKLOG = 128
"""Most unaccepted connections: twice as many as the host serves of one child."""

# <linux/sockios.h>, <linux/if.h>
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
# <linux/netlink.h>, <linux/rtnetlink.h>, <linux/if_addr.h>
_NETLINK_ROUTE = 0
_NLMSG_ERROR = 2
_RTM_NEWADDR, _RTM_NEWROUTE = 20, 24
_REQUEST_ACK_CREATE = 0x1 | 0x4 | 0x400
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_NODAD = 0x02
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_RT_TABLE_LOCAL = 255
_RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL = 3, 254, 2
_LO = 1
"""The index of lo in every net namespace."""

_NO_V6 = frozenset(
    {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EOPNOTSUPP, errno.EACCES}
)
"""Answers of a kernel without v6, or where a sysctl has switched it off."""


def raise_loopback() -> None:
    """Set lo up, in the net namespace of this process.

    Raises:
        OSError: this process has no rights there.
    """
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        request = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, request)
    finally:
        sock.close()


def furnish(order: LoopbackOrder, way: int) -> str:
    """Add addresses and routes to lo, and make the host's sockets.

    Args:
        order: no process has one of its ports in a fresh namespace.
        way: the descriptor of a socket that the host receives from; it is closed.

    Raises:
        OSError: something of it cannot be made, or not be handed over.
    """
    sockets, addresses, networks = order
    line = _socket.socket(fileno=way)
    made: list[_socket.socket] = []
    try:
        has_v6 = _add_networks(addresses, networks)
        for wanted in sockets:
            if wanted[0] != _socket.AF_INET6 or has_v6:
                has_v6 = _make(wanted, made) and has_v6
        wire.send_message(line, (has_v6,), [one.fileno() for one in made])
    finally:
        for sock in (line, *made):
            sock.close()
    return _describe(sockets)


def _describe(sockets: Sequence[SocketOrder]) -> str:
    hosts = dict.fromkeys(host for family, _, host, port in sockets if port)
    told = []
    for host in hosts:
        ports = dict.fromkeys(port for _, _, where, port in sockets if where == host)
        shown = f"[{host}]" if ":" in host else host
        told.append(f"{shown}:{' and '.join(map(str, ports))}")
    return f"{', '.join(told)}, the host's"


def _make(wanted: SocketOrder, made: list[_socket.socket]) -> bool:
    """Make one socket; tell whether the namespace has its family."""
    family, kind, host, port = wanted
    try:
        sock = _socket.socket(family, kind | _socket.SOCK_CLOEXEC)
    except OSError as why:
        if family != _socket.AF_INET6 or why.errno not in _NO_V6:
            raise
        return False
    made.append(sock)
    if family == _socket.AF_INET6:
        sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
    if port:
        sock.bind((host, port))
        if kind == _socket.SOCK_STREAM:
            sock.listen(BACKLOG)
    return True


def _add_networks(addresses: Networks, networks: Networks) -> bool:
    """Add addresses and routes of lo; tell whether there is v6."""
    if not addresses:
        return True
    sources = {family: address for family, address, _ in addresses}
    line = _socket.socket(
        _socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, _NETLINK_ROUTE
    )
    has_v6 = True
    try:
        for family, message in _messages(addresses, networks, sources):
            if family == _socket.AF_INET6 and not has_v6:
                continue
            line.send(message)
            number = _answer(line)
            if number in {0, errno.EEXIST}:
                continue
            if family == _socket.AF_INET6 and number in _NO_V6:
                has_v6 = False
                continue
            raise OSError(number, os.strerror(number))
    finally:
        line.close()
    return has_v6


def _messages(
    addresses: Networks, networks: Networks, sources: dict[int, bytes]
) -> Iterator[tuple[int, bytes]]:
    """Yield (family, message) of netlink for each address, then for each route."""
    for family, address, bits in addresses:
        own_bits = bits if family == _socket.AF_INET else len(address) * 8
        head = struct.pack(
            "=BBBBI", family, own_bits, _IFA_F_NODAD, _RT_SCOPE_HOST, _LO
        )
        body = _attribute(_IFA_LOCAL, address) + _attribute(_IFA_ADDRESS, address)
        yield family, _request(_RTM_NEWADDR, head + body)
    routed = (
        (family, _network_of(address, bits), bits)
        for family, address, bits in addresses
        if family == _socket.AF_INET6
    )
    for family, network, bits in (*routed, *networks):
        head = struct.pack(
            "=BBBBBBBBI",
            *(family, bits, 0, 0, _RT_TABLE_LOCAL),
            *(_RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL, 0),
        )
        body = _attribute(_RTA_DST, network) + _attribute(
            _RTA_OIF, struct.pack("=I", _LO)
        )
        body += _attribute(_RTA_PREFSRC, sources[family])
        yield family, _request(_RTM_NEWROUTE, head + body)


def _network_of(address: bytes, bits: int) -> bytes:
    whole = int.from_bytes(address, "big") >> (len(address) * 8 - bits)
    return (whole << (len(address) * 8 - bits)).to_bytes(len(address), "big")


def _request(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST_ACK_CREATE, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(padding)


def _answer(line: _socket.socket) -> int:
    """Return the errno with which the kernel acknowledges a message; 0 for success."""
    answer = line.recv(4096)
    _, kind, _, _, _, number = struct.unpack_from("=IHHIIi", answer)
    return -number if kind == _NLMSG_ERROR else errno.EPROTO
