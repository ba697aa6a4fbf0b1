"""The Trio twin: the same requests, awaited, and the effects of a cancellation."""

import errno
import os
import socket
import subprocess
import sys

import pytest
import trio
import trio.testing

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate
from vfs import client as door
from vfs.client import Client, aio_connection
from vfs.client.aio import AsyncClient


@pytest.fixture
def client(line: socket.socket) -> AsyncClient:
    return AsyncClient((line.fileno(),))


def start_child(program: str, line: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno())},
    )


async def until_reached(gate: Gate) -> None:
    await trio.to_thread.run_sync(gate.reached.wait)


# The same requests


async def test_what_is_written_is_read_again(
    client: AsyncClient, host: FakeHost
) -> None:
    content = os.urandom(3_000_000)
    fileno = await client.open("a", "w+")
    assert await client.write(fileno, content) == len(content)
    assert await client.seek(fileno, 5) == 5
    assert await client.read(fileno, 1_000_000) == content[5:1_000_005]
    assert await client.read_all(fileno) == content[1_000_005:]
    assert await client.read(fileno, 1) == b""
    await client.truncate(fileno, 3)
    await client.sync(fileno)
    await client.close(fileno)
    assert host.files == {b"a": content[:3]}


async def test_names_directories_and_the_rest(
    client: AsyncClient, host: FakeHost
) -> None:
    await client.mkdir("d")
    await client.close(await client.open(b"\xff", "w"))
    await client.rename(b"\xff", "b")
    assert await client.listdir() == [("b", "file"), ("d", "directory")]
    assert (await client.stat("b")).kind == "file"
    await client.remove("b")
    await client.ping()
    assert (await client.caps())["version"] == 2
    assert await client.llm_quota() == "110.0 weighted tokens (no limit)"
    assert await client.llm_config() == {"default_model": "m"}
    host.chat = (b'{"choices": []}', b"1.0 weighted tokens (no limit)")
    answer = await client.llm_chat("x", preset="general", input_files=["a"])
    assert (answer.text, answer.raw) == ("", b'{"choices": []}')
    assert host.chatted == [b"axgeneral"]
    await client.narrow({"read": []})
    assert host.peers[0].rights == {"read": []}


# spec X1: the payload of a command that is not known would be read as requests.
async def test_an_old_host_gets_no_payload_that_it_does_not_know() -> None:
    words = frozenset({b"RENAME", b"NARROW", b"FD_CALL", b"FD_PUT"})
    for more in (frozenset[bytes](), frozenset({b"CAPS", b"ATTACH"})):
        with FakeHost(unknown=words | more) as host, host.connect() as line:
            host.files[b"a"] = bytearray(b"x")
            client = AsyncClient((line.fileno(),))
            for word, request in (
                ("RENAME", client.rename("a", "\nREMOVE true a\n")),
                ("NARROW", client.narrow({})),
                ("FD_CALL", client.fd_call("list_fds")),
                ("FD_PUT", client.fd_put(b"\nREMOVE true a\n")),
            ):
                with pytest.raises(door.UnknownCommandError, match=f"know {word}: it"):
                    await request
                await client.ping()
            assert b"a" in host.files


async def test_data_above_the_hosts_cap_goes_in_pieces() -> None:
    # spec W3
    with FakeHost(max_write=1000) as host, host.connect() as line:
        client = AsyncClient((line.fileno(),))
        await client.write(await client.open("a", "w"), b"x" * 2500)
        assert host.files[b"a"] == b"x" * 2500
        fileno = await client.open("a")
        host.raw_replies.append(b"ERROR file not open for writing: 1001\n")
        with pytest.raises(OSError, match="not open for writing") as caught:
            await client.write(fileno, b"x")
        assert caught.value.errno == errno.EBADF


@pytest.mark.usefixtures("no_leaks")
async def test_pipes_serve_as_a_socketpair_does(host: FakeHost) -> None:
    # spec T1, N4
    reads, writes, side = host.connect_pipes()
    with side:
        client = AsyncClient((reads, writes, side.fileno()))
        fileno = await client.open("a", "w+")
        await client.write(fileno, b"x" * 300_000)
        await client.seek(fileno, 0)
        assert await client.read_all(fileno) == b"x" * 300_000
        async with await client.attach() as attached:
            await attached.ping()
    os.close(reads)
    os.close(writes)
    await trio.to_thread.run_sync(host.peers[1].gone.wait)
    await trio.to_thread.run_sync(host.peers[0].gone.wait)


async def test_pipes_without_a_third_descriptor_cannot_attach(host: FakeHost) -> None:
    reads, writes, side = host.connect_pipes()
    with side, pytest.raises(door.UnknownCommandError, match="third number"):
        await AsyncClient((reads, writes)).attach()
    for fd in (reads, writes):
        os.close(fd)


async def test_a_kernel_that_cannot_write_without_waiting_is_served_in_small_pieces(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "pwritev", refuse)
    content = os.urandom(600_000)
    fileno = await client.open("a", "w+")
    await client.write(fileno, content)
    await client.seek(fileno, 0)
    assert await client.read_all(fileno) == content


async def test_a_descriptor_is_left_blocking(
    client: AsyncClient, line: socket.socket
) -> None:
    # spec T5: its flags belong to every process that shares it
    await client.write(await client.open("a", "w"), b"x" * 1_000_000)
    assert os.get_blocking(line.fileno())


async def test_every_request_is_a_checkpoint(client: AsyncClient) -> None:
    with trio.testing.assert_checkpoints():
        await client.ping()


# Errors


async def test_errors_are_those_of_the_blocking_client(client: AsyncClient) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await client.open("no such")
    assert caught.value.filename == "no such"
    with pytest.raises(door.UnsendableError):
        await client.open("a ")
    await client.ping()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "closed the connection"),
        (b"HELLO\n", "not a reply"),
        (b"OK 6\n123456", "at most 5"),
        (b"OK 1\n.OK\n", "more than a reply"),
    ],
)
async def test_after_garbage_the_connection_is_given_up(
    client: AsyncClient, host: FakeHost, reply: bytes, why: str
) -> None:
    fileno = await client.open("a", "w+")
    host.raw_replies.append(reply)
    with pytest.raises(door.ConnectionLostError, match=why):
        await client.read(fileno, 5)
    with pytest.raises(door.ConnectionLostError, match=why):
        await client.ping()


async def test_a_host_that_dies_inside_a_body_is_noticed(
    client: AsyncClient, host: FakeHost
) -> None:
    fileno = await client.open("a", "w+")
    host.last_words = b"OK 100000\n" + bytes(70_000)
    with pytest.raises(door.ConnectionLostError, match="inside a reply"):
        await client.read(fileno, 100_000)


async def test_an_attach_that_brings_nothing_loses_the_connection(
    client: AsyncClient, host: FakeHost
) -> None:
    host.raw_replies.append(b"OK 5\n")
    with pytest.raises(door.ConnectionLostError, match="attached nothing"):
        await client.attach()


# Tasks, processes, cancellation


async def test_tasks_take_turns(client: AsyncClient) -> None:
    # spec T3
    async def work(name: str) -> None:
        fileno = await client.open(name, "w+")
        for i in range(30):
            text = f"{name}{i}".encode() * 100
            await client.seek(fileno, 0)
            await client.write(fileno, text)
            await client.seek(fileno, 0)
            assert await client.read(fileno, len(text)) == text

    async with trio.open_nursery() as nursery:
        for name in "abcd":
            nursery.start_soon(work, name)


@pytest.mark.slow
async def test_another_process_on_the_line_is_waited_for(
    client: AsyncClient, host: FakeHost, line: socket.socket
) -> None:
    # spec T5
    program = """
import sys
from vfs.client import Client
client = Client()
fileno = client.open("a")
print(flush=True)
sys.stdin.readline()
for i in range(100):
    assert client.seek(fileno, i % 3) == i % 3
    assert client.read(fileno, 9) == b"abc"[i % 3:]
"""
    host.files[b"a"] = bytearray(b"abc")
    with start_child(program, line) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        await trio.to_thread.run_sync(process.stdout.readline)
        process.stdin.write(b"go\n")
        process.stdin.close()
        fileno = await client.open("b", "w+")
        for i in range(100):
            await client.seek(fileno, 0)
            await client.write(fileno, b"%d" % (i + 100))
            await client.seek(fileno, 1)
            assert await client.read(fileno, 9) == b"%02d" % i
        assert await trio.to_thread.run_sync(process.wait) == 0


async def test_a_cancelled_wait_for_the_turn_leaves_no_trace(
    client: AsyncClient, host: FakeHost, line: socket.socket
) -> None:
    # spec T5
    assert client.turn.lock.acquire(blocking=False)
    with trio.move_on_after(0.01) as scope:
        await client.ping()
    assert scope.cancelled_caught
    client.turn.lock.release()
    await client.ping()
    assert host.peers[0].seen == [m.Ping()]
    assert Client((line.fileno(),)).caps()["version"] == 2


async def test_a_cancelled_request_whose_reply_comes_leaves_the_line_usable(
    client: AsyncClient, host: FakeHost
) -> None:
    gate = host.gates[m.Ping] = Gate()

    async def ping() -> None:
        with scope:
            await client.ping()

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ping)
        await until_reached(gate)
        scope.cancel()
        gate.opened.set()
    assert scope.cancelled_caught
    await client.caps()


async def test_a_cancelled_request_without_a_reply_gives_the_line_up(
    client: AsyncClient,
    host: FakeHost,
    line: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio_connection, "CANCEL_GRACE_S", 0.01)
    gate = host.gates[m.Ping] = Gate()

    async def ping() -> None:
        with scope:
            await client.ping()

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ping)
        await until_reached(gate)
        scope.cancel()
    with pytest.raises(door.ConnectionLostError, match="cancelled"):
        await client.ping()
    # spec T5: and for those that share it
    with pytest.raises(door.ConnectionLostError, match="in the middle"):
        Client((line.fileno(),)).ping()


async def test_a_file_that_a_cancelled_open_opened_is_closed(
    client: AsyncClient, host: FakeHost
) -> None:
    gate = host.gates[m.Open] = Gate()

    async def open_it() -> None:
        with scope:
            await client.open("a", "w")

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_it)
        await until_reached(gate)
        assert host.open_files() == [1000]
        scope.cancel()
        gate.opened.set()
    await client.ping()
    assert host.open_files() == []


@pytest.mark.usefixtures("no_leaks")
async def test_a_connection_that_a_cancelled_attach_brought_is_closed(
    host: FakeHost,
) -> None:
    gate = host.gates[m.Attach] = Gate()

    async def attach() -> None:
        with scope:
            await client.attach()

    scope = trio.CancelScope()
    with host.connect() as line:
        client = AsyncClient((line.fileno(),))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await until_reached(gate)
            scope.cancel()
            gate.opened.set()
        await trio.to_thread.run_sync(host.peers[1].gone.wait)
    for peer in host.peers:
        await trio.to_thread.run_sync(peer.gone.wait)


async def test_a_task_on_a_connection_that_is_closed_gets_an_error(
    client: AsyncClient, host: FakeHost
) -> None:
    gate = host.gates[m.Ping] = Gate()
    attached = await client.attach()

    async def ping() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await attached.ping()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ping)
        await until_reached(gate)
        attached.disconnect()
    with pytest.raises(door.ConnectionLostError, match="disconnect"):
        await attached.ping()


async def test_a_released_connection_is_somebody_elses(client: AsyncClient) -> None:
    attached = await client.attach()
    with socket.socket(fileno=attached.release()):
        attached.disconnect()
        with pytest.raises(door.ConnectionLostError, match="handed over"):
            await attached.ping()
