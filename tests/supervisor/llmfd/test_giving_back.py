"""A thread gives many or long contents back: no caller waits for it."""

import tempfile
import threading
from typing import TYPE_CHECKING

import pytest

from hostlib import threads as hostlib_threads
from supervisor.llmfd import TOOLS, Allowance, ClientFiles, Process, ProcessParts, Store
from supervisor.llmfd import blob_files as files_module
from supervisor.llmfd.allowance import Allowance as Charged
from supervisor.llmfd.blob_files import BlobFiles
from supervisor.llmfd.calls import files
from supervisor.llmfd.release import MOST_AT_ONCE
from tests.helpers.contents import asking, holding, process
from tests.helpers.leaks import give_back
from tests.helpers.sessions import Hall, hall

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["hall"]

MIB = 1024 * 1024


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Return a set that comes to hold the threads in which anything is given back."""
    found: set[threading.Thread] = set()

    def watch(kind: type, name: str) -> None:
        call: Callable[..., None] = getattr(kind, name)

        def watched(*args: object) -> None:
            found.add(threading.current_thread())
            call(*args)

        monkeypatch.setattr(kind, name, watched)

    watch(Store, "forget")
    watch(Charged, "drop")
    watch(BlobFiles, "remove")
    return found


def bounded() -> Process:
    """Return a process that may keep much."""
    return Process(ProcessParts(Store(), TOOLS, allowance=Allowance(1 << 30)))


def is_empty(made: Process) -> bool:
    """Tell whether nothing is held or counted any more."""
    store, allowance = made.shared.store, made.shared.allowance
    assert allowance is not None
    return (store.blobs, store.memory_bytes, allowance.used) == ({}, 0, 0)


# spec S4, S5: 100 conversations with 10,000 descriptors each held up others for seconds.
def test_many_descriptors_are_given_back_beside_the_caller(
    threads: set[threading.Thread],
) -> None:
    made = bounded()
    for number in range(MOST_AT_ONCE * 2 + 1):
        made.add_text(f"text {number}", "test")
    child = made.fork()
    child.close()
    made.close()
    assert not made.table.fds
    give_back()
    assert is_empty(made)
    assert threading.current_thread() not in threads


def test_many_temporary_files_are_given_back_beside_the_caller(
    threads: set[threading.Thread],
) -> None:
    made = bounded()
    temps = made.shared.temps
    for number in range(MOST_AT_ONCE * 2 + 1):
        temps.create(made.put_text(f"text {number}"))
    temps.close()
    give_back()
    assert is_empty(made)
    assert threading.current_thread() not in threads


def test_long_contents_are_freed_beside_the_caller(
    threads: set[threading.Thread],
) -> None:
    made = process()
    store = made.shared.store
    for number in range(5):
        made.add_text(str(number) * 4 * MIB, "test")
    made.table.drop([1, 2, 3, 4, 5])
    assert not store.blobs
    give_back()
    assert store.memory_bytes == 0
    assert threading.current_thread() not in threads


def test_few_short_ones_need_no_thread(threads: set[threading.Thread]) -> None:
    made = holding("text")
    made.close()
    assert threads == {threading.current_thread()}


def test_a_long_file_that_is_begun_is_removed_beside_the_caller(
    threads: set[threading.Thread], monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(files_module, "SLOW_TO_FREE_BYTES", 1000)
    made = Process(ProcessParts(Store(max_memory=1), TOOLS))
    made.begun.put(None, b"x" * 300_000)
    made.close()
    give_back()
    assert len(threads) == 1
    assert threading.current_thread() not in threads


# A thread removes a file just when its name has been written down.
def test_the_program_is_not_replaced_while_anything_is_given_back() -> None:
    held, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        held.wait(60)

    hostlib_threads.in_background(wait)
    begun.wait(60)
    assert hostlib_threads.calls_at_work() == 1
    held.set()
    give_back()
    assert hostlib_threads.calls_at_work() == 0


async def test_what_an_insert_has_read_is_closed_beside_the_caller(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "OLD_IN_MEMORY_BYTES", 1000)
    closed: list[threading.Thread] = []
    kind = tempfile.SpooledTemporaryFile

    def watch(name: str) -> None:
        call = getattr(kind, name)

        def watched(file: object, *args: object) -> None:
            closed.append(threading.current_thread())
            call(file, *args)

        monkeypatch.setattr(kind, name, watched)

    watch("close")
    watch("__exit__")
    (hall.root / "out").write_text("old\n" * 500)
    made = holding("new\n")
    made.files = ClientFiles(hall.fs, hall.connect().client)
    for line, is_good in ((1, True), (1000, False)):
        more = {"mode": "insert", "insert_at_line": line}
        answer = await asking(made, "fd_to_file", fd="fd:1", file_path="out", **more)
        assert (answer.tag == "fd_write") is is_good
    give_back()
    assert (hall.root / "out").read_text() == "new\n" + "old\n" * 500
    assert len(closed) == 2
    assert threading.current_thread() not in closed
