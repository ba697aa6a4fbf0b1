"""Messages of a launchpad to its host, in order, while the host may not listen.

A queue with descriptors that travel with its messages.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import errno
import os
import select

from supervisor.spawn.launchpad import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket


class Outbox:
    """Messages to the host that it has not taken yet.

    Args:
        control: the launchpad's end of the control socket.
        epoll: where that is registered; told when there is room to be waited for.

    Attributes:
        host_is_there: until it is known not to be; then nothing is sent.
    """

    def __init__(self, control: _socket.socket, epoll: select.epoll) -> None:
        self._control = control
        self._epoll = epoll
        self._messages: list[tuple[tuple[object, ...], tuple[int, ...]]] = []
        self._is_blocked = False  # the host does not take messages at the moment
        self.host_is_there = True

    def put(self, message: tuple[object, ...], *fds: int) -> None:
        """Queue a message with descriptors it carries away, and send what can be sent."""
        self._messages.append((message, fds))
        if not self._is_blocked:
            self.flush()

    def fail(self, ident: int, number: int, stage: str, detail: bytes = b"") -> None:
        """Tell that something asked for came to nothing."""
        self.put((wire.FAILED, ident, number, stage, detail))

    def flush(self) -> None:
        """Send what can be sent; where the host is gone, give its descriptors back."""
        sent = 0
        was_blocked, self._is_blocked = self._is_blocked, False
        try:
            for message, fds in self._messages:
                if self.host_is_there:
                    self._send(message, fds)
                for fd in fds:
                    os.close(fd)
                sent += 1
        except BlockingIOError:
            self._is_blocked = True
        except (BrokenPipeError, ConnectionResetError):
            self.host_is_there = False
        del self._messages[:sent]
        if self._is_blocked != was_blocked:
            out = select.EPOLLOUT if self._is_blocked else 0
            self._epoll.modify(self._control.fileno(), select.EPOLLIN | out)

    def _send(self, message: tuple[object, ...], fds: tuple[int, ...]) -> None:
        """Send a message; one whose descriptors may not travel is a start that failed.

        No event tells when fewer are in flight again.
        """
        try:
            wire.send_message(self._control, message, fds)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            if message[0] != wire.OWNED:
                _kill(fds[0])
            failed = (wire.FAILED, message[1], error.errno, "pidfd", b"")
            wire.send_message(self._control, failed)


def _kill(pidfd: int) -> None:
    try:
        _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
    except ProcessLookupError:  # killed before, when the host was busy, and reaped
        return
