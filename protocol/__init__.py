"""The FS Proxy wire, sans-IO: the meaning of bytes, without their effects.

``HostConnection`` and ``ClientConnection`` are the two ends; ``messages`` names what
travels, ``limits`` what bounds it.  Nothing here opens, reads, logs or waits.  Start
with ``commands``, the one table of the language, and ``grammar``, which reads it.

Public: ``chat``, ``door``, ``fdxml``, ``limits``, ``messages``, ``toolexec.body``,
``toolexec.requests``, ``toolexec.token``.
"""

from protocol import limits, messages
from protocol.commands import COMMANDS, MODES, echo, error, invalid
from protocol.connection import ClientConnection, HostConnection
from protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from protocol.grammar import format_request

__all__ = [
    "COMMANDS",
    "MODES",
    "ClientConnection",
    "HostConnection",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteProtocolError",
    "echo",
    "error",
    "format_request",
    "invalid",
    "limits",
    "messages",
]
