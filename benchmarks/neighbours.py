"""Costs of one hostile child for the READs of its neighbours.

One host, 20 children in the walls of `auto`: 19 read 4 KiB a hundred times a second each,
the 20th waits or does its worst within limits as `--limit` sets them.  The peer is the
same host in the same minute with the 20th child at rest; p99 over all neighbours, from
when the hostile one has gone on for a second. A fork bomb has a row for its first two
seconds as well: until it is held back (``supervisor.sandbox.fork_watch``) it competes.
"""

import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from benchmarks.hosts import run_trio
from benchmarks.measure import MeasureError, percentile, workplace
from benchmarks.options import parse, parser
from benchmarks.report import Report, Row, at_most
from hostlib.user_values import Limits
from supervisor.children.child import Child
from supervisor.host import Host, open_host
from supervisor.sandbox.plan import PROFILES
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad
from supervisor.spec import ChildSpec, minimal_env

NAME = "neighbours"
METHOD = (
    "p99 of READ in 19 children beside a hostile one, of the same beside an idle one"
)
ROUNDS = 3
READERS = 19
READS = 150
SETTLED_S = 1.0
PROCESSES = 100
"""The fork bomb's limit of processes; the aim must hold at any number."""

AT_ONCE = "fork bomb, from its first moment"

LARGE = "READs of 16 MiB, 4 in advance"

LARGE_BY_MANY = "READs of 16 MiB by 32 connections"

NO_AIM = frozenset({AT_ONCE, LARGE, LARGE_BY_MANY})
"""A fork bomb until it is held back; and what keeps a client and the host as busy as two
processes that compute are, which on two processors cost the others more than that."""

READER = """
import os, sys, time
def ask(data):
    os.write(3, data)
    return os.read(3, 8192)
number = ask(b'OPEN calm r false\\n').split()[1].decode()
seek, read = f'SEEK {number} 0\\n'.encode(), f'READ {number} 4096\\n'.encode()
for line in sys.stdin:
    took = []
    for _ in range(int(line)):
        time.sleep(0.01)
        ask(seek)
        start = time.perf_counter()
        size = len(ask(read))
        while size < 4096 + 8:
            size += len(os.read(3, 8192))
        took.append(time.perf_counter() - start)
    print(took, flush=True)
"""

FLOOD = """
os.write(3, b'OPEN {name} r false\\n')
number = os.read(3, 99).split()[1].decode()
request = f'SEEK {{number}} 0\\nREAD {{number}} {size}\\n'.encode() * {ahead}
replies = {ahead} * len(b'OK 0\\nOK {size}\\n') + {ahead} * {size}
begun()
while True:
    os.write(3, request)
    left = replies
    while left > 0:
        left -= len(os.read(3, 1 << 16))
"""

ATTACHED = """
import array, socket
door, doors = socket.socket(fileno=3), []
for _ in range({count}):
    os.write(3, b'ATTACH\\n')
    reply, controls, _, _ = door.recvmsg(200, 256)
    if not reply.startswith(b'OK'):
        os._exit(1)
    doors.append(array.array('i', controls[0][2][:4])[0])
"""

# Each says a word when it has begun, and goes on until it is killed.
HOSTILE = {
    "idle": "begun(); time.sleep(600)",
    "fork bomb": """
begun()
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "flood of READs, 16 in advance": FLOOD.format(name="calm", size=4096, ahead=16),
    "flood of READs, one by one": FLOOD.format(name="calm", size=4096, ahead=1),
    "flood of PINGs by 63 connections": ATTACHED.format(count=63)
    + """
begun()
while True:
    for fd in doors:
        os.write(fd, b'PING\\n' * 8)
    for fd in doors:
        os.read(fd, 1 << 16)
""",
    LARGE: FLOOD.format(name="large", size=16 << 20, ahead=4),
    LARGE_BY_MANY: ATTACHED.format(count=32)
    + """
import select
poll, requests, left, size = select.epoll(), {}, {}, 16 << 20
for fd in doors:
    os.write(fd, b'OPEN large r false\\n')
    number = os.read(fd, 99).split()[1]
    requests[fd] = b'SEEK %b 0\\nREAD %b %d\\n' % (number, number, size)
    left[fd] = 0
    poll.register(fd, select.EPOLLIN)
begun()
for fd in doors:
    os.write(fd, requests[fd])
    left[fd] = size + len(b'OK 0\\nOK %d\\n' % size)
while True:
    for fd, _ in poll.poll():
        left[fd] -= len(os.read(fd, 1 << 20))
        if not left[fd]:
            os.write(fd, requests[fd])
            left[fd] = size + len(b'OK 0\\nOK %d\\n' % size)
""",
    "flood without reading": """
begun()
while True:
    os.write(3, b'PING\\n' * 1000)
""",
    "stopped in a WRITE": """
import signal
os.write(3, b'OPEN f w false\\n')
number = os.read(3, 99).split()[1]
os.write(3, b'WRITE %b 1000000\\n' % number + b'x' * 1000)
begun()
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "memory bomb": """
begun()
while True:
    if os.fork() == 0:  # a group that bounds its memory kills it
        held = []
        try:
            while True:
                held.append(bytearray(1 << 20))
        except MemoryError:
            os._exit(1)
    os.wait()
""",
    "yes > f": """
os.write(3, b'OPEN f w false\\n')
number = os.read(3, 99).split()[1]
begun()
block = b'y\\n' * 32768
while True:
    os.write(3, b'WRITE %b %d\\n' % (number, len(block)))
    view = memoryview(block)
    while view:
        view = view[os.write(3, view):]
    if not os.read(3, 200).startswith(b'OK'):
        os.write(3, b'SEEK %b 0\\n' % number)
        os.read(3, 200)
""",
}
BEGUN = "import os, time\ndef begun():\n    os.write(1, b'begun\\n')\n"


class Crowd:
    """Neighbours that read at a rate on one host, beside one hostile child."""

    def __init__(self, host: Host, where: Path, reads: int) -> None:
        self.host = host
        self.where = where
        self.reads = reads
        self.readers: list[tuple[int, trio.lowlevel.FdStream]] = []

    async def start(
        self, program: str, limits: Limits, stdin: int
    ) -> tuple[Child, trio.lowlevel.FdStream]:
        """Start a child that runs a program; the child and what it prints."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        spec = ChildSpec(
            (sys.executable, "-I", "-S", "-c", program),
            cwd=str(self.where / "cwd"), root=str(self.where / "root"),
            env=minimal_env(str(self.where)), stdio=(stdin, theirs, 2),
            sandbox=PROFILES["auto"], rlimits=limits.rlimits(), group_limits=limits,
            max_bytes=limits.bytes,
        )  # fmt: skip
        child = await self.host.spawn(spec)
        os.close(theirs)
        if child.failure is not None:
            raise MeasureError(child.failure.text)
        return child, trio.lowlevel.FdStream(ours)

    async def populate(self) -> None:
        """Start those that read."""
        for _ in range(READERS):
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            _, said = await self.start(READER, Limits(), theirs)
            os.close(theirs)
            self.readers.append((ours, said))

    async def p99_ms_beside(self, hostile: str, wait_s: float = SETTLED_S) -> float:
        """Let somebody loose, and return the p99 of all neighbours' READs after that, ms."""
        limits = Limits(processes=PROCESSES, memory=256 << 20, bytes=64 << 20)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        child, said = await self.start(BEGUN + HOSTILE[hostile], limits, null)
        os.close(null)
        async with said:
            if not await said.receive_some(64):
                raise MeasureError(
                    f"{hostile}: it ended with {await child.wait_gone()}"
                )
            await trio.sleep(wait_s)
            took = await self.take_reads(self.reads)
            if child.process is None or child.exit is not None:
                raise MeasureError(f"{hostile}: it ended before the others had read")
            child.process.send_signal(9)
            await child.wait_gone()
        return percentile(took, 99) * 1e3

    async def take_reads(self, reads: int) -> list[float]:
        """Have each neighbour read so often; return how long each READ took, s."""
        took: list[float] = []

        async def listen(reader: tuple[int, trio.lowlevel.FdStream]) -> None:
            order, answer = reader
            os.write(order, b"%d\n" % reads)
            text = b""
            while not text.endswith(b"\n"):
                text += await answer.receive_some(1 << 16)
            took.extend(json.loads(text))

        async with trio.open_nursery() as nursery:
            for reader in self.readers:
                nursery.start_soon(listen, reader)
        return took


@asynccontextmanager
async def open_crowd(
    launchpad: LaunchpadProcess, where: Path, reads: int
) -> AsyncIterator[Crowd]:
    """Open a host with its neighbours; all end with the block."""
    for name in ("cwd", "root"):
        (where / name).mkdir()
    (where / "root" / "calm").write_bytes(b"c" * 4096)
    (where / "root" / "large").write_bytes(bytes(16 << 20))
    async with open_host(launchpad) as host:
        crowd = Crowd(host, where, reads)
        try:
            await crowd.populate()
            await crowd.p99_ms_beside("idle")  # warmed up
            yield crowd
        finally:
            for order, said in crowd.readers:
                os.close(order)
                await said.aclose()
            await host.stop(grace_s=0.0)


async def measure(
    launchpad: LaunchpadProcess, where: Path, rounds: int, reads: int
) -> dict[str, list[tuple[float, float]]]:
    """Return (at rest, beside it) in ms for each round, by what is let loose."""
    found: dict[str, list[tuple[float, float]]] = {}
    plan = [(name, name, SETTLED_S) for name in HOSTILE if name != "idle"]
    plan.append((AT_ONCE, "fork bomb", 0.0))
    async with open_crowd(launchpad, where, reads) as crowd:
        for number in range(rounds):
            for row, hostile, wait_s in plan:
                order = ["idle", hostile] if number % 2 else [hostile, "idle"]
                pair = {name: await crowd.p99_ms_beside(name, wait_s) for name in order}
                found.setdefault(row, []).append((pair["idle"], pair[hostile]))
    return found


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    made = parser(NAME, METHOD, rounds=ROUNDS)
    made.add_argument(
        "--reads",
        type=int,
        default=READS,
        metavar="N",
        help=f"how often each neighbour reads in a round (default {READS})",
    )
    given = parse(made, argv)
    launchpad = start_launchpad()
    with workplace() as where:
        figures = run_trio(measure, launchpad, where, given.rounds, given.reads)
    rows = []
    for hostile, pairs in figures.items():
        ratio = statistics.median(beside / rest for rest, beside in pairs)
        rest_ms = statistics.median(rest for rest, _ in pairs)
        beside_ms = statistics.median(beside for _, beside in pairs)
        data = {"at_rest_ms": rest_ms, "beside_ms": beside_ms}
        detail = f"{beside_ms:.2f} / {rest_ms:.2f} ms"
        aim = None if hostile in NO_AIM else at_most(2.0)
        rows.append(Row(hostile, ratio, "x", aim, detail, data))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
