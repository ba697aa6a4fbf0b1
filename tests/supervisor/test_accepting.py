"""A fault in one connection of a listener ends that connection, and nothing else.

The endpoint's is in `tests/llm/test_endpoint.py`, that of ToolExec in `tests/toolexec`.
"""

import errno
import os
import socket
from pathlib import Path

import pytest
import trio

from supervisor.accepting import accepted_socket, only_this_one
from supervisor.logs import Log
from tests.helpers.control import ask, connected, path
from tests.helpers.hosts import Stage, stage
from tests.helpers.scrape import listening

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
            patched.setattr("supervisor.metrics.listener.in_thread", no_thread)
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

    with only_this_one(Log("ERROR"), "nobody"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
    assert not capfd.readouterr().err


async def test_who_is_cancelled_stays_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with only_this_one(Log("ERROR"), "nobody"):
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
        held = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patched:
            patched.setattr("supervisor.accepting.socket.socket", broken)
            with pytest.raises(LookupError):
                await accepted_socket(listener, lambda _why: None)
        assert os.listdir("/proc/self/fd") == held
