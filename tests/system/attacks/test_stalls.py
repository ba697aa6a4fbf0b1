"""Slow, silent, stopped and flooding children: they end alone, and delay nobody."""

import errno
import os
import re
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from supervisor.fsproxy.session import Session
from supervisor.parts import Settings
from tests.helpers.delays import NEIGHBOUR_S, slowest_read
from tests.helpers.rounds import LONG
from tests.helpers.stage import Puppet, Stage, descriptors, eventually, open_stage
from tests.system.attacks.conftest import put_behind
from vfs.filesystem import OWN_DESCRIPTORS

pytestmark = [pytest.mark.slow, pytest.mark.attack, pytest.mark.chaos]


DEADLINE_S = 0.4
READS = 2000 if LONG else 600
FLOOD_S = 8.0
"""Within this a flood has gone on, also on a machine that others use."""


@pytest.fixture
async def hasty(readable: Path, kind: str) -> AsyncIterator[Stage]:
    """A host with a short deadline for what has begun (spec F8)."""
    async with open_stage(readable, Settings(deadline_s=DEADLINE_S)) as stage:
        put_behind(stage, kind)
        with (stage.root / "big").open("wb") as file:
            file.truncate(64 * 1024 * 1024)
        yield stage


async def neighbour(stage: Stage) -> Puppet:
    """A well-behaved child, warmed up."""
    (stage.root / "calm").write_bytes(b"c" * 4096)
    child = await stage.puppet()
    await child.do(f"slowest({await child.open(b'calm')}, 5)")
    return child


async def slowest_of(stage: Stage, child: Puppet) -> float:
    """The slowest of many READs of a neighbour, in seconds."""
    assert child.child.session is not None
    fileno = min(child.child.session.files)
    return await slowest_read(stage, child, fileno, READS)


def closed_for(stage: Stage, child: Puppet) -> str | None:
    """Why a child's connection was closed; None while it is open."""
    rows = stage.events("client.gone")
    return next((r["reason"] for r in rows if r["client_id"] == child.client_id), None)


# attack 16, spec F8: a message that was begun must end.
@pytest.mark.parametrize(
    "begun",
    [
        "send(b'OPEN a')",
        "send(b'WRITE %d 100\\nabc' % opened(b'a', b'w'))",
        "send(b'LLM_CHAT false 5 5 5 5\\nab')",
        "send(b'x' * 70000)",
        # A byte now and then is no excuse.
        "[(send(b'P'), time.sleep(0.1)) for _ in range(7)] and None",
    ],
)
async def test_a_message_that_does_not_end_closes_its_connection(
    hasty: Stage, begun: str
) -> None:
    child, idle = await hasty.puppet(), await hasty.puppet()
    await idle.ask(b"PING\n")
    start = time.monotonic()
    child.tell(begun)
    await eventually(lambda: closed_for(hasty, child) is not None)
    assert time.monotonic() - start >= DEADLINE_S
    assert closed_for(hasty, child) == "deadline"
    # Between messages a client may idle for ever, and its child goes on (spec S3).
    assert await idle.ask(b"PING\n") == b"OK"
    await child.hear()
    assert await child.do("'alive'") == "alive"


# attack 17, spec F8, S5, I9
@pytest.mark.parametrize(
    "request_bytes",
    [b"READ %d 16777216\n", b"READ %d 4096\n", b"PING\n", b"nonsense\n"],
)
async def test_a_reader_that_never_reads_is_closed_and_delays_nobody(
    hasty: Stage, request_bytes: bytes
) -> None:
    calm = await neighbour(hasty)
    child = await hasty.puppet()
    fileno = await child.open(b"big")
    line = request_bytes % fileno if b"%" in request_bytes else request_bytes
    child.tell(f"send({line!r} * 1000000)")  # blocks when nobody takes it any more
    session = child.child.session
    assert session is not None
    await eventually(lambda: session.outbound.is_waiting)
    assert await slowest_of(hasty, calm) < NEIGHBOUR_S
    await eventually(lambda: closed_for(hasty, child) is not None)
    assert closed_for(hasty, child) == "deadline"
    assert await slowest_of(hasty, calm) < NEIGHBOUR_S


# attack 17: a stopped child with a reply on its way.
async def test_a_stopped_child_delays_nobody(hasty: Stage) -> None:
    calm = await neighbour(hasty)
    child = await hasty.puppet()
    fileno = await child.open(b"big")
    child.tell(
        f"send(b'READ {fileno} 16777216\\n') and os.kill(os.getpid(), signal.SIGSTOP)"
    )
    assert await slowest_of(hasty, calm) < NEIGHBOUR_S
    await eventually(lambda: closed_for(hasty, child) is not None)
    assert closed_for(hasty, child) == "deadline"
    process = child.child.process
    assert process is not None
    process.send_signal(signal.SIGCONT)
    assert await child.kill() == 128 + signal.SIGKILL


def went_on(session: Session, before: int) -> bool:
    """Whether more requests came than before."""
    return session.requests > before


# spec S5: floods of requests, of garbage, of large reads and writes.
@pytest.mark.parametrize(
    "flood",
    [
        "[ask(b'PING\\n') for _ in range(10**9)]",
        "[ask(b'READ %d 1\\n' % E) for _ in range(10**9)]",
        "[(send(b'PING\\n' * 500), take(1500)) for _ in range(10**9)]",
        # A line each time, for each is answered: who does not take answers stalls.
        (
            "[ask(b'?' + os.urandom(1000).replace(b'\\n', b'') + b'\\n')"
            " for _ in range(10**9)]"
        ),
        "[(ask(b'SEEK %d 0\\n' % F), read(F, 16777216)) for _ in range(10**9)]",
        (
            "[(ask(b'SEEK %d 0\\n' % G),"
            " ask(b'WRITE %d 1048576\\n' % G + bytes(1048576))) for _ in range(10**9)]"
        ),
        "[ask(b'CLOSE %d\\n' % opened(b'big')) for _ in range(10**9)]",
    ],
    ids=["ping", "same", "pipelined", "garbage", "reads", "writes", "opens"],
)
async def test_a_flood_delays_nobody(
    stage: Stage, flood: str, tell: Callable[[str], None]
) -> None:
    (stage.root / "big").write_bytes(bytes(16 * 1024 * 1024))
    calm = await neighbour(stage)
    child = await stage.puppet()
    (stage.root / "empty").touch()
    names = {"E": (b"empty", b"r"), "F": (b"big", b"r"), "G": (b"out", b"w")}
    for letter, (name, mode) in names.items():
        fileno = await child.open(name, mode)
        flood = re.sub(rf"\b{letter}\b", str(fileno), flood)
    child.tell(flood)
    session = child.child.session
    assert session is not None
    await eventually(lambda: session.requests > 3, FLOOD_S)
    before = session.requests
    slowest = await slowest_of(stage, calm)
    # On a busy machine the one that floods may not have run at all beside READs that
    # go first: until it has, nothing was measured.
    deadline = time.monotonic() + FLOOD_S
    while session.requests == before:
        assert time.monotonic() < deadline, "the flood had dried up"
        await eventually(partial(went_on, session, before), FLOOD_S)
        before = session.requests
        slowest = max(slowest, await slowest_of(stage, calm))
    tell(f"slowest READ beside a flood: {slowest * 1000:.1f} ms")
    assert slowest < NEIGHBOUR_S
    await child.kill()


# attack 18: a child has its own bound on open files, and says so in an error.
async def test_a_child_that_opens_too_much_sees_an_error(stage: Stage) -> None:
    (stage.root / "a").write_bytes(b"x")
    child, other = await stage.puppet(), await stage.puppet()
    filenos = await child.do("[opened(b'a') for _ in range(256)]")
    assert len(set(filenos)) == 256
    reason = os.strerror(errno.EMFILE).encode()
    failed = b"ERROR failed to open file 'a': " + reason
    assert await child.do("[opened(b'a') for _ in range(3)]") == [failed] * 3
    await other.open(b"a")
    assert await child.ask(b"CLOSE %d\n" % filenos[0]) == b"OK"
    assert await child.open(b"a") > filenos[-1]
    await child.kill()
    assert len(stage.host.fs.tables.files) == 1


# attack 18: what all children together may open leaves the host its reserve.
async def test_the_host_keeps_descriptors_for_itself(stage: Stage) -> None:
    (stage.root / "a").write_bytes(b"x")
    stage.host.fs.descriptor_account.limit = 300 + 2 * OWN_DESCRIPTORS
    first, second = await stage.puppet(), await stage.puppet()
    assert len(await first.do("[opened(b'a') for _ in range(256)]")) == 256
    got = await second.do("[opened(b'a') for _ in range(50)]")
    assert [isinstance(g, int) for g in got] == [True] * 44 + [False] * 6
    third = await stage.puppet()  # it still spawns, journals and answers
    assert (await third.ask(b"OPEN a r false\n")).startswith(b"ERROR failed to open")
    assert await third.ask(b"MKDIR false made\n") == b"OK"
    await first.kill()
    await third.open(b"a")


# attack 19, I4, spec R2: a number of another client is as unknown as any.
async def test_guessing_filenos_finds_nothing(stage: Stage) -> None:
    victim, thief = await stage.puppet(), await stage.puppet()
    fileno = await victim.open(b"secret", b"w+")
    await victim.write(fileno, b"secret")
    own = await thief.open(b"mine", b"w+")
    guesses = [n for n in (*range(-1, 6), *range(990, 1100), 2**31, 2**63) if n != own]
    for guess in guesses:
        token = b"%d" % guess
        unknown = b"ERROR invalid fileno: " + token
        for request in (
            b"READ %b 10\n" % token,
            b"WRITE %b 3\nabc" % token,
            b"CLOSE %b\n" % token,
            b"SEEK %b 0\n" % token,
            b"TRUNCATE %b 0\n" % token,
            b"SYNC %b\n" % token,
        ):
            assert await thief.ask(request) == unknown
    assert await victim.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
    assert await victim.read(fileno, 99) == b"secret"
    # attack 19: nor does a number come back once its file is closed, or its child dead.
    await victim.kill()
    assert await thief.open(b"mine") > fileno
    unknown = b"ERROR invalid fileno: %d" % fileno
    assert await thief.ask(b"READ %d 10\n" % fileno) == unknown


# attack 19: an attached connection is another client.
async def test_siblings_on_attached_connections_share_no_numbers(stage: Stage) -> None:
    child = await stage.puppet()
    fileno = await child.open(b"a", b"w")
    assert await child.do(f"ask(b'WRITE {fileno} 1\\nx', attached())") == (
        b"ERROR invalid fileno: %d" % fileno
    )


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process have so many more descriptors, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 8, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


# attack 18, spec N4, S7: who asks for a connection that cannot be keeps its own.
@pytest.mark.parametrize("left", [0, 1, 2])
async def test_no_descriptor_is_left_for_a_connection(stage: Stage, left: int) -> None:
    child = await stage.puppet()
    with descriptors_left(left):
        got = await child.do("attached()")
        assert await child.ask(b"PING\n") == b"OK"
    if left < 2:
        assert got == b"ERROR failed to attach: " + os.strerror(errno.EMFILE).encode()
    else:
        assert isinstance(got, int)
