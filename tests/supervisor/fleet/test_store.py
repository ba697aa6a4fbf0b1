"""The store: one directory at a time, under its epoch; rows before messages."""

import errno
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from hostlib.log import Log
from hostlib.threads import in_thread
from supervisor.fleet import store as store_module
from supervisor.fleet.held_slices import LedgerRow
from supervisor.fleet.step import Change, StaleEpochError, Step, StoreError
from supervisor.fleet.store import FILE, FleetStore, StepWriter
from tests.helpers.command import small_disk

ROW = LedgerRow("L1", 2, 3)
LOG = Log("ERROR")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A directory for a store, not made yet."""
    return str(tmp_path / "fleet")


# spec FL2
def test_what_was_put_is_loaded_and_what_was_deleted_is_not(path: str) -> None:
    store = FleetStore(path)
    store.put([Change("ledger", "a", ROW), Change("ledger", "b", ROW)])
    store.put([Change("ledger", "b", None)])
    store.close()
    store = FleetStore(path)
    ((table, key, _),) = store.load()
    assert (table, key) == ("ledger", "a")
    store.close()


# spec FL2
def test_each_start_counts_the_epoch_up(path: str) -> None:
    epochs = []
    for _ in range(3):
        store = FleetStore(path)
        epochs.append(store.epoch)
        store.close()
    assert epochs == [1, 2, 3]


# spec FL2
def test_only_one_directory_has_a_store(path: str) -> None:
    store = FleetStore(path)
    with pytest.raises(StoreError, match="another directory has it; end that one"):
        FleetStore(path)
    store.close()
    FleetStore(path).close()


# spec FL2
def test_another_epoch_writes_nothing(path: str) -> None:
    store = FleetStore(path)
    other = sqlite3.connect(os.path.join(path, FILE))
    with other:
        other.execute("UPDATE epoch SET number = number + 1")
    other.close()
    with pytest.raises(StaleEpochError, match="its epoch is 2, this directory's is 1"):
        store.put([Change("ledger", "a", ROW)])
    assert store.load() == []
    store.close()


# spec FL2
@pytest.mark.slow
def test_a_directory_that_was_killed_leaves_its_rows_and_its_lock(path: str) -> None:
    program = (
        "from supervisor.fleet.store import FleetStore\n"
        "from supervisor.fleet.step import Change\n"
        "from supervisor.fleet.held_slices import LedgerRow\n"
        "import sys, signal\n"
        f"store = FleetStore({path!r})\n"
        "store.put([Change('ledger', 'a', LedgerRow('L1'))])\n"
        "print('stored', flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        process.send_signal(signal.SIGKILL)
    store = FleetStore(path)
    assert store.epoch == 2
    assert [key for _, key, _ in store.load()] == ["a"]
    store.close()


# spec FL2
def test_a_store_is_its_owners_alone(path: str) -> None:
    store = FleetStore(path)
    for name in os.listdir(path):
        assert stat.S_IMODE(os.stat(os.path.join(path, name)).st_mode) == 0o600
    store.close()


# spec FL2
def test_a_store_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="move a damaged file away"):
        FleetStore(str(tmp_path))
    (tmp_path / FILE).unlink()
    FleetStore(str(tmp_path)).close()


# spec FL2
async def test_a_step_is_carried_out_after_it_is_stored(path: str) -> None:
    store = FleetStore(path)
    seen: list[int] = []
    writer: StepWriter[Step] = StepWriter(
        store, lambda _: seen.append(len(store.load())), LOG
    )
    for key in "ab":
        step = Step()
        step.put("ledger", key, ROW)
        writer.add(step)
    writer.add(Step())
    assert seen == []
    await writer.flush()
    assert seen == [2, 2, 2]
    store.close()


# spec FL2
async def test_a_step_that_cannot_be_stored_is_not_carried_out(path: str) -> None:
    store = FleetStore(path)
    other = sqlite3.connect(os.path.join(path, FILE))
    with other:
        other.execute("UPDATE epoch SET number = number + 1")
    other.close()
    seen: list[Step] = []
    writer = StepWriter(store, seen.append, LOG)
    step = Step()
    step.put("ledger", "a", ROW)
    writer.add(step)
    with pytest.raises(StaleEpochError):
        await writer.flush()
    assert seen == []
    store.close()


# spec FL2: the user of the process has as many threads as it may have.
async def test_steps_wait_for_a_thread_and_are_stored_in_order(
    path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts = 0

    async def late(*words: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 4:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await in_thread(*words)

    store = FleetStore(path)
    seen: list[Step] = []
    writer = StepWriter(store, seen.append, Log("WARNING"))
    steps = [Step(), Step()]
    for key, step in zip("ab", steps, strict=True):
        step.put("ledger", key, ROW)
    monkeypatch.setattr(store_module, "in_thread", late)
    writer.add(steps[0])
    with pytest.raises(OSError, match="temporarily unavailable"):
        await writer.try_flush()
    assert seen == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.flush)
        await trio.testing.wait_all_tasks_blocked()
        writer.add(steps[1])
        nursery.start_soon(writer.flush)
    assert seen == steps
    assert [key for _, key, _ in store.load()] == ["a", "b"]
    assert capfd.readouterr().err.count("are written later") == 1
    store.close()


async def fill(writer: StepWriter[Step]) -> None:
    """Store rows, one step each."""
    for number in range(10_000):
        step = Step()
        step.put("ledger", f"{number:0500}", ROW)
        writer.add(step)
        await writer.flush()


# spec FL2
async def test_on_a_full_disk_nothing_is_carried_out_that_is_not_stored(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path, "512k") as disk:
        store = FleetStore(str(disk / "fleet"))
        (disk / "other").write_bytes(bytes(128 << 10))
        seen: list[Step] = []
        writer = StepWriter(store, seen.append, LOG)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await fill(writer)
        store.close()
        (disk / "other").unlink()
        store = FleetStore(str(disk / "fleet"))
        assert len(store.load()) == len(seen) > 0
        store.close()
