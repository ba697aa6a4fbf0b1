"""Costs of the network by name: throughput, and the time to the first byte.

The host's side runs in this process, between two net namespaces: a child's, and one that
is all the world. Beside it, in the same namespaces and in the same round, stands a copier
of two threads that does nothing but splice(2), and for the first byte a connection with
nothing between. Root alone may make such namespaces.
"""

import ctypes
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import trio

from benchmarks.hosts import run_trio
from benchmarks.measure import MeasureError, percentile, workplace
from benchmarks.neighbours import Crowd, open_crowd
from benchmarks.network_beside import measure_beside
from benchmarks.network_costs import measure_costs
from benchmarks.options import parse, parser
from benchmarks.report import Report, Row, at_least, at_most
from hostlib.journal import Journal
from hostlib.log import Log
from supervisor.network.addresses import POOL_V4
from supervisor.network.child_network import ChildIdentity, ChildNetwork, Outside
from supervisor.network.inner_sockets import InnerSockets
from supervisor.network.own_addresses import read_own_addresses
from supervisor.network.pool import NAMESPACE_V4
from supervisor.network.resolver import Resolver
from supervisor.network.section import NetworkSection
from supervisor.network.settings import settings_from
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad

NAME = "network"
METHOD = "host and copier in turn, between the same two namespaces, medians of ratios"
ROUNDS = 9
MEBIBYTES = 512
CONNECTIONS = 200
CHILDREN, CROWD = 100, 1000
READS_AT_ONCE, READS_AT_REST = 5, 50
"""Of each of the children that read: 10 ms lie between two."""

LOOK_S = 0.001
ANSWER_S = 60

SERVER = "203.0.113.5"
BULK, FIRST = 8001, 8002
AT_COPIER = (
    1000  # is added to a port: two listeners on one would be in each other's way
)
COPIER = "127.0.0.9"
CHILD = f"link set lo up\naddress add {NAMESPACE_V4}/{POOL_V4.prefixlen} dev lo\n"
WORLD = "link set lo up\naddress add 203.0.113.1/24 dev lo\n"
PEERS = str(Path(__file__).with_name("network_peers.py"))

_NEW_NET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A net namespace, set up by lines of `ip -batch`."""

    def __init__(self, setup: str, stack: ExitStack) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            raise MeasureError("needs root and ip(8)")
        before = _own()
        try:
            if _libc.unshare(_NEW_NET):
                why = os.strerror(ctypes.get_errno())
                raise MeasureError(f"cannot make a net namespace: {why}")
            self._fd = _own()
            stack.callback(os.close, self._fd)
            batch = ["ip", "-batch", "-"]
            subprocess.run(batch, input=setup.encode(), check=True)
        finally:
            _enter(before)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and what it starts, in the namespace inside."""
        before = _own()
        _enter(os.dup(self._fd))
        try:
            yield
        finally:
            _enter(before)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._fd

    def listener(self, address: str, port: int) -> socket.socket:
        """Return a listener."""
        with self.entered():
            return socket.create_server((address, port), backlog=1024)


class Peer:
    """A process of `network_peers`."""

    def __init__(
        self, where: Namespace, stack: ExitStack, words: Sequence[object]
    ) -> None:
        passed = (socket.socket, Namespace)
        fds = [word.fileno() for word in words if isinstance(word, passed)]
        texts = [
            str(word.fileno() if isinstance(word, passed) else word) for word in words
        ]
        with where.entered():
            self._process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-S", PEERS, *texts],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=fds,
                )
            )
        stack.callback(self._process.kill)

    async def ask(self, question: str) -> str:
        """Return the answer to a question."""
        with trio.fail_after(ANSWER_S):
            ask = partial(self._ask, question)
            return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)

    def _ask(self, question: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise MeasureError("a peer has no pipes")
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise MeasureError(f"no answer to: {question}")
        return answer


async def measure(
    launchpad: LaunchpadProcess, rounds: int, stack: ExitStack
) -> list[Row]:
    """Take all figures."""
    where = stack.enter_context(workplace())
    world, child = Namespace(WORLD, stack), Namespace(CHILD, stack)
    servers = (world.listener(SERVER, BULK), world.listener(SERVER, FIRST))
    Peer(world, stack, ["serve", *servers, MEBIBYTES])
    copiers = [
        (child.listener(COPIER, port + AT_COPIER), SERVER, port)
        for port in (BULK, FIRST)
    ]
    words = [word for copier in copiers for word in copier]
    Peer(world, stack, ["copy", *words])
    inside, outside = Peer(child, stack, ["ask"]), Peer(world, stack, ["ask"])
    for sock in (*servers, *(copier[0] for copier in copiers)):
        sock.close()
    with world.entered():
        async with trio.open_nursery() as nursery:
            outer = _outside()
            nursery.start_soon(outer.run)
            network = _network(child, outer)
            network.start(nursery)
            address = await inside.ask("name web.test")
            rows = await _rows(rounds, address, inside, outside)
            await network.aclose()
            async with open_crowd(launchpad, where, READS_AT_ONCE) as readers:
                rows += await _crowd(rounds, nursery, stack, readers)
            nursery.cancel_scope.cancel()
    return rows


async def _crowd(
    rounds: int, nursery: trio.Nursery, stack: ExitStack, readers: Crowd
) -> list[Row]:
    """Take READs of other children while many children connect at once."""
    children = [Namespace(CHILD, stack) for _ in range(CHILDREN)]
    peer = Peer(children[0], stack, ["ask", *children])
    outside = _outside()
    nursery.start_soon(outside.run)
    networks = [_network(child, outside) for child in children]
    for network in networks:
        network.start(nursery)
    late_ms: list[float] = []
    read_ms: list[float] = []
    taken = []
    question = f"crowd web.test {FIRST} {CROWD // CHILDREN}"
    await peer.ask(question)  # warm-up
    at_rest = await readers.take_reads(READS_AT_REST)
    for _ in range(rounds):
        async with trio.open_nursery() as watching:
            watching.start_soon(_watch, late_ms)
            watching.start_soon(_read, readers, read_ms)
            taken.append(float(await peer.ask(question)))
            watching.cancel_scope.cancel()
    for network in networks:
        await network.aclose()
    beside = f"{CROWD:,} connections of {CHILDREN} children at once"
    return [
        Row(f"READ of others, {beside}", percentile(read_ms, 99), "ms p99", at_most(100.0),
            f"at most {max(read_ms):.0f} ms of {len(read_ms):,};"
            f" at rest {percentile(at_rest, 99) * 1e3:.1f} ms p99;"
            f" all connected in {statistics.median(taken):.2f} s",
            {"highest": max(read_ms), "at_rest": percentile(at_rest, 99) * 1e3}),
        Row(f"turn of the loop, {beside}", percentile(late_ms, 99), "ms p99", None,
            f"at most {max(late_ms):.0f} ms", {"highest": max(late_ms)}),
    ]  # fmt: skip


async def _read(readers: Crowd, read_ms: list[float]) -> None:
    """Have other children read a few times, again and again."""
    while True:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):  # answers that are due are read
            took = await readers.take_reads(READS_AT_ONCE)
        read_ms += [one * 1e3 for one in took]


async def _watch(late_ms: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await trio.sleep(LOOK_S)
        late_ms.append((time.perf_counter() - begun - LOOK_S) * 1000)


async def _rows(rounds: int, address: str, inside: Peer, outside: Peer) -> list[Row]:
    async def seconds(where: str) -> float:
        return float(await inside.ask(f"bulk {where}"))

    async def first(peer: Peer, where: str) -> float:
        return float(await peer.ask(f"first {where} {CONNECTIONS}"))

    host, copier = f"{address} {BULK}", f"{COPIER} {BULK + AT_COPIER}"
    ratios, speeds, added, copied = [], [], [], []
    for number in range(rounds + 1):
        taken = {}
        for where in (copier, host) if number % 2 else (host, copier):
            taken[where] = await seconds(where)
        by_host = await first(inside, f"{address} {FIRST}")
        by_copier = await first(inside, f"{COPIER} {FIRST + AT_COPIER}")
        directly = await first(outside, f"{SERVER} {FIRST}")
        if not number:
            continue  # warm-up
        ratios.append(taken[copier] / taken[host])
        speeds.append(MEBIBYTES / 1024 / taken[host])
        added.append(by_host - directly)
        copied.append(by_copier - directly)
    begun = [_time_own() for _ in range(20)]
    return [
        Row("bytes, of a copier by splice", statistics.median(ratios), "x",
            at_least(0.8), f"{statistics.median(speeds):.2f} GiB/s",
            {"lowest": min(ratios), "highest": max(ratios)}),
        Row("connect to first byte", statistics.median(added), "ms more",
            at_most(0.4), f"the copier: {statistics.median(copied):.2f} ms more",
            {"lowest": min(added), "highest": max(added)}),
        Row("of that, the host's own addresses", statistics.median(begun), "ms"),
    ]  # fmt: skip


def _time_own() -> float:
    begun = time.perf_counter()
    read_own_addresses()
    return (time.perf_counter() - begun) * 1000


def _outside() -> Outside:
    resolver = Resolver(lambda _: (ip_address(SERVER),))
    return Outside(Journal(-1, print), Log("ERROR"), resolver)


def _network(child: Namespace, outside: Outside) -> ChildNetwork:
    section = NetworkSection([f"web.test:{BULK},{FIRST}"])
    listeners: dict[int, tuple[socket.socket, ...]] = {
        port: (child.listener("", port),) for port in (BULK, FIRST)
    }
    with child.entered():
        datagram = socket.socket(type=socket.SOCK_DGRAM)
        datagram.bind(("127.0.0.1", 53))
    streams = [child.listener("127.0.0.1", port) for port in (53, 3128)]
    sockets = InnerSockets(
        datagram, streams[0], streams[1], listeners, [], has_v6=False
    )
    for sock in (datagram, *streams, *(row[0] for row in listeners.values())):
        sock.setblocking(False)
    return ChildNetwork(ChildIdentity("c1"), settings_from(section), sockets, outside)


def _own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    """Enter a namespace, and close its descriptor."""
    try:
        if _libc.setns(fd, _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    options.add_argument(
        "--peers", action="store_true",
        help="beside other products, which are installed into ~/.cache/sandhost/peers",
    )  # fmt: skip
    given = parse(options, argv)
    launchpad = start_launchpad()
    try:
        with ExitStack() as stack:
            rows = run_trio(measure, launchpad, given.rounds, stack)
    except (MeasureError, OSError, subprocess.CalledProcessError) as error:
        rows = [Row("bytes, of a copier by splice", None, "x", detail=str(error))]
    try:
        rows += measure_costs(given.rounds)
    except (MeasureError, OSError) as error:
        rows.append(Row("start with granted ports", None, "ms", detail=str(error)))
    if given.peers:
        rows += measure_beside(given.rounds)
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
