"""Lies about lengths, and descriptors where bytes belong: memory stays bounded."""

import os
import resource
from pathlib import Path

import pytest
import trio

from supervisor.parts import Settings
from tests.helpers.rounds import LONG
from tests.helpers.stage import Stage, descriptors, eventually, open_stage
from tests.system.attacks.conftest import only

pytestmark = [pytest.mark.slow, pytest.mark.attack]


CHILDREN_THAT_LIE, IN_WALLS = 1000, 200 if LONG else 60
GROWTH_BYTES = 8 * 1024 * 1024


def resident_bytes() -> int:
    """Resident memory of this process, which is the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# attack 15, spec W3, R3, I9: half of them claim 10 GB, half the largest WRITE there is;
# each sends three bytes of it.
@pytest.mark.chaos
async def test_children_that_lie_cost_eight_mebibytes(stage: Stage, kind: str) -> None:
    count = CHILDREN_THAT_LIE if kind == "none" else IN_WALLS
    go, starting_pistol = os.pipe2(os.O_CLOEXEC)
    script = (
        "printf 'OPEN f%s w false\\n' $$ >&3; read -r ok n <&3; read -r go;"
        'printf "WRITE $n $SIZE\\nabc" >&3; exec sleep 1000'
    )
    sizes = ("10000000000", "16777216") * (count // 2)
    try:
        for size in sizes:
            env = {"PATH": os.defpath, "SIZE": size}
            await stage.sh(script, env=env, stdio=(go, stage.null, 2))
        tables = stage.host.fs.tables
        await eventually(lambda: len(tables.files) == count)
        before = resident_bytes()
    finally:
        os.close(starting_pistol)  # all of them read the end of the file at once
        os.close(go)
    sessions = list(stage.host.pump.sessions.values())
    await eventually(lambda: all(session.conn.body_left for session in sessions))
    assert resident_bytes() - before < GROWTH_BYTES
    assert (
        stage.host.budget.payload_memory.used
        <= stage.host.settings.payload_budget_bytes
    )
    for child in tuple(stage.host.children.values()):
        child.stop(0.0)
    await eventually(lambda: not stage.host.children)
    stage.assert_nothing_left()
    # spec W2: nothing of what was not complete shows.
    assert {path.stat().st_size for path in stage.root.iterdir()} == {0}


# attack 15: asking to READ ten gigabytes costs what there is to send.
async def test_a_huge_read_costs_what_is_there(stage: Stage) -> None:
    (stage.root / "a").write_bytes(b"abc")
    child = await stage.puppet()
    fileno = await child.open(b"a")
    before = resident_bytes()
    assert await child.read(fileno, 999_999_999_999_999_999) == b"abc"
    assert resident_bytes() - before < GROWTH_BYTES


# attack 15, spec F4: a request line without end costs its limit.
async def test_a_line_of_sixty_four_megabytes_costs_its_limit(stage: Stage) -> None:
    child = await stage.puppet()
    before = resident_bytes()
    reply = await child.ask(b"PING\n")
    assert reply == b"OK"
    await child.do("[send(b'x' * 1048576) for _ in range(64)] and None")
    assert await child.do("line()") == b"ERROR request line too long"
    assert await child.ask(b"\nPING\n") == b"OK"
    assert resident_bytes() - before < GROWTH_BYTES


# attack 30: the host reads bytes, so the kernel drops what was stuffed beside them.
async def test_descriptors_sent_to_the_host_are_dropped(stage: Stage) -> None:
    child = await stage.puppet()
    await child.ask(b"PING\n")
    before, memory = descriptors(), resident_bytes()
    for _ in range(40):
        assert await child.do("stuff(250)") == 5
        assert await child.do("line()") == b"OK"
    assert descriptors() == before
    assert resident_bytes() - memory < GROWTH_BYTES
    # Proof that nobody holds one any more: the end of a pipe whose other end was sent.
    assert await child.do("globals().__setitem__('P', os.pipe())") is None
    await child.do("pass_on([P[1]])")
    assert await child.do("line()") == b"OK"
    assert await child.do("os.close(P[1])") is None
    with trio.fail_after(30):
        assert await child.do("os.read(P[0], 1)") == b""


# attack 30: also inside a payload, and inside a line.
async def test_descriptors_inside_a_payload_are_dropped(stage: Stage) -> None:
    child = await stage.puppet()
    fileno = await child.open(b"a", b"w")
    before = descriptors()
    await child.do(f"send(b'WRITE {fileno} 300000\\n')")
    for _ in range(30):
        await child.do("stuff(100, b'x' * 10000)")
    assert await child.do("line()") == b"OK 300000"
    await child.do("stuff(100, b'PI')")
    await child.do("stuff(100, b'NG\\n')")
    assert await child.do("line()") == b"OK"
    assert descriptors() == before
    assert (stage.root / "a").read_bytes() == b"x" * 300_000


# attack 30: over pipes descriptors can only be sent where nobody reads them; what the
# socket holds goes with the child. Walls would keep it from the FIFO that tells who holds what.
@only("none", "bubblewrap")
async def test_descriptors_stuffed_into_the_side_socket_go_with_the_child(
    stage: Stage,
) -> None:
    child = await stage.puppet(transport="pipes")
    before = descriptors()
    name = os.fsencode(stage.where / "fifo")
    os.mkfifo(name)
    end = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        await child.do(f"pass_on([os.open({name!r}, os.O_WRONLY)], b'x', 5)")
        await child.do("[os.close(n) for n in descriptors() if n > 5 and n < 64]")
        for _ in range(4):
            await child.do("stuff(100, b'x', 5)")
        assert await child.ask(b"PING\n") == b"OK"
        assert descriptors() - before == {end}
        with pytest.raises(BlockingIOError):  # somebody holds the other end: the socket
            os.read(end, 1)
        await child.kill()
        assert os.read(end, 1) == b""
    finally:
        os.close(end)


# attack 30: likewise what waits in a socket that the host does not read for a while.
@only("none", "bubblewrap")  # as above
async def test_descriptors_sent_behind_an_unread_reply_go_with_the_child(
    stage: Stage,
) -> None:
    with (stage.root / "big").open("wb") as file:
        file.truncate(16 << 20)
    child = await stage.puppet()
    fileno = await child.open(b"big")
    session = child.child.session
    assert session is not None
    await child.do(f"send(b'READ {fileno} 16777216\\n')")
    await eventually(lambda: session.outbound.is_waiting)
    before = descriptors()
    name = os.fsencode(stage.where / "fifo")
    os.mkfifo(name)
    end = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        await child.do(f"pass_on([os.open({name!r}, os.O_WRONLY)])")
        await child.do("[os.close(n) for n in descriptors() if n > 3 and n < 64]")
        for _ in range(8):
            await child.do("stuff(50)")
        assert descriptors() - before == {end}
        with pytest.raises(BlockingIOError):  # somebody holds the other end: the socket
            os.read(end, 1)
        await child.kill()
        assert os.read(end, 1) == b""
    finally:
        os.close(end)


# attack 15, I9: the same with payloads that go to files, beyond the budget.
async def test_payloads_beyond_the_budget_are_spooled_and_freed(tmp_path: Path) -> None:
    async with open_stage(tmp_path, Settings(payload_budget_bytes=1 << 20)) as stage:
        puppets = [await stage.puppet() for _ in range(6)]
        for puppet in puppets:
            fileno = await puppet.open(b"f%d" % puppet.pid, b"w")
            size = 4 << 20
            puppet.tell(f"ask(b'WRITE {fileno} {size}\\n' + b'x' * {size})")
        for puppet in puppets:
            assert await puppet.hear() == b"OK %d" % (4 << 20)
        assert stage.host.budget.spooled == 6
        assert stage.host.budget.payload_memory.used == 0
