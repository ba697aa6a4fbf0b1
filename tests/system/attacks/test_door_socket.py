"""The door's socket: connecting is ATTACH, with its bounds, until the child ends."""

import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.helpers.delays import NEIGHBOUR_S, slowest_read
from tests.helpers.stage import Puppet, Stage, eventually
from tests.helpers.tables import client_rows

pytestmark = [pytest.mark.slow, pytest.mark.attack]

Start = Callable[..., Awaitable[Puppet]]


@pytest.fixture
def start(stage: Stage) -> Start:
    """Starts a child that has a directory for its socket, and knows how to connect."""

    async def started(**changes: Any) -> Puppet:
        run_dir = stage.where / f"run-{len(stage.host.children)}"
        run_dir.mkdir(mode=0o700)
        child = await stage.puppet(run_dir=str(run_dir), **changes)
        await child.do("globals().__setitem__('socket', __import__('socket'))")
        await child.do("globals().__setitem__('kept', [])")
        return child

    return started


CONNECTED = (
    "(lambda s: (s.connect(os.environ['FSPROXY_SOCKET']), kept.append(s),"
    " s.fileno())[-1])(socket.socket(socket.AF_UNIX))"
)
"""Connects, and returns the descriptor."""


def path_of(child: Puppet) -> Path:
    """Return where its socket is."""
    door = child.child.clients.door
    assert door is not None
    return Path(door.path)


def clients(stage: Stage) -> list[dict[str, object]]:
    """Return the client table."""
    return client_rows(stage.host.fs)


# spec N4, HM6
async def test_who_connects_is_a_nested_client_with_the_child_s_rights(
    start: Start, stage: Stage
) -> None:
    child = await start()
    fd = await child.do(CONNECTED)
    assert await child.do(f"ask(b'OPEN a w+ false\\n', {fd})") == b"OK 1000"
    own, nested = clients(stage)
    assert nested["parent_id"] == own["id"] == child.client_id
    own_pid = await child.do("os.getpid()")
    assert nested["pid"] == stage.pid_of(child, own_pid)
    assert nested["open_files"] == [1000]
    # Another connection's number is as unknown as one that never was (spec R2).
    assert (await child.ask(b"CLOSE 1000\n")).startswith(b"ERROR invalid fileno")
    await child.do("kept.pop().close()")
    await eventually(lambda: len(clients(stage)) == 1)
    assert not stage.host.fs.tables.files


# I1, S5: a connection whose conversation cannot begin is closed, and nothing is kept of it.
async def test_a_conversation_that_cannot_begin_leaves_nothing(
    start: Start, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await start()
    before = stage.host.fs.descriptor_account.used

    def fail(*_: object, **__: object) -> None:
        raise LookupError

    with monkeypatch.context() as patched:
        patched.setattr(stage.host, "open_session", fail)
        for _ in range(3):
            await child.do(CONNECTED)
            assert await child.do("kept.pop().recv(1)") == b""
    assert stage.host.fs.descriptor_account.used == before
    assert len(clients(stage)) == 1
    fd = await child.do(CONNECTED)
    assert await child.do(f"ask(b'PING\\n', {fd})") == b"OK"


# spec A5: rights that were given up are no way back by the socket.
async def test_the_socket_gives_no_right_back(start: Start, stage: Stage) -> None:
    (stage.root / "a").write_text("x")
    child = await start()
    document = b'{"read":[],"write":[]}'
    narrow = b"NARROW %d\n%b" % (len(document), document)
    assert await child.ask(narrow) == b"OK"
    fd = await child.do(CONNECTED)
    reply = await child.do(f"ask(b'OPEN a r false\\n', {fd})")
    assert reply.startswith(b"ERROR "), reply


# spec S7: whoever connects counts against the child, and what it opens too.
async def test_one_account_for_descriptor_3_and_the_socket(start: Start) -> None:
    child = await start(max_open_files=3)
    fd = await child.do(CONNECTED)
    for name in (b"a", b"b"):
        await child.open(name, b"w")
    asked = f"ask(b'OPEN %s w false\\n', {fd})"
    assert (await child.do(asked % "c")).startswith(b"OK ")
    refused = await child.do(asked % "d")
    assert os.strerror(errno.EMFILE).encode() in refused


# spec S5, S7, attack 18
async def test_a_flood_of_connections_is_bounded_and_costs_no_neighbour(
    start: Start, stage: Stage
) -> None:
    neighbour = await start()
    fileno = await neighbour.open(b"n", b"w+")
    child = await start()
    most = stage.host.settings.clients_per_child
    before = len(os.listdir("/proc/self/fd"))
    replies = f"[ask(b'PING\\n', {CONNECTED}) for _ in range({most + 40})]"
    child.tell(replies)
    assert await slowest_read(stage, neighbour, fileno, 200) < NEIGHBOUR_S
    said = await child.hear()
    assert said[: most - 1] == [b"OK"] * (most - 1)
    users = os.strerror(errno.EUSERS).encode()
    assert set(said[most - 1 :]) == {b"ERROR failed to attach: " + users}
    assert len(os.listdir("/proc/self/fd")) - before <= most
    # As many as it closes may come again; and they come in turn with everybody else.
    await child.do("[s.close() for s in kept]")
    await eventually(lambda: len(clients(stage)) == 2)
    again = f"[(ask(b'PING\\n', {CONNECTED}), kept.pop().close()) for _ in range(500)]"
    child.tell(again)
    assert await slowest_read(stage, neighbour, fileno, 200) < NEIGHBOUR_S
    assert len(await child.hear()) == 500
    await child.kill()
    await neighbour.kill()


async def test_nothing_is_left_of_a_child_that_is_killed(
    start: Start, stage: Stage
) -> None:
    child = await start()
    path = path_of(child)
    fds = [await child.do(CONNECTED) for _ in range(5)]
    for fd in fds:
        assert (await child.do(f"ask(b'OPEN f{fd} w false\\n', {fd})"))[:2] == b"OK"
    assert path.is_socket()
    await child.kill()
    assert not path.exists()
    assert not list(path.parent.iterdir())
    stage.assert_nothing_left()


async def test_a_child_that_removes_or_replaces_the_name_harms_itself_alone(
    start: Start, stage: Stage
) -> None:
    child = await start()
    path = path_of(child)
    with suppress(EOFError):  # its directory is read-only in some containers
        await child.do(f"(os.unlink({str(path)!r}), os.mkdir({str(path)!r}))[0]")
        assert await child.ask(b"PING\n") == b"OK"
        assert await child.leave() == 0
    await child.child.wait_gone()
    stage.assert_nothing_left()
    with suppress(FileNotFoundError):
        path.rmdir()


# The request comes to a conversation that is over: it is told so, and not left waiting.
async def test_after_descriptor_3_is_closed_it_lets_nobody_in(start: Start) -> None:
    child = await start()
    await child.do("os.close(3)")
    session = child.child.session
    assert session is not None
    await eventually(lambda: session.is_over)
    fd = await child.do(CONNECTED)
    said = await child.do(f"ask(b'PING\\n', {fd})")
    assert said == b"ERROR failed to attach: nothing has descriptor 3 open any more"
    await child.kill()


# attack 37: a nested child in Landlock alone knows the directory, and must not learn the name.
async def test_it_is_the_child_s_alone(start: Start) -> None:
    child = await start()
    status = path_of(child).stat()
    assert status.st_mode & 0o777 == 0o600
    assert path_of(child).parent.stat().st_mode & 0o777 == 0o700
    # Nor does a list of the machine's sockets say where it is.
    names = await trio.Path("/proc/net/unix").read_text()
    assert path_of(child).name not in names
