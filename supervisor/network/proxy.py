"""The proxy of a child's namespace, for programs that can use one (spec NET8).

The first byte of a connection tells its protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.network import proxy_socks
from supervisor.network.proxy_dialogue import ProxyError
from supervisor.network.proxy_http import HttpDialogue
from supervisor.network.proxy_socks import SocksDialogue

if TYPE_CHECKING:
    from supervisor.network.proxy_dialogue import Dialogue

PORT = 3128
"""Where the proxy listens on 127.0.0.1 of a child's namespace."""

_SOCKS4 = 4
_SOCKS4_REJECTED = b"\0\x5b" + bytes(6)


def open_dialogue(first: int) -> Dialogue:
    """Return what speaks the protocol of a connection.

    Args:
        first: the first byte that came; `receive` gets it as well.

    Raises:
        ProxyError: the protocol is SOCKS4.
    """
    if first == _SOCKS4:
        raise ProxyError("cannot speak SOCKS4: use SOCKS5", _SOCKS4_REJECTED)
    return SocksDialogue() if first == proxy_socks.VERSION else HttpDialogue()
