"""The start of a directory: without its store it says why, and it gets it later."""

import json
import sqlite3
from pathlib import Path

import pytest
import trio

from hostlib.log import Log
from supervisor.cluster.directory_start import READY, DirectoryStart
from supervisor.cluster.orders import DirectoryOrder
from supervisor.fleet.messages import VERSION
from supervisor.fleet.step import StaleEpochError
from supervisor.fleet.store import FILE, FleetStore

LOG = Log("ERROR")


# spec FL2
async def test_a_directory_waits_for_its_store_and_tells_why(tmp_path: Path) -> None:
    other = FleetStore(str(tmp_path))
    start = DirectoryStart(DirectoryOrder(str(tmp_path), max_tokens=7), no_node, LOG)
    is_done, text = await start.answer(VERSION, "ps", b"{}")
    assert (is_done, b"it opens its store" in text) == (False, True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start.run)
        for do in (READY, "ps", "spawn"):
            is_done, text = await start.answer(VERSION, do, b"{}")
            assert (is_done, b"another directory has it" in text) == (False, True)
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
            words = b'{"name": "x", "program": {"command": ["true"]}, "wait": true}'
            is_done, text = await start.answer(VERSION, "spawn", words)
            assert (is_done, b"its epoch is 2" in text) == (False, True)


def no_node(node: str, message: bytes) -> None:
    raise AssertionError(f"{node}: {message!r}")
