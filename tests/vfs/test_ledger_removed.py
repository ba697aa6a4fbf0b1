"""The charge of a file that is removed while open: given back once, to one child."""

import os

import pytest

from tests.vfs.test_ledger import Room
from tests.vfs.worlds import World, world
from vfs import names
from vfs.backends import RemovedEntry, host
from vfs.backends.host_file import entry_to_lose

__all__ = ["world"]


def put(room: Room, name: bytes, size: int) -> None:
    """Make a file of a size, as the room's client would."""
    file = room.open(name, b"w")
    room.fs.write(file, bytes(size))
    room.fs.close(file)


# attack 20: whoever only looks at what others replace (a log that is rotated) gains nothing.
def test_what_somebody_else_has_removed_is_given_back_to_nobody(world: World) -> None:
    room = Room(world, size_bytes=1000)
    path = world.where / "root" / "log"
    for _ in range(3):
        path.write_bytes(bytes(5000))
        read = room.open(b"log", b"r")
        path.unlink()
        room.fs.close(read)
    assert room.used["bytes"] == 0
    # Nor is what was charged: it was for growth, and that somebody else took it away
    # is no more to know where nobody has it open.
    grown = room.open(b"grown", b"w")
    room.fs.write(grown, bytes(600))
    (world.where / "root" / "grown").unlink()
    room.fs.close(grown)
    assert room.used["bytes"] == 600
    room.fs.disconnect(room.client, "test")


# attack 20
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_of_two_children_one_has_it_back(world: World, how: str) -> None:
    one, other = Room(world, size_bytes=1000), Room(world, size_bytes=1000)
    for _ in range(3):
        put(one, b"shared", 300)
        held = one.open(b"shared", b"r")
        if how == "removed":
            await names.remove_waiting(other.client, b"shared", claim=False)
        else:
            put(other, b"new", 300)
            await names.rename_waiting(other.client, b"new", b"shared", claim=False)
            await names.remove_waiting(other.client, b"shared", claim=False)
        one.fs.close(held)
    # The growth of the one is the loss of the other.
    assert (one.used["bytes"], other.used["bytes"]) == (900, -900)
    for room in (one, other):
        room.fs.disconnect(room.client, "test")


# attack 20, spec A3b
def test_what_a_publication_replaces_is_given_back_to_its_child(world: World) -> None:
    writer, reader = (Room(world, size_bytes=1000) for _ in range(2))
    place = world.place("root", read=True, write=True, relative=b"", publish="on-close")
    policy = type(world.policy())((place,), cwd_fd=world.cwd)
    writer.policy = policy
    writer.client = writer.connect()
    put(writer, b"report", 500)
    for _ in range(3):
        read = reader.open(b"report", b"r")
        put(writer, b"report", 500)
        reader.fs.close(read)
    assert (writer.used["bytes"], reader.used["bytes"]) == (500, 0)
    for room in (writer, reader):
        room.fs.disconnect(room.client, "test")


async def test_what_grows_after_it_was_removed_is_given_back(world: World) -> None:
    room = Room(world, size_bytes=1000)
    file = room.open(b"a", b"w")
    await names.remove_waiting(room.client, b"a", claim=False)
    room.fs.write(file, bytes(700))
    assert room.used["bytes"] == 700
    room.fs.close(file)
    assert room.used["bytes"] == 0
    # The number of its inode may come again: nothing is remembered of it.
    assert not room.top.open.removed
    room.fs.disconnect(room.client, "test")


async def test_a_name_that_is_not_the_last_gives_nothing_back(world: World) -> None:
    room, root = Room(world, size_bytes=1000), world.where / "root"
    put(room, b"a", 300)
    os.link(root / "a", root / "b")
    held = room.open(b"a", b"r")
    await names.remove_waiting(room.client, b"a", claim=False)
    (root / "b").unlink()  # somebody else took the last one
    room.fs.close(held)
    assert room.used["bytes"] == 300
    room.fs.disconnect(room.client, "test")


# A name that came between the look and the removal.
async def test_what_got_another_name_meanwhile_is_not_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, root = Room(world, size_bytes=1000), world.where / "root"
    put(room, b"a", 300)

    def looked(dir_fd: int, last: bytes) -> RemovedEntry | None:
        goes = entry_to_lose(dir_fd, last)
        os.link(root / "a", root / "b")
        return goes

    monkeypatch.setattr(host, "entry_to_lose", looked)
    held = room.open(b"a", b"r")
    await names.remove_waiting(room.client, b"a", claim=False)
    room.fs.close(held)
    assert (set(os.listdir(root)), room.used["bytes"]) == ({"file", "b"}, 300)
    room.fs.disconnect(room.client, "test")


# attack 20: on a file system that knows no O_TMPFILE a staged file has a name meanwhile.
@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_a_staged_file_that_was_removed_is_given_back_once(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(
        os, "O_TMPFILE", os.O_DIRECTORY
    )  # as such a one answers: EISDIR
    room = Room(world, size_bytes=1000)
    place = world.place("root", read=True, write=True, relative=b"", publish="on-close")
    room.policy = type(world.policy())((place,), cwd_fd=world.cwd)
    for _ in range(3):
        client = room.connect()
        file = room.fs.open(client, b"report", b"w", False)
        room.fs.write(file, bytes(900))
        (hidden,) = (n for n in os.listdir(world.where / "root") if n.startswith("."))
        await names.remove_waiting(client, os.fsencode(hidden), claim=False)
        if how == "closed":
            with pytest.raises(FileNotFoundError):
                room.fs.close(file)
        room.fs.disconnect(client, "test")
        assert room.used["bytes"] == 0
    assert not room.top.open.removed
    room.fs.disconnect(room.client, "test")
