"""Contents on the disk: files named by their hash, open only while they are used."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from supervisor.llmfd import TOOLS, FdError, Process, ProcessParts, Store
from supervisor.llmfd import blob_files as files_module
from supervisor.llmfd import store as store_module
from supervisor.llmfd.blob_files import MOST_COPIED_BYTES, ContentMap
from supervisor.llmfd.store import FEW_FILES
from tests.helpers.contents import ask, failed, text_of
from tests.helpers.leaks import give_back

SHORT, LONGER = 100, MOST_COPIED_BYTES + 1
"""Sizes of contents that are copied and mapped."""


def open_now() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def made_of(number: int, size: int) -> bytes:
    """Return a text of its own of some size."""
    return (b"%d\n" % number * size)[:size]


def on_disk(where: Path) -> Store:
    """Return a store whose contents are all on the disk."""
    return Store(max_memory=1, directory=str(where))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The calls that were left to the background thread, which has not begun."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(files_module, "SLOW_TO_FREE_BYTES", 1000)
    for module in (files_module, store_module):
        monkeypatch.setattr(module, "in_background", lambda *call: calls.append(call))
    return calls


def do(calls: list[tuple[object, ...]]) -> None:
    """Do what was left to the background thread."""
    for call, *args in calls:
        assert callable(call)
        call(*args)


# spec S5, attack 18: one child could take every descriptor of the host.
def test_contents_on_the_disk_take_no_descriptors(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    store = on_disk(tmp_path)
    process = Process(ProcessParts(store, TOOLS))
    before = open_now()
    for number in range(50):
        process.add(store.put(made_of(number, 300 + number % 2 * 300_000)), "test")
        process.begun.put(None, made_of(number, 400_000))
    for number in range(50):
        page = ask(process, "read_fd", fd=f"fd:{number + 1}", page=1)
        assert text_of(page).startswith(f"{number}\n")
    assert open_now() == before
    process.close()
    give_back()
    assert (store.blobs, os.listdir(tmp_path)) == ({}, [])
    store.close()


# The contents are a child's: no other user may look at them.
def test_a_file_has_its_hash_as_name_and_only_its_owner_may_read_it(
    tmp_path: Path,
) -> None:
    where = tmp_path / "contents"
    store = on_disk(where)
    content = store.put(b"text")
    file = where / blake3(b"text").hexdigest()
    assert (list(where.iterdir()), file.read_bytes()) == ([file], b"text")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    store.drop(content)
    assert list(where.iterdir()) == []
    store.close()


def test_the_end_of_a_store_leaves_no_file(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    given, own = on_disk(tmp_path), Store(max_memory=1)
    directory = os.readlink(f"/proc/self/fd/{own.files.fd}")
    for store in (given, own):
        content = store.put(b"text")
        store.writer().add(b"begun")
        store.close()
        store.close()
        store.drop(content)
    assert os.listdir(tmp_path) == []
    assert not os.path.exists(directory)


# Damage to a file is an error of the read that meets it, and of no other.
@pytest.mark.parametrize("damage", ["removed", "shortened"])
@pytest.mark.parametrize("size", [SHORT, LONGER])
def test_a_damaged_file_is_an_error_of_its_read(
    tmp_path: Path, no_leaks: None, size: int, damage: str
) -> None:
    del no_leaks
    store = on_disk(tmp_path)
    process = Process(ProcessParts(store, TOOLS))
    for number in (1, 2):
        process.add(store.put(made_of(number, size)), "test")
    file = tmp_path / process.table.fds[1].content.text.name
    if damage == "removed":
        file.unlink()
    else:
        os.truncate(file, size - 1)
    calls = (("search_fd", {"query": "1"}), ("read_fd", {"read_all": True}))
    for call, arguments in calls:
        kind, _, message = failed(ask(process, call, fd="fd:1", **arguments))
        assert (kind, message) == ("file_operation", "Cannot read content: it is gone")
        assert ask(process, call, fd="fd:2", **arguments).tag != "fd_error"
    process.close()
    store.close()


# A mapping takes a descriptor, and there may be none.
@pytest.mark.parametrize("call", ["wrap_output", "wrap_input"])
def test_a_content_that_cannot_be_read_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_leaks: None, call: str
) -> None:
    del no_leaks
    store = on_disk(tmp_path)
    made = Process(ProcessParts(store, TOOLS))

    def refused(fd: int, _: int) -> None:
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(ContentMap, "of", refused)
        kind, _, message = failed(ask(made, call, text="x\n" * 200_000))
    assert kind == "file_operation"
    assert message == "Cannot read content: Too many open files"
    assert (store.blobs, os.listdir(tmp_path)) == ({}, [])
    made.close()
    store.close()


def test_a_reader_has_its_bytes_after_the_last_holder_is_gone(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    store = on_disk(tmp_path)
    before = open_now()
    content = store.put(made_of(1, LONGER))
    data = content.text.data
    assert open_now() == before + 2
    store.drop(content)
    assert os.listdir(tmp_path) == []
    assert data[:] == made_of(1, LONGER)
    del data
    assert open_now() == before
    with pytest.raises(FdError, match="it is gone"):
        content.text.data[:]
    store.close()


def test_a_long_file_is_removed_beside_the_caller(
    tmp_path: Path, later: list[tuple[object, ...]], no_leaks: None
) -> None:
    del no_leaks
    store = on_disk(tmp_path)
    store.drop(store.put(made_of(1, 3000)))
    writer = store.writer()
    writer.add(made_of(2, 3000))
    writer.close()
    assert (store.blobs, len(later)) == ({}, 2)
    assert len(os.listdir(tmp_path)) == 2
    do(later)
    assert os.listdir(tmp_path) == []
    store.close()


# A file is named by its bytes: the same may come again before the old one is removed.
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_content_that_comes_again_keeps_its_file(
    tmp_path: Path, later: list[tuple[object, ...]], place: str
) -> None:
    store = Store(max_memory=2 * LONGER, directory=str(tmp_path))
    data = made_of(1, LONGER)
    other = [store.put(made_of(n, LONGER)) for n in (2, 3)]
    for content in other:
        content.touch()
    first = store.put(made_of(1, LONGER))
    first.touch()
    store.put(made_of(4, 2 * LONGER))  # moves all others to the disk
    assert first.text.in_memory is None
    if place == "memory":
        store.drop(first)
        assert store.reserve(0)
    again = store.put(data)
    assert (again.text is first.text) is (place == "disk")
    if place == "disk":
        store.drop(first)
    do(later)
    assert again.text.data[:] == data
    assert ((tmp_path / again.text.name).exists()) is (again.text.in_memory is None)
    store.close()


# Holders come and go in threads: no one may remove what another has just put in.
def test_the_same_contents_come_and_go_in_many_threads(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    store = Store(max_memory=2500, directory=str(tmp_path))
    wrong: list[int] = []

    def use(first: int) -> None:
        for step in range(300):
            number = (first + step) % 5
            content = store.put(made_of(number, 1000))
            if content.text.data[:] != made_of(number, 1000):
                wrong.append(number)
            store.drop(content)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (store.blobs, store.memory_bytes, os.listdir(tmp_path)) == ({}, 0, [])
    store.close()


# A host that was killed leaves files, whole ones and partial ones; others are a user's.
def test_only_files_of_the_host_before_are_removed(tmp_path: Path) -> None:
    for name in ("00ff", "11ee.part", "held"):
        (tmp_path / name).write_text("left")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    store = on_disk(tmp_path)
    store.files.remove_all_but({"held"})
    assert sorted(os.listdir(tmp_path)) == ["held", "link", "lost+found"]
    store.close()


# spec S5: to remove a file takes 50 us, and a client may have thousands.
def test_many_short_files_are_removed_beside_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(store_module, "in_background", lambda *call: calls.append(call))
    store = on_disk(tmp_path)
    contents = [store.put(made_of(n, SHORT)) for n in range(FEW_FILES + 1)]
    store.drop_all(contents)
    assert (store.blobs, len(os.listdir(tmp_path))) == ({}, FEW_FILES + 1)
    do(calls)
    assert os.listdir(tmp_path) == []
    store.close()
