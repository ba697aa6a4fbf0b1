"""The result of a proxy's dialogue with a program in any protocol: one host.

`proxy_http` and `proxy_socks` speak the protocols; `proxy_server` tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from supervisor.network.hosts import Address
    from supervisor.network.reasons import NetworkRefusal


@dataclass(frozen=True, slots=True)
class ProxyTarget:
    """A host that a program wants to be connected to.

    Attributes:
        host: a name in the form of the rules, or an address.
        port: from 1 to 65535.
    """

    host: str | Address
    port: int


class ProxyError(Exception):
    """A program's request is invalid or refused; the connection ends.

    Attributes:
        reply: the reply that is sent before.
    """

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


class Dialogue(Protocol):
    """One connection of a program to the proxy.

    `receive` until a host is asked for, then one of `accept`, `refuse` and `fail`; after
    `accept`, `forward` for all that comes from the program.
    """

    def receive(self, data: bytes) -> ProxyTarget | None:
        """Add what the program sent before it was answered.

        Returns:
            The host that it asks for, once that is known.

        Raises:
            ProxyError: it asks for none, or in a way that is refused.
        """
        ...

    def take_reply(self) -> bytes:
        """Return what is to be sent before more is received."""
        ...

    def accept(self) -> bytes:
        """Return what tells the program that it is connected."""
        ...

    def refuse(self, refused: NetworkRefusal) -> bytes:
        """Return what tells the program why it is not connected."""
        ...

    def fail(self) -> bytes:
        """Return what tells the program that the host cannot be reached."""
        ...

    def forward(self, data: bytes = b"") -> bytes:
        """Return the bytes for the server that the program's bytes make.

        Call it without data first: bytes behind the request's head are there already.

        Raises:
            ProxyError: a body has another end than its head says.
        """
        ...
