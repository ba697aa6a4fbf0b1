"""SOCKS5 as a program speaks it to the proxy: CONNECT alone (RFC 1928, spec NET8).

The method is always "no authentication": a child's namespace says whose connection it is.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

from supervisor.network.hosts import HostError, parse_proxied_host
from supervisor.network.proxy_dialogue import ProxyError, ProxyTarget

if TYPE_CHECKING:
    from supervisor.network.hosts import Address
    from supervisor.network.reasons import NetworkRefusal

VERSION = 5

_NO_AUTHENTICATION = 0
_NO_METHOD = 0xFF
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
_GRANTED, _REFUSED, _UNREACHABLE, _NO_COMMAND, _NO_ADDRESS_TYPE = 0, 2, 5, 7, 8


class SocksDialogue:
    """One connection that speaks SOCKS5."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._is_greeted = False
        self._reply = b""

    def receive(self, data: bytes) -> ProxyTarget | None:
        """Add what the program sent before it was answered; see `Dialogue`."""
        self._held += data
        if not self._is_greeted:
            self._read_greeting()
        return self._read_request() if self._is_greeted else None

    def take_reply(self) -> bytes:
        """Return what is to be sent before more is received."""
        reply, self._reply = self._reply, b""
        return reply

    def accept(self) -> bytes:
        """Return the reply of success."""
        return _reply(_GRANTED)

    def refuse(self, refused: NetworkRefusal) -> bytes:
        """Return the reply "not allowed by ruleset"; SOCKS has no room for a reason."""
        del refused
        return _reply(_REFUSED)

    def fail(self) -> bytes:
        """Return the reply that the host cannot be reached."""
        return _reply(_UNREACHABLE)

    def forward(self, data: bytes = b"") -> bytes:
        """Return what goes to the server: all that follows the request."""
        data = bytes(self._held) + data
        self._held.clear()
        return data

    def _read_greeting(self) -> None:
        if len(self._held) < 2 or len(self._held) < 2 + self._held[1]:
            return
        version, _, *methods = self._take(2 + self._held[1])
        if version != VERSION or _NO_AUTHENTICATION not in methods:
            reply = bytes((VERSION, _NO_METHOD))
            raise ProxyError("cannot agree on a method of SOCKS5", reply)
        self._reply += bytes((VERSION, _NO_AUTHENTICATION))
        self._is_greeted = True

    def _read_request(self) -> ProxyTarget | None:
        if len(self._held) < 5:  # the fifth byte is the length of a name
            return None
        version, command, reserved, kind, length = self._held[:5]
        if version != VERSION or reserved:
            raise ProxyError("cannot read the SOCKS request")
        if command != _CONNECT:
            raise _error("only CONNECT is done", _NO_COMMAND)
        sizes = {_V4: 4, _NAME: 1 + length, _V6: 16}
        if kind not in sizes:
            raise _error("it is another type of address", _NO_ADDRESS_TYPE)
        if len(self._held) < 4 + sizes[kind] + 2:
            return None
        address = self._take(4 + sizes[kind])[4:]
        port = int.from_bytes(self._take(2), "big")
        try:
            host = _host(kind, address)
        except HostError as why:
            raise _error(str(why), _REFUSED) from None
        if not port:
            raise _error("port 0 is none", _REFUSED)
        return ProxyTarget(host, port)

    def _take(self, size: int) -> bytes:
        data = bytes(self._held[:size])
        del self._held[:size]
        return data


def _host(kind: int, address: bytes) -> str | Address:
    if kind == _V4:
        return IPv4Address(address)
    if kind == _V6:
        v6 = IPv6Address(address)
        if v6.ipv4_mapped is not None:
            raise HostError("a v4 address in v6 form; write it in dotted decimal")
        return v6
    try:
        return parse_proxied_host(address[1:].decode("ascii"))
    except UnicodeDecodeError:
        raise HostError("a name is ASCII; write its xn-- form") from None


def _reply(code: int) -> bytes:
    """Return a reply; the address that it has room for stays empty."""
    return bytes((VERSION, code, 0, _V4)) + bytes(6)


def _error(reason: str, code: int) -> ProxyError:
    return ProxyError(f"cannot do what SOCKS asks for: {reason}", _reply(code))
