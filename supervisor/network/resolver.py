"""Look-ups of names by the host's own resolver (spec NET6).

1. A look-up runs in a thread of its own kind: a name server that is silent holds up no
   disk, and of one child's look-ups `THREADS_PER_CHILD` run at once.
2. A name is asked for once at a time, and the answer is kept for `KEPT_S`: all who ask
   meanwhile share it.
3. An answer is never a permission: its addresses are judged for each connection.
"""

from __future__ import annotations

import os
import socket
import stat
from ipaddress import ip_address
from typing import TYPE_CHECKING

import trio

from hostlib.linux.holdings import open_descriptors
from hostlib.threads import in_abandonable_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from supervisor.network.hosts import Address

KEPT_S = 5.0
"""How long an answer is kept, also the answer that a name does not exist."""
MAX_KEPT = 4096
"""Answers of all children together."""
MAX_THREADS = 32
THREADS_PER_CHILD = 4
MAX_ADDRESSES = 128
"""Addresses of a name: all are judged in the host's one thread, 10 us each."""

_DNS_PORT = 53

_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY})
_CODES = {
    getattr(socket, word): word for word in dir(socket) if word.startswith("EAI_")
}


class ResolverError(Exception):
    """A name of which the resolver cannot tell what it stands for.

    Attributes:
        reason: a symbol of getaddrinfo(3) or errno(3).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ask_system(name: str) -> tuple[Address, ...]:
    """Return all addresses of a name in the order to try them; blocks.

    Raises:
        ResolverError: no server has answered, or with too much.
    """
    # With its last dot no domain of the host's own is put behind it.
    host = name.encode("ascii") + b"."
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as why:
        if why.errno in _NO_SUCH_NAME:
            return ()
        raise ResolverError(_CODES.get(why.errno or 0, "EAI_FAIL")) from why
    return tuple(dict.fromkeys(ip_address(row[4][0]) for row in rows))


def name_server_sockets() -> Iterator[int]:
    """Yield the descriptors by which look-ups of this process ask name servers."""
    for fd in open_descriptors():
        if _asks_name_server(fd):
            yield fd


def _asks_name_server(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as sock:
            is_internet = sock.family in {socket.AF_INET, socket.AF_INET6}
            return is_internet and bool(sock.getpeername()[1] == _DNS_PORT)
    except OSError:  # it is closed by now, or connected to nothing
        return False


class Resolver:
    """Finds the addresses of names, for all children of a host.

    Args:
        look_up: blocks until it has all addresses of a name; raises `ResolverError`.
    """

    def __init__(
        self, look_up: Callable[[str], tuple[Address, ...]] = ask_system
    ) -> None:
        self._look_up = look_up
        self._threads = trio.CapacityLimiter(MAX_THREADS)
        # In the order in which they were asked for, so that the first is the oldest.
        self._kept: dict[str, tuple[float, tuple[Address, ...] | ResolverError]] = {}
        self._under_way: dict[str, trio.Event] = {}

    @property
    def is_asking(self) -> bool:
        """Whether a look-up is under way, also one that was given up."""
        return bool(self._threads.borrowed_tokens)

    def descriptors(self) -> Iterator[int]:
        """Yield what look-ups hold that are under way, the abandoned ones included."""
        if self.is_asking:
            yield from name_server_sockets()

    async def resolve(
        self, name: str, share: trio.CapacityLimiter
    ) -> tuple[Address, ...]:
        """Return the addresses of a name; none if the name does not exist.

        Args:
            name: as `parse_name` returns it.
            share: bounds the look-ups of one child.

        Cancellation: the others who wait for the same name ask anew.

        Raises:
            ResolverError: it is not known what the name stands for.
        """
        while (answer := self._kept_answer(name)) is None:
            if name in self._under_way:
                await self._under_way[name].wait()
                continue
            async with share:
                # Others ask meanwhile, and do not wait for this child's turn.
                if name not in self._under_way and self._kept_answer(name) is None:
                    await self._ask(name)
        if isinstance(answer, ResolverError):
            raise ResolverError(answer.reason)
        return answer

    def _kept_answer(self, name: str) -> tuple[Address, ...] | ResolverError | None:
        kept_until, answer = self._kept.get(name, (0.0, None))
        return answer if trio.current_time() < kept_until else None

    async def _ask(self, name: str) -> None:
        done = self._under_way[name] = trio.Event()
        try:
            answer = await self._answer(name)
        finally:
            del self._under_way[name]
            done.set()
        self._kept.pop(name, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = (trio.current_time() + KEPT_S, answer)

    async def _answer(self, name: str) -> tuple[Address, ...] | ResolverError:
        try:
            addresses = await in_abandonable_thread(
                self._look_up, name, limiter=self._threads
            )
        except ResolverError as why:
            return why
        except OSError:
            return ResolverError("EAGAIN")  # no thread can be started
        if len(addresses) > MAX_ADDRESSES:
            return ResolverError("EMSGSIZE")
        return addresses
