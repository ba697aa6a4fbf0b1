"""A change by a thread is counted once, also beside other changes at that time."""

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from hostlib.threads import calls_at_work
from supervisor.llmfd import ClientFiles
from tests.helpers.leaks import give_back
from tests.vfs.worlds import World, world
from vfs import names, opening
from vfs.backends import HostDirectory
from vfs.backends.host_file import HostHandle, StagedHandle
from vfs.clients import Client, OpenFile
from vfs.ledger import Ledger
from vfs.places import PUBLISH_ON_CLOSE

__all__ = ["world"]

SIZE = 1000
SLOW_S = 0.05


def slow(call: Callable[..., object], *, before: bool) -> Callable[..., object]:
    """Return a call that takes its time, before or after it is done."""

    def slowly(*args: object, **more: object) -> object:
        if before:
            time.sleep(SLOW_S)
        outcome = call(*args, **more)
        if not before:
            time.sleep(SLOW_S)
        return outcome

    return slowly


@pytest.fixture(params=[True, False], ids=["before", "after"], autouse=True)
def _slow_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a thread does take its time, once before it is done, once after."""
    for owner, name in (
        (HostHandle, "truncate"),
        (HostHandle, "pwrite"),
        (StagedHandle, "publish"),
        (HostDirectory, "remove"),
        (HostDirectory, "rename"),
        (HostDirectory, "make_directory"),
    ):
        call = slow(getattr(owner, name), before=request.param)
        monkeypatch.setattr(owner, name, call)


class Pair:
    """Two clients of one child, and what it has used."""

    def __init__(self, world: World, **rules: object) -> None:
        self.fs = world.fs
        self.root = world.where / "root"
        place = world.place("root", read=True, write=True, relative=b"", **rules)
        policy = type(world.policy())((place,), cwd_fd=world.cwd)
        self.ledger = Ledger(size_bytes=100 * SIZE, files=100)
        self.one = self.client(policy)
        self.other = self.client(policy)

    def client(self, policy: object) -> Client:
        """Connect a client whose use is part of the child's."""
        return self.fs.connect(policy, Ledger(self.ledger), "test")  # type: ignore[arg-type]

    def open(self, client: Client, name: bytes, mode: bytes) -> OpenFile:
        """Open a file."""
        return self.fs.open(client, name, mode, False)

    def make(self, name: bytes, size: int = SIZE) -> None:
        """Make a file of a size, as a client would."""
        file = self.open(self.one, name, b"w")
        self.fs.write(file, b"x" * size)
        self.fs.close(file)

    @property
    def used(self) -> tuple[int, int]:
        """The charges: bytes, files."""
        return self.ledger.size_bytes.used, self.ledger.files.used

    def there(self) -> tuple[int, int]:
        """The content, without the file from before."""
        names = set(os.listdir(self.root)) - {"file"}
        size = sum((self.root / name).lstat().st_size for name in names)
        return size, len(names)

    def end(self) -> None:
        """Disconnect both."""
        for client in (self.one, self.other):
            self.fs.disconnect(client, "test")
        give_back()
        assert calls_at_work() == 0


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    made = Pair(world)
    yield made
    assert made.used == made.there()
    made.end()


async def both(*calls: Callable[[], Awaitable[object]]) -> None:
    """Make calls at the same time; a name that is gone for one of them is no matter."""

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        with contextlib.suppress(FileNotFoundError):
            await call()

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(one, call)


# spec S7
async def test_two_truncations_give_back_once(pair: Pair) -> None:
    pair.make(b"f")
    files = [pair.open(client, b"f", b"r+") for client in (pair.one, pair.other)]
    await both(*(lambda f=f: pair.fs.truncate_waiting(f, 0) for f in files))
    assert pair.used == (0, 1)


async def test_a_long_file_that_two_empty_is_given_back_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "INLINE_TRUNCATE_BYTES", 0)
    pair.make(b"f")
    files = [pair.open(client, b"f", b"w") for client in (pair.one, pair.other)]
    assert all(file.must_empty for file in files)
    await both(*(lambda f=f: pair.fs.empty_waiting(f) for f in files))
    assert pair.used == (0, 1)


async def test_two_that_write_the_same_bytes_are_charged_once(pair: Pair) -> None:
    pair.make(b"f", 0)
    files = [pair.open(client, b"f", b"r+") for client in (pair.one, pair.other)]
    data = b"y" * SIZE
    await both(*(lambda f=f: pair.fs.write_waiting(f, data) for f in files))
    assert pair.used == (SIZE, 1)


@pytest.mark.parametrize("how", ["close", "abandon", "end"])
async def test_a_removed_file_is_given_back_once(pair: Pair, how: str) -> None:
    pair.make(b"f")
    file = pair.open(pair.other, b"f", b"r")

    async def close() -> None:
        await trio.sleep(SLOW_S / 2)
        if how == "close":
            pair.fs.close(file)
        elif how == "abandon":
            pair.fs.abandon(file)
        else:
            pair.fs.disconnect(pair.other, "test")

    await both(lambda: names.remove_waiting(pair.one, b"f", claim=False), close)
    assert pair.used == (0, 0)


async def test_what_two_renamings_replace_is_given_back_once(pair: Pair) -> None:
    for name in (b"t", b"a", b"b"):
        pair.make(name)
    rename = names.rename_waiting
    await both(
        lambda: rename(pair.one, b"a", b"t", claim=False),
        lambda: rename(pair.other, b"b", b"t", claim=False),
    )
    assert pair.used == (SIZE, 1)


async def test_two_that_remove_one_file_give_it_back_once(pair: Pair) -> None:
    pair.make(b"f")
    remove = names.remove_waiting
    await both(
        lambda: remove(pair.one, b"f", claim=False),
        lambda: remove(pair.other, b"f", claim=False),
    )
    assert pair.used == (0, 0)


async def test_two_that_appear_under_one_name_are_one_file(world: World) -> None:
    # spec A3b
    pair = Pair(world, publish=PUBLISH_ON_CLOSE)
    files = [pair.open(client, b"f", b"w") for client in (pair.one, pair.other)]
    for file in files:
        await pair.fs.write_waiting(file, b"z" * SIZE)
    await both(*(lambda f=f: pair.fs.close_waiting(f) for f in files))
    assert pair.used == pair.there() == (SIZE, 1)
    pair.end()


async def test_who_is_not_bounded_waits_for_nobody(world: World) -> None:
    policy = world.policy()
    clients = [world.client(policy) for _ in range(2)]
    assert clients[0].ledger.turn is None
    files = [world.fs.open(c, b"file", b"r+", False) for c in clients]
    await both(*(lambda f=f: world.fs.truncate_waiting(f, 0) for f in files))
    for client in clients:
        world.fs.disconnect(client, "test")


async def test_who_is_cancelled_while_it_waits_has_changed_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    truncate = HostHandle.truncate

    def wait(self: HostHandle, size: int) -> None:
        assert goes_on.wait(60)
        truncate(self, size)

    monkeypatch.setattr(HostHandle, "truncate", wait)
    pair.make(b"f")
    files = [pair.open(client, b"f", b"r+") for client in (pair.one, pair.other)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.fs.truncate_waiting, files[0], 10)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(SLOW_S) as patience:
            await pair.fs.truncate_waiting(files[1], 0)
        goes_on.set()
        assert patience.cancelled_caught
    assert pair.used == (10, 1)
    await pair.fs.truncate_waiting(files[1], 0)  # its turn is free again
    assert pair.used == (0, 1)


@pytest.mark.slow
async def test_an_export_takes_its_inode_in_its_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The file system gives what one publication frees to the next that is begun: what
    # is then among the open files would be taken for what was removed.
    pair = Pair(world)
    one, other = (
        ClientFiles(pair.fs, client, claim=False) for client in (pair.one, pair.other)
    )

    def new() -> Iterator[bytes]:
        yield b"y" * 500

    for files, name in ((one, "f"), (other, "g")):
        await files.replace(name, new())
    publish = slow(StagedHandle.publish, before=False)
    monkeypatch.setattr(StagedHandle, "publish", publish)

    async def later() -> None:
        await trio.sleep(0.02)
        await other.replace("g", new())

    await both(lambda: one.replace("f", new()), later)
    assert pair.used == pair.there()
    pair.end()
