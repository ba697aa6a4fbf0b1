"""Net namespaces of a test's own, entered by the test's thread; for root only."""

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import trio

from supervisor.network.addresses import POOL_V4, POOL_V6
from supervisor.network.inner_sockets import InnerSockets
from supervisor.network.pool import NAMESPACE_V4, NAMESPACE_V6

_NEW_NET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

CHILD = f"""
link set lo up
address add {NAMESPACE_V4}/{POOL_V4.prefixlen} dev lo
address add {NAMESPACE_V6}/128 dev lo nodad
route add local {POOL_V6} dev lo
"""
OUTSIDE = """
link set lo up
address add 203.0.113.1/24 dev lo
address add 2001:db8:1::1/128 dev lo nodad
route add local 2001:db8:1::/64 dev lo
route add local 198.51.100.0/24 dev lo
route add local 10.1.0.0/16 dev lo
route add local 169.254.169.254/32 dev lo
route add local fd00:5::/64 dev lo
"""
"""`ip -batch`: public, private and closed addresses, all of which have servers."""


class Namespace:
    """A net namespace.

    Args:
        setup: lines for `ip -batch`.
    """

    def __init__(self, setup: str) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("net namespaces of a test need root and ip(8)")
        before = _open_own()
        try:
            if _libc.unshare(_NEW_NET):
                pytest.skip(f"unshare: {os.strerror(ctypes.get_errno())}")
            self._fd = _open_own()
            batch = ["ip", "-batch", "-"]
            subprocess.run(batch, input=setup.encode(), check=True, capture_output=True)
        finally:
            _enter(before)
            os.close(before)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the calling thread in the namespace inside."""
        before = _open_own()
        try:
            _enter(self._fd)
            yield
        finally:
            _enter(before)
            os.close(before)

    def make_socket(
        self,
        family: socket.AddressFamily = socket.AF_INET,
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> socket.socket:
        """Return a non-blocking socket of the namespace."""
        with self.entered():
            sock = socket.socket(family, kind)
        sock.setblocking(False)
        return sock

    def listener(self, address: str, port: int) -> socket.socket:
        """Return a non-blocking listener of the namespace."""
        is_v6 = ":" in address
        sock = self.make_socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        if is_v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(1024)
        return sock

    def close(self) -> None:
        """Give the namespace up; it goes with the last socket in it."""
        os.close(self._fd)


def inner_sockets(
    child: Namespace, ports: tuple[int, ...], stock: int = 8
) -> InnerSockets:
    """Return what a host holds of a child's namespace."""
    dns_datagram = child.make_socket(kind=socket.SOCK_DGRAM)
    dns_datagram.bind(("127.0.0.1", 53))
    any_v4 = "0.0.0.0"  # noqa: S104 - of a namespace
    own = {
        port: child.listener(any_v4 if port in ports else "127.0.0.1", port)
        for port in (53, 3128)
    }
    listeners: dict[int, tuple[socket.socket, ...]] = {
        port: (
            own.get(port) or child.listener(any_v4, port),
            child.listener("::", port),
        )
        for port in ports
    }
    families = (socket.AF_INET, socket.AF_INET6)
    stock_sockets = [
        child.make_socket(family) for _ in range(stock) for family in families
    ]
    return InnerSockets(
        dns_datagram, own[53], own[3128], listeners, stock_sockets, has_v6=True
    )


def astray() -> int:
    """Return how many threads are in another net namespace than the process."""
    own = os.stat("/proc/self/ns/net").st_ino
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            count += os.stat(f"/proc/self/task/{thread}/ns/net").st_ino != own
    return count


@asynccontextmanager
async def threads_leave() -> AsyncIterator[None]:
    """Have worker threads that are started in a namespace leave it at the end.

    A thread begins in the namespace of its maker, and Trio keeps it for later calls.
    """
    home = _open_own()
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            while count := astray():
                async with trio.open_nursery() as nursery:
                    for _ in range(count + 8):
                        nursery.start_soon(trio.to_thread.run_sync, _come_back, home)
        os.close(home)


def _come_back(home: int) -> None:
    _enter(home)
    time.sleep(0.005)  # so that another call takes another thread


def _open_own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    if _libc.setns(fd, _NEW_NET):
        raise OSError(ctypes.get_errno(), "setns")
