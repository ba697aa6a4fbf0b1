"""What a launchpad has to say to its host, in order, while the host may not listen.

What it is: a queue with descriptors that travel with its messages. What it is not: the
messages, which are in ``launchpad.wire``.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import errno
import os
import resource
import select

from supervisor.launchpad import wire

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

        The kernel counts what is in flight per user, its children's included, compares it
        with the sender's soft limit of open files (unix(7)), and tells nobody when it is
        less again.  That limit is the children's as well, so it is raised for this alone.
        """
        if self._is_sent(message, fds):
            return
        soft, hard = resource.prlimit(0, resource.RLIMIT_NOFILE)
        try:
            resource.prlimit(0, resource.RLIMIT_NOFILE, (hard, hard))
            if self._is_sent(message, fds):
                return
        finally:
            resource.prlimit(0, resource.RLIMIT_NOFILE, (soft, hard))
        try:
            _signal.pidfd_send_signal(fds[0], _signal.SIGKILL)
        except ProcessLookupError:  # it was told before, when the host was busy
            return
        finally:
            failed = (wire.FAILED, message[1], errno.ETOOMANYREFS, "pidfd", b"")
            wire.send_message(self._control, failed)

    def _is_sent(self, message: tuple[object, ...], fds: tuple[int, ...]) -> bool:
        """Send a message; False: too many descriptors are in flight."""
        try:
            wire.send_message(self._control, message, fds)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False
        return True
