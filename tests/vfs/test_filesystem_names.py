"""The facade, names: they need the rights of files, with the system's errors."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.tables import file_rows
from tests.vfs.worlds import World, world
from vfs import names
from vfs.errors import AccessDeniedError
from vfs.places import close_places

__all__ = ["world"]


# spec S1, O8, attack 22: names are bytes, and two of them are two in the table as well.
def test_names_in_the_table_that_are_not_utf_8(world: World) -> None:
    client = world.client(world.policy())
    for name in (b"\xfe", b"\xff", "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()):
        world.fs.open(client, name, b"w", False)
    rows = json.loads(json.dumps(file_rows(world.fs)))
    assert [row["filename"] for row in rows] == [r"\xfe", r"\xff", "\xe9"]
    world.fs.disconnect(client, "test")


# spec X1, A3: names take the same rights as files.
async def test_names_take_the_rights_of_files(world: World) -> None:
    read, write = world.place("in", read=True), world.place("out", write=True)
    fs = world.fs
    client = world.client(world.policy(read, write))
    readable, writable = world.name("in/file"), world.name("out/file")
    assert names.stat(client, readable, claim=False).size == 2
    for name in (writable, world.name("else/file"), b"../else"):
        with pytest.raises(AccessDeniedError):
            names.stat(client, name, claim=False)
    for name in (readable, world.name("in/d"), world.name("else/d"), b"../d"):
        with pytest.raises(AccessDeniedError):
            await names.make_directory_waiting(client, name, claim=False)
        with pytest.raises(AccessDeniedError):
            await names.remove_waiting(client, name, claim=False)
        with pytest.raises(AccessDeniedError):
            await names.rename_waiting(client, b"file", name, claim=False)
        with pytest.raises(AccessDeniedError):
            await names.rename_waiting(client, name, b"new", claim=False)
    await names.make_directory_waiting(client, world.name("out/d"), claim=False)
    # To move a file is to read it, so what can only be written stays where it is.
    with pytest.raises(AccessDeniedError):
        await names.rename_waiting(client, writable, b"new", claim=False)
    await names.rename_waiting(client, b"file", world.name("out/moved"), claim=False)
    await names.remove_waiting(client, writable, claim=False)
    assert sorted(os.listdir(world.where / "out")) == ["d", "moved"]
    fs.disconnect(client, "test")


# spec X1, A1: a claim without the right.
async def test_a_false_claim_is_denied_for_names_too(world: World) -> None:
    client = world.client(world.policy())
    fs = world.fs
    with pytest.raises(AccessDeniedError):
        names.stat(client, b"file", claim=True)
    with pytest.raises(AccessDeniedError):
        await names.list_waiting(client, b".", claim=True, limit=10)
    with pytest.raises(AccessDeniedError):
        await names.rename_waiting(client, b"file", b"new", claim=True)
    fs.disconnect(client, "test")


# spec X1
async def test_listing(world: World) -> None:
    client = world.client(world.policy(top_level=True))
    assert await names.list_waiting(client, b".", claim=False, limit=10) == [
        (b"file", "file")
    ]
    tops = await names.list_waiting(client, b".", claim=True, limit=10)
    assert (b"root", "directory") in tops
    with pytest.raises(OSError, match="too large"):
        await names.list_waiting(client, b".", claim=True, limit=2)
    world.fs.disconnect(client, "test")


# spec X1: between two file systems it is the system's own error, not a denial.
async def test_renaming_to_another_file_system(world: World) -> None:
    shm = Path("/dev/shm")
    devices = {os.stat(path).st_dev for path in (shm, world.where)}
    if not os.access(shm, os.W_OK) or len(devices) == 1:
        pytest.skip("there is no second file system to write to")
    target = shm / f"other-{os.getpid()}"
    target.mkdir()
    try:
        other = world.place(os.fspath(target), read=True, write=True)
        client = world.client(world.policy(other))
        with pytest.raises(OSError, match="cross-device") as raised:
            await names.rename_waiting(
                client, b"file", os.fsencode(target / "file"), claim=False
            )
        assert raised.value.errno == errno.EXDEV
        world.fs.disconnect(client, "test")
    finally:
        target.rmdir()


# spec A2: in the top-level view a loop of links is an error like any other.
def test_a_loop_in_the_top_level_view(world: World) -> None:
    (world.where / "loop").symlink_to("loop")
    client = world.client(world.policy(top_level=True))
    for call in (
        lambda: world.fs.open(client, b"loop", b"r", True),
        lambda: names.stat(client, b"loop", claim=True),
    ):
        with pytest.raises(OSError, match="symbolic links") as raised:
            call()
        assert raised.value.errno == errno.ELOOP
    world.fs.disconnect(client, "test")


# spec A3, X1: a name that leads out of the nearest place may lie in one around it.
async def test_every_place_is_asked_for_a_name(world: World) -> None:
    outer = world.where / "out"
    (outer / "sub").mkdir()
    (outer / "other").mkdir()
    (outer / "sub" / "link").symlink_to("../other")
    (outer / "sub" / "away").symlink_to("../../else")
    grants = [world.place(name, read=True, write=True) for name in ("out", "out/sub")]
    client = world.client(world.policy(*grants))
    fs = world.fs
    link = world.name("out/sub/link")
    assert names.stat(client, link, claim=False).kind == "directory"
    await names.make_directory_waiting(client, link + b"/a", claim=False)
    await names.make_directory_waiting(client, link + b"/b", claim=False)
    listed = await names.list_waiting(client, link, claim=False, limit=9)
    assert listed == [(b"a", "directory"), (b"b", "directory")]
    await names.rename_waiting(client, link + b"/a", link + b"/c", claim=False)
    await names.remove_waiting(client, link + b"/c", claim=False)
    assert os.listdir(outer / "other") == ["b"]
    narrowed = json.dumps({"read": [os.fsdecode(link)]})
    close_places(client.policy.narrow(narrowed.encode()).places)
    away = world.name("out/sub/away") + b"/file"
    for call in (
        partial(names.stat_waiting, client, away),
        partial(names.list_waiting, client, away, limit=9),
        partial(names.make_directory_waiting, client, away),
        partial(names.remove_waiting, client, away),
        partial(names.rename_waiting, client, away, link + b"/f"),
        partial(names.rename_waiting, client, link + b"/b", away),
    ):
        with pytest.raises(AccessDeniedError):
            await call(claim=False)
    with pytest.raises(AccessDeniedError):
        await names.make_directory_waiting(client, away, claim=False)
    assert os.listdir(outer / "other") == ["b"]
    assert (world.where / "else" / "file").read_text() == "else"
    fs.disconnect(client, "test")
