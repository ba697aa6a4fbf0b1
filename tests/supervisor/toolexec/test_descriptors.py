"""One account of descriptors: those of tools are not there for files."""

import errno
import os
import resource
from pathlib import Path

import pytest

from supervisor.toolexec.output import quota as output_quota
from supervisor.toolexec.output.quota import LogQuota
from supervisor.toolexec.slots import (
    MIN_CONNECTIONS,
    OF_EXECUTION,
    BusyError,
    ConnectionPlaces,
    Descriptors,
    Slots,
)
from vfs.filesystem import Filesystem

LIMIT = 800
"""Of descriptors; a hundred of them are for tools alone."""


@pytest.fixture
def fs(monkeypatch: pytest.MonkeyPatch) -> Filesystem:
    """The account of a host with few descriptors, of which files have all but those."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    return Filesystem(max_host_files=LIMIT)


# attack 18
def test_files_leave_tools_their_part(fs: Filesystem) -> None:
    held = Descriptors(fs)
    assert fs.spare == 700
    held.hold(99)
    assert fs.spare == 700
    fs.set_aside(700)  # files that stay open
    assert (held.has(1), held.has(2)) == (True, False)
    fs.set_aside(-3)
    assert (held.has(4), held.has(5)) == (True, False)
    held.hold(4)
    assert fs.spare == 0
    held.hold(-103)
    assert fs.spare == 3


# attack 18: it goes beyond that for who has nothing yet, and the files' part is less then.
def test_a_child_has_one_tool_in_any_case(fs: Filesystem) -> None:
    slots = Slots(64, fs)
    fs.set_aside(fs.spare)
    count = 100 // OF_EXECUTION
    for number in range(count):
        slots.take(number)
    with pytest.raises(BusyError):
        slots.take(1)
    slots.take(0)
    assert fs.spare == 100 - (count + 1) * OF_EXECUTION < 0
    slots.give()
    slots.give()
    assert fs.spare == 0
    slots.take(1)


# spec E32
def test_a_listener_has_a_few_connections_in_any_case(fs: Filesystem) -> None:
    places = ConnectionPlaces(Descriptors(fs))
    places.listeners = 1
    fs.set_aside(fs.spare)
    places.take(100)
    assert not places.has_one(MIN_CONNECTIONS)
    assert places.has_one(MIN_CONNECTIONS - 1)
    places.take(-1)
    assert places.has_one(MIN_CONNECTIONS)


# spec E31: what nobody uses goes before somebody is refused.
def test_logs_give_way_where_descriptors_lack(
    fs: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_quota, "LEAST_FILE_BYTES", 0)
    held = Descriptors(fs)
    kept: list[tuple[int, int]] = []

    def give_one_up() -> bool:
        if not kept:
            return False
        quota.give_file(*kept.pop())
        return True

    quota = LogQuota(10, give_one_up, held)
    fs.set_aside(fs.spare)
    held.hold(98)
    kept += [quota.open_file(str(tmp_path)) for _ in range(2)]
    held.hold(1)
    live = quota.open_file(str(tmp_path))
    assert not kept
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        quota.open_file(str(tmp_path))
    quota.give_file(*live)
    assert held.held == 99


# close(2): a network file system says there what became of what was written before.
@pytest.mark.parametrize("size", [0, 20 * 1024 * 1024])
def test_a_file_that_is_closed_with_an_error_is_given_back(
    fs: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    held = Descriptors(fs)
    quota = LogQuota(1 << 30, lambda: False, held)
    fd, share = quota.open_file(str(tmp_path))
    assert quota.take(size)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail_to_close)
        quota.give_file(fd, share + size)
        quota.drop_spare()
    assert (held.held, quota.used_bytes) == (0, 0)
    os.close(fd)


def fail_to_close(fd: int) -> None:
    """Answer as a server does that had no room for what was written."""
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
