"""One account of descriptors: those of tools are not there for files."""

import errno
import os
import resource
from pathlib import Path

import pytest

from hostlib.accounts import Account
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

LIMIT = 800
"""Of descriptors; a hundred of them are for tools alone."""


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account[int]:
    """The account of a host with few descriptors, of which files have all but those."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    return Account(None, LIMIT)


# attack 18
def test_files_leave_tools_their_part(account: Account[int]) -> None:
    held = Descriptors(account)
    assert account.left == 700
    held.hold(99)
    assert account.left == 700
    account.record(700)  # files that stay open
    assert (held.has(1), held.has(2)) == (True, False)
    account.record(-3)
    assert (held.has(4), held.has(5)) == (True, False)
    held.hold(4)
    assert (account.left, account.excess) == (0, 0)
    held.hold(-103)
    assert account.left == 3
    held.close()
    assert account.left == 103


# attack 18: it goes beyond that for who has nothing yet, and the files' part is less then.
def test_a_child_has_one_tool_in_any_case(account: Account[int]) -> None:
    slots = Slots(64, account)
    account.record(LIMIT - account.used)  # files that stay open
    count = 100 // OF_EXECUTION
    for number in range(count):
        slots.take(number)
    with pytest.raises(BusyError):
        slots.take(1)
    slots.take(0)
    assert account.excess == (count + 1) * OF_EXECUTION - 100 > 0
    slots.give()
    slots.give()
    assert (account.left, account.excess) == (0, 0)
    slots.take(1)


# spec E32
def test_a_listener_has_a_few_connections_in_any_case(account: Account[int]) -> None:
    places = ConnectionPlaces(Descriptors(account))
    places.listeners = 1
    account.record(LIMIT - account.used)  # files that stay open
    places.take(100)
    assert not places.has_one(MIN_CONNECTIONS)
    assert places.has_one(MIN_CONNECTIONS - 1)
    places.take(-1)
    assert places.has_one(MIN_CONNECTIONS)


# spec E31: what nobody uses goes before somebody is refused.
def test_logs_give_way_where_descriptors_lack(
    account: Account[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_quota, "LEAST_FILE_BYTES", 0)
    held = Descriptors(account)
    kept: list[tuple[int, int]] = []

    def give_one_up() -> bool:
        if not kept:
            return False
        quota.give_file(*kept.pop())
        return True

    quota = LogQuota(10, give_one_up, held)
    account.record(LIMIT - account.used)  # files that stay open
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
    account: Account[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    held = Descriptors(account)
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
