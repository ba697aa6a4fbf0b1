"""Reuse of TCP sockets, and their state: tcp(7), connect(2)."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.connect.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)

_UNSPECIFIED = struct.pack("H14x", socket.AF_UNSPEC)
_CLOSED = 7  # of <netinet/tcp.h>; the first byte of struct tcp_info
_LINGER = struct.Struct("ii")


def disconnect(sock: socket.socket) -> None:
    """Reset a socket's connection, so that the socket can be connected again.

    Raises:
        OSError: the kernel refuses it.
    """
    if _libc.connect(sock.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(0, 0))


def is_closed(sock: socket.socket) -> bool:
    """Return whether both ends of a connection are closed, or there is none."""
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _CLOSED


def is_to_be_reset(sock: socket.socket) -> bool:
    """Return whether closing this socket sends a reset (SO_LINGER of 0 s)."""
    linger = sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size)
    return _LINGER.unpack(linger) == (1, 0)
