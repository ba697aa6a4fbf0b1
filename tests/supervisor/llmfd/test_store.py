"""The store: once each, in memory or on the disk, freed with the last holder."""

import errno
import os
from pathlib import Path

import pytest

from supervisor.llmfd import TOOLS, FdError, Process, ProcessParts, Store
from supervisor.llmfd import store as store_module
from supervisor.llmfd.index import TextIndex
from tests.helpers.contents import ask, failed, process, text_of


def test_the_same_content_is_kept_once() -> None:
    store = Store()
    one, other = store.put(b"text"), store.put(b"text")
    assert one.text is other.text
    assert store.memory_bytes == 4
    store.drop(one)
    assert len(store.blobs) == 1
    store.drop(other)
    assert (store.blobs, store.memory_bytes) == ({}, 0)


@pytest.mark.parametrize("data", [b"x" * 1000 + b"\n", b"\xff" * 1000])
def test_what_memory_has_no_room_for_lies_in_a_file(
    data: bytes, tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    store = Store(max_memory=100, directory=str(tmp_path))
    content = store.put(data)
    assert content.text.in_memory is None
    assert store.memory_bytes == 0
    assert content.original.data[:] == data
    made = Process(ProcessParts(store, TOOLS))
    made.add(content, "test")
    page = ask(made, "read_fd", fd="fd:1")
    if content.raw is None:
        assert text_of(page) == data.decode()
        assert ask(made, "search_fd", fd="fd:1", query="xx").get("matches") == "1"
    made.close()
    assert not store.blobs


@pytest.mark.parametrize("step", [1, 3, 70, 1 << 20])
@pytest.mark.parametrize("limit", [100, 1 << 20], ids=["disk", "memory"])
def test_pieces_are_the_same_content_as_the_whole(
    limit: int, step: int, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(store_module, "MOST_IN_MEMORY_BYTES", limit)
    monkeypatch.setattr(store_module, "STEP_BYTES", step)
    pieces = [f"line {n} \N{SNOWMAN}\n".encode() * n for n in range(60)]
    store = Store()
    writer = store.writer()
    for piece in pieces:
        writer.add(piece)
    content = writer.finish()
    whole = b"".join(pieces)
    assert content.text.data[:] == whole
    assert (content.text.in_memory is None) is (limit == 100)
    assert store.put(whole).text is content.text
    assert writer.size == len(whole)
    other = Store().put(whole).text.index
    for name in TextIndex.__slots__:
        assert getattr(content.text.index, name) == getattr(other, name)
    for _ in range(2):
        store.drop(content)
    assert os.listdir(store.files.fd) == []


def test_pieces_that_the_disk_refuses_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(store_module, "MOST_IN_MEMORY_BYTES", 100)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store()
    writer = store.writer()
    writer.add(b"0123456789\n" * 9)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(FdError, match="No space left"):
        writer.add(b"0123456789\n")
    writer.close()
    assert (store.blobs, store.memory_bytes) == ({}, 0)


def test_content_in_pieces_goes_to_a_file_when_it_grows(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    monkeypatch.setattr(store_module, "MOST_IN_MEMORY_BYTES", 100)
    store = Store()
    writer = store.writer()
    for _ in range(50):
        writer.add(b"0123456789\n")
    content = writer.finish()
    assert content.text.in_memory is None
    assert content.text.data[:] == b"0123456789\n" * 50
    assert content.text.index.lines == 50
    again = store.put(b"0123456789\n" * 50)
    assert again.text is content.text
    store.drop(again)
    store.drop(content)
    assert (store.blobs, store.memory_bytes) == ({}, 0)


def test_a_writer_that_is_given_up_leaves_nothing(no_leaks: None) -> None:
    del no_leaks
    store = Store(max_memory=5)
    for size in (3, 10):
        writer = store.writer()
        writer.add(b"x" * size)
        writer.close()
        writer.close()
    assert (store.blobs, store.memory_bytes) == ({}, 0)


@pytest.mark.parametrize("size", [9000, 17_000_000])
def test_a_full_disk_is_an_error_and_no_content(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None, size: int
) -> None:
    del no_leaks

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = Process(ProcessParts(Store(max_memory=100), TOOLS))
    monkeypatch.setattr(os, "write", full)
    answer = ask(made, "wrap_output", text="x" * size)
    monkeypatch.undo()
    assert failed(answer)[::2] == (
        "file_operation",
        "Cannot store content: No space left on device",
    )
    store = made.shared.store
    assert (made.table.fds, store.blobs, store.memory_bytes) == ({}, {}, 0)
    store.close()


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    store = Store(max_memory=1, directory=str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    with pytest.raises(FdError, match="No such file or directory"):
        store.put(b"text")


def test_a_hundred_megabytes_on_one_line() -> None:
    made = process()
    made.add(made.shared.store.put(b"x" * 100_000_000), "test")
    page = ask(made, "read_fd", fd="fd:1", page=25_000)
    assert (page.get("continued"), page.get("truncated")) == ("true", "false")
    assert len(text_of(page)) == 4000
    found = ask(made, "search_fd", fd="fd:1", query="y")
    assert found.get("matches") == "0"
    whole = ask(made, "read_fd", fd="fd:1", read_all=True)
    assert failed(whole)[0] == "invalid_parameter"


def test_a_fork_shares_what_it_has() -> None:
    made = process()
    for number in range(100):
        made.add_text(f"{number}" * 10_000, "test")
    before = made.shared.store.memory_bytes
    forks = [made.fork() for _ in range(10)]
    assert made.shared.store.memory_bytes == before
    for fork in forks:
        fork.close()
    made.close()
    assert made.shared.store.blobs == {}
