"""Streams of a daemon as a node actor reads them, by a clock of the tests."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hostlib.log import Log
from supervisor.cluster.node_service import (
    READER_S,
    ControlRequest,
    NodeService,
    ReadStream,
)
from supervisor.cluster.orders import NodeOrder
from supervisor.cluster.requests import FleetUnavailableError, result_of
from supervisor.fleet.messages import VERSION
from tests.helpers.fleetnode import StandIn


@dataclass
class Nodes:
    """Two node actors, in no fleet; they ask each other."""

    actors: dict[str, NodeService] = field(default_factory=dict)

    def send(self, messages: list[bytes]) -> None:
        """Lose what is for the directory."""

    async def ask_directory(self, do: str, _args: bytes) -> bytes:
        """Refuse: there is no directory."""
        raise FleetUnavailableError(f"cannot ask {do!r}: there is no directory")

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Ask the other node."""
        return result_of(await self.actors[node].answer(VERSION, do, args))


@asynccontextmanager
async def two_nodes(where: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes()
    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            control = f"{where}/{name}"
            await nursery.start(StandIn(f"ledger-{name}").serve, control)
            order = NodeOrder(name, (), control, str(where))
            nodes.actors[name] = NodeService(order, nodes, Log("ERROR"), lambda: None)
            await nursery.start(nodes.actors[name].run)
        yield nodes
        nursery.cancel_scope.cancel()


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let time pass, in steps of a second."""
    for _ in range(int(seconds)):
        clock.jump(1.0)
        await wait_all_tasks_blocked()


# spec FL3: `fleet logs | less`, and nobody turns the page.
@pytest.mark.parametrize("node", ["a", "b"])
async def test_a_stream_waits_for_a_reader_that_takes_its_time(
    tmp_path: Path, mock_clock: MockClock, node: str
) -> None:
    async with two_nodes(tmp_path) as nodes:
        items = nodes.actors["a"].items(node, "count", {"most": 100})
        async with aclosing(items):
            numbers = [json.loads(bytes(await anext(items)))]
            await pass_time(mock_clock, 3 * READER_S)
            numbers += [json.loads(bytes(item)) async for item in items]
        assert numbers == list(range(100))


# spec FL8: the node actor of its reader was killed.
async def test_a_stream_is_closed_where_its_reader_says_nothing(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with two_nodes(tmp_path) as nodes:
        opened = msgspec.json.encode(ControlRequest("count", {"most": 100}))
        stream = json.loads(await nodes.ask_node("b", "open-stream", opened))
        words = msgspec.json.encode(ReadStream(stream, 0.0))
        await wait_all_tasks_blocked()
        read = json.loads(await nodes.ask_node("b", "read-stream", words))
        assert read["items"][0] == 0
        await pass_time(mock_clock, READER_S + 1)
        with pytest.raises(FleetUnavailableError, match="was closed; open it again"):
            await nodes.ask_node("b", "read-stream", words)
