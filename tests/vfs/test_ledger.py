"""The charges of each client, and that all are given back."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.vfs.worlds import World, close, world
from vfs import names
from vfs.backends.host_file import HostHandle
from vfs.clients import Client, OpenFile
from vfs.filesystem import ATTACHED_DESCRIPTORS, OWN_DESCRIPTORS, Filesystem
from vfs.growth import charges_of, content_before, content_of, settle
from vfs.ledger import Ledger
from vfs.mounts import Mount

__all__ = ["world"]


def test_what_is_bounded_above_is_bounded_below() -> None:
    top = Ledger(size_bytes=10)
    below = Ledger(Ledger(top, files=3))
    assert (top.bounds_size, top.bounds_files) == (True, False)
    assert (below.bounds_size, below.bounds_files) == (True, True)
    assert below.open is top.open
    assert below.threads is top.threads
    assert Ledger().open is not top.open


# Charges for files


class Room:
    """A client whose files are bounded, in the root of a world."""

    def __init__(self, world: World, **limits: int) -> None:
        self.world = world
        self.fs: Filesystem = world.fs
        self.top = Ledger(None, **limits)
        self.top.open_files.join(world.fs.descriptor_account)
        self.policy = world.policy()
        self.client = self.connect()

    def connect(self, parent: Client | None = None) -> Client:
        """Connect one more client, charged to the same top."""
        return self.fs.connect(self.policy, Ledger(self.top), "test", parent)

    def open(self, name: bytes, mode: bytes) -> OpenFile:
        """Open a file for the client."""
        return self.fs.open(self.client, name, mode, False)

    @property
    def used(self) -> dict[str, int]:
        """The charges of the topmost ledger."""
        names = ("open_files", "clients", "bytes", "files")
        return {
            name: account.used
            for name, account in zip(names, self.top.accounts, strict=True)
        }


def refused(call: Callable[[], object], code: int) -> None:
    """Make sure that a call is refused for a reason."""
    with pytest.raises(OSError, match=r".") as raised:
        call()
    assert raised.value.errno == code


async def make_refused(room: Room, name: bytes, code: int) -> None:
    """Make sure that a directory is not made, for a reason."""
    with pytest.raises(OSError, match=r".") as raised:
        await names.make_directory_waiting(room.client, name, claim=False)
    assert raised.value.errno == code


# attack 18, spec S7
def test_open_files_are_bounded(world: World) -> None:
    room = Room(world, open_files=3)
    files = [room.open(b"file", b"r") for _ in range(3)]
    refused(lambda: room.open(b"file", b"r"), errno.EMFILE)
    nested = room.connect(room.client)
    refused(lambda: room.fs.open(nested, b"file", b"r", False), errno.EMFILE)
    room.fs.close(files.pop())
    files.append(room.fs.open(nested, b"file", b"r", False))
    refused(lambda: room.open(b"file", b"r"), errno.EMFILE)
    # A request that is refused for another reason costs nothing.
    room.fs.close(files.pop())
    for name, code in ((b"nothing", errno.ENOENT), (b".", errno.EISDIR)):
        refused(lambda n=name: room.open(n, b"r"), code)  # type: ignore[misc]
    assert room.used["open_files"] == 2
    room.fs.disconnect(room.client, "test")
    assert room.used["open_files"] == 0
    assert not room.fs.tables.files


# attack 18: over all clients.
def test_the_host_keeps_a_reserve(world: World) -> None:
    room = Room(world)
    account = room.fs.descriptor_account
    before = account.used
    account.limit = before + 2 + 2 * OWN_DESCRIPTORS
    one, other = room.connect(), room.connect()
    for client in (one, other):
        room.fs.open(client, b"file", b"r", False)
    refused(lambda: room.fs.open(one, b"file", b"r", False), errno.EMFILE)
    room.fs.disconnect(other, "test")
    room.fs.open(one, b"file", b"r", False)
    room.fs.disconnect(one, "test")
    assert account.used == before


# attack 18, S7: connections are descriptors too, and so is what is staged.
def test_connections_are_kept_from_the_reserve(staging: Room) -> None:
    room = staging
    account = room.fs.descriptor_account
    account.limit = OWN_DESCRIPTORS + 3 + 2 * ATTACHED_DESCRIPTORS
    attached = [room.connect(room.client) for _ in range(2)]
    room.open(b"staged", b"w")  # with the directory that it will be in
    room.open(b"file", b"r")
    refused(lambda: room.open(b"file", b"r"), errno.EMFILE)
    refused(lambda: room.connect(room.client), errno.EMFILE)
    room.fs.disconnect(attached[0], "test")
    room.connect(room.client)
    refused(lambda: room.connect(room.client), errno.EMFILE)
    room.fs.disconnect(room.client, "test")
    assert account.used == 0


# spec S7
def test_clients_are_bounded(world: World) -> None:
    room = Room(world, clients=3)
    one = room.connect(room.client)
    two = room.connect(one)
    refused(lambda: room.connect(two), errno.EUSERS)
    # Nested clients go with the one that they hang on.
    room.fs.disconnect(one, "test")
    assert room.used["clients"] == 1
    assert list(room.fs.tables.clients) == [room.client.id]
    room.fs.disconnect(room.client, "test")
    assert room.used["clients"] == 0


# attack 20
async def test_growth_is_bounded(world: World) -> None:
    room = Room(world, size_bytes=100)
    file = room.open(b"a", b"w+")
    room.fs.write(file, bytes(60))
    refused(lambda: room.fs.write(file, bytes(41)), errno.EDQUOT)
    assert file.offset == 60
    assert file.handle.size() == 60
    file.offset = 30
    room.fs.write(file, bytes(60))  # 30 of it were there
    assert room.used["bytes"] == 90
    file.offset = 10**9  # a hole counts
    refused(lambda: room.fs.write(file, b"x"), errno.EDQUOT)
    with pytest.raises(OSError, match="quota"):
        await room.fs.truncate_waiting(file, 101)
    await room.fs.truncate_waiting(file, 20)
    assert room.used["bytes"] == 20
    room.fs.write(file, b"")
    room.fs.close(file)
    appending = room.open(b"a", b"a")
    room.fs.write(appending, bytes(80))
    refused(lambda: room.fs.write(appending, b"x"), errno.EDQUOT)
    room.fs.close(appending)
    # Emptied again by `w`: it is free again.
    room.fs.close(room.open(b"a", b"w"))
    assert room.used["bytes"] == 0
    room.fs.disconnect(room.client, "test")


# attack 20
async def test_what_is_removed_is_free_again(world: World) -> None:
    room = Room(world, size_bytes=100, files=3)
    for _ in range(5):
        for name in (b"a", b"b"):
            file = room.open(name, b"w")
            room.fs.write(file, bytes(50))
            room.fs.close(file)
        assert room.used == {"open_files": 0, "clients": 1, "bytes": 100, "files": 2}
        held = room.open(b"a", b"r")
        await names.remove_waiting(room.client, b"a", claim=False)
        await names.rename_waiting(room.client, b"b", b"c", claim=False)
        assert room.used["bytes"] == 100  # somebody has it open
        room.fs.close(held)
        assert room.used["bytes"] == 50
        await names.remove_waiting(room.client, b"c", claim=False)
        assert room.used == {"open_files": 0, "clients": 1, "bytes": 0, "files": 0}
    room.fs.disconnect(room.client, "test")


async def test_what_a_renaming_replaces_is_free_again(world: World) -> None:
    room = Room(world, size_bytes=100)
    for name in (b"a", b"b"):
        file = room.open(name, b"w")
        room.fs.write(file, bytes(50))
        room.fs.close(file)
    held = [room.open(b"b", b"r") for _ in range(2)]
    await names.rename_waiting(room.client, b"a", b"b", claim=False)
    room.fs.close(held[0])
    assert room.used["bytes"] == 100
    room.fs.close(held[1])
    assert room.used["bytes"] == 50
    room.fs.disconnect(room.client, "test")


# spec S5: counted, not timed; the others wait while a client is struck out.
async def test_the_end_of_a_client_looks_at_each_open_file_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(world, size_bytes=1000)
    for number in range(50):
        name = b"%d" % number
        file = room.open(name, b"w")
        room.fs.write(file, bytes(10))
        room.open(name, b"r")  # the last close of the two gives back
        await names.remove_waiting(room.client, name, claim=False)
    assert room.used["bytes"] == 500
    looked = 0
    identity = HostHandle.identity

    def counted(handle: HostHandle) -> tuple[int, int]:
        nonlocal looked
        looked += 1
        return identity(handle)

    monkeypatch.setattr(HostHandle, "identity", counted)
    room.fs.disconnect(room.client, "test")
    assert room.used == {"open_files": 0, "clients": 0, "bytes": 0, "files": 0}
    assert looked <= 100


# attack 20: whoever renames a file onto itself gains nothing.
async def test_a_renaming_that_does_nothing_frees_nothing(world: World) -> None:
    room = Room(world, size_bytes=100, files=2)
    file = room.open(b"a", b"w")
    room.fs.write(file, bytes(60))
    room.fs.close(file)
    (world.where / "root" / "second").hardlink_to(world.where / "root" / "a")
    for new in (b"second", b"a", b"./a"):
        await names.rename_waiting(room.client, b"a", new, claim=False)
    (world.where / "root" / "second").unlink()
    for new in (b"a", b"./a"):
        await names.rename_waiting(room.client, b"a", new, claim=False)
    assert (room.used["bytes"], room.used["files"]) == (60, 1)
    room.fs.disconnect(room.client, "test")


# attack 20
async def test_files_are_bounded(world: World) -> None:
    room = Room(world, files=2)
    room.fs.close(room.open(b"file", b"w"))  # was there
    room.fs.close(room.open(b"a", b"w"))
    await names.make_directory_waiting(room.client, b"d", claim=False)
    for mode in (b"w", b"a", b"w+", b"a+"):
        refused(lambda m=mode: room.open(b"b", m), errno.EDQUOT)  # type: ignore[misc]
    await make_refused(room, b"e", errno.EDQUOT)
    assert sorted(os.listdir(world.where / "root")) == ["a", "d", "file"]
    await make_refused(room, b"d", errno.EDQUOT)
    # A request that fails for another reason costs nothing.
    await names.remove_waiting(room.client, b"a", claim=False)
    for name, code in ((b"a/", errno.EISDIR), (b"no/a", errno.ENOENT)):
        refused(lambda n=name: room.open(n, b"w"), code)  # type: ignore[misc]
    assert room.used["files"] == 1
    room.fs.close(room.open(b"a", b"w"))
    await names.remove_waiting(room.client, b"d", claim=False)
    await make_refused(room, b"a", errno.EEXIST)
    room.fs.close(room.open(b"b", b"a+"))
    assert room.used["files"] == 2
    room.fs.disconnect(room.client, "test")


# attack 20: to save under another name and to rename needs room for one more, once.
async def test_a_file_that_a_renaming_replaces_counts_no_more(world: World) -> None:
    room = Room(world, files=2)
    for _ in range(4):
        room.fs.close(room.open(b"new", b"w"))
        await names.rename_waiting(room.client, b"new", b"saved", claim=False)
        assert room.used["files"] == 1
    for name in (b"d", b"e"):
        if name == b"e":
            await names.remove_waiting(room.client, b"saved", claim=False)
        await names.make_directory_waiting(room.client, name, claim=False)
    await names.rename_waiting(room.client, b"d", b"e", claim=False)
    assert room.used["files"] == 1
    # A file from before was not charged, and gives nothing back.
    await names.rename_waiting(room.client, b"e", b"f", claim=False)
    await names.remove_waiting(room.client, b"f", claim=False)
    (world.where / "root" / "old").touch()
    await names.rename_waiting(room.client, b"old", b"file", claim=False)
    assert room.used["files"] == 0
    room.fs.disconnect(room.client, "test")


# attack 20: a link that leads to nothing is one new file, and no endless search.
def test_a_file_that_is_made_through_a_link_counts(world: World) -> None:
    room = Room(world, files=1)
    for name in ("one", "two"):
        (world.where / "root" / name).symlink_to(f"to-{name}")
    room.fs.close(room.open(b"one", b"w"))
    assert room.used["files"] == 1
    refused(lambda: room.open(b"two", b"w"), errno.EDQUOT)
    room.fs.disconnect(room.client, "test")


@pytest.fixture
def staging(world: World) -> Room:
    """Return a bounded room that publishes on CLOSE."""
    room = Room(world, size_bytes=100, files=5)
    place = room.policy.places[0]
    place.publish = "on-close"
    return room


# spec A3b, attack 20: what never appeared cost nothing in the end.
async def test_what_was_staged_and_dropped_is_free_again(staging: Room) -> None:
    room = staging
    for end in ("close", "waiting", "gone"):
        client = room.connect(room.client)
        file = room.fs.open(client, b"new", b"w", False)
        room.fs.write(file, bytes(90))
        assert room.used["bytes"] == 90
        if end == "gone":
            room.fs.disconnect(client, "test")
        else:
            (room.world.where / "root" / "new").mkdir()
            with pytest.raises(IsADirectoryError):
                await close(room.fs, file, waiting=end == "waiting")
            (room.world.where / "root" / "new").rmdir()
            room.fs.disconnect(client, "test")
        assert room.used["bytes"] == 0
    room.fs.disconnect(room.client, "test")


# spec A3b, attack 20: what replaces an old file takes its place.
async def test_what_is_replaced_on_close_is_free_again(staging: Room) -> None:
    room = staging
    for number in range(6):
        file = room.open(b"same", b"w")
        await room.fs.write_waiting(file, bytes(40))
        if number % 2:
            room.fs.close(file)
        else:
            await room.fs.close_waiting(file)
        assert room.used["bytes"] == 40
    room.fs.disconnect(room.client, "test")


# spec A3b, attack 20: nor does the entry that a staged file did not make cost anything.
async def test_the_entry_of_what_was_staged_and_dropped_is_free_again(
    world: World,
) -> None:
    room = Room(world, files=1)
    room.policy.places[0].publish = "on-close"
    for end in ("abandoned", "close", "waiting", "gone", "distant"):
        client = room.connect(room.client)
        file = room.fs.open(client, b"new", b"w", False)
        refused(lambda: room.open(b"other", b"w"), errno.EDQUOT)
        await make_refused(room, b"d", errno.EDQUOT)
        if end == "abandoned":
            room.fs.abandon(file)
        elif end == "distant":
            file.handle.mount = Mount("nfs")
            await room.fs.end_distant(client, "test")
        elif end != "gone":
            (room.world.where / "root" / "new").mkdir()
            with pytest.raises(IsADirectoryError):
                await close(room.fs, file, waiting=end == "waiting")
            (room.world.where / "root" / "new").rmdir()
        room.fs.disconnect(client, "test")
        assert (room.used["files"], room.top.files.reserved) == (0, 0)
    room.fs.close(room.fs.open_replacing(room.client, b"new", claim=False))
    assert (room.used["files"], room.top.files.reserved) == (1, 0)
    room.fs.disconnect(room.client, "test")


# spec A3b, attack 20
async def test_two_that_are_staged_for_one_name_are_one_file(staging: Room) -> None:
    room = staging
    for _ in range(3):
        first, second = room.open(b"new", b"w"), room.open(b"new", b"w")
        assert room.top.files.reserved == 2
        await room.fs.close_waiting(first)
        assert (room.used["files"], room.top.files.reserved) == (1, 1)
        room.fs.close(second)
        assert (room.used["files"], room.top.files.reserved) == (1, 0)
        await names.remove_waiting(room.client, b"new", claim=False)
        assert room.used["files"] == 0
    room.fs.disconnect(room.client, "test")


# spec A3b, attack 20: what a staged file was to replace may go before its CLOSE.
@pytest.mark.parametrize("waiting", [False, True])
async def test_a_staged_file_whose_old_one_has_gone_is_a_new_one(
    world: World, waiting: bool
) -> None:
    room = Room(world, files=2)
    room.policy.places[0].publish = "on-close"
    room.fs.close(room.open(b"a", b"w"))
    file = room.open(b"a", b"w")
    await names.remove_waiting(room.client, b"a", claim=False)
    assert (room.used["files"], room.top.files.reserved) == (0, 0)
    await close(room.fs, file, waiting=waiting)
    assert (room.used["files"], room.top.files.reserved) == (1, 0)
    # Where there is no room for it, it never appears.
    for gone in ("removed", "renamed"):
        if gone == "renamed":
            await names.remove_waiting(room.client, b"other", claim=False)
            room.fs.close(room.open(b"a", b"w"))
            room.fs.close(room.open(b"c", b"w"))
        file = room.open(b"a", b"w")
        if gone == "removed":
            await names.remove_waiting(room.client, b"a", claim=False)
            for name in (b"b", b"other"):
                room.fs.close(room.open(name, b"w"))
            await names.rename_waiting(room.client, b"b", b"c", claim=False)
        else:
            await names.rename_waiting(room.client, b"a", b"d", claim=False)
        with pytest.raises(OSError, match="quota"):
            await close(room.fs, file, waiting=waiting)
        assert (room.used["files"], room.top.files.reserved) == (2, 0)
        assert "a" not in os.listdir(world.where / "root")
        if gone == "removed":
            await names.remove_waiting(room.client, b"c", claim=False)
    # To replace something takes no room.
    await close(room.fs, room.open(b"d", b"w"), waiting=waiting)
    assert (room.used["files"], room.top.files.reserved) == (2, 0)
    assert not list(room.fs.descriptors())
    room.fs.disconnect(room.client, "test")


# A staged file lies in no directory, so a look at the places does not find it.
def test_a_look_at_the_places_leaves_what_is_staged(staging: Room) -> None:
    room = staging
    ledger = room.top
    file = room.open(b"new", b"w")
    charged = charges_of(ledger)
    ledger.before = content_before(charged, content_of(room.policy.places))
    settle(ledger, charged, content_of(room.policy.places), charged)
    room.fs.abandon(file)
    assert room.used["files"] == 0
    file = room.open(b"new", b"w")
    charged = charges_of(ledger)
    settle(ledger, charged, content_of(room.policy.places), charged)
    room.fs.close(file)
    assert room.used["files"] == 1
    room.fs.disconnect(room.client, "test")


# spec W5: a write in a thread that fails costs nothing.
async def test_a_write_that_fails_is_not_charged(world: World) -> None:
    room = Room(world, size_bytes=10**18)
    file = room.open(b"a", b"w")
    file.offset = 10**17
    with pytest.raises(OSError, match="too large"):
        await room.fs.write_waiting(file, bytes(5000))
    with pytest.raises(OSError, match="too large"):
        room.fs.write(file, bytes(5000))
    assert (file.offset, room.used["bytes"]) == (10**17, 0)
    room.fs.disconnect(room.client, "test")


# I1, I5: who is cancelled while it waits for a thread still closes.
async def test_a_close_is_never_abandoned(staging: Room, tmp_path: Path) -> None:
    room = staging
    file = room.open(b"new", b"w")
    room.fs.write(file, b"content")
    with trio.CancelScope() as scope:
        scope.cancel()
        await room.fs.close_waiting(file)
    assert (room.world.where / "root" / "new").read_bytes() == b"content"
    assert not list(room.fs.descriptors())
    room.fs.disconnect(room.client, "test")
    del tmp_path
