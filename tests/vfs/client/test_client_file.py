"""The blocking client's file objects, under the standard library."""

import csv
import errno
import gc
import io
import json
import os
import zipfile

import pytest

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from vfs.client import Client


def test_csv_and_json_work_on_a_file(client: Client) -> None:
    rows = [["a", "b"], ["1", "zwei\nZeilen"]]
    with io.TextIOWrapper(
        io.BufferedWriter(client.open_file("t.csv", "wb")), newline=""
    ) as text:
        csv.writer(text).writerows(rows)
    raw = client.open_file("t.csv", "rb")
    with io.TextIOWrapper(io.BufferedReader(raw), newline="") as text:
        assert list(csv.reader(text)) == rows
    with client.open_file("t.json", "w") as raw:
        raw.write(json.dumps(rows).encode())
    with client.open_file("t.json") as raw:
        assert json.load(raw) == rows


def test_a_zip_file_is_written_and_read(client: Client) -> None:
    with zipfile.ZipFile(client.open_file("z", "w+"), "w") as archive:
        archive.writestr("a.txt", "alpha" * 100)
    with client.open_file("z") as raw, zipfile.ZipFile(raw) as archive:
        assert archive.read("a.txt") == b"alpha" * 100


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_001])
def test_the_end_is_found_on_the_handle_itself(
    client: Client, host: FakeHost, size: int
) -> None:
    host.files[b"a"] = bytearray(size)
    with client.open_file("a") as file:
        host.files.pop(b"a")  # the name stands for nothing any more
        assert file.seek(0, os.SEEK_END) == size
        assert file.read() == b""
        assert file.seek(-size, os.SEEK_CUR) == 0
        assert len(file.read()) == size


def test_tell_counts_what_was_read_and_written(client: Client) -> None:
    # spec P1
    with client.open_file("a", "w+") as file:
        file.write(b"0123456789")
        assert file.tell() == 10
        file.seek(4)
        assert file.read(2) == b"45"
        assert file.tell() == 6
        assert file.truncate() == 6
        assert file.tell() == 6
        file.seek(0)
        assert file.readall() == b"012345"


def test_an_appending_file_tells_where_the_end_is(
    client: Client, host: FakeHost
) -> None:
    # spec P1
    host.files[b"a"] = bytearray(b"123")
    with client.open_file("a", "a") as file:
        assert file.tell() == 3
        file.write(b"45")
        host.files[b"a"] += b"6"
        assert file.tell() == 6
    with client.open_file("a", "a+") as file:
        assert file.tell() == 0
        assert file.read(2) == b"12"
        file.write(b"7")
        assert file.tell() == 7
        assert file.read() == b""


def test_what_a_mode_cannot_do_is_unsupported(client: Client) -> None:
    with client.open_file("a", "w") as writes:
        assert (writes.readable(), writes.writable(), writes.seekable()) == (
            False,
            True,
            True,
        )
        for call in (writes.read, writes.fileno, lambda: writes.seek(0, os.SEEK_END)):
            with pytest.raises(io.UnsupportedOperation):
                call()
        for offset, whence in ((-1, 0), (0, 9)):
            with pytest.raises(ValueError, match=r"seek|whence"):
                writes.seek(offset, whence)
    with client.open_file("a") as reads:
        with pytest.raises(io.UnsupportedOperation):
            reads.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        reads.read(1)


def test_a_failed_write_leaves_the_offset_unknown(
    client: Client, host: FakeHost
) -> None:
    with client.open_file("a", "w") as file:
        host.raw_replies.append(b"ERROR failed to write: No space left on device\n")
        with pytest.raises(OSError, match="No space") as caught:
            file.write(b"x")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(io.UnsupportedOperation, match="unknown"):
            file.tell()


def test_a_file_is_closed_once(client: Client, host: FakeHost) -> None:
    # spec C1
    file = client.open_file("a", "w")
    file.close()
    file.close()
    assert [type(r) for r in host.peers[0].seen] == [m.Open, m.Close]


@pytest.mark.slow
def test_a_dropped_file_is_closed_by_the_next_request(
    client: Client, host: FakeHost
) -> None:
    # A finalizer may run in the middle of a request, so it sends nothing itself.
    file: object = client.open_file("a", "w")
    cycle: list[object] = [file]
    cycle.append(cycle)
    del file, cycle
    gc.collect()
    assert host.open_files() == [1000]
    client.ping()
    assert host.open_files() == []
