"""Messages that a launchpad cannot send: a start of which nothing is left."""

import _socket
import errno
import os
import resource
import select
import signal
import subprocess
from typing import Any

import pytest

from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.outbox import Outbox

pytestmark = pytest.mark.slow


# attack 18, spec S5: unix(7) counts what is in flight by user, its children's included.
def test_who_cannot_be_handed_to_the_host_is_killed_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = wire.send_message

    def too_many(sock: _socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
        if fds:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        send(sock, message)

    monkeypatch.setattr("supervisor.spawn.launchpad.wire.send_message", too_many)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    with subprocess.Popen(["/bin/sleep", "1000"]) as child, select.epoll() as epoll:
        outbox = Outbox(ours, epoll)
        outbox.put((wire.SWEPT, (1,), 0))
        pidfd = os.pidfd_open(child.pid)
        outbox.put((wire.SPAWNED, 7, child.pid, 0, (), -1), pidfd)
        try:
            assert child.wait(timeout=30) == -signal.SIGKILL
        finally:
            child.kill()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(pidfd)
        outbox.put((wire.SWEPT, (2,), 0))
    told = [wire.receive_message(theirs) for _ in range(3)]
    failed = (wire.FAILED, 7, errno.ETOOMANYREFS, "pidfd", b"")
    swept: list[object] = [((wire.SWEPT, (ident,), 0), []) for ident in (1, 2)]
    assert told == [swept[0], (failed, []), swept[1]]
    ours.close()
    theirs.close()


class Crowded:
    """A socket of a user who has as much in flight as a soft limit allows, and more."""

    def __init__(self, real: _socket.socket, hard: int) -> None:
        self._real = real
        self._hard = hard
        self.limits: list[int] = []

    def sendmsg(self, *arguments: Any) -> int:
        """Send, as the kernel does."""
        self.limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if self.limits[-1] < self._hard:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._real.sendmsg(*arguments)


# A launchpad's children have the soft limit that it has; when it sends the hard one counts.
def test_what_fits_into_the_hard_limit_is_sent() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (min(soft, hard - 1), hard)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    crowded = Crowded(ours, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, low)
        wire.send_message(crowded, (wire.SPAWNED, 7), (0,))  # type: ignore[arg-type]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == low
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        ours.close()
    received = wire.receive_message(theirs)
    theirs.close()
    assert received is not None
    message, fds = received
    os.close(*fds)
    assert (message, crowded.limits) == ((wire.SPAWNED, 7), [low[0], hard])
