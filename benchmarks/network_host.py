"""A host whose children have the network by name, as a program that is measured.

    python -m benchmarks.network_host PLACE STARTS ROUNDS

Run by unshare(1) with a net and a mount namespace, which become all the world. Prints figures as JSON, one line
for each kind. At the line "idle" it does nothing until a line comes on standard input.
"""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from benchmarks.hosts import run_trio
from benchmarks.measure import MeasureError
from hostlib.linux.processes import children_of
from supervisor.children.child import Child
from supervisor.host import Host, open_host
from supervisor.network.section import CredentialSection, NetworkSection
from supervisor.network.service import NetworkService, open_network
from supervisor.sandbox.plan import PROFILES
from supervisor.sandbox.scratch import Scratch
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad
from supervisor.spec import ChildSpec, minimal_env
from tests.helpers.networkworld import ADDRESS, FILES, SETUP, furnish

NAME = "web.test"
FIRST, TLS = 8002, 8443
PORTS = (0, 1, 8)
CHILDREN = 50
REQUESTS = 50
"""Of each kind in a round."""

PEERS = Path(__file__).with_name("network_peers.py")
_ANSWER_S = 30


class Program:
    """A peer (`network_peers`) that is asked by lines."""

    def __init__(self, orders: int, answers: trio.lowlevel.FdStream) -> None:
        self._orders = orders
        self._answers = answers

    async def ask(self, question: str) -> str:
        """Return the answer to a question."""
        os.write(self._orders, f"{question}\n".encode())
        text = b""
        with trio.fail_after(_ANSWER_S):
            while not text.endswith(b"\n"):
                piece = await self._answers.receive_some()
                if not piece:
                    raise MeasureError(f"no answer to: {question}")
                text += piece
        return text.decode().strip()


@asynccontextmanager
async def started(
    host: Host,
    command: Sequence[str],
    keys: NetworkSection | None,
    took_ms: list[float] | None = None,
    stdio: tuple[int, int] | None = None,
) -> AsyncIterator[Child]:
    """Start a child in the walls of `auto`; it is gone at the end, its places too."""
    profile = PROFILES["auto"]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    scratch = Scratch(None, has_user="uid" in profile.layers)
    spec = ChildSpec(
        tuple(command), cwd=scratch.tmp, root=scratch.root, run_dir=scratch.run,
        made_in=scratch.fd, tmp_dir=scratch.tmp, env=minimal_env(scratch.tmp),
        stdio=(*(stdio or (null, null)), 2), sandbox=profile, network_keys=keys,
    )  # fmt: skip
    begun = time.perf_counter()
    child = await host.spawn(spec)
    if took_ms is not None:
        took_ms.append((time.perf_counter() - begun) * 1e3)
    os.close(null)
    if child.failure is not None or child.process is None:
        raise MeasureError(child.failure.text if child.failure else "it has ended")
    try:
        yield child
    finally:
        if command[0] != "/bin/true":
            child.process.send_signal(9)
        await child.wait_gone()
        await scratch.remove()


@asynccontextmanager
async def asked(
    host: Host, keys: NetworkSection
) -> AsyncIterator[tuple[Child, Program]]:
    """Start a child that answers questions."""
    (read, orders), (answers, write) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    command = (sys.executable, "-I", "-S", "-c", PEERS.read_text(), "ask")
    async with (
        trio.lowlevel.FdStream(answers) as stream,
        started(host, command, keys, stdio=(read, write)) as child,
    ):
        os.close(read)
        os.close(write)
        try:
            yield child, Program(orders, stream)
        finally:
            os.close(orders)


def with_ports(count: int) -> NetworkSection:
    """Return rules that grant so many ports."""
    ports = ",".join(str(8001 + number) for number in range(count))
    return NetworkSection([f"{NAME}:{ports}" if ports else f"!{NAME}"])


async def take_starts(host: Host, starts: int) -> dict[str, list[float]]:
    """Return ms of starts, in turn: without rules, and with each number of ports."""
    kinds = {"none": None, **{str(count): with_ports(count) for count in PORTS}}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(starts + 2):  # the first two are forked anew, as in `sandbox`
        order = list(kinds)
        for kind in reversed(order) if number % 2 else order:
            took_ms = taken[kind] if number >= 2 else []
            async with started(host, ("/bin/true",), kinds[kind], took_ms):
                pass
    return taken


async def take_changes(
    host: Host, service: NetworkService, rounds: int
) -> dict[str, list[float]]:
    """Return ms from an order to the end of the next connection, which obeys it."""
    taken: dict[str, list[float]] = {"allow": [], "deny": [], "unchanged": []}
    rule, where = f"{NAME}:{FIRST}", f"reach {NAME} {FIRST}"
    async with asked(host, with_ports(1)) as (child, program):
        for number in range(10 * rounds + 1):
            for kind, wanted in (("allow", "byte"), ("deny", "refused")):
                rules = ([rule], []) if kind == "allow" else ([], [rule])
                begun = time.perf_counter()
                await service.change_network(child.id, *rules, cut=False)
                answer = await program.ask(where)
                took_ms = (time.perf_counter() - begun) * 1e3
                if answer != wanted:
                    raise MeasureError(f"after {kind}: {answer}")
                begun = time.perf_counter()
                await program.ask(where)
                if number:
                    taken[kind].append(took_ms)
                    again_ms = (time.perf_counter() - begun) * 1e3
                    taken["unchanged"].append(again_ms)
    return taken


async def take_requests(host: Host, place: Path, rounds: int) -> dict[str, list[float]]:
    """Return ms of requests: with a credential, and by TLS itself from the world."""
    keys = NetworkSection([f"{NAME}:{FIRST}"], credentials=["web"])
    kinds = ("credential new", "credential kept", "direct new", "direct kept")
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    words = (sys.executable, str(PEERS), "ask")
    async with asked(host, keys) as (_, inside), outside(words) as direct:
        for number in range(rounds + 1):
            order = kinds if number % 2 else tuple(reversed(kinds))
            for kind in order:
                way, keeping = kind.split()
                where = (
                    f"http://{NAME}.sandhost -"
                    if way == "credential"
                    else f"https://{NAME}:{TLS} {place}/tls-made.pem"
                )
                program = inside if way == "credential" else direct
                answer = await program.ask(f"request {where} {keeping} {REQUESTS}")
                if number:
                    taken[kind].append(float(answer))
    return taken


@asynccontextmanager
async def outside(words: Sequence[str]) -> AsyncIterator[Program]:
    """Run a peer that is no child."""
    (read, orders), (answers, write) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    async with trio.lowlevel.FdStream(answers) as stream, trio.open_nursery() as tasks:
        run = partial(trio.run_process, words, stdin=read, stdout=write, check=False)
        process: trio.Process = await tasks.start(run)
        os.close(read)
        os.close(write)
        try:
            yield Program(orders, stream)
        finally:
            os.close(orders)
            process.kill()


async def hold_idle(host: Host) -> None:
    """Hold children that do nothing until a line comes on standard input."""
    async with trio.open_nursery() as nursery:
        for _ in range(CHILDREN):
            await nursery.start(_hold, host)
        idle = {"processes": descendants(os.getpid())}
        print(json.dumps({"idle": idle}), flush=True)
        async with trio.lowlevel.FdStream(os.dup(0)) as orders:
            await orders.receive_some()
        nursery.cancel_scope.cancel()


async def _hold(host: Host, task_status: trio.TaskStatus[None]) -> None:
    with trio.CancelScope(shield=True) as scope:
        async with started(host, ("/bin/sleep", "1000"), with_ports(max(PORTS))):
            task_status.started()
            scope.shield = False
            await trio.sleep_forever()


def descendants(pid: int) -> list[int]:
    """Return a process and all beneath it."""
    return [pid, *(low for child in children_of(pid) for low in descendants(child))]


async def measure(
    launchpad: LaunchpadProcess, place: Path, starts: int, rounds: int
) -> None:
    """Take and print all figures."""
    server = f"{NAME}:{TLS}"
    section = CredentialSection(
        server, "Authorization: Bearer {file}", str(place / "key"), str(place / "tls-made.pem")
    )  # fmt: skip
    async with open_host(launchpad) as host:
        async with open_network(host, {"web": section}) as service:
            print(json.dumps({"starts": await take_starts(host, starts)}), flush=True)
            words = [sys.executable, "-S", str(PEERS), "tls", ADDRESS, str(TLS)]
            async with outside([*words, str(FIRST), str(place / "tls.pem")]) as serving:
                await serving.ask("")
                changes = await take_changes(host, service, rounds)
                print(json.dumps({"changes": changes}), flush=True)
                requests = await take_requests(host, place, rounds)
                print(json.dumps({"requests": requests}), flush=True)
            await hold_idle(host)
        await host.stop(grace_s=0.0)


def main(argv: Sequence[str]) -> int:
    """Measure; what cannot be measured is one line."""
    try:
        place = Path(argv[0])
        furnish(place, SETUP, FILES)
        launchpad = start_launchpad()
        run_trio(measure, launchpad, place, int(argv[1]), int(argv[2]))
    except (MeasureError, OSError) as why:
        print(json.dumps({"failed": str(why)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
