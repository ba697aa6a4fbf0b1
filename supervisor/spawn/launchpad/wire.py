"""The messages between the host and its launchpad, as datagrams.

1. A datagram is one marshalled tuple: both ends are one program in one interpreter, and no
   child ever holds the socket.
2. A message and its descriptors arrive together or not at all; nothing here blocks.
3. A changed form that the program before cannot speak (``handover``) has a new
   ``VERSION``.
"""

from __future__ import annotations

# `socket` imports `selectors` and `enum`: 7 ms of a start that takes 9.
import _socket
import errno
import marshal
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Messages, host to launchpad:
#
# ``(SPAWN, id, executable, argv, env, targets, rlimits, umask, layers)`` with descriptors:
# the working directory, then as many as ``layers`` has "locks", which the launchpad keeps
# until SWEPT, then the source of each target number, then the mounts that ``layers`` names
# in "mountns" by position, then, with "listener", the socket by which the sockets of its
# loopback go to the host. ``rlimits`` are ``(resource, soft, hard)``; ``umask`` is None for
# the host's; ``layers`` maps the name of a layer to the argument of its apply.
# ``(SIGNAL, id, signal)``, to the child and all beneath it.
# ``(SPARE, 0, groups)``: groups that a coming child may be asked to be in.
# ``(LIST, id)``: asks for the children in stock.
# ``(ARM, id, deadline_ns)``: end this process at that time of CLOCK_BOOTTIME.
# ``(OWNERS, id, user, owner)``: the namespace that shows one's files as the other's.
# ``(FURNISH, id, order)`` with a net namespace, the socket by which it is sent to the host,
# and the user namespace that owns it where that is another: see ``addition``.
#
# Launchpad to host; SPAWNED, EXITED, SWEPT of one id come in this order:
#
# ``(SPAWNED, id, pid, create_time, applied, init)`` with the pidfd: the exec succeeded;
# ``applied`` are ``(layer, detail)`` from the child; ``init`` is the pid of the init of its
# pid namespace, -1 for none.
# ``(FAILED, id, errno, stage, detail)``: it did not, and the child ends.
# ``(EXITED, id, code or None, signal or None, utime_s, stime_s, maxrss_kib)``.
# ``(SWEPT, ids, killed)``: nothing that these ended children left is alive.
# ``(LISTED, id, stock)``: (pid, create_time) of each, and of its init.
# ``(ARMED, id)``: the kernel has that time, and no other; or FAILED.
# ``(OWNED, id)`` with that user namespace; or FAILED.
# ``(FURNISHED, id)``: it is sent; or FAILED.
#
# Launchpad and a child in stock (``launchpad.prefork``): ``((executable, ... layers),
# has_owners)`` is an order; the last descriptor is a user namespace if `has_owners`.

VERSION = 17

SPAWN, SIGNAL, SPAWNED, FAILED, EXITED, SWEPT, SPARE, LIST, LISTED = range(9)
OWNERS, OWNED, ARM, ARMED, FURNISH, FURNISHED = range(9, 15)

# A bigger message travels in a memfd, sent as the last descriptor: a datagram must fit into
# the socket's buffer (208 KiB by default). The datagram then names the message, for a
# receiver without room for the descriptor: a byte which no marshalled tuple begins with,
# its kind and its id.
DATAGRAM_BYTES = 65_536
# execve(2) takes 6 MiB of arguments and environment at most, whatever the limits.
TEXT_BYTES = 6 * 1024 * 1024
# SCM_MAX_FD of the kernel is 253; the working directory, the ways of mounts and of a
# listener, the user namespace of an order, three of a child that a tool joins and the memfd
# are eight of them.
TARGETS = 245

_LONG = b"\0"
_RIGHTS_SPACE = _socket.CMSG_SPACE(4 * (TARGETS + 8))


class CutOffError(OSError):
    """A long message came in part, for this process may open no more.

    Attributes:
        ident: of the child that it is about; 0 if there is none.
    """

    def __init__(self, ident: int) -> None:
        super().__init__(errno.EMFILE, "no descriptor left to receive a message")
        self.ident = ident


def send_message(
    sock: _socket.socket, message: tuple[Any, ...], fds: Sequence[int] = ()
) -> None:
    """Send one message and copies of `fds`, whole or not at all.

    Raises:
        BlockingIOError: The other end's buffer is full.
        OSError: The other end is gone (EPIPE, ECONNRESET), no memfd could be made, or
            too many descriptors are in flight (ETOOMANYREFS).
    """
    body = marshal.dumps(message)
    if len(body) <= DATAGRAM_BYTES:
        _send(sock, body, fds)
        return
    with open(os.memfd_create("sandhost-message"), "wb", buffering=0) as memory:
        left = memoryview(body)
        while left:
            left = left[memory.write(left) :]
        head = message[:2] if isinstance(message[0], int) else (0, 0)
        _send(sock, _LONG + marshal.dumps(head), (*fds, memory.fileno()))


def _send(sock: _socket.socket, body: bytes, fds: Sequence[int]) -> None:
    rights = struct.pack(f"{len(fds)}i", *fds)
    control = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
    flags = _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL
    try:
        sock.sendmsg([body], control, flags)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        _send_at_the_hard_limit(sock, body, control, flags)


def _send_at_the_hard_limit(
    sock: _socket.socket, body: bytes, control: list[Any], flags: int
) -> None:
    """Send what the soft limit of open files refuses.

    The kernel counts what is in flight per user, its children's included, and compares
    it with the sender's soft limit (unix(7)).  The launchpad's is its children's as well,
    who are to have it as it is; so it is raised for this alone.
    """
    soft, hard = resource.prlimit(0, resource.RLIMIT_NOFILE)
    resource.prlimit(0, resource.RLIMIT_NOFILE, (hard, hard))
    try:
        sock.sendmsg([body], control, flags)
    finally:
        resource.prlimit(0, resource.RLIMIT_NOFILE, (soft, hard))


def receive_message(sock: _socket.socket) -> tuple[tuple[Any, ...], list[int]] | None:
    """Receive one message; the descriptors belong to the caller and are CLOEXEC.

    Returns:
        None when the other end is gone.

    Raises:
        BlockingIOError: Nothing is there.
        CutOffError: A message in a memfd came, but this process may open no more.
    """
    return _receive(sock, _socket.MSG_DONTWAIT)


def wait_for_message(sock: _socket.socket) -> tuple[tuple[Any, ...], list[int]] | None:
    """Wait for one message of a blocking socket, else as `receive_message`."""
    return _receive(sock, 0)


def _receive(
    sock: _socket.socket, how: int
) -> tuple[tuple[Any, ...], list[int]] | None:
    flags = how | _socket.MSG_CMSG_CLOEXEC
    try:
        body, control, said, _ = sock.recvmsg(DATAGRAM_BYTES, _RIGHTS_SPACE, flags)
    except ConnectionResetError:  # it died with messages of ours unread
        return None
    if not body:
        return None
    fds: list[int] = []
    for _, _, rights in control:
        fds.extend(struct.unpack(f"{len(rights) // 4}i", rights))
    if body.startswith(_LONG):
        if not fds or said & _socket.MSG_CTRUNC:  # the memfd was the last of them
            for fd in fds:
                os.close(fd)
            raise CutOffError(marshal.loads(body[1:])[1])  # noqa: S302 - as below
        with open(fds.pop(), "rb") as memory:
            memory.seek(0)
            body = memory.read()
    return marshal.loads(body), fds  # noqa: S302 - our own interpreter wrote it
