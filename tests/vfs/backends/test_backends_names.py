"""The contract of every backend for names, and for operations on them."""

import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.helpers.memory_directory import MemoryDirectory
from tests.helpers.trees import content, names, opened, put, swapped_users, tree
from vfs.backends import Backend, HostDirectory, MountDirectory
from vfs.errors import AccessDeniedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["swapped_users", "tree"]


# spec O8
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"a\0", errno.EINVAL),
        (b"d/a\0b", errno.EINVAL),
        (b"\0/a", errno.EINVAL),
        (b"n" * 256, errno.ENAMETOOLONG),
        (b"d/" + b"n" * 256, errno.ENAMETOOLONG),
        (b"x/" * 2048, errno.ENAMETOOLONG),
        (b"file/x", errno.ENOTDIR),
        (b"nothing/x", errno.ENOENT),
    ],
)
def test_a_name_that_cannot_be(
    tree: Backend, name: bytes, code: int, staged: bool
) -> None:
    tree.make_directory(b"d")
    put(tree, b"file", b"x")
    calls: list[Callable[[], object]] = [
        lambda: opened(tree, name, b"w", staged=staged),
        lambda: tree.stat(name),
        lambda: tree.list(name, 10),
        lambda: tree.make_directory(name),
        lambda: tree.remove(name),
        lambda: tree.rename(name, tree, b"new"),
        lambda: tree.rename(b"file", tree, name),
        lambda: tree.narrow(name, create=False),
    ]
    for call in calls:
        with pytest.raises(OSError, match=r".") as raised:
            call()
        if code in (errno.EINVAL, errno.ENAMETOOLONG):
            assert raised.value.errno == code
    assert names(tree) == [b"d", b"file"]
    assert names(tree, b"d") == []


# spec A4
@pytest.mark.parametrize("name", [b"..", b"../x", b"d/../../x", b"/", b"/etc", b"/x/y"])
def test_a_name_that_leads_out(tree: Backend, name: bytes) -> None:
    tree.make_directory(b"d")
    put(tree, b"file", b"x")
    for staged in (False, True):
        with pytest.raises((AccessDeniedError, IsADirectoryError)) as raised:
            opened(tree, name, b"w", staged=staged)
        if not name.endswith((b"..", b"/")):
            assert raised.type is AccessDeniedError
    with pytest.raises(AccessDeniedError):
        tree.stat(name)
    with pytest.raises(AccessDeniedError):
        tree.list(name, 10)
    with pytest.raises(AccessDeniedError):
        tree.narrow(name, create=True)
    calls: list[Callable[[], object]] = [
        lambda: tree.make_directory(name),
        lambda: tree.remove(name),
        lambda: tree.rename(b"file", tree, name),
        lambda: tree.rename(name, tree, b"new"),
    ]
    for call in calls:
        with pytest.raises((AccessDeniedError, OSError)) as raised:
            call()
        if not name.endswith((b"..", b"/")):
            assert issubclass(raised.type, AccessDeniedError)
    assert names(tree) == [b"d", b"file"]


# Names


# spec X1
def test_directories(tree: Backend) -> None:
    tree.make_directory(b"d")
    tree.make_directory(b"d/e/")
    put(tree, b"d/f", b"12345")
    assert tree.list(b"d", 2) == [(b"e", "directory"), (b"f", "file")]
    assert tree.list(b"d/e/", 2) == []
    assert tree.stat(b"d").kind == "directory"
    status = tree.stat(b"d/f")
    assert (status.kind, status.size) == ("file", 5)
    assert abs(status.mtime_ns - tree.stat(b"d/e").mtime_ns) < 60 * 10**9
    with pytest.raises(FileExistsError):
        tree.make_directory(b"d")
    with pytest.raises(NotADirectoryError):
        tree.list(b"d/f", 2)
    with pytest.raises(OSError, match="too large") as raised:
        tree.list(b"d", 1)
    assert raised.value.errno == errno.EOVERFLOW


# spec X1
def test_removal(tree: Backend) -> None:
    tree.make_directory(b"d")
    put(tree, b"d/f", b"12345")
    with pytest.raises(OSError, match="not empty"):
        tree.remove(b"d")
    with pytest.raises(NotADirectoryError):
        tree.remove(b"d/f/")
    handle = opened(tree, b"d/f", b"r")
    removed = tree.remove(b"d/f")
    assert removed.size == 5
    assert removed.identity == handle.identity()
    assert handle.links() == 0
    assert handle.pread_wait(9, 0) == b"12345"
    handle.close()
    assert tree.remove(b"d/").size == 0
    assert names(tree) == []
    with pytest.raises(FileNotFoundError):
        tree.remove(b"d")


# spec X1
def test_renaming(tree: Backend) -> None:
    tree.make_directory(b"d")
    put(tree, b"a", b"1")
    assert tree.rename(b"a", tree, b"d/b") is None
    put(tree, b"a", b"22")
    replaced = tree.rename(b"a", tree, b"d/b")
    assert replaced is not None
    assert replaced.size == 1
    assert content(tree, b"d/b") == b"22"
    assert names(tree) == [b"d"]
    tree.rename(b"d", tree, b"e/")
    assert names(tree, b"e") == [b"b"]
    for same in (b"e/b", b"./e/b"):
        assert tree.rename(b"e/b", tree, same) is None, "nothing has gone"
    assert names(tree, b"e") == [b"b"]


# spec X1
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"nothing", b"x", errno.ENOENT),
        (b"a", b"nothing/x", errno.ENOENT),
        (b"a", b"d", errno.EISDIR),
        (b"d", b"a", errno.ENOTDIR),
        (b"d", b"full", errno.ENOTEMPTY),
        (b"d", b"d/e", errno.EINVAL),
        (b"a/", b"x", errno.ENOTDIR),
        (b"a", b"x/", errno.ENOTDIR),
        (b".", b"x", errno.EINVAL),
        (b"a", b"d/..", errno.EINVAL),
    ],
)
def test_a_renaming_that_cannot_be(
    tree: Backend, old: bytes, new: bytes, code: int
) -> None:
    for directory in (b"d", b"full"):
        tree.make_directory(directory)
    for file in (b"a", b"full/f"):
        put(tree, file, b"x")
    before = [tree.list(where, 10) for where in (b".", b"d", b"full")]
    with pytest.raises(OSError, match=r".") as raised:
        tree.rename(old, tree, new)
    assert raised.value.errno == code
    assert [tree.list(where, 10) for where in (b".", b"d", b"full")] == before


def test_a_tree_is_renamed_into_another_kind_of_tree_by_nobody(tree: Backend) -> None:
    put(tree, b"a", b"x")
    other: Backend = MemoryDirectory()
    if isinstance(tree, MemoryDirectory):
        other = HostDirectory(-1)
    with pytest.raises(OSError, match="cross-device") as raised:
        tree.rename(b"a", other, b"a")
    assert raised.value.errno == errno.EXDEV
    assert names(tree) == [b"a"]


# Parts of a tree


# spec A5
def test_a_part_is_a_tree_of_its_own(tree: Backend) -> None:
    tree.make_directory(b"d")
    put(tree, b"d/f", b"x")
    part, only = tree.narrow(b"d/", create=False)
    assert only is None
    assert part.identity() != tree.identity()
    assert names(part) == [b"f"]
    with pytest.raises(AccessDeniedError):
        part.stat(b"../d/f")
    put(part, b"g", b"y")
    part.close()
    assert content(tree, b"d/g") == b"y"
    whole, _ = tree.narrow(b".", create=False)
    assert whole.identity() == tree.identity()
    whole.close()


# spec A3: one file can be a part, also one that does not exist yet.
def test_a_file_is_a_part_by_its_directory(tree: Backend) -> None:
    tree.make_directory(b"d")
    put(tree, b"d/f", b"x")
    part, only = tree.narrow(b"d/f", create=False)
    assert only == b"f"
    assert content(part, b"f") == b"x"
    part.close()
    with pytest.raises(FileNotFoundError):
        tree.narrow(b"d/new", create=False)
    part, only = tree.narrow(b"d/new", create=True)
    assert only == b"new"
    put(part, b"new", b"y")
    part.close()
    assert content(tree, b"d/new") == b"y"
    with pytest.raises(FileNotFoundError):
        tree.narrow(b"nothing/new", create=True)


def test_descriptors_are_told_and_given_back(tree: Backend) -> None:
    handle = opened(tree, b"a", b"w")
    staged = opened(tree, b"b", b"w", staged=True)
    on_host = isinstance(tree, HostDirectory)
    assert len(tree.descriptors()) == (1 if on_host else 0)
    assert len(handle.descriptors()) == (1 if on_host else 0)
    assert len(staged.descriptors()) == (2 if on_host else 0)
    for number in (*handle.descriptors(), *staged.descriptors()):
        os.fstat(number)
    handle.close()
    staged.close()
    assert handle.descriptors() == staged.descriptors() == ()


# open and stat use a name only in the call that a mount makes as the child's user; the
# others use the held directory alone.
WITHOUT_RIGHTS_OF_ITS_OWN = {"open", "stat", "descriptors", "close"}


# docs/how-to/extending.md: a method that a mount inherits has the host's rights.
def test_a_mount_has_each_operation_in_the_rights_of_its_user() -> None:
    operations = {name for name in vars(Backend) if not name.startswith("_")}
    assert {"remove", "rename", *WITHOUT_RIGHTS_OF_ITS_OWN} <= operations
    assert operations - WITHOUT_RIGHTS_OF_ITS_OWN <= set(vars(MountDirectory))
