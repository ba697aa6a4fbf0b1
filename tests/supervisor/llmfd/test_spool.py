"""Contents on the disk.

Few descriptors for many of them, and no more disk than they are.
"""

import errno
import os
from pathlib import Path

import pytest

from supervisor.llmfd import TOOLS, FdError, Process, Shared, Store
from supervisor.llmfd import slots as slots_module
from supervisor.llmfd import spool as spool_module
from supervisor.llmfd.handover import BlobState, Entering, StoreState
from supervisor.llmfd.slots import MOST_COPIED_BYTES, SLOT_SIZES, Slot, SlotFile
from supervisor.llmfd.spool import (
    LIMIT_PER_FILE,
    LIMIT_PER_MAP,
    FileMap,
    Incoming,
    Spool,
)
from tests.helpers.contents import ask, failed, text_of
from tests.helpers.leaks import give_back

LIMIT = 256
FEW = len(SLOT_SIZES) + LIMIT // LIMIT_PER_MAP


def open_now() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def made_of(number: int, size: int) -> bytes:
    """Return a text of its own of some size."""
    return (b"%d\n" % number * size)[:size]


# One child could take every descriptor of the host (spec S5).
def test_many_longer_contents_take_few_descriptors(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "descriptor_limit", lambda: LIMIT)
    store = Store(max_memory=1_000_000)
    process = Process(Shared(store, TOOLS))
    before = open_now()
    for number in range(200):
        process.add(store.put(made_of(number, 300_000)), "test")
    for number in range(200):
        page = ask(process, "read_fd", fd=f"fd:{number + 1}", page=2)
        assert text_of(page).startswith(f"{number}\n")
    assert open_now() - before <= FEW
    # Each of them is explained to who looks for leaks.
    held = {fd for fd, _ in store.descriptors()}
    assert len(held) == open_now() - before
    process.close()
    give_back()
    assert (store.blobs, list(store.descriptors())) == ({}, [])


def test_many_contents_that_are_begun_take_few_descriptors(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "descriptor_limit", lambda: LIMIT)
    store = Store(max_memory=10)
    before = open_now()
    writers = [store.writer() for _ in range(100)]
    for number, writer in enumerate(writers):
        for piece in (b"%d\n" % number, b"x" * 20, b"y" * 300_000):
            writer.add(piece)
    assert open_now() - before <= FEW
    contents = [writer.finish() for writer in writers]
    for number, content in enumerate(contents):
        data = b"%d\n" % number + b"x" * 20 + b"y" * 300_000
        assert content.text.data[:] == data
        store.drop(content)
    assert list(store.descriptors()) == []


def test_so_many_contents_have_a_file_and_the_others_need_none(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "LONG_BYTES", 1_000_000)
    monkeypatch.setattr(spool_module, "SLOW_TO_FREE_BYTES", 1_000_000)
    monkeypatch.setattr(spool_module, "in_background", lambda call, *args: call(*args))
    store = Store(max_memory=10)
    store.spool = Spool(most_files=3)
    datas = [made_of(n, 1_000_001 + n) for n in range(8)]
    contents = [store.put(data) for data in datas]
    files = [content for content in contents if content.text.mapping is not None]
    assert files == contents[:3]
    for content, data in zip(contents, datas, strict=True):
        assert content.text.data[:] == data
        assert content.text.index.lines == data.count(b"\n") + (data[-1:] != b"\n")
    # A file that is given back makes room for another one.
    store.drop(contents.pop(0))
    store.drop(contents.pop())
    for content in contents[2:]:
        store.drop(content)
    again = store.put(made_of(9, 2_000_000))
    assert again.text.mapping is not None
    for content in (*contents[:2], again):
        store.drop(content)
    assert list(store.descriptors()) == []


# attack 18: so many are kept from files and tools.
def test_no_more_descriptors_are_taken_than_are_set_aside(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "descriptor_limit", lambda: LIMIT)
    monkeypatch.setattr(spool_module, "LONG_BYTES", 500_000)
    monkeypatch.setattr(spool_module, "SLOW_TO_FREE_BYTES", 500_000)
    store = Store(max_memory=1_000_000)
    process = Process(Shared(store, TOOLS))
    before = open_now()
    for number in range(40):
        process.add(store.put(made_of(number, 600_000)), "test")
        process.add(store.put(made_of(number, 300_000)), "test")
        ask(process, "read_fd", fd=f"fd:{2 * number + 2}", page=2)
    most = store.spool.most_descriptors
    assert 2 * (LIMIT // LIMIT_PER_FILE) <= open_now() - before <= most < LIMIT // 4
    process.close()
    give_back()


@pytest.mark.parametrize("limit", [256, 4096])
def test_how_many_have_a_file_is_a_part_of_what_the_host_may_open(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(spool_module, "descriptor_limit", lambda: limit)
    monkeypatch.setattr(spool_module, "LONG_BYTES", 4)
    spool = Spool()
    descriptors = [spool.files.open() for _ in range(limit // LIMIT_PER_FILE)]
    assert not spool.has_files
    place = spool.keep(b"12345")
    assert isinstance(place, Slot)
    place.free()
    for fd in descriptors:
        spool.files.close(fd)


# To map a content takes a descriptor, and there may be none.
@pytest.mark.parametrize("call", ["wrap_output", "wrap_input"])
def test_what_cannot_be_read_when_it_has_come_is_given_back(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None, call: str
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "descriptor_limit", lambda: 1)
    store = Store(max_memory=10)
    made = Process(Shared(store, TOOLS))

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "map", refused)
        kind, _, message = failed(ask(made, call, text="x\n" * 200_000))
        assert kind == "file_operation"
        assert message == "Cannot read content: Too many open files"
    assert not store.blobs
    made.close()
    assert list(store.descriptors()) == []


def test_what_no_slot_can_hold_needs_a_file_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "LONG_BYTES", 2000)
    monkeypatch.setattr(spool_module, "SLOW_TO_FREE_BYTES", 2000)
    monkeypatch.setattr(spool_module, "in_background", lambda call, *args: call(*args))
    store = Store(max_memory=10)
    store.spool = Spool(most_files=1)
    store.spool.slots = {1024: store.spool.slots[1024]}
    first = store.put(made_of(1, 3000))
    with pytest.raises(FdError, match="needs a file of its own") as caught:
        store.put(made_of(2, 3000))
    assert caught.value.details.startswith("Limit: 1 such files in this host")
    store.drop(first)
    store.drop(store.put(made_of(2, 3000)))
    assert (store.blobs, list(store.descriptors())) == ({}, [])


@pytest.mark.parametrize("most_files", [0, 1])
@pytest.mark.parametrize("at_least", [0, 70_000, 3_000_000])
def test_what_outgrows_its_place_is_what_came_in(
    monkeypatch: pytest.MonkeyPatch, at_least: int, most_files: int, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "LONG_BYTES", 1024 * 1024)
    spool = Spool(most_files=most_files)
    other = spool.keep(b"other")
    pieces = [made_of(n, 7**n) for n in range(8)] * 2
    incoming = Incoming(spool, at_least)
    for piece in pieces:
        incoming.add(piece)
    place = incoming.finish()
    incoming.close()
    assert isinstance(place, FileMap if most_files else Slot)
    data = place[:] if isinstance(place, FileMap) else place.read()[:]
    assert data == b"".join(pieces)
    place.free()
    assert isinstance(other, Slot)
    assert other.read() == b"other"
    other.free()
    assert list(spool.descriptors()) == []


def test_what_is_given_up_on_its_way_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(spool_module, "LONG_BYTES", 2_000_000)
    spool = Spool()
    for size in (10, 1_000_000, 3_000_000):
        incoming = Incoming(spool)
        incoming.add(b"x" * size)
        incoming.close()
        incoming.close()
        assert list(spool.descriptors()) == []


def test_a_slot_is_nobody_elses_while_somebody_reads_it(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(
        slots_module, "in_background_only", lambda call, *args: call(*args)
    )
    size = MOST_COPIED_BYTES + 1
    spool = Spool()
    first = spool.keep(b"1" * size)
    assert isinstance(first, Slot)
    data = first.read()
    first.free()
    first.free()
    second = spool.keep(b"2" * size)
    assert isinstance(second, Slot)
    assert second.address != first.address
    assert data[:] == b"1" * size
    with pytest.raises(FdError, match="gone"):
        first.read()
    del data
    third = spool.keep(b"3" * size)
    assert isinstance(third, Slot)
    assert third.address == first.address, "it is free with its last reader"
    for slot, byte in ((second, b"2"), (third, b"3")):
        assert slot.read()[:] == byte * size
        slot.free()
    assert list(spool.descriptors()) == []


def test_what_is_given_back_is_given_back_to_the_disk(no_leaks: None) -> None:
    del no_leaks
    spool = Spool()
    places = [spool.keep(os.urandom(1_000_000)) for _ in range(8)]
    ((fd, _),) = spool.descriptors()
    os.fsync(fd)
    full = os.fstat(fd).st_blocks
    for place in places[1:]:
        place.free()
    assert os.fstat(fd).st_blocks < full // 4
    places[0].free()


def test_a_long_slot_is_freed_beside_the_caller(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    later: list[tuple[object, ...]] = []
    monkeypatch.setattr(slots_module, "SLOW_TO_FREE_BYTES", 1000)
    monkeypatch.setattr(slots_module, "in_background", lambda *call: later.append(call))
    spool = Spool()
    place = spool.keep(b"x" * 300_000)
    assert isinstance(place, Slot)
    place.free()
    file = spool.slots[place.room]
    assert file.numbers() == (1, [0]), "the next program of this host may use it"
    for call, *args in later:
        assert callable(call)
        call(*args)
    assert list(spool.descriptors()) == []


def test_a_file_that_the_program_before_kept_is_gone_on_with(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    data = made_of(1, 300_000)
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, data)
    content = Store().put(data)
    key = content.text.key
    memory_fd = os.memfd_create("test")
    state = BlobState(key.hex(), len(data), None, fd, None, None, None, False, [])
    store = Store()
    entering = Entering(store, StoreState(memory_fd, [], [state]), [], Shared)  # type: ignore[arg-type]
    assert store.blobs[key].data[:] == data
    assert len(store.files()) == 1
    entering.close()
    assert (store.blobs, store.files()) == ({}, [])
