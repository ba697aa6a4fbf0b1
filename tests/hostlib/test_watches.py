"""Waits while a child of this user has used up the shared epoll watches."""

import errno
import os
import select
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from hostlib.readiness import report_unwatched_to, wait_readable, wait_writable
from tests.helpers.sessions import Hall, hall

__all__ = ["hall"]


class FewWatches:
    """An epoll set of a user who has no watch left, until `left` says that he has."""

    def __init__(self, real: select.epoll, lacks: int = errno.ENOSPC) -> None:
        self._real = real
        self._lacks = lacks
        self.left = False
        self.refused = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def register(self, fd: int, events: int) -> None:
        """Watch a descriptor."""
        if not self.left:
            self.refused += 1
            raise OSError(self._lacks, os.strerror(self._lacks))
        self._real.register(fd, events)


@pytest.fixture
def few(hall: Hall) -> FewWatches:
    made = FewWatches(hall.pump.epoll)
    hall.pump.epoll = made  # type: ignore[assignment]
    return made


# security.md, no child starves another; attack 18: a client is served, watched or not.
async def test_a_client_for_whom_no_watch_is_left_is_served(
    hall: Hall, few: FewWatches
) -> None:
    lines = [hall.connect() for _ in range(3)]
    assert few.refused
    for _ in range(3):
        for line in lines:
            assert await line.ask(b"PING\n") == b"OK"
    # Its requests may go to its own task, and it comes back from there.
    (hall.root / "d").mkdir()
    for line in lines:
        reply = await line.ask(b"LIST false .\n")
        await line.exactly(int(reply.split()[1]))
    few.left = True
    refused = few.refused
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert hall.pump.statistics().unwatched == 0
    for line in lines:
        assert await line.ask(b"PING\n") == b"OK"
        line.close()
    await trio.testing.wait_all_tasks_blocked()
    assert len(hall.closed) == len(lines)
    assert few.refused == refused


async def test_its_end_is_noticed_without_a_watch(hall: Hall, few: FewWatches) -> None:
    line = hall.connect()
    assert await line.ask(b"PING\n") == b"OK"
    line.close()
    with trio.fail_after(10):
        await line.gone()
    assert hall.pump.statistics().unwatched == 0
    assert few.refused


async def test_nobody_looks_where_all_is_watched(hall: Hall) -> None:
    line = hall.connect()
    assert await line.ask(b"PING\n") == b"OK"
    assert hall.pump.statistics().unwatched == 0


async def unwatched(fd: object) -> None:
    """Trio's wait, of a user who has no watch left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_wait_without_a_watch_ends_when_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trio.lowlevel, "wait_readable", unwatched)
    monkeypatch.setattr(trio.lowlevel, "wait_writable", unwatched)
    told: list[str] = []
    report_unwatched_to(told.append)
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        with trio.fail_after(10):
            await wait_writable(one)
            with trio.move_on_after(0.1) as scope:
                await wait_readable(one)
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_readable, one.fileno())
                other.send(b"x")
            assert one.recv(9) == b"x"
            other.close()
            await wait_readable(one)  # its end
    (text,) = told  # once
    assert text.endswith("or raise sysctl fs.epoll.max_user_watches")


async def test_another_fault_of_a_wait_is_its_callers(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(PermissionError):
        await wait_readable(file)  # epoll(7) knows no files
