"""The facade: who has which file, and that nobody has one after its client."""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.clock import timestamp
from tests.helpers.memory_directory import MemoryDirectory
from tests.helpers.tables import client_rows, file_rows
from tests.vfs.worlds import World, close, world
from vfs.clients import Client, OpenFile
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.places import Place
from vfs.policy import Policy

__all__ = ["world"]


@pytest.fixture
def memory() -> Iterator[Filesystem]:
    """Return a VFS whose clients have a root in memory; see `connect`."""
    fs = Filesystem()
    yield fs
    assert not fs.tables.files
    assert not fs.tables.clients


def connect(fs: Filesystem, root: MemoryDirectory, **rules: str) -> Client:
    """Connect a client with a root in memory."""
    place = Place(root, (), read=True, write=True, relative=b"", **rules)  # type: ignore[arg-type]
    return fs.connect(Policy((place,)), Ledger(), "test")


def put(fs: Filesystem, client: Client, name: bytes, data: bytes) -> None:
    """Make a file."""
    file = fs.open(client, name, b"w", False)
    fs.write(file, data)
    fs.close(file)


# The tables


# spec S1: the names are the contract's.
def test_rows_are_as_the_contract_prints_them(world: World) -> None:
    policy = world.policy(top_level=True)
    client = world.client(policy)
    nested = world.fs.connect(policy, Ledger(client.ledger), "pipe", client)
    file = world.fs.open(nested, b"file", b"r+", False)
    world.fs.open(client, os.fsencode(world.where / "in/file"), b"r", None)
    rows = json.loads(json.dumps(client_rows(world.fs)))
    assert [row["id"] for row in rows] == [client.id, nested.id]
    assert list(rows[1])[:4] == ["id", "pipe_id", "open_files", "connected_at"]
    assert rows[1]["open_files"] == [file.fileno]
    assert rows[1]["parent_id"] == client.id
    files = json.loads(json.dumps(file_rows(world.fs)))
    assert list(files[0])[:6] == [
        "fileno", "filename", "mode", "client_id", "opened_at", "is_top_level",
    ]  # fmt: skip
    assert files[0]["fileno"] == file.fileno
    assert (files[0]["mode"], files[0]["client_id"]) == ("r+", nested.id)
    # spec S1: the effective view, not what was claimed.
    assert [row["is_top_level"] for row in files] == [False, True]
    for text in (rows[0]["connected_at"], files[0]["opened_at"]):
        assert text.endswith("Z")
        assert datetime.fromisoformat(text).utcoffset() is not None
    world.fs.disconnect(client, "test")
    assert not client_rows(world.fs)
    assert not file_rows(world.fs)


def test_times_are_rfc_3339_in_utc() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000000Z"
    assert timestamp(1_700_000_000.25) == "2023-11-14T22:13:20.250000Z"


# spec O9, I4: one counter, from 1000, never twice.
@pytest.mark.slow
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("oocd")), max_size=30)
)
def test_a_fileno_is_never_given_twice(steps: list[tuple[int, str]]) -> None:
    fs = Filesystem()
    root = MemoryDirectory()
    clients = [connect(fs, root) for _ in range(3)]
    given_out: list[int] = []
    for index, what in steps:
        client = clients[index]
        if what == "o":
            file = fs.open(client, b"a", b"a+", False)
            given_out.append(file.fileno)
            assert client.files[file.fileno] is file
        elif what == "c" and client.files:
            fs.close(next(iter(client.files.values())))
        elif what == "d":
            expected = list(client.files)
            assert fs.disconnect(client, "test") == expected
            clients[index] = connect(fs, root)
        held = [number for client in clients for number in client.files]
        assert sorted(held) == sorted(fs.tables.files)
    assert given_out == sorted(set(given_out))
    assert all(number >= 1000 for number in given_out)
    for client in clients:
        fs.disconnect(client, "test")
    assert not fs.tables.files


def test_client_ids_are_never_given_twice(memory: Filesystem) -> None:
    root = MemoryDirectory()
    seen = set()
    for _ in range(5):
        client = connect(memory, root)
        seen.add(client.id)
        memory.disconnect(client, "test")
    assert len(seen) == 5


# The end of a client


class Told:
    """Writes down what an observer is told."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, str | None]] = []

    def file_opened(self, file: OpenFile) -> None:
        """Note an OPEN."""
        self.log.append(("opened", file.fileno, None))

    def file_closed(self, file: OpenFile, *, why: str | None) -> None:
        """Note the end of a file."""
        self.log.append(("closed", file.fileno, why))


# spec S3, I5: every file of it and of what is nested in it, nested first, once.
def test_the_end_of_a_client_closes_everything(world: World) -> None:
    told = world.fs.observer = Told()
    policy = world.policy()
    top = world.client(policy)
    middle = world.fs.connect(policy, Ledger(top.ledger), "test", top)
    bottom = world.fs.connect(policy, Ledger(middle.ledger), "test", middle)
    other = world.client(policy)
    numbers = [
        world.fs.open(client, b"file", b"r", False).fileno
        for client in (top, middle, bottom, other)
    ]
    held = set(world.fs.descriptors())
    assert len(held) == 4
    told.log.clear()
    assert world.fs.disconnect(top, "process exit") == numbers[2::-1]
    assert told.log == [("closed", n, "process exit") for n in numbers[2::-1]]
    assert list(world.fs.tables.clients) == [other.id]
    assert list(world.fs.tables.files) == [numbers[3]]
    assert len(set(world.fs.descriptors())) == 1
    # A second call finds nothing to do.
    assert world.fs.disconnect(top, "pipe EOF") == []
    assert world.fs.disconnect(middle, "pipe EOF") == []
    world.fs.disconnect(other, "pipe EOF")
    assert told.log[-1] == ("closed", numbers[3], "pipe EOF")


# spec S3: one file that cannot be closed well does not stop the others.
def test_a_close_that_fails_at_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = world.fs.observer = Told()
    client = world.client(world.policy())
    files = [world.fs.open(client, b"file", b"r", False) for _ in range(3)]
    plain_close = os.close
    first = files[0].handle.fd

    def close(fd: int) -> None:
        plain_close(fd)
        if fd == first:
            raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "close", close)
    told.log.clear()
    assert len(world.fs.disconnect(client, "pipe EOF")) == 3
    reasons = [why for _, _, why in told.log]
    assert reasons == [
        "pipe EOF; close failed: the disk is gone",
        "pipe EOF",
        "pipe EOF",
    ]


# spec C1: the entry goes away all the same.
@pytest.mark.parametrize("waiting", [False, True])
async def test_a_close_that_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    told = world.fs.observer = Told()
    policy = world.policy()
    policy.places[0].durability = "close"
    client = world.client(policy)
    file = world.fs.open(client, b"file", b"r+", False)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        await close(world.fs, file, waiting=waiting)
    assert not client.files
    assert not world.fs.tables.files
    assert [account.used for account in client.ledger.accounts] == [0, 1, 0, 0]
    assert told.log[-1] == ("closed", file.fileno, None)
    assert not list(world.fs.descriptors())
    world.fs.disconnect(client, "test")


# spec A3b: what a client staged and did not publish never was.
def test_what_was_staged_dies_with_its_client(memory: Filesystem) -> None:
    root = MemoryDirectory()
    client = connect(memory, root, publish="on-close")
    put(memory, client, b"a", b"old")
    for name in (b"a", b"new"):
        file = memory.open(client, name, b"w", False)
        memory.write(file, b"fresh")
    memory.disconnect(client, "process exit")
    assert root.list(b".", 5) == [(b"a", "file")]
    assert root.stat(b"a").size == 3


# Offsets


# spec P1
def test_an_offset_belongs_to_a_handle(memory: Filesystem) -> None:
    client = connect(memory, MemoryDirectory())
    put(memory, client, b"a", b"0123456789")
    one, other = (memory.open(client, b"a", b"r+", False) for _ in range(2))
    assert one.read(4) == b"0123"
    memory.write(one, b"xx")
    assert other.read(10) == b"0123xx6789"
    assert (one.offset, other.offset) == (6, 10)
    assert one.read(100) == b"6789"
    assert one.read(1) == b""
    memory.disconnect(client, "test")


# spec P1
def test_an_append_leaves_the_offset_at_the_end(memory: Filesystem) -> None:
    client = connect(memory, MemoryDirectory())
    put(memory, client, b"a", b"01234")
    one, other = (memory.open(client, b"a", b"a+", False) for _ in range(2))
    assert one.read(2) == b"01"
    memory.write(one, b"56")
    assert one.offset == 7
    memory.write(other, b"78")
    assert one.read(10) == b"78"
    assert other.offset == 9
    memory.disconnect(client, "test")


# spec W5, A3b: if the fsync that a WRITE pays fails, the offset is as before, and what was
# appended is cut off again: a client that tries once more does not write it twice.
@pytest.mark.parametrize("mode", [b"a+", b"r+"])
async def test_a_write_whose_fsync_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: bytes
) -> None:
    policy = world.policy()
    policy.places[0].durability = "write"
    client = world.client(policy)
    file = world.fs.open(client, b"file", mode, False)
    size = file.handle.size()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            await world.fs.write_waiting(file, b"x" * (size + 1))
        assert file.offset == 0
        assert file.handle.size() == size
    world.fs.disconnect(client, "test")


# spec A3b: when fsync is paid; a name that is new is put on the disk before what stands
# under it is acknowledged.
@pytest.mark.parametrize(
    ("durability", "publish", "paid"),
    [
        ("none", "direct", []),
        ("none", "on-close", []),
        ("close", "direct", ["fsync", "fsync of the directory"]),
        ("close", "on-close", ["fsync", "fsync of the directory"]),
        (
            "write",
            "direct",
            ["fdatasync", "fsync of the directory", "fdatasync", "fsync"],
        ),
        (
            "write",
            "on-close",
            ["fdatasync", "fdatasync", "fsync", "fsync of the directory"],
        ),
    ],
)
async def test_durability_is_paid_as_it_says(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    publish: str,
    paid: list[str],
) -> None:
    policy = world.policy()
    place = policy.places[0]
    place.durability, place.publish = durability, publish
    client = world.client(policy)
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def call(fd: int, name: str = name, real: object = real) -> None:
            is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            calls.append(name + " of the directory" * is_directory)
            assert callable(real)
            real(fd)

        monkeypatch.setattr(os, name, call)
    file = world.fs.open(client, b"file", b"w", False)
    for data in (b"one", b"two"):
        await world.fs.write_waiting(file, data)
    await world.fs.close_waiting(file)
    assert calls == paid
    # A file that is only read costs no sync, and an existing one has its name.
    calls.clear()
    reading = world.fs.open(client, b"file", b"r", False)
    assert reading.read(10) == b"onetwo"
    world.fs.close(reading)
    assert not calls
    file = world.fs.open(client, b"file", b"r+", False)
    await world.fs.truncate_waiting(file, 3)
    assert calls == ["fdatasync"] * (durability == "write")
    calls.clear()
    await world.fs.close_waiting(file)
    assert calls == ["fsync"] * (durability != "none")
    world.fs.disconnect(client, "test")


# spec A3b, C1: who takes the new name away has nothing of it to wait for.
@pytest.mark.parametrize(
    "how", ["renamed", "removed", "a file", "a link that leads out"]
)
async def test_a_new_name_that_went_away_is_not_put_on_the_disk(
    world: World, how: str
) -> None:
    policy = world.policy()
    policy.places[0].durability = "close"
    client = world.client(policy)
    root = world.where / "root"
    (root / "d").mkdir()
    file = world.fs.open(client, b"d/new", b"w", False)
    await world.fs.write_waiting(file, b"x")
    if how == "removed":
        (root / "d" / "new").unlink()
    (root / "d").rename(root / "e")
    if how == "a file":
        (root / "d").touch()
    if how == "a link that leads out":
        (root / "d").symlink_to(world.where / "else")
    await world.fs.close_waiting(file)
    assert not list(world.fs.descriptors())
    world.fs.disconnect(client, "test")


# A long file of an ended client is freed beside the host's other work.
@pytest.mark.parametrize("publish", ["direct", "on-close"])
def test_a_long_file_of_a_client_that_goes_is_closed_in_a_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, publish: str
) -> None:
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(
        "hostlib.large_files.in_background",
        lambda call, *args: later.append(partial(call, *args)),
    )
    monkeypatch.setattr("hostlib.large_files.INLINE_TRUNCATE_BYTES", 100_000)
    grant = world.place("out", read=True, write=True, publish=publish)
    client = world.client(world.policy(grant))
    file = world.fs.open(client, world.name("out/long"), b"w", False)
    file.handle.append(b"x" * 300_000)
    file.handle.sync()
    if publish == "direct":
        (world.where / "out/long").unlink()
    fds = file.handle.descriptors()
    assert world.fs.disconnect(client, "test") == [file.fileno]
    (run,) = later
    os.fstat(fds[0])
    run()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    assert os.listdir(world.where / "out") == ["file"]
