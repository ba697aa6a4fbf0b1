"""A dead file system stalls the clients that wait for it, and no others.

The root of the test is taken for one of NFS; calls that lead to names with `hung` in them
wait until the test lets them, as those to a server that is gone do. A call in the Trio
thread is caught.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from hostlib.linux import resolve
from tests.helpers.sessions import Hall, hall
from vfs import mounts
from vfs.backends import host
from vfs.backends.host_file import HostHandle
from vfs.ledger import Ledger
from vfs.mounts import Mount

__all__ = ["hall"]

MIB = 1024 * 1024


class Server:
    """The server of a file system: it answers, or does not.

    Attributes:
        asked: somebody waits for it.
        stalled: how often the Trio thread would have waited.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.stalled = 0
        self._answers = threading.Event()
        self._trio = threading.current_thread()

    def hang(self) -> None:
        """Answer nobody."""
        self._answers.clear()

    def answer(self) -> None:
        """Answer those who wait, and everybody from now on."""
        self._answers.set()

    def wait(self) -> None:
        """Be somebody who needs an answer."""
        if self._answers.is_set():
            return
        if threading.current_thread() is self._trio:
            self.stalled += 1
            return
        self.asked.set()
        assert self._answers.wait(60)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Let the file system of the test be a distant one, that answers for now."""
    server = Server()
    server.answer()
    monkeypatch.setitem(mounts.MOUNTS, tmp_path.stat().st_dev, Mount("nfs4"))
    open_beneath = resolve.open_beneath

    def asking(dir_fd: int, name: bytes, flags: int) -> int:
        if b"hung" in name:
            server.wait()
        return open_beneath(dir_fd, name, flags)

    monkeypatch.setattr(host, "open_beneath", asking)
    yield server
    server.answer()
    assert not server.stalled


def asking(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a call about an open file need the server, but for the neighbour's."""
    call: Callable[..., object] = getattr(HostHandle, name)

    def ask(handle: HostHandle, *args: object) -> object:
        if not os.readlink(f"/proc/self/fd/{handle.fd}").endswith("/near"):
            server.wait()
        return call(handle, *args)

    monkeypatch.setattr(HostHandle, name, ask)


async def others_are_served(hall: Hall, server: Server) -> None:
    """Wait until somebody waits for the server; meanwhile another client works."""
    with trio.fail_after(30):
        while not server.asked.is_set():  # noqa: ASYNC110 - a thread tells
            await trio.sleep(0.001)
    neighbour = hall.connect()
    assert await neighbour.ask(b"PING\n") == b"OK"
    fileno = await neighbour.open(b"near")
    assert await neighbour.read(fileno, 4) == b"near"
    server.answer()


# spec S5: whatever a name is asked for, and X1
@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b"OPEN hung r false\n", b"OK 1001"),
        (b"OPEN hung w+ false\n", b"OK 1001"),
        (b"OPEN new-hung w false\n", b"OK 1001"),
        (b"OPEN no/hung r false\n", b"ERROR failed to open file 'no/hung': No such"),
        (b"OPEN ../hung r false\n", b"ERROR VFS access denied: '../hung'"),
        (b"STAT false hung\n", b"OK "),
        (b"STAT false no/hung\n", b"ERROR failed to stat 'no/hung': No such"),
        (b"LIST false dir-hung\n", b"OK "),
        (b"MKDIR false dir-hung/inner\n", b"OK"),
        (b"MKDIR false dir-hung/file\n", b"ERROR failed to make"),
        (b"REMOVE false dir-hung/file\n", b"OK"),
        (b'NARROW 18\n{"read": ["hung"]}', b"OK"),
        (b'NARROW 23\n{"write": ["dir-hung"]}', b"OK"),
        (b'NARROW 21\n{"read": ["no/hung"]}', b"ERROR invalid rights: cannot narrow"),
    ],
)
async def test_a_name_that_nobody_answers_for(
    hall: Hall, server: Server, request_line: bytes, reply: bytes
) -> None:
    (hall.root / "near").write_bytes(b"near")
    (hall.root / "hung").write_bytes(b"hung")
    (hall.root / "dir-hung").mkdir()
    (hall.root / "dir-hung" / "file").touch()
    line = hall.connect()
    server.hang()
    await line.send(request_line)
    await others_are_served(hall, server)
    assert (await line.line()).startswith(reply)


# spec P1, R1, W1, C1: it is a file system like any other.
async def test_files_of_a_distant_place_are_files(hall: Hall, server: Server) -> None:
    data = os.urandom(3 * MIB)
    line = hall.connect()
    fileno = await line.open(b"file", b"w+")
    assert await line.write(fileno, data) == b"OK %d" % len(data)
    assert await line.ask(b"SEEK %d 0\n" % fileno) == b"OK 0"
    assert await line.read(fileno, len(data) + 1) == data
    assert await line.read(fileno, MIB) == b""
    assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert await line.ask(b"CLOSE %d\n" % fileno) == b"ERROR invalid fileno: %d" % (
        fileno
    )
    for mode in (b"w", b"r", b"a", b"r"):
        fileno = await line.open(b"file", mode)
        assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert (hall.root / "file").read_bytes() == b""
    assert not server.stalled


async def test_a_close_that_nobody_answers(
    hall: Hall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "near").write_bytes(b"near")
    line = hall.connect()
    fileno = await line.open(b"file", b"w")
    asking(server, monkeypatch, "close")
    server.hang()
    await line.send(b"CLOSE %d\n" % fileno)
    await others_are_served(hall, server)
    assert await line.line() == b"OK"


async def test_a_large_read_that_nobody_answers(
    hall: Hall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "near").write_bytes(b"near")
    (hall.root / "file").write_bytes(bytes(MIB))
    line = hall.connect()
    fileno = await line.open(b"file")
    for name in ("size", "pread_wait"):
        asking(server, monkeypatch, name)
    server.hang()
    await line.send(b"READ %d %d\n" % (fileno, 2 * MIB))
    await others_are_served(hall, server)
    assert await line.body() == bytes(MIB)


# spec S2, S3: also where a client goes and leaves its files.
async def test_the_end_of_a_client_that_nobody_answers(
    hall: Hall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "near").write_bytes(b"near")
    line = hall.connect()
    filenos = [await line.open(name, b"w") for name in (b"one", b"two")]
    asking(server, monkeypatch, "drop")
    server.hang()
    line.close()
    await others_are_served(hall, server)
    await line.gone()
    assert line.session.closed_files == filenos
    assert not hall.fs.tables.clients.get(line.client.id)


# spec S7: the size of a file whose growth is bounded is asked for in a thread, too.
@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b"WRITE 1000 5\nhello", b"OK 5"),
        (b"WRITE 1000 70000\n" + bytes(70_000), b"OK 70000"),
        (b"TRUNCATE 1000 7\n", b"OK"),
        (b"CLOSE 1000\n", b"OK"),
        (b"OPEN file w false\n", b"OK 1001"),
    ],
)
@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_size_that_nobody_answers(
    hall: Hall,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    request_line: bytes,
    reply: bytes,
    is_removed: bool,
) -> None:
    (hall.root / "near").write_bytes(b"near")
    (hall.root / "file").write_bytes(b"file")
    line = hall.connect(ledger=Ledger(size_bytes=MIB))
    assert await line.open(b"a", b"w") == 1000
    assert await line.write(1000, b"hello") == b"OK 5"
    if is_removed:
        assert await line.ask(b"REMOVE false a\n") == b"OK"
    for name in ("size", "links"):
        asking(server, monkeypatch, name)
    server.hang()
    await line.send(request_line)
    if not is_removed and request_line.startswith(b"CLOSE"):
        server.asked.set()  # it asks for no size
    await others_are_served(hall, server)
    assert await line.line() == reply


class Unconnected:
    """A server that has gone for good: open files have no state any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_gone = False
        for name in ("size", "links"):
            call = getattr(HostHandle, name)
            monkeypatch.setattr(HostHandle, name, self._asking(call))

    def _asking(self, call: Callable[[HostHandle], int]) -> Callable[[HostHandle], int]:
        def ask(handle: HostHandle) -> int:
            if self.is_gone:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            return call(handle)

        return ask


# spec S3, S7: then the child ends all the same, and its charges with it.
@pytest.mark.parametrize("end", ["close", "gone"])
@pytest.mark.parametrize("publish", ["on-close", "direct"])
async def test_the_end_of_a_file_whose_server_has_gone(
    hall: Hall,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    publish: str,
) -> None:
    ledger = Ledger(size_bytes=MIB)
    line = hall.connect(hall.policy(publish=publish), ledger)
    fileno = await line.open(b"a", b"w")
    assert await line.write(fileno, b"hello") == b"OK 5"
    if publish == "direct":
        assert await line.ask(b"REMOVE false a\n") == b"OK"
    dead = Unconnected(monkeypatch)
    dead.is_gone = True
    if end == "close":
        assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
    line.close()
    await line.gone()
    assert not hall.fs.tables.files
    assert not ledger.open_files.used
    assert ledger.size_bytes.used == (
        0 if (publish, end) == ("on-close", "gone") else 5
    )
    assert not server.stalled


def test_what_is_near_is_no_distant_file_system() -> None:
    for kind in ("ext4", "tmpfs", "overlay", "btrfs", "xfs"):
        assert not Mount(kind).is_distant
    for kind in ("nfs", "nfs4", "cifs", "fuse", "fuse.sshfs", "9p", "ceph", "unknown"):
        assert Mount(kind).is_distant


# A host whose user has all the threads it may have: OPEN is refused, the client stays.
async def test_without_a_thread_nothing_is_opened(
    hall: Hall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    del server

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    (hall.root / "file").touch()
    line = hall.connect()
    with monkeypatch.context() as patched:
        patched.setattr(trio.to_thread, "run_sync", none)
        assert await line.ask(b"OPEN file r false\n") == (
            b"ERROR failed to open file 'file': Resource temporarily unavailable"
        )
    assert await line.ask(b"OPEN file r false\n") == b"OK 1000"
