"""Errors of the wire, from the view of the end that raises.

``LocalProtocolError`` says that *this* end was used against its rules (a bug here);
``RemoteProtocolError`` says that the peer sent bytes that no conforming peer sends.  A
host never raises the latter: it answers everything that a child sends (spec F3), so a
request it cannot accept is a ``Refusal`` message, not an exception.
"""


class ProtocolError(Exception):
    """Base of both."""


class LocalProtocolError(ProtocolError):
    """The caller asked this end for something that its state does not allow."""


class RemoteProtocolError(ProtocolError):
    """The host sent something that is not a reply of this protocol."""
