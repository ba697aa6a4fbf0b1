"""The content of places, counted once, and the charge for it."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.sandbox.scratch import remove_tree
from vfs import growth, mounts
from vfs.growth import MovedError, PlacesContent, charges_of, content_of, settle
from vfs.ledger import Ledger
from vfs.places import Place, open_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Place]]:
    """Open places that are closed at the end."""
    held = []

    def opened(path: Path) -> Place:
        held.append(open_place(str(path), read=True, write=True, relative=None))
        return held[-1]

    yield opened
    for place in held:
        place.backend.close()


def test_everything_is_an_entry_and_files_have_a_length(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"x" * 10)
    (tmp_path / "a" / "b" / "g").write_bytes(b"x" * 5)
    (tmp_path / "out").symlink_to("/usr")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    assert content_of([hold(tmp_path)]) == PlacesContent(
        15 + len("/usr") + (1 << 20), 7, 0
    )


def test_what_has_two_names_or_lies_in_two_places_is_counted_once(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "f").write_bytes(b"x" * 7)
    os.link(inner / "f", tmp_path / "again")
    (inner / "alone").write_bytes(b"y" * 3)
    expected = PlacesContent(10, 4, 0)
    whole = hold(tmp_path)
    assert content_of([whole]) == expected
    assert content_of([whole, hold(tmp_path)]) == expected
    assert content_of([whole, hold(inner)]) == expected
    assert content_of([hold(inner), whole]) == expected
    single = hold(inner / "alone")
    assert content_of([whole, single]) == content_of([single, whole]) == expected
    assert content_of([single]) == PlacesContent(3, 1, 0)
    (inner / "alone").unlink()
    assert content_of([single]) == PlacesContent(0, 0, 0)


# spec S7
def test_each_name_of_a_file_is_an_entry(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 7)
    (tmp_path / "inner").mkdir()
    for number in range(20):
        os.link(tmp_path / "f", tmp_path / "inner" / str(number))
    whole, single = hold(tmp_path), hold(tmp_path / "f")
    other = hold(tmp_path / "inner" / "7")
    assert content_of([whole]) == PlacesContent(7, 22, 0)
    assert content_of([whole, single, other, single]) == PlacesContent(7, 22, 0)
    assert content_of([single, other]) == PlacesContent(7, 2, 0)


KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: fallocate(2)


def allocate(path: Path, size_bytes: int) -> None:
    """Allocate room for a file without making it longer."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    with path.open("ab") as file:
        offset, size = ctypes.c_long(0), ctypes.c_long(size_bytes)
        if call(file.fileno(), KEEP_SIZE, offset, size):
            pytest.skip("the file system allocates nothing ahead")


# spec S7: room that was allocated beyond a file's end is taken as well.
def test_what_is_allocated_beyond_an_end_counts(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    allocate(tmp_path / "f", 5 << 20)
    assert (tmp_path / "f").stat().st_size == 0
    place = hold(tmp_path)
    found = content_of([place])
    assert 5 << 20 <= found.size_bytes <= (5 << 20) + growth.ROUNDING_BYTES
    assert content_of([place]) == found
    (tmp_path / "g").write_bytes(b"x" * 10)
    allocate(tmp_path / "g", 32 * 1024)
    assert content_of([place]).size_bytes == found.size_bytes + 10


class Status(NamedTuple):
    """As much of a status as is looked at."""

    st_size: int
    st_blocks: int
    st_blksize: int = 4096
    st_dev: int = -1


@pytest.mark.parametrize(
    ("kind", "length", "allocated", "beyond"),
    [
        ("ext4", 0, 64 << 10, 0),
        ("ext4", 0, 68 << 10, 68 << 10),
        ("ext4", 1 << 20, 3 << 20, 2 << 20),
        ("ext4", 3 << 20, 1 << 20, 0),
        ("xfs", 0, 68 << 10, 68 << 10),
        ("xfs", 1 << 20, 3 << 20, 0),
        ("overlay", 1 << 20, 4 << 20, 1 << 20),
        ("tmpfs", 0, 2 << 20, 2 << 20),
    ],
)
# spec S7
def test_what_blocks_are_rounded_up_to_does_not_count(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int, allocated: int, beyond: int
) -> None:
    monkeypatch.setitem(mounts.MOUNTS, -1, mounts.Mount(kind))
    status = cast("os.stat_result", Status(length, allocated // 512))
    assert growth.bytes_beyond(length, status, -1) == beyond


# spec S7
def test_a_long_directory_takes_room(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "f").write_bytes(b"")
    place = hold(tmp_path)
    assert content_of([place]) == PlacesContent(0, 2, 0)
    for number in range(1000):
        os.link(inner / "f", inner / f"{'x' * 200}{number}")
    allocated = inner.stat().st_blocks * 512
    counted = allocated if allocated > growth.ROUNDING_BYTES else 0
    assert content_of([place]) == PlacesContent(counted, 1002, 0)


@pytest.mark.slow
def test_a_tree_deeper_than_any_path_is_counted_with_few_descriptors(
    tmp_path: Path, hold: Callable[[Path], Place]
) -> None:
    depth = 3000  # no path leads there
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("deep", dir_fd=fd)
            inner = os.open("deep", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        file = os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        os.write(file, b"bottom")
        os.close(file)
    finally:
        os.close(fd)
    try:
        place = hold(top)
        before = set(os.listdir("/proc/self/fd"))
        assert content_of([place]) == PlacesContent(6, depth + 1, 0)
        assert set(os.listdir("/proc/self/fd")) <= before  # others may close theirs
    finally:
        assert remove_tree(top) is None  # the test removes its deep tree itself


@pytest.mark.parametrize(
    ("depth", "is_told"), [(growth.HELD - 2, False), (growth.HELD + 8, True)]
)
def test_a_directory_that_is_moved_meanwhile(
    tmp_path: Path,
    hold: Callable[[Path], Place],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    is_told: bool,
) -> None:
    root = tmp_path / "root"
    bottom, moved = (root.joinpath(*["d"] * number) for number in (depth, 5))
    bottom.mkdir(parents=True)
    (bottom / "mark").write_bytes(b"")
    place = hold(root)
    bottom_number = bottom.stat().st_ino
    real = growth.Look.list_names

    def moving(self: growth.Look, frame: growth.Frame) -> list[str]:
        found = real(self, frame)
        if os.fstat(frame.fd).st_ino == bottom_number:
            moved.rename(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(growth.Look, "list_names", moving)
    before = os.listdir("/proc/self/fd")
    if is_told:
        with pytest.raises(MovedError):
            content_of([place])
    else:
        assert content_of([place]).files == depth + 1
    assert os.listdir("/proc/self/fd") == before


def test_a_directory_that_its_owner_has_closed_is_told(
    tmp_path: Path, hold: Callable[[Path], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    place = hold(tmp_path)
    real = os.open

    def refusing(name: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if name == "closed":
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
    assert content_of([place]) == PlacesContent(0, 2, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # another's
    assert content_of([place]) == PlacesContent(0, 2, 0)


@settings(max_examples=50, deadline=None)
@given(
    tree=st.recursive(
        st.integers(0, 5000),
        lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
        max_leaves=20,
    )
)
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    top = tmp_path_factory.mktemp("tree")
    size_bytes = files = 0

    def make(path: Path, what: object) -> None:
        nonlocal size_bytes, files
        files += 1
        if isinstance(what, dict):
            path.mkdir()
            for name, inner in what.items():
                make(path / name, inner)
        elif isinstance(what, int):
            path.write_bytes(bytes(what))
            size_bytes += what

    make(top / "t", tree)
    place = open_place(str(top), read=True, write=True, relative=None)
    try:
        assert content_of([place]) == PlacesContent(size_bytes, files, 0)
    finally:
        place.backend.close()


def ledgers() -> tuple[Ledger, Ledger]:
    """Return a ledger, and one beneath it that has charged 100 bytes and 2 files."""
    above = Ledger(size_bytes=1000, files=10)
    ledger = Ledger(above, size_bytes=1000)
    ledger.before = (500, 5, 0)
    ledger.size_bytes.charge(100)
    ledger.files.charge(2)
    return ledger, above


def test_growth_is_charged_above_too_beyond_every_limit_and_given_back() -> None:
    # spec S7
    ledger, above = ledgers()
    charged = charges_of(ledger)
    settle(ledger, charged, PlacesContent(5000, 20, 0), charged)
    assert charges_of(ledger) == charges_of(above) == (4500, 15, 0)
    assert not ledger.size_bytes.charge(1)
    charged = charges_of(ledger)
    settle(ledger, charged, PlacesContent(400, 3, 0), charged)
    assert charges_of(ledger) == charges_of(above) == (-100, 0, 0)


def test_what_a_write_has_reserved_is_not_taken_for_what_is_there() -> None:
    # spec S7
    ledger, _ = ledgers()
    charged = charges_of(ledger, 60)
    settle(ledger, charged, PlacesContent(540, 7, 0), charged)
    assert charges_of(ledger) == (100, 2, 0)
    settle(ledger, charged, PlacesContent(640, 7, 0), charged)
    assert charges_of(ledger) == (200, 2, 0)


def test_beside_other_work_only_what_is_beyond_doubt_is_charged() -> None:
    # spec S7
    ledger, _ = ledgers()
    charged = charges_of(ledger)
    ledger.size_bytes.charge(50)
    now = charges_of(ledger)
    settle(ledger, charged, PlacesContent(510, 5, 0), now)
    assert charges_of(ledger) == now, "nothing is given back"
    settle(ledger, charged, PlacesContent(900, 8, 0), now)
    assert charges_of(ledger) == (400, 3, 0)
