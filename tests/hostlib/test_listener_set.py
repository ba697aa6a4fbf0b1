"""Listeners of all children at one epoll: connections, shortages, their ends."""

import errno
import os
import resource
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from hostlib.listener_set import BATCH, ListenerSet
from hostlib.log import Log
from tests.hostlib.test_watches import FewWatches

IN_TIME_S = 10.0

AcceptedConnection = trio.MemoryReceiveChannel[socket.socket]
Add = Callable[[socket.socket], AcceptedConnection]


@asynccontextmanager
async def accepting(
    listeners: ListenerSet | None = None,
) -> AsyncIterator[tuple[ListenerSet, Add]]:
    """Run listeners; yield what adds one, and returns what is accepted there."""
    listeners = listeners or ListenerSet("network")

    def add(listener: socket.socket) -> AcceptedConnection:
        sends, receives = trio.open_memory_channel[socket.socket](1000)
        listeners.add(listener, sends.send_nowait)
        return receives

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listeners.run, Log("ERROR"))
        with trio.fail_after(IN_TIME_S):
            yield listeners, add
        nursery.cancel_scope.cancel()
    assert not list(listeners.descriptors())


def listen() -> socket.socket:
    """Return a non-blocking listener."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setblocking(False)
    return listener


def connect(listener: socket.socket) -> socket.socket:
    """Return a connection to a listener."""
    return socket.create_connection(listener.getsockname())


# spec NET4: each granted port has listeners of its own, and they cost no task each.
async def test_many_listeners_are_one_task(no_leaks: None) -> None:
    del no_leaks
    async with accepting() as (listeners, add):
        before = trio.lowlevel.current_statistics().tasks_living
        held = [listen() for _ in range(128)]
        channels = [add(listener) for listener in held]
        assert trio.lowlevel.current_statistics().tasks_living == before
        for listener, channel in zip(held, channels, strict=True):
            with connect(listener), await channel.receive() as sock:
                assert not sock.getblocking()
            listeners.remove(listener)
            listener.close()


# spec NET6: a child that connects without end leaves others their turn.
# attack 61
async def test_connections_of_one_listener_hold_up_no_other() -> None:
    async with accepting() as (_, add):
        with listen() as busy, listen() as other:
            lines = [connect(busy) for _ in range(10 * BATCH)]
            lines.append(connect(other))
            many, one = add(busy), add(other)
            (await one.receive()).close()
            assert many.statistics().current_buffer_used <= BATCH
            for line in lines[1:]:
                (await many.receive()).close()
                line.close()
            lines[0].close()


# spec NET12: a port that is not granted any more accepts nothing.
async def test_a_listener_that_was_removed_accepts_nothing() -> None:
    async with accepting() as (listeners, add):
        with listen() as gone, listen() as other:
            channel = add(gone)
            listeners.remove(gone)
            listeners.remove(gone)  # a second time it is nothing
            with connect(gone), connect(other):
                (await add(other).receive()).close()
                assert not channel.statistics().current_buffer_used


# attack 18, spec S5: without a descriptor connections wait, and it is told once.
async def test_a_shortage_is_told_and_connections_wait(
    capfd: pytest.CaptureFixture[str],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with accepting() as (_, add):
        with listen() as listener:
            channel = add(listener)
            with connect(listener):
                lowest_free = os.dup(0)
                os.close(lowest_free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
                try:
                    said = ""
                    while "cannot accept a connection" not in said:
                        await trio.sleep(0.001)
                        said += capfd.readouterr().err
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                (await channel.receive()).close()
    assert "Too many open files; those that come wait" in said
    assert "cannot accept" not in capfd.readouterr().err


# spec NET6: a listener that is of no use is told, and holds up no other.
async def test_a_listener_of_no_use_holds_up_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with accepting() as (listeners, add):
        with listen() as broken, listen() as other:
            add(broken)
            channel = add(other)
            broken.shutdown(socket.SHUT_RDWR)
            with connect(other):
                (await channel.receive()).close()
            with connect(other):
                (await channel.receive()).close()
            listeners.remove(broken)
    assert (
        "network: a listener accepts no more: Invalid argument"
        in capfd.readouterr().err
    )


# spec S5: a fault of one connection ends that connection alone.
async def test_a_connection_that_cannot_be_begun_is_closed_and_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: socket.socket) -> None:
        raise LookupError("a secret")

    async with accepting() as (listeners, add):
        with listen() as failing, listen() as other:
            listeners.add(failing, fail)
            for _ in range(2):
                with connect(failing) as line, connect(other):
                    line.setblocking(False)
                    await trio.lowlevel.wait_readable(line)
                    assert line.recv(1) == b""
            channel = add(other)
            for _ in range(2):
                (await channel.receive()).close()
    said = capfd.readouterr().err
    assert said.count("Fault serving network: LookupError in fail, ") == 2
    assert "secret" not in said


# attack 18, spec S5: epoll(7) counts the watches of a user, its children's included.
@pytest.mark.parametrize("lacks", [errno.ENOSPC, errno.ENOMEM])
async def test_a_listener_without_a_watch_is_polled(
    monkeypatch: pytest.MonkeyPatch, lacks: int
) -> None:
    few = FewWatches(select.epoll(), lacks)
    with monkeypatch.context() as patched:
        patched.setattr("hostlib.listener_set.select.epoll", lambda: few)
        made = ListenerSet("network")
    async with accepting(made) as (listeners, add):
        with listen() as first, listen() as second, listen() as third:
            channels = [add(first), add(second)]
            for listener, channel in zip((first, second), channels, strict=True):
                with connect(listener):
                    (await channel.receive()).close()
            assert few.refused
            listeners.remove(second)
            few.left = True
            channels[1] = add(third)
            for listener, channel in zip((first, third), channels, strict=True):
                with connect(listener):
                    (await channel.receive()).close()
                listeners.remove(listener)
