"""The name by which a door is known."""

import socket

from protocol.door import DOOR_NAME


# spec HM6
def test_the_other_end_of_a_named_socket_shows_the_name() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.bind(DOOR_NAME + b"test-of-the-name")
        assert far.getpeername().startswith(DOOR_NAME)
        assert near.getpeername() in {"", b""}
