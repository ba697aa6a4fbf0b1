"""What can be wrong with a use of the wire, seen from the end that raises.

``LocalProtocolError`` says that *this* end was used against its rules (a bug here);
``RemoteProtocolError`` says that the peer sent what no conforming peer sends.  A host
never raises the latter: whatever a child sends is answered (spec F3), so a request it
cannot accept is a ``Refusal`` message, not an exception.
"""


class ProtocolError(Exception):
    """Base of both."""


class LocalProtocolError(ProtocolError):
    """This end was asked for something its state does not allow."""


class RemoteProtocolError(ProtocolError):
    """The host sent something that is not a reply of this protocol."""
