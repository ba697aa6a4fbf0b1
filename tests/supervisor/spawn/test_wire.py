"""Messages between host and launchpad, where one may open no more descriptors."""

import errno
import os
import socket

import pytest

from supervisor.spawn.launchpad import wire
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.stage import descriptors

LONG = (wire.SPAWN, 7, "x" * wire.DATAGRAM_BYTES)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of the line."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# attack 18: what a long message lies in comes last, so it is what is missing; another
# descriptor is not read in its place.
@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_long_message_that_came_in_part_is_an_error_and_no_leak(room: int) -> None:
    before = descriptors()
    ours, theirs = pair()
    with ours, theirs:
        held = descriptors()
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
        wire.send_message(theirs, LONG, fds)
        for fd in fds:
            os.close(fd)
        with no_descriptor_left(but=room), pytest.raises(wire.CutOffError) as why:
            wire.receive_message(ours)
        # Its sender can be told.
        assert (why.value.errno, why.value.ident) == (errno.EMFILE, 7)
        assert descriptors() == held
        wire.send_message(theirs, LONG, [ours.fileno()])
        message, (one,) = wire.receive_message(ours) or ((), [-1])
        assert message == LONG
        os.close(one)
    assert descriptors() == before


# The receiver counts them: a short one says itself what belongs to it.
@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_short_message_has_the_descriptors_that_there_was_room_for(room: int) -> None:
    ours, theirs = pair()
    with ours, theirs:
        wire.send_message(theirs, ("short",), [0, 1, 2])
        with no_descriptor_left(but=room):
            message, fds = wire.receive_message(ours) or ((), [])
        assert (message, len(fds)) == (("short",), room)
        for fd in fds:
            os.close(fd)
