"""A full memory: what came first and nobody asked for moves to the disk."""

import errno
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd import TOOLS, Content, FdError, Process, ProcessParts, Store
from supervisor.llmfd import store as store_module
from supervisor.llmfd.blob_files import MOST_COPIED_BYTES
from supervisor.llmfd.store import MOST_IN_MEMORY_BYTES
from tests.helpers.contents import ask


def made_of(number: int, size: int) -> bytes:
    """Return a text of its own of some size."""
    return (b"%d\n" % number * size)[:size]


def places(contents: list[Content]) -> str:
    """Tell of each content where it lies: m for memory, d for the disk."""
    return "".join("d" if c.text.in_memory is None else "m" for c in contents)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, MOST_COPIED_BYTES + 1, MOST_IN_MEMORY_BYTES])
def test_what_came_first_moves_when_later_contents_need_the_room(
    size: int, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(store_module, "in_background", lambda call, *args: call(*args))
    store = Store(max_memory=3 * size)
    contents = [store.put(made_of(n, size)) for n in range(5)]
    assert places(contents) == "ddmmm"
    assert store.memory_bytes == 3 * size
    for number, content in enumerate(contents):
        assert content.text.data[:] == made_of(number, size)
        assert content.text.index.lines == made_of(number, size).count(b"\n") + (
            not made_of(number, size).endswith(b"\n")
        )
    for content in contents:
        store.drop(content)
    assert (store.blobs, store.memory_bytes) == ({}, 0)
    assert os.listdir(store.files.fd) == []


def test_what_is_asked_for_stays() -> None:
    store = Store(max_memory=300)
    process = Process(ProcessParts(store, TOOLS))
    for number in range(3):
        process.add(store.put(made_of(number, 100)), "test")
    ask(process, "read_fd", fd="fd:1")
    ask(process, "rename_fd", fd="fd:2", name="second")
    ask(process, "read_fd", name="second")
    process.add(store.put(made_of(3, 100)), "test")
    contents = [fd.content for fd in process.table.fds.values()]
    assert places(contents) == "mmdm"
    # Once considered it has to be asked for again.
    for number in (4, 5):
        process.add(store.put(made_of(number, 100)), "test")
    contents = [fd.content for fd in process.table.fds.values()]
    assert places(contents) == "dddmmm"
    assert store.memory_bytes == 300
    process.close()


def test_what_alone_is_too_long_goes_to_the_disk_and_moves_nobody() -> None:
    store = Store(max_memory=100)
    short, long = store.put(b"x" * 100), store.put(b"y" * 101)
    assert places([short, long]) == "md"


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 5000)),
            st.tuples(st.just("drop"), st.integers(0, 99), st.just(0)),
            st.tuples(st.just("use"), st.integers(0, 99), st.just(0)),
        ),
        max_size=60,
    )
)
def test_whatever_moves_every_content_is_what_was_put_in(
    steps: list[tuple[str, int, int]],
) -> None:
    store = Store(max_memory=9000)
    held: list[tuple[Content, bytes]] = []
    for step, number, size in steps:
        if step == "put":
            data = made_of(number, size)
            held.append((store.put(data), data))
        elif held and step == "drop":
            store.drop(held.pop(number % len(held))[0])
        elif held:
            held[number % len(held)][0].touch()
        assert store.memory_bytes <= 9000
        in_memory = {
            id(c.text): c.text for c, _ in held if c.text.in_memory is not None
        }
        assert store.memory_bytes == sum(blob.size for blob in in_memory.values())
        for content, data in held:
            assert content.text.data[:] == data
    for content, _ in held:
        store.drop(content)
    assert (store.blobs, store.memory_bytes) == ({}, 0)
    assert os.listdir(store.files.fd) == []


@pytest.mark.parametrize("size", [200, MOST_COPIED_BYTES + 1, MOST_IN_MEMORY_BYTES])
def test_a_full_disk_moves_nobody_and_is_told(
    monkeypatch: pytest.MonkeyPatch, size: int, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(store_module, "in_background", lambda call, *args: call(*args))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store(max_memory=size)
    first = store.put(made_of(1, size))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(FdError, match="No space left on device"):
            store.put(made_of(2, size))
    assert places([first]) == "m"
    assert first.text.data[:] == made_of(1, size)
    second = store.put(made_of(2, size))  # there is room again
    assert places([first, second]) == "dm"
    for content in (first, second):
        store.drop(content)
    assert (store.blobs, store.memory_bytes) == ({}, 0)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [10_000, 300_000])  # copied, mapped
def test_contents_are_read_while_they_move(size: int, no_leaks: None) -> None:
    del no_leaks
    store = Store(max_memory=5 * size)
    contents = [store.put(made_of(n, size)) for n in range(5)]
    wrong: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            found = [content.text.data[:] for content in contents]
            wrong.extend(n for n in range(5) if found[n] != made_of(n, size))

    def put(first: int) -> None:
        for number in range(first, first + 200):
            store.drop(store.put(made_of(number, size)))
        over.set()

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads += [threading.Thread(target=put, args=(1000 * n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for content in contents:
        store.drop(content)
    assert (store.blobs, store.memory_bytes) == ({}, 0)
    assert os.listdir(store.files.fd) == []
