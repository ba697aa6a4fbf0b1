"""The file of a control socket: its mode, what it replaces, what it leaves alone."""

import contextlib
import errno
import fcntl
import os
import socket
import stat

import pytest
import trio

from hostlib.unix_listener import MAX_NAME_BYTES
from supervisor.control.server import serve_control
from supervisor.run import innermost
from tests.helpers.control import ask, controlled, path
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.stage import Stage, eventually, stage

pytestmark = pytest.mark.slow

__all__ = ["path", "stage"]


def is_socket(path: str) -> bool:
    """Whether a socket is there."""
    return stat.S_ISSOCK(os.lstat(path).st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
async def test_the_file_is_its_owners_alone_whatever_the_umask(
    stage: Stage, umask: int
) -> None:
    before = os.umask(umask)
    try:
        async with controlled(stage) as path:
            status = os.lstat(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()


async def test_the_file_is_gone_when_the_host_stops(stage: Stage) -> None:
    async with controlled(stage) as path:
        assert is_socket(path)
    assert sorted(os.listdir(stage.where)) == ["journal", "root"]


# attack 39
async def test_a_socket_that_a_dead_host_left_is_replaced(stage: Stage) -> None:
    path = str(stage.where / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    async with controlled(stage):
        assert await ask(path, "ps") == []


# It would look like a living host's to a try that has no socket.
async def test_a_dead_hosts_socket_is_no_living_ones_where_descriptors_are_few(
    stage: Stage,
) -> None:
    told: set[int | None] = set()
    for left in range(8):
        path = stage.where / f"control{left}"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        with no_descriptor_left(left):
            try:
                async with controlled(stage, str(path)):
                    pass
            except* OSError as group:
                why = innermost(group)
                assert isinstance(why, OSError)
                told.add(why.errno)
    assert told == {errno.EMFILE}


# attack 39
async def test_a_living_hosts_socket_is_not_taken(stage: Stage, path: str) -> None:
    with pytest.raises(OSError, match="a living host listens there") as refusal:
        await serve_control(stage.host, path)
    assert refusal.value.errno == errno.EADDRINUSE
    assert refusal.value.filename == path
    assert await ask(path, "ps") == []


# attack 39
async def test_a_socket_whose_queue_is_full_is_alive(stage: Stage) -> None:
    path = str(stage.where / "control")
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(path)
        with pytest.raises(OSError, match="a living host listens there"):
            await serve_control(stage.host, path)
    assert is_socket(path)


@pytest.mark.parametrize("kind", ["file", "directory", "fifo", "link"])
async def test_what_is_not_a_socket_is_left_alone(stage: Stage, kind: str) -> None:
    where = stage.where / "control"
    if kind == "file":
        where.write_text("precious")
    elif kind == "directory":
        where.mkdir()
    elif kind == "fifo":
        os.mkfifo(where)
    else:
        where.symlink_to("nowhere")
    before = where.lstat()
    with pytest.raises(OSError, match="it is there and not a socket") as refusal:
        await serve_control(stage.host, str(where))
    assert refusal.value.filename == str(where)
    assert where.lstat() == before


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing/control", "its directory does not exist"),
        ("control/", "it names a directory"),
        ("journal/control", "Not a directory"),
        ("x" * 256, "85 are the most"),
    ],
)
async def test_a_place_that_will_not_do_is_told(
    stage: Stage, path: str, why: str
) -> None:
    with pytest.raises(OSError, match=why) as refusal:
        await serve_control(stage.host, f"{stage.where}/{path}")
    assert refusal.value.filename == f"{stage.where}/{path}"


async def test_a_locked_directory_is_given_up_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostlib.unix_listener.LOCK_TIMEOUT_S", 0.05)
    holder = os.open(stage.where, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_SH)
        with pytest.raises(OSError, match="its directory is locked"):
            await serve_control(stage.host, str(stage.where / "control"))
    finally:
        os.close(holder)


async def test_many_hosts_that_want_one_path_leave_one_that_answers(
    stage: Stage,
) -> None:
    path = str(stage.where / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    refused = 0

    async def want() -> None:
        nonlocal refused
        try:
            await serve_control(stage.host, path)
        except OSError as why:
            if why.errno != errno.EADDRINUSE:
                raise
            refused += 1

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(want)
        await eventually(lambda: refused == 7)
        assert await ask(path, "ps") == []
        nursery.cancel_scope.cancel()


async def test_a_stopping_host_leaves_anothers_socket_alone(stage: Stage) -> None:
    async with controlled(stage) as path:
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert is_socket(path)


async def test_a_path_longer_than_an_address_works(stage: Stage) -> None:
    deep = stage.where / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with controlled(stage, str(deep / "control")) as path:
        assert await ask(path, "ps") == []


# If the path is too long, a client goes through the directory: the name has to fit.
async def test_a_name_that_nobody_could_connect_to_is_refused(stage: Stage) -> None:
    deep = stage.where / ("d" * 100)
    deep.mkdir()
    async with controlled(stage, str(deep / ("c" * MAX_NAME_BYTES))) as path:
        assert await ask(path, "ps") == []
        with pytest.raises(OSError, match="a living host listens there"):
            await serve_control(stage.host, path)
    path = str(deep / ("c" * (MAX_NAME_BYTES + 1)))
    with pytest.raises(OSError, match="its name has 86 bytes, 85 are the most") as why:
        await serve_control(stage.host, path)
    assert (why.value.errno, why.value.filename) == (errno.ENAMETOOLONG, path)
    assert not list(deep.iterdir())
