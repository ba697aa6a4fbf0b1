"""The start of a directory: without its store it says why, and it gets it later."""

import errno
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hostlib.log import Log
from hostlib.threads import in_thread
from supervisor.cluster import directory_start
from supervisor.cluster.directory_service import open_store
from supervisor.cluster.directory_start import READY, DirectoryStart
from supervisor.cluster.orders import DirectoryOrder
from supervisor.fleet.messages import VERSION
from supervisor.fleet.step import Change, StaleEpochError, StoreError
from supervisor.fleet.store import FILE, FleetStore
from tests.helpers import postgres

LOG = Log("ERROR")
PAGE_BYTES = 4096
SPAWN = b'{"name": "x", "program": {"command": ["true"]}, "wait": true}'


class LongRow(msgspec.Struct, frozen=True):
    """A row that fills a part of a page."""

    text: str


# spec FL2
@pytest.mark.slow
async def test_a_directory_waits_for_its_store_and_tells_why(tmp_path: Path) -> None:
    other = FleetStore(str(tmp_path))
    start = DirectoryStart(DirectoryOrder(str(tmp_path), max_tokens=7), no_node, LOG)
    is_done, text = await start.answer(VERSION, "ps", b"{}")
    assert (is_done, b"it opens its store" in text) == (None, True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start.run)
        for do in (READY, "ps", "spawn"):
            is_done, text = await start.answer(VERSION, do, b"{}")
            assert (is_done, b"another directory has it" in text) == (None, True)
        start.receive([b"lost"])
        other.close()
        while not (await start.answer(VERSION, READY, b"{}"))[0]:
            await trio.lowlevel.checkpoint()
        _, data = await start.answer(VERSION, "quota", b"{}")
        (account,) = json.loads(data)["accounts"]
        assert account["limit"] == 7
        nursery.cancel_scope.cancel()
    again = FleetStore(str(tmp_path))  # it was closed
    assert again.epoch == 3
    again.close()


# spec FL2
async def test_a_directory_whose_store_has_another_epoch_ends(tmp_path: Path) -> None:
    start = DirectoryStart(DirectoryOrder(str(tmp_path), max_tokens=7), no_node, LOG)
    with pytest.RaisesGroup(StaleEpochError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start.run)
            assert (await start.answer(VERSION, READY, b"{}"))[0]
            other = sqlite3.connect(tmp_path / FILE)
            with other:
                other.execute("UPDATE epoch SET number = number + 1")
            other.close()
            is_done, text = await start.answer(VERSION, "spawn", SPAWN)
            assert (is_done, b"its epoch is 2" in text) == (None, True)


# spec FL2, FL11: as a full disk does.
async def test_a_store_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    start = DirectoryStart(DirectoryOrder(str(tmp_path)), no_node, LOG)
    with pytest.RaisesGroup(StoreError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start.run)
            while not (await start.answer(VERSION, "ps", b"{}"))[0]:
                await trio.lowlevel.checkpoint()
            base = sqlite3.connect(tmp_path / FILE)
            with base:
                base.execute("DROP TABLE rows")
            base.close()
            is_done, text = await start.answer(VERSION, "spawn", SPAWN)
            assert not is_done
            assert text.decode() == (
                "cannot write the fleet's store: no such table: rows; make room for it;"
                " the directory begins anew"
            )


# spec FL2
@pytest.mark.slow
@pytest.mark.parametrize(("table", "row"), [("nodes", b"\x01"), ("ghosts", b"\x80")])
async def test_a_row_that_cannot_be_read_is_named(
    tmp_path: Path, table: str, row: bytes
) -> None:
    FleetStore(str(tmp_path)).close()
    base = sqlite3.connect(tmp_path / FILE)
    with base:
        base.execute("INSERT INTO rows VALUES (?, 'a', ?)", (table, row))
    start = DirectoryStart(DirectoryOrder(str(tmp_path)), no_node, LOG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start.run)
        is_done, text = await start.answer(VERSION, READY, b"{}")
        assert (is_done, f"'a' of '{table}'".encode() in text) == (None, True), text
        with base:
            base.execute("DELETE FROM rows")
        base.close()
        while not (await start.answer(VERSION, READY, b"{}"))[0]:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


# spec FL2: its first pages are whole, so it opens.
async def test_a_store_that_is_damaged_is_told_and_stays_as_it_is(
    tmp_path: Path,
) -> None:
    store = FleetStore(str(tmp_path))
    row = LongRow("x" * 500)
    store.put([Change("nodes", f"{number}", row) for number in range(100)])
    store.close()
    file = tmp_path / FILE
    begin = file.read_bytes()[: 3 * PAGE_BYTES]
    rest = b"\xff" * (file.stat().st_size - len(begin))
    file.write_bytes(begin + rest)
    start = DirectoryStart(DirectoryOrder(str(tmp_path)), no_node, LOG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start.run)
        is_done, text = await start.answer(VERSION, READY, b"{}")
        assert not is_done
        assert text.decode() == (
            "cannot read the fleet's store: database disk image is malformed; move a"
            " damaged file away"
        )
        nursery.cancel_scope.cancel()
    assert file.read_bytes().endswith(rest)


# spec FL2: the user of the process has as many threads as it may have.
@pytest.mark.slow
async def test_a_directory_that_gets_no_thread_waits_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_thread(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(directory_start, "in_thread", no_thread)
    start = DirectoryStart(DirectoryOrder(str(tmp_path)), no_node, LOG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start.run)
        is_done, text = await start.answer(VERSION, READY, b"{}")
        assert (is_done, b"Resource temporarily unavailable" in text) == (None, True)
        monkeypatch.setattr(directory_start, "in_thread", in_thread)
        while not (await start.answer(VERSION, READY, b"{}"))[0]:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


# spec FL2
@pytest.mark.slow
async def test_a_store_that_cannot_be_read_is_waited_for() -> None:
    rename = "ALTER TABLE sandhost_fleet_rows RENAME {} TO {}"
    with postgres.server() as server:
        open_store(server.address).close()
        server.run(rename.format("data", "away"))
        start = DirectoryStart(DirectoryOrder(server.address), no_node, LOG)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start.run)
            is_done, text = await start.answer(VERSION, READY, b"{}")
            assert (is_done, b"cannot read the fleet's store" in text) == (None, True)
            server.run(rename.format("away", "data"))
            while not (await start.answer(VERSION, READY, b"{}"))[0]:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


# spec FL2: its answer comes late; the loop goes on meanwhile.
@pytest.mark.slow
async def test_a_store_that_is_read_slowly_holds_up_nothing() -> None:
    with postgres.server() as server:
        open_store(server.address).close()
        psycopg = pytest.importorskip("psycopg")
        start = DirectoryStart(DirectoryOrder(server.address), no_node, LOG)
        async with trio.open_nursery() as nursery:
            with psycopg.connect(server.address) as other:
                other.execute("LOCK TABLE sandhost_fleet_rows")
                nursery.start_soon(start.run)
                while await in_thread(server.run, WAITING) != [(1,)]:
                    pass
                is_done, text = await start.answer(VERSION, "ps", b"{}")
                assert (is_done, b"it opens its store" in text) == (None, True)
            assert (await start.answer(VERSION, READY, b"{}"))[0]
            nursery.cancel_scope.cancel()


def no_node(node: str, message: bytes) -> None:
    raise AssertionError(f"{node}: {message!r}")
