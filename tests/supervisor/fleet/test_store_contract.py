"""The contract of a directory's stores: the file of SQLite, and a real PostgreSQL."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hostlib.log import Log
from supervisor.cluster.directory_service import open_store
from supervisor.fleet.held_slices import LedgerRow
from supervisor.fleet.messages import Renewed, Session
from supervisor.fleet.step import (
    Change,
    Send,
    StaleEpochError,
    Step,
    Store,
    StoreError,
)
from supervisor.fleet.store import FILE, StepWriter
from supervisor.fleet.store_address import is_postgres
from tests.helpers import postgres

pytestmark = pytest.mark.slow

ROW = LedgerRow("L1", 2, 3)
LOG = Log("ERROR")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest) -> Iterator[postgres.Server | None]:
    """A server for the tests of this file; None for those of files."""
    if request.param == "sqlite":
        yield None
        return
    with postgres.server() as one:
        yield one


@dataclass
class Place:
    """A place for a store.

    Attributes:
        name: as `[fleet] store` has it.
        run: does a statement there, as another program does.
        prefix: of the names of its tables.
    """

    name: str
    run: Callable[[str], object]
    prefix: str = ""

    def count_epoch(self) -> None:
        """Count the epoch up, as another directory does."""
        query = f"UPDATE {self.prefix}epoch SET number = number + 1"  # noqa: S608 - ours
        self.run(query)

    def rename(self, table: str, name: str) -> None:
        """Give a table another name: no statement finds it then."""
        self.run(f"ALTER TABLE {self.prefix}{table} RENAME TO {self.prefix}{name}")

    def open(self) -> Store:
        """Return the store, opened."""
        if not is_postgres(self.name):
            return open_store(self.name)
        from supervisor.fleet.postgres_store import (  # noqa: PLC0415 - an extra
            PostgresStore,
            TimeBounds,
        )

        return PostgresStore(self.name, TimeBounds(lock_s=0))


@pytest.fixture
def place(server: postgres.Server | None, tmp_path: Path) -> Place:
    """A place of each kind, without a store yet."""
    if server is None:
        path = tmp_path / "fleet"

        def run(query: str) -> None:
            other = sqlite3.connect(path / FILE)
            with other:
                other.execute(query)
            other.close()

        return Place(str(path), run)
    base = server.make_base()
    return Place(
        server.address_of(base),
        lambda query: server.run(query, base),
        "sandhost_fleet_",
    )


def rows(store: Store) -> list[tuple[str, str]]:
    return [(table, key) for table, key, _ in store.load()]


# spec FL2
def test_what_was_put_is_loaded_and_what_was_deleted_is_not(place: Place) -> None:
    store = place.open()
    store.put([Change("ledger", key, ROW) for key in ("c10", "c2", "é", "a/b")])
    store.put([Change("ledger", "c2", None), Change("ledger", "none", None)])
    store.close()
    store = place.open()
    assert rows(store) == [("ledger", "a/b"), ("ledger", "c10"), ("ledger", "é")]
    assert {data for *_, data in store.load()} == {msgspec.msgpack.encode(ROW)}
    store.close()


# spec FL2
def test_the_last_change_of_a_row_counts(place: Place) -> None:
    store = place.open()
    last = LedgerRow("L1", 9, 9)
    changes = [Change("a", "x", ROW), Change("a", "y", None), Change("a", "x", last)]
    store.put([*changes, Change("a", "z", ROW), Change("a", "z", None)])
    assert store.load() == [("a", "x", msgspec.msgpack.encode(last))]
    store.close()


# spec FL2
def test_many_rows_are_put_and_loaded(place: Place) -> None:
    store = place.open()
    store.put([Change("children", f"c{number:05}", ROW) for number in range(5000)])
    assert len(rows(store)) == 5000
    store.close()


# spec FL2
def test_each_start_counts_the_epoch_up(place: Place) -> None:
    epochs = []
    for _ in range(3):
        store = place.open()
        epochs.append(store.epoch)
        store.close()
    assert epochs == [1, 2, 3]


# spec FL2
def test_only_one_directory_has_a_store(place: Place) -> None:
    store = place.open()
    with pytest.raises(StoreError, match=r"another directory has.*end that one first"):
        place.open()
    store.put([Change("ledger", "a", ROW)])
    store.close()
    again = place.open()
    assert (again.epoch, rows(again)) == (2, [("ledger", "a")])
    again.close()


# spec FL2
@pytest.mark.parametrize("changes", [[Change("ledger", "a", ROW)], []])
def test_another_epoch_writes_nothing(place: Place, changes: list[Change]) -> None:
    store = place.open()
    place.count_epoch()
    if changes or store.is_remote:
        with pytest.raises(StaleEpochError, match="epoch is 2, this directory's is 1"):
            store.put(changes)
    store.close()
    again = place.open()
    assert rows(again) == []
    again.close()


WRITER = """
import itertools, sys
from supervisor.cluster.directory_service import open_store
from supervisor.fleet.held_slices import LedgerRow
from supervisor.fleet.step import Change
store = open_store(sys.argv[1])
for number in itertools.count():
    changes = [Change("ledger", f"{number:06}{part}", LedgerRow("L1")) for part in "ab"]
    store.put(changes)
    print(number, flush=True)
"""


# spec FL2
def test_a_directory_killed_while_it_commits_has_lost_nothing_it_told(
    place: Place,
) -> None:
    for epoch in range(1, 6):
        words = [sys.executable, "-c", WRITER, place.name]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(3 * epoch):
                process.stdout.readline()
            process.kill()
            told = process.stdout.read().split("\n")
        store = open_store(place.name)
        numbers = {key[:6] for _, key in rows(store)}
        assert len(numbers) * 2 == len(rows(store))  # all of a step, or none of it
        assert len(numbers) >= 3 * epoch + len([one for one in told[:-1] if one])
        assert store.epoch == 2 * epoch
        store.put([Change(*row, None) for row in rows(store)])
        store.close()


# spec FL2
async def test_a_step_is_carried_out_after_it_is_stored(place: Place) -> None:
    store = place.open()
    seen: list[int] = []
    writer: StepWriter[Step] = StepWriter(
        store, lambda _: seen.append(len(rows(store))), LOG
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
async def test_a_step_that_cannot_be_stored_is_not_carried_out(place: Place) -> None:
    store = place.open()
    place.count_epoch()
    seen: list[Step] = []
    writer = StepWriter(store, seen.append, LOG)
    step = Step()
    step.put("ledger", "a", ROW)
    writer.add(step)
    with pytest.raises(StaleEpochError):
        await writer.flush()
    assert seen == []
    store.close()


# spec FL2: a fault that passes, as a full disk does; the caller was told of a failure.
async def test_a_step_that_could_not_be_stored_is_not_stored_later(
    place: Place,
) -> None:
    store = place.open()
    seen: list[Step] = []
    writer = StepWriter(store, seen.append, LOG)
    step = Step()
    step.put("ledger", "a", ROW)
    writer.add(step)
    place.rename("rows", "away")
    with pytest.raises((StoreError, sqlite3.Error)):
        await writer.flush()
    place.rename("away", "rows")
    writer.add(Step())
    for _ in range(2):
        with pytest.raises((StoreError, sqlite3.Error)):
            await writer.flush()
    assert seen == []
    store.close()
    again = place.open()
    assert rows(again) == []
    again.close()


# spec FL2, FL5: a renewal of a directory that has lost its store to another machine's.
async def test_a_message_without_a_change_goes_out_under_the_epoch(
    place: Place,
) -> None:
    store = place.open()
    seen: list[Step] = []
    writer = StepWriter(store, seen.append, LOG)
    writer.add(Step(sends=[Send("a", Renewed(1, Session("L1", 1), 1))]))
    await writer.flush()
    assert len(seen) == 1
    place.count_epoch()
    writer.add(Step(sends=[Send("a", Renewed(1, Session("L1", 1), 2))]))
    if store.is_remote:
        with pytest.raises(StaleEpochError):
            await writer.flush()
        assert len(seen) == 1
    store.close()
