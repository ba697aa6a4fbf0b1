"""A daemon that cannot be asked, or does not answer, and its node actor."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from hostlib.log import Log
from hostlib.threads import in_thread
from hostlib.unix_listener import listen_at
from supervisor.cluster import daemon_socket
from supervisor.cluster.daemon_socket import DaemonError
from supervisor.cluster.node_service import JoinState, NodeService
from supervisor.cluster.orders import NodeOrder
from supervisor.cluster.requests import FleetUnavailableError, RequestError
from supervisor.control import lines
from supervisor.fleet.messages import VERSION
from tests.helpers.fleetnode import StandIn


class NoOthers:
    """A node alone: its messages are lost, and it reaches no other."""

    def send(self, messages: list[bytes]) -> None:
        """Lose messages."""

    async def ask_directory(self, do: str, args: bytes) -> bytes:
        """Reach no directory."""
        raise RequestError(f"cannot do {do!r}")

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Reach no node."""
        raise RequestError(f"cannot reach {node!r}")


def service(control: str) -> NodeService:
    order = NodeOrder("n1", (), control, "/nonexistent")
    return NodeService(order, NoOthers(), Log("ERROR"), lambda: None)


async def state_of(node: NodeService) -> JoinState:
    is_done, data = await node.answer(VERSION, "join-state", b"{}")
    assert is_done, data
    return msgspec.json.decode(data, type=JoinState)


@contextmanager
def silent_daemon(path: str) -> Iterator[None]:
    """Have a socket that listens, as that of a daemon that is stopped."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield
    Path(path).unlink()


@contextmanager
def no_more_files() -> Iterator[None]:
    """Have this process at its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# spec FL1
async def test_a_node_outlives_a_time_without_free_descriptors(tmp_path: Path) -> None:
    control = f"{tmp_path}/control"
    with silent_daemon(control), no_more_files():
        with pytest.raises(DaemonError, match="raise the number of open files"):
            await daemon_socket.ask(control, "ps", {})


# spec FL1
async def test_an_answer_of_any_length_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)

    async def speak() -> None:
        connection = await listener.accept()
        async with connection:
            await connection.send_all(b'{"v":1,"ok":true}'.ljust(1001))

    async with listen_at(f"{tmp_path}/control") as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(speak)
            with pytest.raises(DaemonError, match="a line has more than 1000 bytes"):
                await daemon_socket.ask(f"{tmp_path}/control", "ps", {})


# spec FL11
async def test_a_daemon_that_is_silent_is_told_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_socket, "SILENT_S", 0.1)
    with silent_daemon(f"{tmp_path}/control"):
        node = service(f"{tmp_path}/control")
        for do, args in (("leave", b"{}"), ("control", b'{"do":"ps"}')):
            is_done, data = await node.answer(VERSION, do, args)
            assert not is_done
            assert data.startswith(b"cannot ask node 'n1': the daemon at ")
            assert b"does not answer within 0.1 s" in data


# spec FL1
@pytest.mark.slow
async def test_a_leave_that_is_cancelled_leaves_the_node_linked(tmp_path: Path) -> None:
    control = f"{tmp_path}/control"
    node = service(control)
    with silent_daemon(control):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.answer, VERSION, "leave", b"{}")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        assert "no daemon at" in (await state_of(node)).reason
        await nursery.start(StandIn("ledger-n1").serve, control)
        while "the directory does not answer" not in (await state_of(node)).reason:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


# spec FL1: each part names itself beside its version.
async def test_a_node_actor_that_refuses_a_version_names_itself(
    tmp_path: Path,
) -> None:
    node = service(f"{tmp_path}/control")
    is_done, data = await node.answer("fleet-0", "join-state", b"{}")
    assert is_done is False
    assert data.decode() == (
        "cannot admit a node actor: its version is 'fleet-0', this node actor's is"
        f" {VERSION!r}; install one version everywhere"
    )


# spec FL3, FL11
async def test_a_stream_whose_daemon_ends_is_not_whole(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/control")
        listener.listen()
        node = service(f"{tmp_path}/control")

        def say_one() -> None:
            asked = b""
            while b'"logs"' not in asked:  # and no link
                connection, _ = listener.accept()
                with connection:
                    asked = connection.recv(4096)
                    connection.sendall(b'{"v":1,"item":"one"}\n')

        async with trio.open_nursery() as nursery:
            await nursery.start(node.run)
            nursery.start_soon(in_thread, say_one)
            items = node.items("n1", "logs", {})
            assert bytes(await anext(items)) == b'"one"'
            with pytest.raises(
                FleetUnavailableError, match="cannot ask node 'n1': the dae"
            ):
                await anext(items)
            nursery.cancel_scope.cancel()
