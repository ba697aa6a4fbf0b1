"""A child has its door at its start, and nothing else of the host's."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.helpers.stage import Puppet, Stage, eventually
from tests.helpers.tables import client_rows, file_rows

pytestmark = [pytest.mark.slow, pytest.mark.attack]


TRANSPORTS = ["socketpair", "pipes"]


def sockets_and_pipes(found: dict[int, str]) -> list[int]:
    return [n for n, what in found.items() if what.startswith(("socket:", "pipe:"))]


# spec T1, T2
@pytest.mark.parametrize(
    ("transport", "numbers", "variable"),
    [("socketpair", {0, 1, 2, 3}, "3"), ("pipes", {0, 1, 2, 3, 4, 5}, "3,4,5")],
)
async def test_a_child_has_its_descriptors_and_no_others(
    stage: Stage, transport: str, numbers: set[int], variable: str
) -> None:
    others = [await stage.puppet(transport=transport) for _ in range(2)]
    child = await stage.puppet(transport=transport)
    assert set(await child.do("descriptors()")) == numbers
    assert await child.do("os.environ['FSPROXY_FD']") == variable
    for other in others:
        assert not set((await other.do("descriptors()")).values()) & set(
            (await child.do("descriptors()")).values()
        ) - {os.readlink("/proc/self/fd/2")}


# spec T1: with pipes the child reads replies on 3 and writes requests on 4.
async def test_pipes_are_two_real_pipes(stage: Stage) -> None:
    child = await stage.puppet(transport="pipes")
    found = await child.do("descriptors()")
    assert [found[n].partition(":")[0] for n in (3, 4, 5)] == ["pipe", "pipe", "socket"]
    assert await child.ask(b"PING\n") == b"OK"
    fileno = await child.open(b"a", b"w+")
    assert await child.write(fileno, b"x" * 100_000) == b"OK 100000"
    assert await child.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
    assert await child.read(fileno, 200_000) == b"x" * 100_000


@pytest.fixture
def junk(tmp_path: Path) -> Iterator[list[int]]:
    """Fifty inheritable files and directories that the host's parent left open."""
    names = (tmp_path / "junk", tmp_path / "junk-directory")
    names[0].touch()
    names[1].mkdir()
    with ExitStack() as stack:
        numbers = [os.open(names[number % 2], os.O_RDONLY) for number in range(50)]
        for fd in numbers:
            stack.callback(os.close, fd)
            os.set_inheritable(fd, True)
        yield numbers


def links(pid: int) -> set[str]:
    """Return where the descriptors of a process lead."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


# attack 6: what a host was started with, inheritable even, is not there in a child, nor in
# the launchpad. `junk` comes first: it is there when the launchpad is started.
async def test_fifty_inheritable_descriptors_stay_in_the_host(
    junk: list[int], stage: Stage
) -> None:
    assert not any(map(os.get_inheritable, junk))
    names = {os.readlink(f"/proc/self/fd/{fd}") for fd in junk}
    for _ in range(3):  # forked for its order, and one that waited for it
        child = await stage.puppet()
        assert set(await child.do("descriptors()")) == {0, 1, 2, 3}
        if os.geteuid() == 0:  # it lets nobody else look into it, its own user neither
            assert not names & links(stage.launchpad)


# attack 6: names that lead to the host's own descriptors or root are no way in.
@pytest.mark.parametrize(
    "name",
    [
        b"/proc/self/fd/3",
        b"/proc/self/root/etc/passwd",
        b"/proc/self/cwd/journal",
        b"/dev/fd/2",
        b"../journal",
        b"/proc/self/environ",
    ],
)
async def test_names_of_the_hosts_descriptors_are_denied(
    stage: Stage, name: bytes
) -> None:
    child = await stage.puppet()
    assert await child.ask(b"OPEN %b r false\n" % name) == (
        b"ERROR VFS access denied: '%b'" % name
    )


# attack 6: likewise through a link that the child made itself.
async def test_a_link_to_a_descriptor_of_the_host_is_denied(stage: Stage) -> None:
    child = await stage.puppet()
    for number, target in enumerate(("/proc/self/fd/0", "/proc/self/root", "/")):
        # By the test: a child behind walls cannot make one in its root.
        (stage.root / f"l{number}").symlink_to(target)
    assert await child.do("opened(b'l0')") == b"ERROR VFS access denied: 'l0'"
    for name in (b"l1/etc/passwd", b"l2/etc/passwd"):
        assert await child.do(f"opened({name!r})") == (
            b"ERROR VFS access denied: '%b'" % name
        )


# spec T2: the host keeps no copy of the child's end, so closing it is noticed.
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_child_that_closes_its_door_is_noticed(
    stage: Stage, transport: str
) -> None:
    child = await stage.puppet(transport=transport)
    await child.open(b"a", b"w")
    await child.do("[os.close(n) for n in {IN, OUT}]")
    await eventually(lambda: not stage.host.fs.tables.clients)
    assert not stage.host.fs.tables.files
    # spec S3: EOF closes the client's files and never ends the child.
    assert await child.do("1 + 1") == 2
    assert await child.leave() == 0


# spec T5
async def test_processes_of_one_child_share_its_door(stage: Stage) -> None:
    (stage.root / "shared").write_bytes(b"0123456789" * 500)
    out = stage.where / "out"
    with out.open("wb") as file:
        child = await stage.spawn(
            sys.executable,
            "-I",
            stage.script("sharing.py"),
            stdio=(stage.null, file.fileno(), 2),
        )
        assert await child.wait_gone() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["wrong"] for row in rows] == [0] * 4
    assert sorted(row["requests"] for row in rows) == [300] * 4


# attack 1, spec A1: a claim is no right.
async def test_a_claim_of_a_restricted_child_is_denied_and_on_record(
    stage: Stage,
) -> None:
    child = await stage.puppet()
    (stage.root / "mine").write_bytes(b"x")
    for request in (b"OPEN mine r true", b"STAT true mine", b"REMOVE true mine"):
        reply = await child.ask(request + b"\n")
        assert reply == b"ERROR VFS access denied: 'mine'"
    assert (stage.root / "mine").exists()
    # A model is asked with what the child has; also a host that has none takes note.
    reply = await child.ask(b"LLM_CHAT true 0 0 2 0\nhi")
    assert reply == b"ERROR LLM not available"
    denied = stage.events("security.denied")
    commands = [row["command"] for row in denied]
    assert commands == ["OPEN", "STAT", "REMOVE", "LLM_CHAT"]
    assert {row["client_id"] for row in denied} == {child.client_id}
    assert {row["filename"] for row in denied[:3]} == {"mine"}


# spec A1, A2: the right is the parent's to give; a claim of false drops it.
async def test_a_top_level_child_may_drop_to_the_restricted_view(stage: Stage) -> None:
    child = await stage.puppet(top_level=True)
    assert await child.do("os.environ['FSPROXY_TOP_LEVEL']") == "true"
    (stage.where / "here").write_bytes(b"outside")
    (stage.root / "here").write_bytes(b"inside")
    outside = await child.open(b"here", b"r", b"true")
    inside = await child.open(b"here", b"r", b"false")
    assert await child.read(outside, 99) == b"outside"
    assert await child.read(inside, 99) == b"inside"
    name = os.fsencode(stage.where / "here")
    denied = await child.ask(b"OPEN %b r false\n" % name)
    assert denied.startswith(b"ERROR VFS access denied: '")
    rows = file_rows(stage.host.fs)
    assert [row["is_top_level"] for row in rows] == [True, False]


# spec S1: both tables, by the contract's names.
async def test_the_tables_have_the_contracts_columns(stage: Stage) -> None:
    child = await stage.puppet()
    fileno = await child.open(b"a", b"w+")
    (client,) = client_rows(stage.host.fs)
    (file,) = file_rows(stage.host.fs)
    assert {
        "id": child.client_id,
        "open_files": [fileno],
        "pid": child.pid,
        "parent_id": None,
    }.items() <= client.items()
    assert {"pipe_id", "connected_at"} <= set(client)
    assert {
        "fileno": fileno,
        "filename": "a",
        "mode": "w+",
        "client_id": child.client_id,
        "is_top_level": False,
    }.items() <= file.items()
    for time in (client["connected_at"], file["opened_at"]):
        assert isinstance(time, str)
        assert time.endswith("Z")
    assert await child.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert file_rows(stage.host.fs) == []


async def test_a_puppet_is_a_child_like_any_other(stage: Stage) -> None:
    child: Puppet = await stage.puppet()
    assert await child.leave() == 0
    stage.assert_nothing_left()
