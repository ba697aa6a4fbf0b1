"""A fault in one connection of a listener ends that connection, and nothing else.

The endpoint's is in `tests/supervisor/llm/test_endpoint.py`, that of ToolExec in `tests/supervisor/toolexec`.
"""

import errno
import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from hostlib import unix_listener
from hostlib.listener import Server, accept, accept_socket, contain_fault
from hostlib.log import Log
from tests.helpers.control import ask, connected, path
from tests.helpers.leaks import open_here
from tests.helpers.scrape import listening
from tests.helpers.stage import Stage, stage

pytestmark = pytest.mark.slow

__all__ = ["path", "stage"]


def broken(*_: object) -> None:
    """Fail, as a fault of this program would."""
    raise LookupError("a secret")


# spec S5
async def test_a_fault_in_an_answer_of_the_control_socket_ends_that_answer(
    path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with connected(path) as other, connected(path) as line:
        with monkeypatch.context() as patched:
            patched.setattr("supervisor.control.answers.process_facts", broken)
            answer = await line.ask(b'{"v":1,"do":"stats"}\n')
            assert answer["error"] == "internal error: LookupError; see the host's log"
        assert (await other.ask(b'{"v":1,"do":"stats"}\n'))["ok"]
    assert await ask(path, "ps") == []
    log = capfd.readouterr().err
    assert "Fault doing 'stats': LookupError in broken, " in log
    assert "secret" not in log


# spec S5: as many threads as the user of the host may have.
async def test_a_scrape_for_which_there_is_no_thread_ends_its_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def no_thread(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with listening(stage) as listener:
        with monkeypatch.context() as patched:
            patched.setattr("supervisor.observe.listener.in_thread", no_thread)
            stream = await trio.open_tcp_stream(*listener.address)
            async with stream:
                await stream.send_all(
                    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )
                assert await stream.receive_some() == b""
        assert (await listener.curl("/metrics")).status == 200
    assert "Fault serving metrics: BlockingIOError in " in capfd.readouterr().err


async def test_a_peer_that_has_gone_is_no_fault(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def send() -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    with contain_fault(Log("ERROR"), "nobody"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
    assert not capfd.readouterr().err


async def test_who_is_cancelled_stays_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with contain_fault(Log("ERROR"), "nobody"):
            await trio.sleep_forever()
        raise AssertionError("it went on")
    assert scope.cancelled_caught


# spec S5: what is accepted and cannot be held is given back.
async def test_a_connection_that_cannot_be_held_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    where = str(tmp_path / "s")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as peer,
    ):
        listener.bind(where)
        listener.listen()
        listener.setblocking(False)
        peer.connect(where)
        held = open_here("socket:")
        with monkeypatch.context() as patched:
            patched.setattr("hostlib.listener.socket.socket", broken)
            with pytest.raises(LookupError):
                await accept_socket(listener, lambda _why: None)
        assert open_here("socket:") == held


class Unwatched:
    """A listener for which there was no epoll watch, once."""

    def __init__(self) -> None:
        self.tries = 0

    async def accept(self) -> str:
        """Fail as Trio does, and then accept."""
        await trio.lowlevel.checkpoint()
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "a connection"


# attack 18, spec S5: epoll(7) counts the watches of a user, its children's included.
async def test_a_listener_without_an_epoll_watch_goes_on() -> None:
    listener = Unwatched()
    told: list[OSError] = []
    stream: object = await accept(listener, told.append)  # type: ignore[arg-type]
    assert stream == "a connection"
    assert listener.tries == 2
    assert len(told) == 1


# attack 18, spec S5: the same where it is told, and what is to be done.
async def test_who_connects_to_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    told: list[str | None] = []
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as peer,
    ):
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)

        async def no_watch(_listener: object) -> None:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def tell(why: OSError) -> None:
            if not told:
                peer.connect(str(tmp_path / "s"))
            told.append(why.strerror)

        monkeypatch.setattr("trio.lowlevel.wait_readable", no_watch)
        (await accept_socket(listener, tell)).close()
    (text,) = told
    assert text is not None
    assert text.endswith("or raise sysctl fs.epoll.max_user_watches")


class Line:
    """A connection that ``Server`` serves."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()


# Rule 3 of the module: what goes wrong with one connection ends that one.
async def test_a_server_goes_on_when_a_connection_fails(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    where = str(tmp_path / "s")

    async def serve(line: Line) -> None:
        said = await line.stream.receive_some(10)
        if said == b"fail":
            raise LookupError
        await line.stream.send_all(said)
        await trio.sleep_forever()

    async with (
        unix_listener.listen_at(where) as listener,
        trio.open_nursery() as nursery,
    ):
        server = Server(listener, Line, serve, Log("ERROR"), "a test")
        nursery.start_soon(server.run)
        failing, lasting = [await trio.open_unix_socket(where) for _ in range(2)]
        async with failing, lasting:
            await lasting.send_all(b"ping")
            assert await lasting.receive_some(10) == b"ping"
            await failing.send_all(b"fail")
            assert await failing.receive_some(10) == b""
            await trio.testing.wait_all_tasks_blocked()
            (left,) = server.connections
            assert list(server.descriptors()) == [left.stream.socket.fileno()]
            left.scope.cancel()
            assert await lasting.receive_some(10) == b""
            await trio.testing.wait_all_tasks_blocked()
            assert not server.connections
        nursery.cancel_scope.cancel()
