"""One contract for every backend: reading, writing, and files that are staged.

The kinds are a directory of the host, on a disk and in memory, and the tree that lives in
this process. Names have a file of their own, so has what only the host's has.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.memory_directory import MemoryDirectory
from tests.helpers.trees import (
    content,
    host_directory,
    names,
    opened,
    put,
    swapped_users,
    tree,
)
from vfs.backends import MODES, Backend

__all__ = ["swapped_users", "tree"]


# Reading and writing


# spec P1
def test_writes_go_where_they_are_told(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w+")
    handle.pwrite(b"hello", 0)
    handle.pwrite(b"XY", 1)
    assert handle.pread_wait(100, 0) == b"hXYlo"
    assert handle.pread_wait(2, 3) == b"lo"
    assert handle.pread_wait(100, 5) == b""
    assert handle.pread_wait(100, 1000) == b""
    assert handle.pread_wait(0, 0) == b""
    handle.pwrite(memoryview(b"!"), 8)
    assert handle.pread_wait(100, 0) == b"hXYlo\0\0\0!"
    assert handle.size() == 9
    handle.pwrite(b"", 100)
    assert handle.size() == 9
    handle.close()


# spec R1: `pread` gives what `pread_wait` gives, or says that it would have to wait.
def test_reading_without_waiting(tree: Backend) -> None:
    put(tree, b"a", bytes(range(256)) * 100)
    handle = opened(tree, b"a", b"r")
    handle.pread_wait(100_000, 0)
    if handle.mount.kind == "overlay":
        with pytest.raises(BlockingIOError):
            handle.pread(1000, 20_000)
        handle.close()
        return
    assert handle.pread(1000, 20_000) == handle.pread_wait(1000, 20_000)
    assert handle.pread(10_000, 25_000) == handle.pread_wait(10_000, 25_000)
    assert handle.pread(10, 25_600) == b""
    handle.close()


# spec P1: appends never overwrite each other, and tell where they ended.
def test_appends_go_to_the_end(tree: Backend) -> None:
    put(tree, b"a", b"123")
    one, other = (opened(tree, b"a", b"a+") for _ in range(2))
    assert one.append(b"45") == 5
    assert other.append(b"67") == 7
    assert one.append(b"") in (5, 7)
    assert one.append(b"8") == 8
    assert other.pread_wait(100, 0) == b"12345678"
    one.close()
    other.close()


def test_the_size_can_be_set(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w+")
    handle.pwrite(b"123456", 0)
    handle.truncate(3)
    handle.truncate(5)
    assert handle.pread_wait(100, 0) == b"123\0\0"
    handle.sync()
    handle.close()


# spec W5
def test_what_was_added_can_be_cut_off(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w+")
    handle.pwrite(b"123456", 0)
    handle.cut_off(5, 3)  # somebody has added to it since
    handle.cut_off(6, 6)
    assert handle.size() == 6
    handle.cut_off(6, 4)
    assert handle.pread_wait(100, 0) == b"1234"
    handle.close()


# spec O3
def test_modes_that_create_and_modes_that_do_not(tree: Backend) -> None:
    for mode in (b"r", b"r+"):
        with pytest.raises(FileNotFoundError):
            opened(tree, b"a", mode)
    for number, mode in enumerate((b"w", b"a", b"w+", b"a+")):
        opened(tree, b"%d" % number, mode).close()
    assert names(tree) == [b"0", b"1", b"2", b"3"]
    put(tree, b"0", b"x")
    opened(tree, b"0", b"a").close()
    opened(tree, b"0", b"r+").close()
    assert content(tree, b"0") == b"x"


def test_exclusive_creation(tree: Backend) -> None:
    put(tree, b"a", b"x")
    with pytest.raises(FileExistsError):
        tree.open(b"a", MODES[b"w"], create=True, exclusive=True, staged=False)
    tree.open(b"b", MODES[b"w"], create=True, exclusive=True, staged=False).close()


# spec O7
@pytest.mark.parametrize("staged", [False, True])
def test_a_directory_is_not_opened(tree: Backend, staged: bool) -> None:
    tree.make_directory(b"d")
    for mode in MODES:
        if staged and not MODES[mode].empties:
            continue
        for name in (b"d", b"d/", b".", b"d/."):
            with pytest.raises(IsADirectoryError):
                opened(tree, name, mode, staged=staged)
    for name in (b"new/", b"d/new/"):
        with pytest.raises(IsADirectoryError):
            opened(tree, name, b"w", staged=staged)
    assert names(tree) == [b"d"]
    assert names(tree, b"d") == []


# Staged files


# spec A3b
def test_a_staged_file_knows_whether_its_name_is_there(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w", staged=True)
    assert not handle.will_replace()
    opened(tree, b"a", b"w").close()
    assert handle.will_replace()
    handle.publish(durable=False)
    handle.close()


def test_a_staged_file_appears_when_it_is_published(tree: Backend) -> None:
    put(tree, b"a", b"old")
    handle = opened(tree, b"a", b"w+", staged=True)
    handle.pwrite(b"fresh", 0)
    assert handle.pread_wait(100, 0) == b"fresh"
    assert content(tree, b"a") == b"old"
    assert names(tree) == [b"a"]
    replaced = handle.publish(durable=False)
    assert replaced is not None
    assert replaced.size == 3
    assert content(tree, b"a") == b"fresh"
    handle.close()
    assert content(tree, b"a") == b"fresh"
    assert names(tree) == [b"a"]


# spec A3b
@pytest.mark.parametrize("durable", [False, True])
def test_a_new_file_can_be_staged(tree: Backend, durable: bool) -> None:
    tree.make_directory(b"d")
    handle = opened(tree, b"d/new", b"w", staged=True)
    handle.pwrite(b"fresh", 0)
    assert names(tree, b"d") == []
    assert handle.publish(durable=durable) is None
    handle.close()
    assert content(tree, b"d/new") == b"fresh"
    assert names(tree) == [b"d"]
    assert names(tree, b"d") == [b"new"]


# spec A3b: without publication there never was anything.
def test_a_staged_file_that_is_not_published_never_was(tree: Backend) -> None:
    put(tree, b"a", b"old")
    for name in (b"a", b"new"):
        handle = opened(tree, name, b"w", staged=True)
        handle.pwrite(b"fresh", 0)
        handle.close()
    assert names(tree) == [b"a"]
    assert content(tree, b"a") == b"old"


# spec A3b: a reader that has the old file goes on reading the old one.
def test_who_has_the_old_file_keeps_it(tree: Backend) -> None:
    put(tree, b"a", b"old")
    reader = opened(tree, b"a", b"r")
    handle = opened(tree, b"a", b"w", staged=True)
    handle.pwrite(b"fresh!", 0)
    handle.publish(durable=False)
    handle.close()
    assert reader.pread_wait(100, 0) == b"old"
    assert reader.links() == 0
    reader.close()


# spec A3b
def test_of_two_staged_files_the_last_published_stands(tree: Backend) -> None:
    one, other = (opened(tree, b"a", b"w", staged=True) for _ in range(2))
    one.pwrite(b"one", 0)
    other.pwrite(b"other", 0)
    other.publish(durable=False)
    one.publish(durable=False)
    for handle in (one, other):
        handle.close()
    assert content(tree, b"a") == b"one"
    assert names(tree) == [b"a"]


# spec C1: a publication that fails leaves what was there, and nothing else.
def test_a_publication_that_fails(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w", staged=True)
    handle.pwrite(b"fresh", 0)
    tree.make_directory(b"a")
    with pytest.raises(IsADirectoryError):
        handle.publish(durable=False)
    handle.close()
    assert tree.list(b".", 10) == [(b"a", "directory")]


# A model: every tree behaves as a dictionary of byte strings

WRITES = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "cut"]),
        st.integers(0, 9000),
        st.binary(max_size=5000),
    ),
    max_size=12,
)


# spec P1
@given(steps=WRITES, in_memory=st.booleans())
def test_any_writes_leave_what_they_should(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, bytes]],
    in_memory: bool,
) -> None:
    tree: Backend = MemoryDirectory()
    if not in_memory:
        tree = host_directory(tmp_path_factory.mktemp("model"))
    model = bytearray()
    plain, appending = opened(tree, b"a", b"w+"), opened(tree, b"a", b"a")
    for what, number, data in steps:
        if what == "write":
            plain.pwrite(data, number)
            if data:
                model.extend(bytes(max(0, number - len(model))))
                model[number : number + len(data)] = data
        elif what == "append":
            model += data
            if data:
                assert appending.append(data) == len(model)
        else:
            plain.truncate(number)
            model[:] = model[:number].ljust(number, b"\0")
    assert plain.pread_wait(100_000, 0) == model
    for held in (plain, appending, tree):
        held.close()
